#include <clattn/plugin.hpp>

#include <dlfcn.h>
#include <fmt/ranges.h>
#include <link.h>

#include <algorithm>
#include <clattn/config_fields.hpp>
#include <clattn/device.hpp>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <utility>

#include "backends/plugin_adapter.hpp"
#include "backends/registry.hpp"
#include "base/checked.hpp"
#include "base/config_in_c.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/launch/step_launch.hpp"

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
  throw_unsupported_if(table.config_size > sizeof(ClattnAttentionConfig),
                       "plugin '{}': config_size is {}, legal: up to {}: it was compiled for a "
                       "newer library",
                       path_, table.config_size, sizeof(ClattnAttentionConfig));
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

PluginConfig::PluginConfig(const AttentionConfig& given) : resolved(given) {
  resolved.kv_cache_dtype = given.cache_format();
  resolved.scale = softmax_scale(given.scale, given.head_size);
  config_in_c(resolved, config);
}

void check_status(ClattnStatus& status, std::string_view backend, std::string_view call) {
  if (status.code == CLATTN_OK) return;
  status.message[sizeof(status.message) - 1] = '\0';
  constexpr std::array kCodes = {ErrorCode::kInvalidArgument, ErrorCode::kUnsupported,
                                 ErrorCode::kOpenCL};
  const bool known = status.code >= CLATTN_INVALID_ARGUMENT && status.code <= CLATTN_OPENCL;
  throw Error(known ? kCodes.at(to_size(status.code - 1)) : ErrorCode::kUnsupported,
              fmt::format("backend {}: {}: {}", backend, call, status.message), status.cl_code);
}

namespace {

// The ABI's numbers are the library's: the structs are filled by casts.
constexpr bool same(auto ours, int theirs) {
  return static_cast<int>(ours) == theirs;
}
static_assert(same(DType::kF32, CLATTN_F32) && same(DType::kF16, CLATTN_F16) &&
              same(DType::kBF16, CLATTN_BF16) && same(DType::kFp8E4M3, CLATTN_FP8_E4M3) &&
              same(DType::kFp8E5M2, CLATTN_FP8_E5M2) && same(DType::kInt8, CLATTN_INT8));
static_assert(same(KVCacheLayout::kNHD, CLATTN_NHD) && same(KVCacheLayout::kHND, CLATTN_HND));
static_assert(same(DeviceKind::kGpu, CLATTN_GPU) && same(DeviceKind::kCpu, CLATTN_CPU) &&
              same(DeviceKind::kOther, CLATTN_OTHER));

ClattnDevice c_device(const DeviceCapabilities* capabilities) {
  if (capabilities == nullptr) return {};
  return {.struct_size = sizeof(ClattnDevice),
          .kind = static_cast<std::int32_t>(capabilities->kind),
          .compute_units = capabilities->compute_units,
          .name = capabilities->name.c_str(),
          .vendor = capabilities->vendor.c_str(),
          .driver_version = capabilities->driver_version.c_str(),
          .max_work_group_size = capabilities->max_work_group_size,
          .global_mem_bytes = capabilities->global_mem_bytes,
          .max_alloc_bytes = capabilities->max_alloc_bytes,
          .local_mem_bytes = capabilities->local_mem_bytes};
}

/// Throws kUnsupported naming the first place where a plugin's shape is not that of its cache:
/// `wanted` K/V, blocks, tokens, heads, dims.
void check_shape(const AttentionBackend& backend, const std::array<std::int64_t, 5>& shape,
                 const std::array<std::int64_t, 5>& wanted) {
  constexpr std::array<std::string_view, 5> kNames = {"K and V", "num_blocks", "block_size",
                                                      "num_kv_heads", "head_size"};
  const std::int32_t kv = backend.kv_dimension();
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const std::size_t of = i < 2 && kv == 1 ? 1 - i : i;
    throw_unsupported_if(shape.at(i) != wanted.at(of),
                         "backend {}: kv_cache_shape[{}] is {}, legal: {} ({}, kv_dimension {})",
                         backend.name(), i, shape.at(i), wanted.at(of), kNames.at(of), kv);
  }
}

/// The C contract has no stride of dims: they come last.
void check_order(std::string_view backend, const StrideOrder& order) {
  StrideOrder sorted = order;
  std::ranges::sort(sorted);
  const bool permutation = sorted == StrideOrder{0, 1, 2, 3, 4};
  if (permutation && order.back() == 4) return;
  throw_unsupported(
      "backend {}: kv_cache_stride_order is {}, legal: {}", backend, fmt::join(order, ", "),
      permutation ? "4 last (a head's elements are contiguous)" : "a permutation of 0 … 4");
}

