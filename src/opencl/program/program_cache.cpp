#include "opencl/program/program_cache.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <clattn/error.hpp>
#include <cstdint>
#include <iterator>

#include "files/files.hpp"

namespace clattn::detail {
namespace {

constexpr std::string_view kMagic = "CLAttn\r\n";  // a text-mode transfer breaks it visibly
constexpr std::uint32_t kFormatVersion = 1;

std::string digest_of(std::string_view text) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(text.data(), text.size()));
  return {reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest)};
}

template <typename Number>
std::string stored(Number number) {
  return {reinterpret_cast<const char*>(&number), sizeof(number)};
}

/// Everything before the payload, which it describes wholly: an entry is good when its header
/// equals the one that its payload and key give.
std::string header_of(const CacheKey& key, std::string_view payload) {
  return std::string(kMagic) + stored(kFormatVersion) + key +
         stored(std::uint64_t{payload.size()}) + digest_of(payload);
}

constexpr std::uintmax_t kLargestEntry = std::uintmax_t{256} << 20;

}  // namespace

CacheKey make_cache_key(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts)
    fmt::format_to(std::back_inserter(text), "{}:{}", part.size(), part);
  return digest_of(text);
}

std::string encode_cache_entry(const CacheKey& key, std::string_view payload) {
  return header_of(key, payload).append(payload);
}

std::optional<std::string> decode_cache_entry(const CacheKey& key, std::string_view file) {
  static const std::size_t header_bytes = header_of(key, {}).size();
  if (file.size() < header_bytes) return std::nullopt;
  const std::string_view payload = file.substr(header_bytes);
  if (!file.starts_with(header_of(key, payload))) return std::nullopt;
  return std::string(payload);
}

std::filesystem::path ProgramCache::path_of(const CacheKey& key) const {
  std::string name;
  for (const char byte : key)
    fmt::format_to(std::back_inserter(name), "{:02x}", static_cast<unsigned char>(byte));
  return folder_ / (name + ".bin");
}

bool ProgramCache::usable() const {
  return !folder_.empty() && files::is_private_folder(folder_);
}

std::string ProgramCache::problem() const {
  if (folder_.empty() || usable()) return {};
  return fmt::format(
      "{}: not used: no folder of this user's that nobody else can write to; legal after a look at "
      "its files: chmod go-w",
      folder_.string());
}

std::optional<std::string> ProgramCache::load(const CacheKey& key) const {
  if (!usable()) return std::nullopt;
  try {
    return decode_cache_entry(key, files::read_file(path_of(key), kLargestEntry));
  } catch (const Error&) {
    return std::nullopt;
  }
}

void ProgramCache::store(const CacheKey& key, std::string_view payload) const {
  if (!usable()) return;
  try {
    files::replace_file(path_of(key), encode_cache_entry(key, payload));
  } catch (const Error&) {  // not stored: the next start compiles again
  }
}

}  // namespace clattn::detail
