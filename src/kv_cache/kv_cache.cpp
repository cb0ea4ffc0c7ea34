#include <clattn/kv_cache.hpp>

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <clattn/attention_backend.hpp>
#include <clattn/device.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <set>

#include "base/checked.hpp"
#include "base/environment.hpp"
#include "kv_cache/spec.hpp"

namespace clattn {

namespace {

using detail::check_at_least, detail::checked_mul, detail::throw_invalid_if;
using detail::throw_unsupported_if, detail::to_size;

constexpr int kNoOverride = -1;
/// The one choice that a process makes for all its contexts; vLLM's API asks for it. A number,
/// because an atomic optional is not lock-free with every compiler.
constinit std::atomic<int> set_layout = kNoOverride;

using PageBytes = std::map<std::string, std::size_t>;

/// Bytes of a page of each layer. Every layer of the groups must stand in exactly one tensor, and
/// no other layer in any.
PageBytes page_bytes_of(const KVCacheConfig& config) {
  PageBytes page_bytes;
  std::set<std::string> missing;  // those without a tensor so far
  for (const KVCacheGroupSpec& group : config.groups) {
    for (const std::string& layer : group.layer_names) {
      throw_invalid_if(!page_bytes.emplace(layer, group.spec_of(layer).page_size_bytes()).second,
                       "KVCacheConfig: layer '{}' stands in two groups", layer);
      missing.insert(layer);
    }
  }
  for (const KVCacheTensor& tensor : config.tensors) {
    for (const std::string& layer : tensor.shared_by) {
      throw_invalid_if(!page_bytes.contains(layer),
                       "KVCacheConfig: tensor for layer '{}', which is in no group", layer);
      throw_invalid_if(missing.erase(layer) == 0, "KVCacheConfig: layer '{}' is given two tensors",
                       layer);
    }
  }
  if (missing.empty()) return page_bytes;
  detail::throw_invalid(
      "KVCacheConfig: some layers are not correctly initialized: '{}' has no tensor",
      *missing.begin());
}

/// Each tensor must hold the given number of pages of its layers' spec, if one is given, and fit in
/// an allocation; all of them must fit on the device.
void check_tensors(const KVCacheConfig& config, const PageBytes& page_bytes,
                   const DeviceCapabilities& device) {
  throw_invalid_if(config.num_blocks < 0,
                   "KVCacheConfig: num_blocks is {}, legal: >= 0 (0 = as many as fit)",
                   config.num_blocks);
  std::size_t total = 0, block_bytes = 0;
  for (const KVCacheTensor& tensor : config.tensors) {
    for (const std::string& layer : tensor.shared_by) {
      const std::size_t wanted =
          checked_mul(to_size(config.num_blocks), page_bytes.at(layer), "KVCacheConfig");
      throw_invalid_if(
          config.num_blocks != 0 && tensor.size_bytes != wanted,
          "KVCacheConfig: the tensor of layer '{}' has {} bytes, legal: {} ({} blocks)", layer,
          tensor.size_bytes, wanted, config.num_blocks);
    }
    const bool named = !tensor.shared_by.empty();
    const std::string layer = named ? tensor.shared_by.front() : "?";
    throw_invalid_if(tensor.size_bytes == 0, "KVCacheConfig: the tensor of layer '{}' has 0 bytes",
                     layer);
    const std::size_t page = named ? page_bytes.at(layer) : 1;
    block_bytes += page;
    throw_unsupported_if(
        tensor.size_bytes > device.max_alloc_bytes,
        "KV cache: layer '{}' needs {} bytes, but '{}' allows {} bytes in one allocation: at most "
        "{} blocks fit",
        layer, tensor.size_bytes, device.name, device.max_alloc_bytes,
        device.max_alloc_bytes / page);
    total = detail::checked_add(total, tensor.size_bytes, "KVCacheConfig: bytes of all tensors");
  }
  throw_unsupported_if(
      total > device.global_mem_bytes,
      "KV cache: {} tensors need {} bytes, but '{}' has {} bytes of memory: at most {} blocks fit",
      config.tensors.size(), total, device.name, device.global_mem_bytes,
      device.global_mem_bytes / std::max<std::size_t>(block_bytes, 1));
}

bool has_row_scales(const KVCacheSpec& spec) {
  return spec.kv_quant_mode == KVQuantMode::kPerTokenHead;
}

/// What pages may hold that a KVCache cannot say, and why not.
void require_plain_pages(const KVCacheSpec& spec) {
  throw_invalid_if(spec.kind == KVCacheKind::kMamba,
                   "KV cache: pages of states, legal: keys and values (view_state_pages)");
  const std::int32_t value = spec.value_size();
  throw_unsupported_if(
      value != spec.head_size && (value > spec.head_size || value % 8 != 0),
      "KV cache: head_size_v is {}, supported: 8 … {} (head_size) in steps of 8, or 0", value,
      spec.head_size);
  if (!has_row_scales(spec)) return;
  throw_unsupported_if(spec.use_mla,
                       "KV cache: kv_quant_mode is kPerTokenHead, supported with use_mla: kNone");
  throw_unsupported_if(value != spec.head_size,
                       "KV cache: kv_quant_mode is kPerTokenHead, supported with head_size_v {}: "
                       "kNone",
                       value);
  throw_unsupported_if(!why_not(CacheFormat::per_row(spec.dtype)).empty(),
                       "KV cache: dtype is {}, supported with kv_quant_mode kPerTokenHead: int8, "
                       "fp8_e4m3, uint4x2",
                       to_string(spec.dtype));
}

/// Elements from page to page of a spec with padding or scales.
std::int64_t page_stride(const KVCacheSpec& spec) {
  const std::size_t unit = to_size(detail::load_elements(spec.dtype));
  const std::size_t unit_bytes = unit * element_size_bytes(spec.dtype);
  throw_invalid_if(
      spec.page_size_padded % unit_bytes != 0,
      "KVCacheSpec: page_size_padded is {}, legal: multiples of {} ({} elements of {})",
      spec.page_size_padded, unit_bytes, unit, to_string(spec.dtype));
  return static_cast<std::int64_t>(spec.page_size_bytes() / element_size_bytes(spec.dtype));
}

/// Strides of the backend's order. Padded pages and those with scales are contiguous, K and V of a
/// block together, even where the order puts all K first: layers of other shapes may share the
/// buffer page by page.
std::array<std::int64_t, 5> page_strides(const KVCacheSpec& spec,
                                         const std::array<std::int64_t, 5>& shape,
                                         std::array<std::int32_t, 5> order, std::size_t blocks) {
  if (spec.page_size_padded == 0 && !has_row_scales(spec)) return detail::strides_of(shape, order);
  const auto place = std::ranges::find(order, static_cast<std::int32_t>(blocks));
  std::rotate(order.begin(), place, place + 1);
  std::array<std::int64_t, 5> strides = detail::strides_of(shape, order);
  strides.at(blocks) = page_stride(spec);
  return strides;
}

/// Lays out the values and the scales of a page.
void add_row_scales(KVCache& cache, std::size_t kv) {
  constexpr std::int64_t kScale = sizeof(float);
  const std::int64_t row = cache.key_elements();
  const detail::RowPage page =
      detail::row_page(std::int64_t{cache.block_size} * cache.num_kv_heads, row,
                       detail::load_elements(cache.dtype));  // of a byte each
  cache.v_offset = page.values;
  cache.strides.at(kv) = cache.v_offset;
  cache.scales = cache.buffer;
  cache.row_scales = {.k_offset = page.key_scales / kScale,
                      .v_offset = page.value_scales / kScale,
                      .block_stride = cache.block_stride / kScale,
                      .token_stride = cache.token_stride / row,
                      .head_stride = cache.head_stride / row};
}

/// Pages of this size that a raw buffer holds. Throws unless they are whole.
std::int64_t count_pages(std::string_view what, const Buffer& raw, std::size_t page_bytes) {
  throw_invalid_if(!raw || raw.size_bytes() < page_bytes || raw.size_bytes() % page_bytes != 0,
                   "{}: buffer of {} bytes, legal: a positive multiple of the page size {}", what,
                   raw.size_bytes(), page_bytes);
  return static_cast<std::int64_t>(raw.size_bytes() / page_bytes);
}

}  // namespace

std::array<std::int64_t, 5> detail::strides_of(const std::array<std::int64_t, 5>& shape,
                                               const std::array<std::int32_t, 5>& order) {
  std::array<std::int64_t, 5> strides{};
  std::int64_t step = 1;
  for (std::size_t place = order.size(); place-- > 0;) {
    const auto dimension = to_size(order.at(place));
    strides.at(dimension) = step;
    step = checked_mul(step, shape.at(dimension), "KV cache: elements");
  }
  return strides;
}

std::optional<KVCacheLayout> detail::choose_kv_cache_layout(
    std::optional<KVCacheLayout> layout_override, std::string_view variable) {
  if (layout_override) return layout_override;
  if (variable.empty()) return std::nullopt;
  try {
    return parse_kv_cache_layout(variable);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("CLATTN_KV_CACHE_LAYOUT: {}", error.what()));
  }
}

