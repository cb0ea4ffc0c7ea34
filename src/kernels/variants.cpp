#include "kernels/variants.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {

namespace {
constexpr std::array<std::string_view, 4> kFamilyNames = {"auto", "cpu", "gpu", "gpu_ptx"};
}

std::string_view to_string(KernelFamily family) {
  return kFamilyNames.at(static_cast<std::size_t>(family));
}

KernelFamily parse_kernel_family(std::string_view name) {
  const auto found = std::find(kFamilyNames.begin(), kFamilyNames.end(), name);
  if (found == kFamilyNames.end()) {
    detail::throw_invalid("kernel family is '{}', legal: auto, cpu, gpu, gpu_ptx", name);
  }
  return static_cast<KernelFamily>(found - kFamilyNames.begin());
}

}  // namespace clattn

namespace clattn::detail {

namespace {

constexpr auto kVariants = std::to_array<Variant>({
#define CLATTN_VARIANT(name, role, family, file, entry, block_rows, block_kv, wg, operands) \
  {#name,    Role::role, KernelFamily::family, file, entry, block_rows,                     \
   block_kv, wg,         Operands::operands},
#include "kernels/variants.inc"
#undef CLATTN_VARIANT
});

constexpr bool attends(Role role) {
  return role == Role::kDecode || role == Role::kPrefill || role == Role::kMLADecode ||
         role == Role::kPackedDecode;
}

constexpr bool rows_are_sound() {
  for (const Variant& v : kVariants) {
    if (attends(v.role) != (v.block_rows > 0 && v.block_kv > 0)) return false;
    if (v.work_group_size < 1 || (v.family == KernelFamily::kCpu) != (v.work_group_size == 1)) {
      return false;
    }
    for (const Variant& other : kVariants) {
      if (&other != &v && other.name == v.name) return false;
    }
  }
  return true;
}
static_assert(rows_are_sound(), "variants.inc: a tile, a work-group size or a name is wrong");

constexpr std::array kCpuLadder = {KernelFamily::kCpu};
constexpr std::array kGpuLadder = {KernelFamily::kGpu};
constexpr std::array kPtxLadder = {KernelFamily::kGpuPtx, KernelFamily::kGpu};

/// Lanes of a CPU kernel's vectors: 16, 8 or 4, as wide as the device likes and the head size
/// divides.
int vector_width(int head_size, int preferred) {
  if (preferred >= 16 && head_size % 16 == 0) return 16;
  return preferred >= 8 ? 8 : 4;
}

int dtype_macro(DType dtype) {
  return static_cast<int>(dtype);
}
// The values of CLA_Q_DTYPE and CLA_KV_DTYPE.
static_assert(static_cast<int>(DType::kF32) == 0 && static_cast<int>(DType::kF16) == 1 &&
              static_cast<int>(DType::kBF16) == 2 && static_cast<int>(DType::kFp8E4M3) == 3 &&
              static_cast<int>(DType::kFp8E5M2) == 4 && static_cast<int>(DType::kInt8) == 5);

}  // namespace

std::string_view to_string(Role role) {
  constexpr std::array<std::string_view, 7> kNames = {
      "decode", "prefill", "merge", "cache", "cache_packed", "mla_decode", "packed_decode"};
  return kNames.at(static_cast<std::size_t>(role));
}

std::span<const Variant> variants() {
  return kVariants;
}

KernelShape kernel_shape(const AttentionConfig& config) {
  const KernelOptions options{
      .window = config.sliding_window > 0 || config.attention_chunk_size > 0,
      .soft_cap = config.logits_soft_cap != 0,
      .alibi = !config.alibi_slopes.empty(),
      .sink = !config.sinks.empty(),
      .mask = config.custom_mask,
      .out_fp8 = config.output_fp8,
  };
  return {config.num_heads, config.num_kv_heads,
          config.head_size, config.contiguous_kv() ? 0 : config.block_size,
          config.dtype,     config.cache_dtype(),
          options,          CacheForm::kStrided};
}

std::string option_macros(const KernelOptions& options, Role role) {
  const bool attention = attends(role);
  const bool merge = role == Role::kMerge;
  struct Macro {
    std::string_view name;
    bool wanted;
  };
  const Macro macros[] = {
      {"WINDOW", attention && options.window}, {"SOFT_CAP", attention && options.soft_cap},
      {"ALIBI", attention && options.alibi},   {"SINK", (attention || merge) && options.sink},
      {"MASK", attention && options.mask},     {"OUT_FP8", (attention || merge) && options.out_fp8},
  };
  std::string text;
  for (const Macro& macro : macros) {
    if (macro.wanted) text += fmt::format(" -DCLA_{}=1", macro.name);
  }
  return text;
}

/// Rows of a work item. CPU tiles keep their rows in private memory and grow with the heads of a KV
/// head, up to what a thread's stack holds, so that its keys are read once.
std::int32_t tile_rows(const Variant& variant, const KernelShape& shape) {
  constexpr std::int32_t kMostRows = 1024;
  const bool grows = variant.family == KernelFamily::kCpu && variant.role == Role::kPrefill;
  const std::int32_t wanted = grows ? std::min(shape.group(), kMostRows) : 0;
  return std::max({variant.block_rows, wanted, 1});
}

/// KV heads that a CPU's work-group reads of a page before it goes on to the next page: memory is
/// faster in runs of several heads. More of them would push the rows out of the nearer caches.
constexpr std::int32_t kHeadsOfAPage = 8;

HeadTiling head_tiling(const Variant& variant, const KernelShape& shape) {
  HeadTiling tiling;
  const std::int32_t rows = tile_rows(variant, shape);
  tiling.heads_per_item = std::min(shape.group(), rows);
  tiling.head_chunks = ceil_div(shape.group(), tiling.heads_per_item);
  tiling.item_tokens = rows / tiling.heads_per_item;
  const bool by_page = variant.family == KernelFamily::kCpu && variant.role == Role::kDecode;
  tiling.kv_heads = by_page ? std::min(shape.num_kv_heads, kHeadsOfAPage) : 1;
  tiling.groups_per_item = ceil_div(shape.num_kv_heads, tiling.kv_heads) * tiling.head_chunks;
  return tiling;
}

std::span<const KernelFamily> family_ladder(KernelFamily wanted,
                                            const DeviceCapabilities& capabilities) {
  switch (wanted) {
    case KernelFamily::kCpu:
      return kCpuLadder;
    case KernelFamily::kGpu:
      return kGpuLadder;
    case KernelFamily::kGpuPtx:
      return kPtxLadder;
    case KernelFamily::kAuto:
      break;
  }
  if (capabilities.kind == DeviceKind::kCpu) return kCpuLadder;
  return capabilities.inline_ptx ? std::span<const KernelFamily>(kPtxLadder) : kGpuLadder;
}

std::vector<std::string> why_not(const Variant& variant, const DeviceCapabilities& capabilities) {
  std::vector<std::string> reasons;
  if (variant.family == KernelFamily::kGpuPtx && !capabilities.inline_ptx) {
    reasons.emplace_back("needs inline PTX");
  }
  if (variant.operands == Operands::kWarpgroup && !capabilities.warpgroup_products) {
    reasons.emplace_back("needs warpgroup products (compute capability 9.0)");
  }
  if (variant.operands == Operands::kBF16Pairs && !capabilities.bf16_products) {
    reasons.emplace_back("needs products of bf16 pairs (AVX512_BF16, AVX512_VBMI)");
  }
  if (variant.family == KernelFamily::kCpu && capabilities.kind == DeviceKind::kGpu) {
    reasons.emplace_back("needs a CPU: it keeps its tiles in private memory, which a GPU spills");
  }
  if (static_cast<std::uint64_t>(variant.work_group_size) > capabilities.max_work_group_size) {
    reasons.push_back(fmt::format("needs {} work-items per group, the device allows {}",
                                  variant.work_group_size, capabilities.max_work_group_size));
  }
  return reasons;
}

std::int32_t staying_groups(const Variant& variant) {
  if (variant.operands == Operands::kWarpgroup) return 1;
  if (variant.operands == Operands::kAsyncCopies) return resident_groups(variant);
  // Two a core: older versions of PoCL hand a thread one group more than its share, so with one a
  // core some thread would go without. A group that comes late finds no task.
  return takes_from_queue(variant) ? 2 : 0;
}

std::int32_t step_keys(const Variant& variant, std::int32_t head_size) {
  const bool decodes = variant.file.starts_with("decode_") && variant.family != KernelFamily::kCpu;
  if (!decodes) return variant.block_kv;
  // Warps have keys of their own, or where there are no matrix units as many lanes as a key has
  // units of eight elements (kernels_cl/lib/slots.clh).
  constexpr std::uint32_t kWarp = 32;
  const std::uint32_t lanes =
      variant.operands != Operands::kAny
          ? kWarp
          : std::min(kWarp, std::bit_ceil(static_cast<std::uint32_t>(std::max(head_size / 8, 1))));
  const std::int32_t sharers = variant.work_group_size / static_cast<std::int32_t>(lanes);
  return variant.block_kv * std::max(sharers, 1);
}

std::int32_t merge_heads(const Variant& variant, std::int32_t head_size) {
  constexpr std::int32_t kDims = 4;  // of a work-item
  return std::max(1, variant.work_group_size * kDims / head_size);
}

bool assembles_tensor_maps(const DeviceCapabilities& capabilities) {
  constexpr int kFirstDriver = 555;
  const std::string& version = capabilities.driver_version;
  int driver = 0;
  std::from_chars(version.data(), version.data() + version.size(), driver);
  return driver >= kFirstDriver;
}

bool takes_tiles(const Variant& variant) {
  if (variant.role == Role::kMerge) return true;
  return variant.family != KernelFamily::kCpu &&
         (variant.role == Role::kCacheWrite || variant.file == "prefill_wgmma.cl" ||
          variant.file == "decode_mma.cl" || variant.file == "decode_ring.cl");
}

bool takes_types(const Variant& variant, const KernelShape& shape) {
  if (shape.tiles && !takes_tiles(variant)) return false;
  const bool queries = element_size_bytes(shape.dtype) == 2;
  const bool same = shape.cache_dtype == shape.dtype;
  switch (variant.operands) {
    case Operands::kAny:
      return true;
    case Operands::k16Bit:
      return queries && (same || element_size_bytes(shape.cache_dtype) == 1);
    case Operands::kAsyncCopies: {
      // What eight warps hold of the results of 16 rows of more dims does not fit.
      constexpr std::int32_t kSums = 16 * 128;
      const bool fp8 = shape.cache_dtype == DType::kFp8E4M3 || shape.cache_dtype == DType::kFp8E5M2;
      return queries && (same || fp8) && (shape.head_size == 128 || shape.head_size == 256) &&
             shape.block_size > 0 && shape.block_size % 16 == 0 &&
             variant.block_rows * shape.head_size <= kSums;
    }
    case Operands::kBF16Pairs:
      return shape.dtype == DType::kBF16 && (same || element_size_bytes(shape.cache_dtype) == 1) &&
             shape.head_size % 64 == 0;
    case Operands::kWarpgroup:
      if (shape.form == CacheForm::kLatent) {
        return queries && same && shape.rope_dim == 64 &&
               (shape.head_size == 256 || shape.head_size == 512);
      }
      // Local memory holds two tiles each of keys and values.
      constexpr std::int32_t kTileElements = 128 * 128;
      return queries && same && shape.head_size >= 64 &&
             std::has_single_bit(static_cast<std::uint32_t>(shape.head_size)) &&
             shape.head_size * variant.block_kv <= kTileElements;
  }
  return false;
}

bool takes_shape(const Variant& variant, const KernelShape& shape) {
  return takes_types(variant, shape) &&
         (variant.role != Role::kDecode || variant.block_rows >= shape.group());
}

bool any_variant_runs(Role role, KernelFamily family, const DeviceCapabilities& capabilities) {
  for (const KernelFamily rung : family_ladder(family, capabilities)) {
    for (const Variant& variant : variants()) {
      if (variant.role == role && variant.family == rung &&
          why_not(variant, capabilities).empty()) {
        return true;
      }
    }
  }
  return false;
}

KernelSource kernel_source(const Variant& variant, const KernelShape& shape,
                           const DeviceCapabilities& capabilities) {
  const bool cpu = variant.family == KernelFamily::kCpu;
  // The fetch hint is a compiler built-in that CPU drivers know; another kind of device that
  // runs this family does without.
  const bool prefetch = cpu && capabilities.kind == DeviceKind::kCpu;
  const HeadTiling tiling = head_tiling(variant, shape);
  const int vec =
      cpu ? vector_width(shape.head_size + shape.rope_dim, capabilities.float_vector_width) : 0;
  const int x = 16 / static_cast<int>(element_size_bytes(shape.cache_dtype));
  std::string options = fmt::format(
      "-DCLA_HEAD_DIM={} -DCLA_GROUP={} -DCLA_HEADS_PER_ITEM={} "
      "-DCLA_HEAD_CHUNKS={} -DCLA_Q_DTYPE={} -DCLA_KV_DTYPE={} -DCLA_PAGE_SIZE={} "
      "-DCLA_BLOCK_ROWS={} -DCLA_BLOCK_KV={} -DCLA_WG_SIZE={} -DCLA_VEC={} "
      "-DCLA_REDUCE={} -DCLA_MERGE_TAIL={} -DCLA_CACHE_X={} -DCLA_PREFETCH={} "
      "-DCLA_KV_HEADS={} -DCLA_FP8_CVT={} -DCLA_DOT={}",
      shape.head_size, shape.group(), tiling.heads_per_item, tiling.head_chunks,
      dtype_macro(shape.dtype), dtype_macro(shape.cache_dtype), shape.block_size,
      variant.block_rows > 0 ? tile_rows(variant, shape) : 0, variant.block_kv,
      variant.work_group_size, vec, variant.family == KernelFamily::kGpuPtx ? 1 : 0,
      joins_splits(variant) ? 1 : 0, x, prefetch ? 1 : 0, tiling.kv_heads,
      variant.family == KernelFamily::kGpuPtx && capabilities.fp8_conversions ? 1 : 0,
      variant.operands == Operands::kBF16Pairs ? 1 : 0);
  if (shape.form == CacheForm::kLatent)
    options += fmt::format(" -DCLA_ROPE_DIM={}", shape.rope_dim);
  if (shape.tiles && variant.role != Role::kMerge) options += " -DCLA_TILES=1";
  const bool boxes = makes_tensor_maps(variant) && assembles_tensor_maps(capabilities) &&
                     shape.block_size > 0 && shape.block_size % 16 == 0;
  if (boxes) options += " -DCLA_BOXES=1";
  options += option_macros(shape.options, variant.role);
  // PoCL 5.0 computes most of these kernels wrong when it optimises, under each of its work-group
  // methods that builds them; PoCL 3.1 and 6.0, an H200 and oclgrind compute the same sources
  // right. On a CPU these families only serve comparison, so right comes before fast.
  if (!cpu && capabilities.kind == DeviceKind::kCpu) options += " -cl-opt-disable";
  return {std::string(variant.file), std::string(variant.entry), std::move(options)};
}

bool fits_after_build(const Variant& variant, const KernelPool& pool,
                      const DeviceCapabilities& capabilities) {
  // CPU drivers report fixed numbers for these (PoCL: 4096 work-items, 1024 private bytes).
  if (capabilities.kind == DeviceKind::kCpu) return true;
  constexpr std::uint64_t kSpillBytesAllowed =
      256;  // a handful of registers: cheaper than a smaller tile
  // What the self-test saw work counts more than what the driver says.
  const std::uint64_t local_limit = capabilities.static_local_mem_bytes != 0
                                        ? capabilities.static_local_mem_bytes
                                        : capabilities.local_mem_bytes;
  // NVIDIA's driver answers a power of two; its assembler has seen that these groups fit.
  const bool size_fits =
      variant.operands == Operands::kWarpgroup ||
      pool.work_group_size() >= static_cast<std::size_t>(variant.work_group_size);
  return pool.local_mem_bytes() <= local_limit && pool.private_mem_bytes() <= kSpillBytesAllowed &&
         size_fits;
}

}  // namespace clattn::detail
