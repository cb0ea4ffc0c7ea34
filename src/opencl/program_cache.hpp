#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace clattn::detail {

using Bytes = std::vector<std::byte>;
/// XXH3-128 of everything that decides a cached payload.
using CacheKey = std::array<std::byte, 16>;

/// The key of `parts` in this order; moving a byte from one part to the next changes it.
CacheKey make_cache_key(std::initializer_list<std::string_view> parts);

/// The content of a cache file: magic, format version, key, payload size, payload XXH3-128,
/// payload.
Bytes encode_cache_entry(const CacheKey& key, std::span<const std::byte> payload);
/// The payload, or nothing when `file` is truncated, foreign, damaged or of another key.
std::optional<Bytes> decode_cache_entry(const CacheKey& key, std::span<const std::byte> file);

/// One folder of entries, one file a key. It never fails: what cannot be read is absent, what
/// cannot be written is dropped. Entries appear whole, by a rename, so processes may race. Nothing
/// is evicted: an entry is some kilobytes, and deleting the folder is always safe. Entries are
/// executed, so the folder is created with mode 0700 and is not used if it belongs to another user
/// or others can write to it.
class ProgramCache {
 public:
  /// An empty `folder` makes a cache that holds nothing.
  explicit ProgramCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  std::optional<Bytes> load(const CacheKey& key) const;
  void store(const CacheKey& key, std::span<const std::byte> payload) const;
  /// Where the entry of `key` lies.
  std::filesystem::path path_of(const CacheKey& key) const;

  /// Why the folder is not used; empty = it is, or there is none.
  std::string problem() const;

 private:
  bool usable() const;

  std::filesystem::path folder_;
};

}  // namespace clattn::detail
