#pragma once

#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace clattn::detail {

/// The 16 bytes of XXH3-128 of everything that decides a cached payload.
using CacheKey = std::string;

/// The key of `parts` in this order; moving a byte from one part to the next changes it.
CacheKey make_cache_key(std::initializer_list<std::string_view> parts);

/// A cache file: magic, format version, key, payload size, payload XXH3-128, payload.
std::string encode_cache_entry(const CacheKey& key, std::string_view payload);
/// The payload, or nothing when `file` is truncated, foreign, damaged or of another key.
std::optional<std::string> decode_cache_entry(const CacheKey& key, std::string_view file);

/// One folder of entries, one file a key. What cannot be read is absent, what cannot be written is
/// dropped. Entries appear whole, so processes may race. Nothing is evicted: an entry is some
/// kilobytes, and deleting the folder is always safe. Entries are executed, so a folder of another
/// user, or that others can write to, is not used.
class ProgramCache {
 public:
  /// An empty `folder` makes a cache that holds nothing.
  explicit ProgramCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  std::optional<std::string> load(const CacheKey& key) const;
  void store(const CacheKey& key, std::string_view payload) const;
  /// Where the entry of `key` lies.
  std::filesystem::path path_of(const CacheKey& key) const;

  /// Why the folder is not used; empty = it is, or there is none.
  std::string problem() const;

 private:
  bool usable() const;

  std::filesystem::path folder_;
};

}  // namespace clattn::detail
