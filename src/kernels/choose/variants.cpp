#include "kernels/choose/variants.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <numeric>
#include <utility>

#include "base/checked.hpp"
#include "kernels/choose/attention_kernels.hpp"
#include "opencl/device/device_info.hpp"
#include "shared/work_item.h"

namespace clattn {

namespace {

constexpr std::array<std::string_view, kKernelFamilies.size()> kFamilyNames = {
    "auto", "cpu", "gpu", "gpu_ptx", "gpu_matrix"};
}  // namespace

std::string_view to_string(KernelFamily family) {
  return kFamilyNames.at(static_cast<std::size_t>(family));
}

KernelFamily parse_kernel_family(std::string_view name) {
  const auto found = std::ranges::find(kFamilyNames, name);
  detail::throw_invalid_if(found == kFamilyNames.end(), "kernel family is '{}', legal: {}", name,
                           fmt::join(kFamilyNames, ", "));
  return static_cast<KernelFamily>(found - kFamilyNames.begin());
}

}  // namespace clattn

namespace clattn::detail {

namespace {

constexpr auto kVariants = std::to_array<Variant>({
#define VARIANT(name, role, unit, kernel, rows, kv, wg) \
  {#name, Role::k##role, UnitId::unit, KernelId::kernel, rows, kv, wg},
#include "kernels/choose/variants.inc"
});

constexpr bool attends(Role role) {
  return role == Role::kDecode || role == Role::kPrefill || role == Role::kMLADecode ||
         role == Role::kPackedDecode;
}

constexpr bool rows_are_sound() {
  for (const Variant& v : kVariants) {
    if (attends(v.role) != (v.block_rows > 0 && v.block_kv > 0)) return false;
    if (v.work_group_size < 1) return false;
    for (const Variant& other : kVariants) {
      if (&other != &v && other.name == v.name) return false;
    }
  }
  return true;
}
static_assert(rows_are_sound(), "variants.inc: a tile, a work-group size or a name is wrong");

/// Query rows of the decode tiles on devices that multiply prompts in e4m3.
constexpr std::int32_t decode_rows(const Variant& variant) {
  const UnitTraits& unit = unit_of(variant.unit_id).traits;
  return unit.ptx && unit.few_rows ? variant.block_rows : 0;
}
static_assert(decode_rows(std::ranges::max(kVariants, {}, decode_rows)) == kMostDecodeRows,
              "kMostDecodeRows is not the largest tile's");

/// The families to look in for a device, best first.
std::vector<KernelFamily> family_ladder(KernelFamily wanted,
                                        const DeviceCapabilities& capabilities) {
  using enum KernelFamily;
  if (wanted == kAuto) {
    wanted = takes_single_items(capabilities)     ? kCpu
             : capabilities.inline_ptx            ? kGpuPtx
             : !capabilities.matrix_units.empty() ? kGpuMatrix
                                                  : kGpu;
  }
  if (wanted == kGpuPtx || wanted == kGpuMatrix) return {wanted, kGpu};
  return {wanted};
}

bool contains(TypeSet types, DType dtype, DType queries) {
  return (types & type_set(dtype)) != 0 || ((types & kSameType) != 0 && dtype == queries);
}

/// Elements of a head's row in a kernel's tiles: its own, or those of the next size that the kernel
/// pads it to; 0 = it takes no such heads.
std::int32_t padded_head(const KernelTraits& kernel, const KernelShape& shape) {
  if (kernel.heads.front() == 0) return shape.head_size;
  const bool pads = kernel.pads_from != 0 && shape.head_size >= kernel.pads_from &&
                    shape.cache_dtype == shape.dtype && !shape.values_apart();
  for (const std::int32_t size : kernel.heads)
    if (size == shape.head_size || (pads && size > shape.head_size)) return size;
  return 0;
}

bool is_within(std::int32_t value, std::int32_t most) {
  return most == 0 || value <= most;
}

/// Lanes of a CPU kernel's vectors: 16, 8 or 4, as wide as the device likes and the head size
/// divides.
int vector_width(int head_size, int preferred) {
  if (preferred >= 16 && head_size % 16 == 0) return 16;
  return preferred >= 8 ? 8 : 4;
}

/// Rows per warp, if the warps divide the tile's rows evenly.
std::int32_t warp_rows(const Variant& variant) {
  return variant.block_rows * std::max(variant.unit().lanes, 1) / variant.work_group_size;
}

/// Warps that share the same keys (UnitTraits::warp_dims).
std::int32_t key_sharers(const Variant& variant, std::int32_t head_size) {
  const UnitTraits& unit = variant.unit();
  if (unit.warp_dims == 0) return 1;
  const auto dim_parts =
      std::bit_ceil(static_cast<std::uint32_t>(ceil_div(head_size, unit.warp_dims)));
  return variant.block_rows / unit.tile_rows * static_cast<std::int32_t>(dim_parts);
}

// The values of CLA_Q_DTYPE and CLA_KV_DTYPE.
static_assert(static_cast<int>(DType::kF32) == 0 && static_cast<int>(DType::kF16) == 1 &&
              static_cast<int>(DType::kBF16) == 2 && static_cast<int>(DType::kFp8E4M3) == 3 &&
              static_cast<int>(DType::kFp8E5M2) == 4 && static_cast<int>(DType::kInt8) == 5 &&
              static_cast<int>(DType::kUInt4x2) == 6);

/// Whether the driver's assembler takes the strides of tensor maps as PTX says, in bytes: from
/// CUDA 12.5's (R555) on; those before it take units of 16.
bool assembles_tensor_maps(const DeviceCapabilities& capabilities) {
  constexpr int kFirstDriver = 555;
  const std::string& version = capabilities.driver_version;
  int driver = 0;
  std::from_chars(version.data(), version.data() + version.size(), driver);
  return driver >= kFirstDriver;
}

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
  const ListRules lists = lists_of(config);
  const KernelOptions options{
      .window = window_of(config) != KeyWindow{} || lists.any(),
      .chunk_lookback = window_of(config).chunk_lookback,
      .listed_rows = lists.any(),
      .gaps = lists.gaps(),
      .soft_cap = config.logits_soft_cap != 0,
      .alibi = !config.alibi_slopes.empty(),
      .sink = !config.sinks.empty(),
      .mask = config.custom_mask,
      .out_fp8 = config.output_fp8,
  };
  return {.num_heads = config.num_heads,
          .num_kv_heads = config.num_kv_heads,
          .head_size = config.use_mla ? config.output_head_size() : config.head_size,
          .block_size = config.contiguous_kv() ? 0 : config.block_size,
          .dtype = config.dtype,
          .cache_dtype = config.cache_dtype(),
          .options = options,
          .form = config.use_mla ? CacheForm::kLatent : CacheForm::kStrided,
          .rope_dim = config.use_mla ? config.rope_dim : 0,
          .head_size_v = config.output_head_size(),
          // ALiBi and masks need more registers than that kernel has; decodes of more heads would
          // have no other.
          .fp8_products = config.fp8_products && !config.use_mla && !options.alibi &&
                          !options.mask && config.num_queries_per_kv() <= kMostDecodeRows &&
                          config.cache_format() == DType::kFp8E4M3,
          .row_scales = config.cache_format().scales_per_row()};
}

std::string option_macros(const KernelOptions& options, Role role) {
  const bool attention = attends(role);
  const bool merge = role == Role::kMerge;
  const std::pair<std::string_view, bool> macros[] = {
      {"WINDOW", attention && options.window},
      {"LISTED_ROWS", attention && options.listed_rows},
      {"GAPS", attention && options.gaps},
      {"SOFT_CAP", attention && options.soft_cap},
      // A layer's launches share the list of tensors.
      {"ALIBI", (attention || merge) && options.alibi},
      {"SINK", (attention || merge) && options.sink},
      {"MASK", (attention || merge) && options.mask},
      {"OUT_FP8", (attention || merge) && options.out_fp8},
  };
  std::string text;
  for (const auto& [name, wanted] : macros) {
    if (wanted) text += fmt::format(" -DCLA_{}=1", name);
  }
  if (attention && options.chunk_lookback > 0)
    text += fmt::format(" -DCLA_CHUNK_LOOKBACK={}", options.chunk_lookback);
  return text;
}

/// Rows of a work item. Tiles in private memory grow with the heads of a KV head, up to what a
/// thread's stack holds, so that its keys are read once.
std::int32_t tile_rows(const Variant& variant, const KernelShape& shape) {
  return std::max(
      {variant.block_rows, std::min(shape.group(), variant.kernel().most_grown_rows), 1});
}

HeadTiling head_tiling(const Variant& variant, const KernelShape& shape,
                       const DeviceCapabilities& capabilities) {
  // A few cores read faster the longer their runs are. Many cores are bound by memory itself; with
  // smaller tasks they end closer together and need fewer splits (docs/journal.md, "CPUs").
  constexpr std::int32_t kFewUnits = 8, kKVHeadsOfMany = 2;
  const std::int32_t most_kv_heads = capabilities.compute_units > kFewUnits
                                         ? std::min(variant.kernel().most_kv_heads, kKVHeadsOfMany)
                                         : variant.kernel().most_kv_heads;
  HeadTiling tiling;
  const std::int32_t rows = tile_rows(variant, shape);
  tiling.heads_per_item = std::min(shape.group(), rows);
  tiling.head_chunks = ceil_div(shape.group(), tiling.heads_per_item);
  tiling.item_tokens = rows / tiling.heads_per_item;
  tiling.kv_heads = std::min(shape.num_kv_heads, most_kv_heads);
  tiling.groups_per_item = ceil_div(shape.num_kv_heads, tiling.kv_heads) * tiling.head_chunks;
  return tiling;
}

bool serves_family(KernelFamily wanted, KernelFamily family,
                   const DeviceCapabilities& capabilities) {
  const auto ladder = family_ladder(wanted, capabilities);
  return std::ranges::find(ladder, family) != ladder.end();
}

bool use_best_family(Role role, KernelFamily wanted, const DeviceCapabilities& capabilities,
                     const std::function<bool(const Variant&)>& use) {
  for (const KernelFamily family : family_ladder(wanted, capabilities)) {
    bool used = false;
    for (const Variant& variant : variants()) {
      if (variant.role == role && variant.family() == family) used |= use(variant);
    }
    if (used) return true;
  }
  return false;
}

std::vector<std::string> why_not(const Variant& variant, const DeviceCapabilities& capabilities) {
  std::vector<std::string> reasons;
  append_if(reasons, !capabilities.struct_arguments,
            "needs structs passed by value, which this driver was seen to damage");
  if (const auto reason = unmet_need(unit_of(variant.unit_id), capabilities))
    reasons.push_back(*reason);
  append_if(reasons, variant.work_group_size == 1 && !capabilities.long_loops,
            "needs loops of any length, which this driver was seen to cut short");
  append_if(reasons, std::cmp_greater(variant.work_group_size, capabilities.max_work_group_size),
            "needs {} work-items per group, the device allows {}", variant.work_group_size,
            capabilities.max_work_group_size);
  return reasons;
}

std::int32_t step_keys(const Variant& variant, std::int32_t head_size) {
  const StepKeys keys = variant.kernel().keys;
  if (keys == StepKeys::kTile) return variant.block_kv;
  // Those that share a key: of a warp, or as many lanes as a key has units of eight elements.
  constexpr std::uint32_t kWarp = 32;
  const std::uint32_t lanes =
      keys == StepKeys::kPerWarp
          ? static_cast<std::uint32_t>(variant.unit().lanes)
          : std::min(kWarp, std::bit_ceil(static_cast<std::uint32_t>(std::max(head_size / 8, 1))));
  const std::int32_t of_a_tile = static_cast<std::int32_t>(lanes) * key_sharers(variant, head_size);
  return variant.block_kv * std::max(variant.work_group_size / of_a_tile, 1);
}

std::int32_t merge_tasks(const Variant& variant, const KernelShape& shape,
                         std::int32_t most_splits) {
  if (variant.work_group_size == 1) return shape.num_heads;
  const std::int32_t columns = shape.num_heads * (shape.value_size() / CLA_COLUMN_DIMS);
  const std::int32_t parts = most_splits > CLA_ALONE ? CLA_COLUMN_PARTS : 1;
  return ceil_div(columns, variant.work_group_size / parts);
}

std::string why_not_types(const Variant& variant, const KernelShape& shape) {
  const Unit& unit = unit_of(variant.unit_id);
  const KernelTraits& kernel = variant.kernel();
  if (!contains(unit.queries, shape.dtype, shape.dtype))
    return fmt::format("does not take {} queries", to_string(shape.dtype));
  if (!contains(unit.cache, shape.cache_dtype, shape.dtype) ||
      !contains(kernel.cache, shape.cache_dtype, shape.dtype))
    return fmt::format("does not take {} caches under {}", to_string(shape.cache_dtype),
                       to_string(shape.dtype));
  if (shape.row_scales && !(unit.traits.row_scales && kernel.row_scales))
    return fmt::format("does not take {} caches", to_string(shape.cache_format()));
  if (unit.traits.fp8_products && !shape.fp8_products)
    return "taken only where fp8_products asks for it";
  const std::int32_t head = shape.head_size;
  const auto row_bytes = head / codes_per_element(shape.cache_dtype) *
                         static_cast<std::int32_t>(element_size_bytes(shape.cache_dtype));
  const std::int32_t room = padded_head(kernel, shape);
  if ((room == 0 && !shape.values_apart()) || head % unit.traits.head_step != 0 ||
      head > kernel.most_head)
    return fmt::format("does not take heads of {}", head);
  const std::int32_t value = shape.value_size();
  const bool paged = shape.block_size > 0;
  const bool listed = shape.values_apart() && !paged && kernel.head_pair == HeadPair{head, value};
  const bool smaller = paged ? kernel.values_in_pages : kernel.values_apart || listed;
  if (shape.values_apart() && (!smaller || value % unit.traits.head_step != 0))
    return fmt::format("does not take heads of {} with values of {}{}", head, value,
                       paged ? " in pages" : "");
  if (row_bytes % kernel.row_bytes_step != 0)
    return fmt::format("does not take heads of {} over {} caches", head,
                       to_string(shape.cache_dtype));
  if (shape.form == CacheForm::kLatent && shape.rope_dim % unit.traits.head_step != 0)
    return fmt::format("does not take rotary parts of {}", shape.rope_dim);
  if (kernel.rope_dim != 0 && kernel.rope_dim != shape.rope_dim)
    return fmt::format("takes rotary parts of {} only", kernel.rope_dim);
  if (kernel.page_step != 0 && (shape.block_size == 0 || shape.block_size % kernel.page_step != 0))
    return fmt::format("takes pages of multiples of {} only", kernel.page_step);
  const std::int32_t padding = room > head ? room - head : 0;
  // The mean of K and V.
  const std::int32_t tile_elements = variant.block_kv * ((head + value) / 2 + padding);
  if (!is_within(variant.block_rows * head, kernel.most_row_elements) ||
      (!listed && !is_within(tile_elements, kernel.most_key_elements)) ||
      !is_within(tile_elements, unit.traits.most_key_elements) ||
      !is_within(warp_rows(variant) * value, unit.traits.most_sums))
    return fmt::format("its tile is too large for heads of {}", head);
  return {};
}

std::string why_not_shape(const Variant& variant, const KernelShape& shape) {
  std::string types = why_not_types(variant, shape);
  if (!types.empty() || variant.role != Role::kDecode) return types;
  if (variant.block_rows >= shape.group()) return types;
  return fmt::format("has {} rows for {} query heads a KV head", variant.block_rows, shape.group());
}

std::string why_none_runs(Role role, KernelFamily family, const DeviceCapabilities& capabilities) {
  std::optional<std::string> first;
  const bool runs = use_best_family(role, family, capabilities, [&](const Variant& variant) {
    const std::vector<std::string> reasons = why_not(variant, capabilities);
    if (!first && !reasons.empty()) first = reasons.front();
    return reasons.empty();
  });
  return runs ? "" : first.value_or("there is none");
}

bool copies_boxes(const Variant& variant, const KernelShape& shape,
                  const DeviceCapabilities& capabilities) {
  const bool unconverted = variant.unit().fp8_products || shape.cache_dtype == shape.dtype;
  return variant.kernel().tensor_maps && assembles_tensor_maps(capabilities) && unconverted &&
         shape.block_size > 0 && shape.block_size % 16 == 0;
}

KernelSource kernel_source(const Variant& variant, const KernelShape& shape,
                           const DeviceCapabilities& capabilities) {
  const UnitTraits& unit = variant.unit();
  const bool cpu = variant.family() == KernelFamily::kCpu;
  const HeadTiling tiling = head_tiling(variant, shape, capabilities);
  const int vec = cpu ? vector_width(std::gcd(shape.head_size + shape.rope_dim, shape.value_size()),
                                     capabilities.float_vector_width)
                      : 0;
  const int x = 16 / static_cast<int>(element_size_bytes(shape.cache_dtype));
  std::string options = fmt::format(
      "-DCLA_HEAD_DIM={} -DCLA_GROUP={} -DCLA_HEADS_PER_ITEM={} "
      "-DCLA_HEAD_CHUNKS={} -DCLA_Q_DTYPE={} -DCLA_KV_DTYPE={} -DCLA_PAGE_SIZE={} "
      "-DCLA_BLOCK_ROWS={} -DCLA_BLOCK_KV={} -DCLA_WG_SIZE={} -DCLA_VEC={} "
      "{} -DCLA_MERGE_TAIL={} -DCLA_CACHE_X={} "
      "-DCLA_KV_HEADS={} -DCLA_FP8_CVT={} -DCLA_DOT={}",
      shape.head_size, shape.group(), tiling.heads_per_item, tiling.head_chunks,
      static_cast<int>(shape.dtype), static_cast<int>(shape.cache_dtype), shape.block_size,
      variant.block_rows > 0 ? tile_rows(variant, shape) : 0, variant.block_kv,
      variant.work_group_size, vec, unit_options(unit_of(variant.unit_id), capabilities),
      merges_splits(variant) ? 1 : 0, x, tiling.kv_heads,
      unit.ptx && (capabilities.fp8_conversions || unit.fp8_products) ? 1 : 0, unit.dot);
  if (shape.values_apart()) options += fmt::format(" -DCLA_VALUE_DIM={}", shape.value_size());
  if (const std::int32_t room = padded_head(variant.kernel(), shape); room > shape.head_size)
    options += fmt::format(" -DCLA_PADDED_DIM={}", room);
  if (shape.form == CacheForm::kLatent)
    options += fmt::format(" -DCLA_ROPE_DIM={}", shape.rope_dim);
  if (shape.row_scales) options += " -DCLA_ROW_SCALES=1";
  if (copies_boxes(variant, shape, capabilities)) options += " -DCLA_BOXES=1";
  options += option_macros(shape.options, variant.role);
  // On a CPU these families only serve comparison, so correct results and short builds matter more
  // than speed: PoCL 5.0 computes most scalar kernels wrong when it optimises, under each of its
  // work-group methods that builds them (PoCL 3.1 and 6.0, an H200 and oclgrind compute the same
  // sources right), and Intel's compiler takes up to a minute for a kernel of lanes.
  if (!cpu && capabilities.kind == DeviceKind::kCpu) options += " -cl-opt-disable";
  const Kernel& kernel = kernel_of(variant.kernel_id);
  return {std::string(kernel.file), std::string(kernel.entry), std::move(options),
          std::string(unit_of(variant.unit_id).header)};
}

bool spills(const Variant& variant, std::uint64_t private_bytes,
            const DeviceCapabilities& capabilities) {
  // A few are known not to hurt on NVIDIA alone, where prefill_wgmma has 40 B over f16.
  const std::uint64_t allowed = variant.family() == KernelFamily::kGpuMatrix ? 0 : kCheapSpillBytes;
  return capabilities.kind != DeviceKind::kCpu && private_bytes > allowed;
}

}  // namespace clattn::detail