KVCacheLayout detail::supported_layout(const AttentionBackend& backend,
                                       const DeviceCapabilities& capabilities,
                                       std::optional<KVCacheLayout> wanted) {
  const KVCacheLayout layout = wanted ? *wanted : default_kv_cache_layout(backend, capabilities);
  const auto reasons = backend.validate_layout(layout);
  throw_unsupported_if(!reasons.empty(), "KV cache: {}", fmt::join(reasons, "; "));
  return layout;
}

std::int64_t detail::whole_pages(const Buffer& raw, const KVCacheSpec& spec) {
  const std::size_t page_bytes = spec.page_size_bytes();
  require_plain_pages(spec);
  return count_pages("KV cache", raw, page_bytes);
}

std::optional<KVCacheLayout> get_kv_cache_layout() {
  const int chosen = set_layout.load();
  return detail::choose_kv_cache_layout(
      chosen == kNoOverride ? std::nullopt : std::optional(static_cast<KVCacheLayout>(chosen)),
      detail::environment().kv_cache_layout);
}

void set_kv_cache_layout(std::optional<KVCacheLayout> layout) {
  if (layout) static_cast<void>(to_string(*layout));  // refuses what is no layout
  set_layout.store(layout ? static_cast<int>(*layout) : kNoOverride);
}

