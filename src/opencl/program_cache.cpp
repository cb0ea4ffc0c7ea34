#include "opencl/program_cache.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <clattn/error.hpp>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "files/files.hpp"

namespace clattn::detail {
namespace {

constexpr std::string_view kMagic = "CLAttn\r\n";  // a text-mode transfer breaks it visibly
constexpr std::uint32_t kFormatVersion = 1;

CacheKey digest_of(const XXH128_hash_t& hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  CacheKey digest{};
  static_assert(sizeof(canonical.digest) == sizeof(digest));
  std::memcpy(digest.data(), canonical.digest, sizeof(digest));
  return digest;
}

/// Everything before the payload, which it describes wholly: an entry is good when its header
/// equals the one that its payload and key give.
Bytes make_header(const CacheKey& key, std::span<const std::byte> payload) {
  Bytes header;
  const auto append = [&](const void* data, std::size_t size) {
    header.resize(header.size() + size);
    std::memcpy(header.data() + header.size() - size, data, size);
  };
  const std::uint64_t size = payload.size();
  const CacheKey digest = digest_of(XXH3_128bits(payload.data(), payload.size()));
  append(kMagic.data(), kMagic.size());
  append(&kFormatVersion, sizeof(kFormatVersion));
  append(key.data(), key.size());
  append(&size, sizeof(size));
  append(digest.data(), digest.size());
  return header;
}

constexpr std::size_t kHeaderBytes = kMagic.size() + sizeof(std::uint32_t) + sizeof(CacheKey) +
                                     sizeof(std::uint64_t) + sizeof(CacheKey);

constexpr std::uintmax_t kLargestEntry = std::uintmax_t{256} << 20;

}  // namespace

CacheKey make_cache_key(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts)
    fmt::format_to(std::back_inserter(text), "{}:", part.size()), text += part;
  return digest_of(XXH3_128bits(text.data(), text.size()));
}

Bytes encode_cache_entry(const CacheKey& key, std::span<const std::byte> payload) {
  Bytes file = make_header(key, payload);
  file.insert(file.end(), payload.begin(), payload.end());
  return file;
}

std::optional<Bytes> decode_cache_entry(const CacheKey& key, std::span<const std::byte> file) {
  if (file.size() < kHeaderBytes) return std::nullopt;
  const std::span<const std::byte> payload = file.subspan(kHeaderBytes);
  const Bytes header = make_header(key, payload);
  if (std::memcmp(file.data(), header.data(), kHeaderBytes) != 0) return std::nullopt;
  return Bytes(payload.begin(), payload.end());
}

std::filesystem::path ProgramCache::path_of(const CacheKey& key) const {
  std::string name;
  for (const std::byte byte : key) {
    fmt::format_to(std::back_inserter(name), "{:02x}", std::to_integer<unsigned>(byte));
  }
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

std::optional<Bytes> ProgramCache::load(const CacheKey& key) const {
  if (!usable()) return std::nullopt;
  try {
    const std::string file = files::read_file(path_of(key), kLargestEntry);
    return decode_cache_entry(key, std::as_bytes(std::span(file)));
  } catch (const Error&) {
    return std::nullopt;
  }
}

void ProgramCache::store(const CacheKey& key, std::span<const std::byte> payload) const {
  if (!usable()) return;
  try {
    files::replace_file(path_of(key), {}, encode_cache_entry(key, payload));
  } catch (const Error&) {  // not stored: the next start compiles again
  }
}

}  // namespace clattn::detail