/// Of a table's `layouts`: 1 (NHD), 2 (HND), 3 (both).
std::span<const KVCacheLayout> layouts_of(std::uint32_t bits) {
  const std::span<const KVCacheLayout> both = kBothLayouts;
  return bits == 3 ? both : both.subspan(bits - 1, 1);
}

class PluginBackend final : public DescribedBackend {
 public:
  explicit PluginBackend(std::shared_ptr<const PluginLibrary> library)
      : DescribedBackend(
            {.name = library->table().name,
             .layouts = layouts_of(library->table().layouts),
             .preferred = static_cast<KVCacheLayout>(library->table().preferred_layout),
             .kv_dimension = library->table().kv_dimension}),
        library_(std::move(library)) {}

  std::string library() const override { return library_->path(); }

  std::vector<std::string> validate_configuration(
      const AttentionConfig& config, const DeviceCapabilities* capabilities) const override {
    std::vector<std::string> reasons;
    append_config_reasons(config, reasons);
    refuse_row_scales(config, "plugins", reasons);
    append_if(reasons, config.head_size < 1, "head_size is {}, supported: >= 1", config.head_size);
    for (const std::string& option : fields_not_taken(config, field::kPlugins)) {
      const bool list =
          option == "span_rule" ||
          std::ranges::find(kListFields, option, &ListField::name) != std::end(kListFields);
      if (!list) reasons.push_back(fmt::format("{} not supported by plugins", option));
      append_if(reasons, list && table().takes_seen_keys == 0,
                "{} not supported by {}: its takes_seen_keys is 0", option, name());
    }
    std::uint64_t end = 0;
    for_each_field([&](const auto& row) {
      end += sizeof(std::int64_t);  // as every field of ClattnAttentionConfig
      append_if(reasons, end > table().config_size && row.is_set(config),
                "{} not supported: {} was compiled before it existed", row.name, name());
    });
    // What is wrong already is not the plugin's to judge: it may rely on sane numbers.
    if (!reasons.empty()) return reasons;
    const PluginConfig wanted(config);
    const auto add = [](void* sink, const char* reason) {
      static_cast<std::vector<std::string>*>(sink)->emplace_back(reason == nullptr ? "?" : reason);
    };
    const ClattnDevice device = c_device(capabilities);
    table().validate(table().self, &wanted.config, capabilities == nullptr ? nullptr : &device, add,
                     &reasons);
    return reasons;
  }

  std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t num_blocks, std::int32_t block_size,
                                                 std::int32_t num_kv_heads,
                                                 std::int32_t head_size) const override {
    std::array<std::int64_t, 5> shape{};
    ClattnStatus status{};
    table().kv_cache_shape(table().self, num_blocks, block_size, num_kv_heads, head_size,
                           shape.data(), &status);
    check_status(status, name(), "kv_cache_shape");
    check_shape(*this, shape, {2, num_blocks, block_size, num_kv_heads, head_size});
    return shape;
  }

  std::array<std::int32_t, 5> get_kv_cache_stride_order(KVCacheLayout layout) const override {
    throw_unsupported_if(!validate_layout(layout).empty(), "layout {} not supported by {}",
                         to_string(layout), name());
    StrideOrder order{};
    ClattnStatus status{};
    table().kv_cache_stride_order(table().self, static_cast<std::int32_t>(layout), order.data(),
                                  &status);
    check_status(status, name(), "kv_cache_stride_order");
    check_order(name(), order);
    return order;
  }

  std::shared_ptr<const AttentionImpl> make_impl(std::shared_ptr<Context> context,
                                                 const AttentionConfig& config) const override {
    require_valid(name(), validate_configuration(config, &context->capabilities()));
    return make_plugin_impl(library_, *this, std::move(context), config);
  }

  std::unique_ptr<AttentionMetadataBuilder> make_builder(
      std::shared_ptr<Context> context, const AttentionConfig& config,
      const BuilderOptions& options) const override {
    require_valid(name(), validate_configuration(config, &context->capabilities()));
    return make_plugin_builder(shared_from_this(), std::move(context), config, options);
  }

 private:
  const ClattnBackendPlugin& table() const noexcept { return library_->table(); }

  std::shared_ptr<const PluginLibrary> library_;
};

}  // namespace

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
  detail::remove_entry(backend_);
  backend_.reset();
}

BackendPlugin load_backend_plugin(const std::string& path, std::size_t position) {
  auto library = std::make_shared<const detail::PluginLibrary>(path);
  try {
    return BackendPlugin(std::make_shared<const detail::PluginBackend>(std::move(library)),
                         position);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("plugin '{}': {}", path, error.what()));
  }
}

}  // namespace clattn
