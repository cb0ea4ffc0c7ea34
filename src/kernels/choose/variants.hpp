#pragma once

#include <clattn/attention.hpp>
#include <clattn/device.hpp>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/choose/traits.hpp"
#include "opencl/runtime.hpp"

namespace clattn::detail {

enum class Role : std::uint8_t {
  kDecode,
  kPrefill,
  kMerge,
  kCacheWrite,
  kCacheWritePacked,
  kMLADecode,
  kPackedDecode,
};
std::string_view to_string(Role role);

/// One row of variants.inc.
struct Variant {
  std::string_view name;
  Role role;
  UnitId unit_id;
  KernelId kernel_id;
  std::int32_t block_rows;
  std::int32_t block_kv;
  std::int32_t work_group_size;

  const UnitTraits& unit() const { return unit_of(unit_id).traits; }
  const KernelTraits& kernel() const { return kernel_of(kernel_id).traits; }
  KernelFamily family() const { return unit_of(unit_id).family; }
};
std::span<const Variant> variants();

/// What a layer adds to plain attention, compiled in only where wanted
/// (kernels_cl/core/options.clh).
struct KernelOptions {
  bool window = false;              ///< sliding window or chunked-local, or listed rows
  std::int32_t chunk_lookback = 0;  ///< no more than hide a key
  bool listed_rows = false;         ///< of what batches say of requests
  bool gaps = false;                ///< some see keys with gaps between: kept ones, trees
  bool soft_cap = false;
  bool alibi = false;
  bool sink = false;
  bool mask = false;
  bool out_fp8 = false;
  bool operator==(const KernelOptions&) const = default;
};

/// How the cache of a layer is laid out, which decides the roles that serve it.
enum class CacheForm : std::uint8_t {
  kStrided,  ///< K and V by strides
  kLatent,   ///< MLA: one row a token, of which V is the front
  kPacked,   ///< x-packed K and V
};

/// What a kernel is specialised for.
struct KernelShape {
  std::int32_t num_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_size = 0;
  std::int32_t block_size = 0;  ///< 0: keys and values are contiguous, no pages
  DType dtype = DType::kF16;
  DType cache_dtype = DType::kF16;
  KernelOptions options;
  CacheForm form = CacheForm::kStrided;
  std::int32_t rope_dim = 0;     ///< kLatent: elements of a key beyond its head_size latent ones
  std::int32_t head_size_v = 0;  ///< elements of a value and of a result; 0 = head_size
  bool fp8_products = false;     ///< over e4m3: kernels may multiply as UnitTraits::fp8_products
  bool row_scales = false;       ///< the cache has a scale for each token and head
  CacheFormat cache_format() const {
    return row_scales ? CacheFormat::per_row(cache_dtype) : cache_dtype;
  }
  std::int32_t group() const { return num_heads / num_kv_heads; }
  std::int32_t value_size() const { return head_size_v != 0 ? head_size_v : head_size; }
  bool values_apart() const { return value_size() != head_size; }
  std::int64_t kv_row() const { return std::int64_t{num_kv_heads} * head_size; }  ///< of a token
  std::int64_t value_row() const { return std::int64_t{num_kv_heads} * value_size(); }
  std::int64_t query_row() const { return std::int64_t{num_heads} * (head_size + rope_dim); }
  std::int64_t output_row() const { return std::int64_t{num_heads} * value_size(); }
};

/// The kernel shape of a validated configuration.
KernelShape kernel_shape(const AttentionConfig& config);

/// The -D options that compile them into a kernel of `role`, each with a leading space.
std::string option_macros(const KernelOptions& options, Role role);

/// How a variant covers the query heads of one KV head.
struct HeadTiling {
  std::int32_t heads_per_item = 1;  ///< heads of a KV head in one work item
  std::int32_t head_chunks = 1;     ///< work items that share a KV head whose heads exceed the tile
  std::int32_t item_tokens = 1;     ///< query tokens that fit one item
  std::int32_t kv_heads = 1;        ///< most KV heads that one work-group takes
  std::int32_t groups_per_item = 1;  ///< work-groups that one item becomes
};
HeadTiling head_tiling(const Variant& variant, const KernelShape& shape,
                       const DeviceCapabilities& capabilities);

/// Whether a device serves `wanted` by kernels of `family`: kAuto follows the capabilities.
bool serves_family(KernelFamily wanted, KernelFamily family,
                   const DeviceCapabilities& capabilities);

/// Offers the variants of `role` to `use`, one family after the other and best first, until some
/// variant of a family was used. Returns whether one was.
bool use_best_family(Role role, KernelFamily wanted, const DeviceCapabilities& capabilities,
                     const std::function<bool(const Variant&)>& use);

/// Why a variant cannot run on a device at all; empty = it can.
std::vector<std::string> why_not(const Variant& variant, const DeviceCapabilities& capabilities);

/// Whether it merges the splits of its tiles itself: the last group of a tile to end does.
inline bool merges_splits(const Variant& variant) {
  return variant.kernel().merges_splits && variant.unit().fence;
}

/// Keys that one of its groups processes at once.
std::int32_t step_keys(const Variant& variant, std::int32_t head_size);

/// The number of tasks for each merge item if no item has more than `most_splits` splits
/// (kernels_cl/attention/merge.cl).
std::int32_t merge_tasks(const Variant& variant, const KernelShape& shape,
                         std::int32_t most_splits);

/// Why it does not take the element types and the sizes of a shape; empty = it does.
std::string why_not_types(const Variant& variant, const KernelShape& shape);
inline bool takes_types(const Variant& variant, const KernelShape& shape) {
  return why_not_types(variant, shape).empty();
}

/// The same of a whole shape: its types and, as a decode tile, all query heads of a KV head.
std::string why_not_shape(const Variant& variant, const KernelShape& shape);
inline bool takes_shape(const Variant& variant, const KernelShape& shape) {
  return why_not_shape(variant, shape).empty();
}

/// Why no variant of `role` in the family, or its ladder, runs on a device: the first variant's
/// reason; empty if one runs.
std::string why_none_runs(Role role, KernelFamily family, const DeviceCapabilities& capabilities);

/// Whether the kernel copies keys by tensor maps, in boxes of 16 tokens of a page.
bool copies_boxes(const Variant& variant, const KernelShape& shape,
                  const DeviceCapabilities& capabilities);

/// File, entry and -D options of a variant under a shape.
KernelSource kernel_source(const Variant& variant, const KernelShape& shape,
                           const DeviceCapabilities& capabilities);

/// Bytes of spilled registers that cost less than a smaller tile does, or another family.
inline constexpr std::uint64_t kCheapSpillBytes = 256;

/// Whether a GPU should take a smaller tile than one that needs so much private memory: on a matrix
/// unit any, elsewhere more than kCheapSpillBytes.
bool spills(const Variant& variant, std::uint64_t private_bytes,
            const DeviceCapabilities& capabilities);

}  // namespace clattn::detail