KVCacheLayout default_kv_cache_layout(const AttentionBackend& backend,
                                      const DeviceCapabilities& capabilities) {
  const std::optional<KVCacheLayout> set = get_kv_cache_layout();
  return set ? *set : backend.preferred_layout(capabilities);
}

std::map<std::string, Buffer> allocate_kv_cache(const Context& context, cl_command_queue queue,
                                                const KVCacheConfig& config) {
  const PageBytes page_bytes = page_bytes_of(config);
  check_tensors(config, page_bytes, context.capabilities());
  const Queue commands = Queue::adopt(queue);
  std::map<std::string, Buffer> caches;
  for (const KVCacheTensor& tensor : config.tensors) {
    constexpr std::size_t kFillUnit = 4;
    const std::size_t size = detail::round_up(tensor.size_bytes, kFillUnit);
    const Buffer buffer = context.allocate(size);
    commands.fill(buffer, 0, 0, size);
    for (const std::string& layer : tensor.shared_by) caches.emplace(layer, buffer);
  }
  commands.finish();
  return caches;
}

KVCache reshape_kv_cache(const Buffer& raw, const KVCacheSpec& spec,
                         const AttentionBackend& backend, KVCacheLayout layout) {
  throw_unsupported_if(spec.use_mla != backend.is_mla(),
                       "KV cache: use_mla is {}, supported by backend {}: {}", spec.use_mla,
                       backend.name(), backend.is_mla());
  KVCache cache;
  cache.num_blocks = detail::whole_pages(raw, spec);
  cache.buffer = raw;
  cache.dtype = spec.dtype;
  cache.block_size = spec.block_size;
  cache.num_kv_heads = spec.num_kv_heads;
  cache.head_size = spec.head_size;
  cache.shape = backend.get_kv_cache_shape(cache.num_blocks, spec.block_size, spec.num_kv_heads,
                                           spec.head_size / codes_per_element(spec.dtype));
  const auto layouts = backend.supported_layouts();
  throw_unsupported_if(std::ranges::find(layouts, layout) == layouts.end(),
                       "KV cache: layout {} is none of backend {}", to_string(layout),
                       backend.name());
  // Every backend's logical shape is {K/V, blocks in either order} followed by token, head, dim.
  const auto kv = to_size(backend.kv_dimension());
  const bool narrow = spec.value_size() != spec.head_size;
  if (narrow) {  // one row of a head's key and its value
    cache.head_size_v = spec.head_size_v;
    cache.shape.at(kv) = 1;
    cache.shape.back() += spec.head_size_v;
  }
  cache.strides =
      page_strides(spec, cache.shape, backend.get_kv_cache_stride_order(layout), 1 - kv);
  if (!spec.use_mla)  // of a latent row, V is the front
    cache.v_offset = narrow ? spec.head_size : cache.strides.at(kv);
  cache.block_stride = cache.strides.at(1 - kv);
  cache.token_stride = cache.strides[2];
  cache.head_stride = cache.strides[3];
  if (has_row_scales(spec)) add_row_scales(cache, kv);
  return cache;
}

