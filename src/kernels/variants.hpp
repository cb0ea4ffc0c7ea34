#pragma once

#include <clattn/attention.hpp>
#include <clattn/device.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

/// Element types that a variant takes.
enum class Operands : std::uint8_t {
  kAny,
  k16Bit,      ///< matrix units: 16-bit queries, and a cache of their type or of 8 bits
  kWarpgroup,  ///< matrix units of warpgroups: 16-bit queries, a cache of their type, heads of 64,
               ///< 128 or 256, or latent rows of 256 + 64 or 512 + 64
  kAsyncCopies,  ///< matrix units that copies keep ahead of: 16-bit queries, a cache of their type
                 ///< or of fp8, heads of 128 or 256, pages of a multiple of 16 tokens
  kBF16Pairs,  ///< x86's products of bf16 pairs: bf16 queries, a cache of bf16 or 8 bits, heads of
               ///< a multiple of 64
};

/// One row of variants.inc.
struct Variant {
  std::string_view name;
  Role role;
  KernelFamily family;
  std::string_view file;
  std::string_view entry;
  std::int32_t block_rows;
  std::int32_t block_kv;
  std::int32_t work_group_size;
  Operands operands;
};
std::span<const Variant> variants();

/// What a layer adds to plain attention, compiled in only where wanted
/// (kernels_cl/lib/options.clh).
struct KernelOptions {
  bool window = false;  ///< sliding window or chunked-local
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
  std::int32_t rope_dim = 0;  ///< kLatent: elements of a key beyond its head_size latent ones
  bool tiles = false;         ///< kStrided: the cache's blocks lie as KVCacheLayout::kTiles says
  std::int32_t group() const { return num_heads / num_kv_heads; }
};

/// The kernel shape of a validated configuration.
KernelShape kernel_shape(const AttentionConfig& config);

/// The -D options that compile them into a kernel of `role`, each with a leading space.
std::string option_macros(const KernelOptions& options, Role role);

/// How a variant covers the query heads of one KV head.
struct HeadTiling {
  std::int32_t heads_per_item = 1;  ///< heads of a KV head in one work item
  std::int32_t head_chunks =
      1;  ///< work items that share a KV head: 1 unless its heads exceed the tile
  std::int32_t item_tokens = 1;      ///< query tokens that fit one item
  std::int32_t kv_heads = 1;         ///< most KV heads that one work-group takes
  std::int32_t groups_per_item = 1;  ///< work-groups that one item becomes
};
HeadTiling head_tiling(const Variant& variant, const KernelShape& shape);

/// The families to look in for a device, best first: kAuto follows the capabilities.
std::span<const KernelFamily> family_ladder(KernelFamily wanted,
                                            const DeviceCapabilities& capabilities);

/// Why a variant cannot run on a device at all; empty = it can.
std::vector<std::string> why_not(const Variant& variant, const DeviceCapabilities& capabilities);

/// Whether it rounds probabilities before they meet V (KernelInfo::rounds_weights).
inline bool rounds_weights(const Variant& variant) {
  return variant.operands != Operands::kAny;
}

/// Whether it joins the splits of its tiles itself: the last group of a tile to end does.
inline bool joins_splits(const Variant& variant) {
  return variant.file.starts_with("decode_") && variant.family != KernelFamily::kGpu;
}

/// Whether its work-groups stay, a few for each compute unit, and take tasks from a queue
/// (kernels_cl/lib/cpu_queue.clh).
inline bool takes_from_queue(const Variant& variant) {
  return variant.family == KernelFamily::kCpu &&
         (variant.role == Role::kDecode || variant.role == Role::kPrefill ||
          variant.role == Role::kMLADecode);
}

/// Whether its launches describe the cache to the device's copy engine
/// (kernels_cl/lib/tensor_map.clh).
inline bool makes_tensor_maps(const Variant& variant) {
  return variant.operands == Operands::kWarpgroup && variant.role == Role::kPrefill;
}

/// Whether the driver's assembler takes the strides of tensor maps as PTX says, in bytes: from
/// CUDA 12.5's (R555) on; those before it take units of 16.
bool assembles_tensor_maps(const DeviceCapabilities& capabilities);

/// Work-groups that a compute unit runs at once; 0 where it is not known.
inline std::int32_t resident_groups(const Variant& variant) {
  // Their tiles fill the local memory.
  if (variant.file == "mla_wgmma.cl" || variant.operands == Operands::kAsyncCopies) return 1;
  return variant.file == "decode_mma.cl" ? 2 : 0;
}

/// Keys that one of its groups processes at once.
std::int32_t step_keys(const Variant& variant, std::int32_t head_size);

/// Heads of a token that a group of a merge kernel merges (kernels_cl/merge.cl).
std::int32_t merge_heads(const Variant& variant, std::int32_t head_size);

/// Work-groups for each compute unit that go through all tasks of a launch; 0: a group serves one.
std::int32_t staying_groups(const Variant& variant);

/// Whether it can be built for a cache in tiles.
bool takes_tiles(const Variant& variant);

/// Whether it takes the element types, the head size and the order of a shape.
bool takes_types(const Variant& variant, const KernelShape& shape);

/// Whether it takes a shape: its types and, as a decode tile, all query heads of a KV head.
bool takes_shape(const Variant& variant, const KernelShape& shape);

/// Whether some variant of `role` in the family, or its ladder, runs on a device.
bool any_variant_runs(Role role, KernelFamily family, const DeviceCapabilities& capabilities);

/// File, entry and -D options of a variant under a shape.
KernelSource kernel_source(const Variant& variant, const KernelShape& shape,
                           const DeviceCapabilities& capabilities);

/// Whether a built variant fits the device: its local memory, its work-group
/// size, and on a GPU no more than a few spilled registers.
bool fits_after_build(const Variant& variant, const KernelPool& pool,
                      const DeviceCapabilities& capabilities);

}  // namespace clattn::detail
