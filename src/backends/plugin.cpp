#include <clattn/plugin.hpp>

#include <dlfcn.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <utility>

#include "backends/plugin_adapter.hpp"
#include "backends/registry.hpp"
#include "base/error.hpp"

namespace clattn {

namespace detail {

PluginLibrary::PluginLibrary(std::string path) : path_(std::move(path)) {
  open();
  fill_table();
}

PluginLibrary::~PluginLibrary() {
  room_.table.destroy(room_.table.self);
}

void PluginLibrary::Close::operator()(void* object) const noexcept {
  dlclose(object);
}

namespace {

/// Throws kIo for a truncated library: dlopen() maps the segments that its header lists, and
/// touching one past the end of the file would kill the process with SIGBUS. A file that is not a
/// library at all is left to dlopen(), which refuses it.
void require_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  ElfW(Ehdr) header{};
  const auto read = [&](auto& value) {
    return static_cast<bool>(file.read(reinterpret_cast<char*>(&value), sizeof(value)));
  };
  std::error_code failure;
  const std::uintmax_t size = std::filesystem::file_size(path, failure);
  if (failure || !read(header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return;
  file.seekg(static_cast<std::streamoff>(header.e_phoff));
  for (int i = 0; i < int{header.e_phnum}; ++i) {
    ElfW(Phdr) part{};
    const bool there = read(part);
    if (there && (part.p_type != PT_LOAD ||
                  (part.p_offset <= size && part.p_filesz <= size - part.p_offset)))
      continue;
    throw Error(
        ErrorCode::kIo,
        fmt::format("plugin '{}' cannot be opened: its file of {} bytes is cut off", path, size));
  }
}

}  // namespace

void PluginLibrary::open() {
  require_whole(path_);
  dlerror();  // NOLINT(concurrency-mt-unsafe): glibc keeps it per thread
  object_.reset(dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL));
  if (object_ != nullptr) return;
  const char* why = dlerror();  // NOLINT(concurrency-mt-unsafe)
  throw Error(ErrorCode::kIo, fmt::format("plugin '{}' cannot be opened: {}", path_,
                                          why == nullptr ? "no reason given" : why));
}

void PluginLibrary::fill_table() {
  const auto entry =
      reinterpret_cast<ClattnBackendPluginEntry>(dlsym(object_.get(), CLATTN_BACKEND_PLUGIN_ENTRY));
  throw_unsupported_if(entry == nullptr, "plugin '{}' has no entry point {}", path_,
                       CLATTN_BACKEND_PLUGIN_ENTRY);
  const ClattnHostApi host{CLATTN_BACKEND_ABI_VERSION, sizeof(ClattnHostApi), CLATTN_VERSION};
  const int answer = entry(&host, &room_.table);
  const ClattnBackendPlugin& table = room_.table;
  throw_unsupported_if(answer != 0, "plugin '{}' refuses to load ({}): {}", path_, answer,
                       table.refusal == nullptr ? "no reason given" : table.refusal);
  // Only the first two fields mean anything before the version is known to be ours.
  throw_unsupported_if(table.abi_version != CLATTN_BACKEND_ABI_VERSION,
                       "plugin '{}' speaks ABI version {}, legal: {}", path_, table.abi_version,
                       CLATTN_BACKEND_ABI_VERSION);
  throw_unsupported_if(table.struct_size != sizeof(ClattnBackendPlugin),
                       "plugin '{}': its ClattnBackendPlugin has {} bytes, legal: {}", path_,
                       table.struct_size, sizeof(ClattnBackendPlugin));
  try {
    check_table();
  } catch (...) {
    if (table.destroy != nullptr) table.destroy(table.self);
    throw;
  }
}

void PluginLibrary::check_table() const {
  const ClattnBackendPlugin& table = room_.table;
  const std::pair<std::string_view, bool> functions[] = {
      {"destroy", table.destroy != nullptr},
      {"validate", table.validate != nullptr},
      {"kv_cache_shape", table.kv_cache_shape != nullptr},
      {"kv_cache_stride_order", table.kv_cache_stride_order != nullptr},
      {"impl_create", table.impl_create != nullptr},
      {"impl_destroy", table.impl_destroy != nullptr},
      {"write_kv_cache", table.write_kv_cache != nullptr},
      {"forward", table.forward != nullptr},
      {"name", table.name != nullptr}};
  for (const auto& [name, there] : functions) {
    if (!there) throw_unsupported("plugin '{}' lacks {}", path_, name);
  }
  constexpr std::uint32_t kBoth = 1U << CLATTN_NHD | 1U << CLATTN_HND;
  throw_unsupported_if(table.kv_dimension != 0 && table.kv_dimension != 1,
                       "plugin '{}': kv_dimension is {}, legal: 0, 1", path_, table.kv_dimension);
  throw_unsupported_if(table.layouts == 0 || (table.layouts & ~kBoth) != 0,
                       "plugin '{}': layouts is {}, legal: 1 (NHD), 2 (HND), 3 (both)", path_,
                       table.layouts);
  throw_unsupported_if(
      (table.preferred_layout != CLATTN_NHD && table.preferred_layout != CLATTN_HND) ||
          (table.layouts & 1U << table.preferred_layout) == 0,
      "plugin '{}': preferred_layout is {}, legal: one of its layouts ({})", path_,
      table.preferred_layout, table.layouts);
}

}  // namespace detail

BackendPlugin::BackendPlugin(std::shared_ptr<const AttentionBackend> backend, std::size_t position)
    : backend_(std::move(backend)) {
  register_backend(backend_, position);
}

BackendPlugin& BackendPlugin::operator=(BackendPlugin&& other) noexcept {
  std::swap(backend_, other.backend_);
  return *this;
}

BackendPlugin::~BackendPlugin() {
  reset();
}

void BackendPlugin::reset() noexcept {
  if (backend_ == nullptr) return;
  detail::Registry::instance().remove_entry(backend_);
  backend_.reset();
}

BackendPlugin load_backend_plugin(const std::string& path, std::size_t position) {
  auto library = std::make_shared<const detail::PluginLibrary>(path);
  try {
    return BackendPlugin(detail::make_plugin_backend(std::move(library)), position);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("plugin '{}': {}", path, error.what()));
  }
}

}  // namespace clattn