KVCache make_kv_cache(const Context& context, cl_command_queue queue,
                      const AttentionBackend& backend, const AttentionConfig& config,
                      std::int64_t num_blocks, std::optional<KVCacheLayout> layout) {
  const KVCacheLayout order = detail::supported_layout(backend, context.capabilities(), layout);
  const KVCacheSpec spec = detail::page_spec(config);
  check_at_least("num_blocks", num_blocks, 1);
  const std::size_t bytes =
      checked_mul(to_size(num_blocks), spec.page_size_bytes(), "KV cache: bytes");
  const KVCacheConfig one_layer{num_blocks, {{bytes, {"layer"}}}, {{{"layer"}, spec}}};
  const Buffer raw = allocate_kv_cache(context, queue, one_layer).at("layer");
  return reshape_kv_cache(raw, spec, backend, order);
}

std::vector<StateView> view_state_pages(const Buffer& raw, const KVCacheSpec& spec) {
  throw_invalid_if(spec.kind != KVCacheKind::kMamba,
                   "view_state_pages: pages of keys and values, legal: kMamba");
  const std::size_t page = spec.page_size_bytes();
  const std::int64_t num_blocks = count_pages("view_state_pages", raw, page);
  std::vector<StateView> views;
  std::size_t begin = 0;
  for (const StateTensor& state : spec.states) {
    const std::size_t element = element_size_bytes(state.dtype);
    throw_invalid_if(begin % element != 0 || page % element != 0,
                     "view_state_pages: state {} begins at byte {} of pages of {}, legal: "
                     "multiples of {} ({})",
                     views.size(), begin, page, element, to_string(state.dtype));
    views.push_back({.buffer = raw,
                     .tensor = state,
                     .num_blocks = num_blocks,
                     .offset = static_cast<std::int64_t>(begin / element),
                     .block_stride = static_cast<std::int64_t>(page / element)});
    begin += detail::state_bytes(state);
  }
  return views;
}

}  // namespace clattn
