#include "opencl/program_cache.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

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
    const auto* bytes = static_cast<const std::byte*>(data);
    header.insert(header.end(), bytes, bytes + size);
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

std::string unique_suffix() {
  std::random_device random;
  return fmt::format(".{:08x}{:08x}.tmp", random(), random());
}

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

std::optional<Bytes> ProgramCache::load(const CacheKey& key) const {
  if (folder_.empty()) return std::nullopt;
  std::error_code error;
  const std::filesystem::path path = path_of(key);
  if (!std::filesystem::is_regular_file(path, error)) return std::nullopt;
  std::ifstream stream(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  return decode_cache_entry(key, std::as_bytes(std::span(text)));
}

void ProgramCache::store(const CacheKey& key, std::span<const std::byte> payload) const {
  if (folder_.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  const std::filesystem::path path = path_of(key);
  const std::filesystem::path temporary = path.string() + unique_suffix();
  const Bytes file = encode_cache_entry(key, payload);
  std::ofstream stream(temporary, std::ios::binary);
  stream.write(reinterpret_cast<const char*>(file.data()),
               static_cast<std::streamsize>(file.size()));
  stream.close();
  if (stream) std::filesystem::rename(temporary, path, error);
  if (!stream || error) std::filesystem::remove(temporary, error);
}

}  // namespace clattn::detail
