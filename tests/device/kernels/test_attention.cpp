#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <clattn/clattn.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"
#include "device/forced_variant.hpp"
#include "kernels/choose/variants.hpp"

namespace test_attention {

using attention_test::all_contexts;
using attention_test::CaseResult;
using attention_test::CaseSpec;
using attention_test::Request;
using clattn::DType;
using clattn::KernelFamily;
using clattn::KVCacheLayout;
using clattn::detail::Role;
using clattn::detail::Variant;

constexpr std::array kDTypes = {DType::kF32, DType::kF16, DType::kBF16};

/// Query and cache types: each with itself and in both places of a mixed pair. The other pairs meet
/// the same loads and stores; compiling them takes minutes on a CPU driver.
struct TypePair {
  DType query;
  DType cache;
};
constexpr std::array kTypePairs = {
    TypePair{DType::kF32, DType::kF32},   TypePair{DType::kF16, DType::kF16},
    TypePair{DType::kBF16, DType::kBF16}, TypePair{DType::kF32, DType::kBF16},
    TypePair{DType::kBF16, DType::kF16},  TypePair{DType::kF16, DType::kF32}};

/// Those of kernels that multiply in fp8.
constexpr std::array kFp8TypePairs = {TypePair{DType::kF16, DType::kFp8E4M3},
                                      TypePair{DType::kBF16, DType::kFp8E4M3}};

std::span<const TypePair> type_pairs_of(const Variant& variant) {
  if (variant.unit().fp8_products) return kFp8TypePairs;
  return kTypePairs;
}

/// Gives every request of a spec a tensor content of its own.
CaseSpec with_identities(CaseSpec spec) {
  std::uint32_t next = 1;
  for (Request& request : spec.requests) {
    if (request.identity == 0) request.identity = next++;
  }
  return spec;
}

CaseResult expect_right(const std::shared_ptr<clattn::Context>& context, const CaseSpec& given) {
  const CaseSpec spec = with_identities(given);
  const CaseResult result = attention_test::run_case(context, spec);
  EXPECT_EQ(result.fault, "") << describe(spec);
  EXPECT_LE(result.worst_share, 1.0)
      << describe(spec) << "\n on " << context->capabilities().name << "\n " << result.worst_place;
  return result;
}

/// A forced family that the device cannot run is refused with a reason, never replaced.
void expect_refused(const std::shared_ptr<clattn::Context>& context, const CaseSpec& spec) {
  try {
    attention_test::run_case(context, spec);
    FAIL() << describe(spec);
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), clattn::ErrorCode::kUnsupported) << error.what();
  }
}

CaseSpec small_case(DType dtype = DType::kF16) {
  CaseSpec spec;
  spec.config.num_heads = 8;
  spec.config.num_kv_heads = 2;
  spec.config.head_size = 64;
  spec.config.block_size = 16;
  spec.config.dtype = dtype;
  spec.requests = {{1, 40}, {1, 0}, {5, 30}, {33, 0}};
  return spec;
}

/// Whether the devices that run one run the other: a unit may have a header for few rows.
bool runs_where(const Variant& one, const Variant& other) {
  return one.family() == other.family() && one.unit().lanes == other.unit().lanes &&
         clattn::detail::unit_of(one.unit_id).needs == clattn::detail::unit_of(other.unit_id).needs;
}

/// Whether a row before it has the same tile, and is taken unless it spills.
bool is_spare(const Variant& variant) {
  for (const Variant& other : clattn::detail::variants()) {
    if (&other == &variant) return false;
    if (other.role == variant.role && runs_where(other, variant) &&
        other.kernel().heads == variant.kernel().heads && other.block_rows == variant.block_rows) {
      return true;
    }
  }
  return false;
}

/// A head size for which the variant is chosen: large for a spare, which takes over where the first
/// tile spills; for kernels that take any size, one that the pickier ones refuse.
std::int32_t head_size_for(const Variant& variant) {
  if (variant.kernel().wide) return variant.kernel().heads.front();
  const std::int32_t smaller = variant.family() == KernelFamily::kCpu ? 80 : 96;
  const std::int32_t odd = is_spare(variant) ? 240 : smaller;
  const bool takes_odd = variant.kernel().heads.front() == 0 && odd % variant.unit().head_step == 0;
  if (takes_odd) return odd;
  return is_spare(variant) ? 256 : 128;
}

/// Whether the device runs a row of the same family: other roles take the ladder's next one then.
bool is_replaced(const Variant& variant, const clattn::DeviceCapabilities& device) {
  const auto rows = clattn::detail::variants();
  return std::any_of(rows.begin(), rows.end(), [&](const Variant& other) {
    return other.family() == variant.family() && clattn::detail::why_not(other, device).empty();
  });
}

/// Whether a decode tile before it runs, and takes these types and the heads that fill its own.
bool is_preceded(const Variant& variant, const clattn::detail::KernelShape& shape,
                 const clattn::DeviceCapabilities& device) {
  for (const Variant& other : clattn::detail::variants()) {
    if (&other == &variant) return false;
    if (variant.role == Role::kDecode && other.role == variant.role && runs_where(other, variant) &&
        other.block_rows >= variant.block_rows && clattn::detail::takes_types(other, shape) &&
        clattn::detail::why_not(other, device).empty()) {
      return true;
    }
  }
  return false;
}

/// A case whose work goes to the variant: heads that fill a decode tile, or queries too long for
/// smaller tiles.
CaseSpec case_for(const Variant& variant, DType dtype, DType cache_dtype) {
  CaseSpec spec;
  spec.config.num_kv_heads = 2;
  spec.config.head_size = head_size_for(variant);
  spec.config.block_size = 16;
  spec.config.dtype = dtype;
  spec.config.kv_cache_dtype = cache_dtype;
  spec.config.kernel_family = variant.family();
  spec.config.fp8_products = variant.unit().fp8_products;
  if (spec.config.fp8_products) spec.query_scale = 0.25;
  if (variant.role == Role::kDecode) {
    spec.config.num_heads = 2 * variant.block_rows;
    spec.requests = {{1, 0}, {1, 16}, {1, 77}, {1, 600}};
  } else {
    // The query length decides among prefill tiles; tokens of four heads that fill a small one
    // exceed decode's. CPUs get the heads of decode's cases, whose programs hold both kernels.
    spec.config.num_heads = variant.family() == KernelFamily::kCpu ? 32 : 8;
    const std::int32_t tokens = variant.block_rows > 32 ? 40 : variant.block_rows / 4;
    spec.requests = {{1, 70}, {tokens, 300}};
  }
  return spec;
}

/// Whether it is there for devices that allow no larger groups: elsewhere others take its work.
bool is_for_small_groups(const Variant& variant) {
  return variant.work_group_size == 32 && variant.unit().lanes == 0;
}

/// Whether the device runs a row before it that may take the heads of its cases: of another unit
/// for CPUs, or for GPUs one for long queries whose tile is no smaller.
bool is_outranked(const Variant& variant, const clattn::DeviceCapabilities& device) {
  const bool on_cpu = variant.family() == KernelFamily::kCpu;
  if (on_cpu ? variant.unit().head_step == 1 : variant.role != Role::kPrefill) return false;
  for (const Variant& other : clattn::detail::variants()) {
    if (&other == &variant) return false;
    if (other.role != variant.role || !clattn::detail::why_not(other, device).empty()) continue;
    if (on_cpu ? other.unit_id != variant.unit_id
               : other.family() == variant.family() && other.block_rows >= variant.block_rows) {
      return true;
    }
  }
  return false;
}

/// Whether a device would otherwise not take the variant: its unit is used only on request, or is
/// one of those that CPUs execute side by side, or another one's work is its own, or it is for
/// small groups, or a spare on a CPU, where no tile ever spills, or plans choose it by its costs.
bool must_be_forced(const Variant& variant, const clattn::Context& context) {
  const clattn::DeviceCapabilities& device = context.capabilities();
  const bool on_cpu = device.kind == clattn::DeviceKind::kCpu;
  return variant.unit().asked_only || variant.unit().by_sub_groups || variant.kernel().wide ||
         is_outranked(variant, device) || is_for_small_groups(variant) ||
         (on_cpu && is_spare(variant));
}

/// The row of GPUs that compiles fastest for what the variant does not do.
const Variant& plain_partner(const Variant& variant) {
  const bool decodes = variant.role == Role::kDecode;
  const std::string_view name = decodes ? "prefill_gpu__r8_wg32" : "decode_gpu__r4_local";
  return *std::ranges::find(clattn::detail::variants(), name, &Variant::name);
}

/// The variant where the device would not take it. Drivers that build whole programs would spend
/// most of their time on the matrix unit's kernels for the other role, which have their own tests.
std::vector<const Variant*> rows_to_force(const Variant& variant, const clattn::Context& context) {
  std::vector<const Variant*> rows;
  if (must_be_forced(variant, context)) rows.push_back(&variant);
  if (variant.family() != KernelFamily::kCpu) rows.push_back(&plain_partner(variant));
  return rows;
}

/// The case is right, and the row is among its kernels.
void expect_runs(const std::shared_ptr<clattn::Context>& context, const Variant& variant,
                 const CaseSpec& spec) {
  attention_test::expect_ran(context, variant, spec, expect_right(context, spec));
}

class EveryVariant : public testing::TestWithParam<const Variant*> {};

/// On every device that runs it, in all types that it takes.
TEST_P(EveryVariant, IsRight) {
  const Variant& variant = *GetParam();
  ASSERT_FALSE(all_contexts().empty());
  bool ran = false;
  std::string why_not = "rows before it take its work";
  for (const auto& context : all_contexts()) {
    const clattn::DeviceCapabilities& device = context->capabilities();
    const auto reasons = clattn::detail::why_not(variant, device);
    const bool forced = must_be_forced(variant, *context);
    std::optional<attention_test::ForcedVariants> rows;
    if (reasons.empty()) rows.emplace(context, rows_to_force(variant, *context));
    for (const auto [dtype, cache_dtype] : type_pairs_of(variant)) {
      const CaseSpec spec = case_for(variant, dtype, cache_dtype);
      const auto shape = clattn::detail::kernel_shape(spec.config);
      if (!clattn::detail::takes_shape(variant, shape)) continue;
      if (!forced && is_preceded(variant, shape, device)) continue;
      if (!reasons.empty()) {
        why_not = device.name + ": " + reasons.front();
        if (!is_replaced(variant, device)) expect_refused(context, spec);
        continue;
      }
      ran = true;
      expect_runs(context, variant, spec);
    }
  }
  if (!ran) GTEST_SKIP() << why_not;
}

/// Expects the row to be right in each of the types on every device that runs it, with its case for
/// them as `adapt` changes it. Returns whether there is such a device.
template <typename Adapt>
bool check_in(const Variant& variant, std::span<const TypePair> types, const Adapt& adapt) {
  bool ran = false;
  for (const auto& context : all_contexts()) {
    if (!clattn::detail::why_not(variant, context->capabilities()).empty()) continue;
    const attention_test::ForcedVariants rows(context, rows_to_force(variant, *context));
    for (const auto [dtype, cache_dtype] : types) {
      CaseSpec spec = case_for(variant, dtype, cache_dtype);
      adapt(spec);
      expect_runs(context, variant, spec);
      ran = true;
    }
  }
  return ran;
}

// Units of several numbers of lanes run side by side on a CPU, where one of them gets what the
// tests of its family ask: so each row is asked for the largest heads, whose dims warps share,
// 8-bit caches and fp8 output.
TEST_P(EveryVariant, IsRightWithLargeHeadsAndBytes) {
  const Variant& variant = *GetParam();
  if (variant.family() != KernelFamily::kGpuMatrix)
    GTEST_SKIP() << "the tests of its family reach it";
  constexpr std::array kTypes{TypePair{DType::kF16, DType::kF16},
                              TypePair{DType::kF16, DType::kInt8},
                              TypePair{DType::kBF16, DType::kFp8E4M3}};
  const bool ran = check_in(variant, kTypes, [&](CaseSpec& spec) {
    const DType cache_dtype = spec.config.cache_dtype();
    spec.config.head_size = 256;
    if (!clattn::detail::takes_shape(variant, clattn::detail::kernel_shape(spec.config)))
      spec.config.head_size = 128;
    spec.config.output_fp8 = cache_dtype == DType::kFp8E4M3;
    spec.last_token_overflows = cache_dtype == DType::kF16;
    if (spec.last_token_overflows && variant.role == Role::kDecode) {
      // A second token fills the tile: its rows see infinity, and those of the first do not.
      spec.config.num_heads /= 2;
      for (auto& request : spec.requests) request.query_len = 2;
    }
  });
  if (!ran) GTEST_SKIP() << "no device runs it";
}

// Lanes share units of small heads. 8-bit values may meet products as they are stored: where a mask
// hides a key, its NaN is taken out of them.
TEST_P(EveryVariant, IsRightWithSmallHeadsAndBytes) {
  const Variant& variant = *GetParam();
  if (variant.family() != KernelFamily::kGpuMatrix || variant.role != Role::kDecode)
    GTEST_SKIP() << "other tests reach it";
  constexpr std::array kTypes{
      TypePair{DType::kF16, DType::kFp8E5M2}, TypePair{DType::kF16, DType::kInt8},
      TypePair{DType::kBF16, DType::kFp8E4M3}, TypePair{DType::kF16, DType::kUInt4x2},
      TypePair{DType::kBF16, DType::kUInt4x2}};
  const bool ran = check_in(variant, kTypes, [](CaseSpec& spec) {
    spec.config.head_size = spec.config.dtype == DType::kF16 ? 32 : 56;
    if (spec.config.cache_dtype() == DType::kUInt4x2)
      spec.config.kv_cache_dtype = clattn::CacheFormat::per_row(DType::kUInt4x2);
    spec.config.custom_mask = true;
    spec.unseen_is_nan = spec.config.cache_dtype() != DType::kInt8;
  });
  if (!ran) GTEST_SKIP() << "no device runs it";
}

// Caches with a scale for each token and head, where a kernel on a unit takes them. Weights of f16
// are kept in its range; a mask hides keys with scales of NaN and infinity.
TEST_P(EveryVariant, IsRightWithScalesOfRows) {
  const Variant& variant = *GetParam();
  const auto& unit = clattn::detail::unit_of(variant.unit_id);
  const bool takes_bytes = (unit.cache & clattn::detail::k8Bit) != 0;
  const bool warpgroups = unit.needs == clattn::detail::Needs::kWarpgroups;
  if (!variant.kernel().row_scales || !takes_bytes || (unit.traits.tile_rows == 0 && !warpgroups))
    GTEST_SKIP() << "it does not take them, or other tests reach it";
  constexpr std::array kTypes{TypePair{DType::kF16, DType::kInt8},
                              TypePair{DType::kBF16, DType::kFp8E4M3}};
  const bool ran = check_in(variant, kTypes, [warpgroups](CaseSpec& spec) {
    spec.config.kv_cache_dtype = clattn::CacheFormat::per_row(spec.config.cache_dtype());
    // Of heads of 256 the scales have no room in local memory: prefill_mma takes them.
    if (warpgroups) spec.config.head_size = 128;
    spec.config.custom_mask = spec.unseen_is_nan = spec.config.dtype == DType::kF16;
  });
  if (!ran) GTEST_SKIP() << "no device runs it";
}

// Codes of 4 bits, whose rows have zeros besides.
TEST_P(EveryVariant, IsRightWithCodesOf4Bits) {
  const Variant& variant = *GetParam();
  const auto& unit = clattn::detail::unit_of(variant.unit_id);
  constexpr auto kCode = clattn::detail::type_set(DType::kUInt4x2);
  if ((variant.kernel().cache & kCode) == 0 || (unit.cache & kCode) == 0)
    GTEST_SKIP() << "it does not take them";
  constexpr std::array kTypes{TypePair{DType::kF16, DType::kUInt4x2},
                              TypePair{DType::kBF16, DType::kUInt4x2},
                              TypePair{DType::kF32, DType::kUInt4x2}};
  const bool takes_f32 = (unit.queries & clattn::detail::type_set(DType::kF32)) != 0;
  // Matrix units of the same family go before scalar kernels, and leave them f32.
  const bool f32_alone = takes_f32 && variant.family() == KernelFamily::kGpuPtx;
  const std::span types =
      std::span(kTypes).subspan(f32_alone ? 2 : 0, f32_alone ? 1 : (takes_f32 ? 3 : 2));
  const bool warpgroups = unit.needs == clattn::detail::Needs::kWarpgroups;
  const bool ran = check_in(variant, types, [warpgroups](CaseSpec& spec) {
    spec.config.kv_cache_dtype = clattn::CacheFormat::per_row(spec.config.cache_dtype());
    if (warpgroups) spec.config.head_size = 128;  // as of rows of 8 bits
    spec.config.custom_mask = spec.unseen_is_nan = spec.config.dtype == DType::kF16;
  });
  if (!ran) GTEST_SKIP() << "no device runs it";
}

INSTANTIATE_TEST_SUITE_P(Rows, EveryVariant,
                         testing::ValuesIn(attention_test::variants_of({Role::kDecode,
                                                                        Role::kPrefill})),
                         [](const auto& tested) { return std::string(tested.param->name); });

class AttentionOnDevice : public testing::TestWithParam<KernelFamily> {
 protected:
  /// Runs the case on every device with the family under test. On CPUs `auto` only has to choose
  /// the kernels of `cpu`, which has an instance of its own.
  std::vector<CaseResult> check(CaseSpec spec) {
    spec.config.kernel_family = GetParam();
    std::vector<CaseResult> results;
    for (const auto& context : devices()) {
      if (GetParam() == KernelFamily::kAuto &&
          context->capabilities().kind == clattn::DeviceKind::kCpu) {
        const std::vector<std::string> chosen = kernel_names(context, spec);
        spec.config.kernel_family = KernelFamily::kCpu;
        EXPECT_EQ(chosen, kernel_names(context, spec)) << describe(spec);
        spec.config.kernel_family = GetParam();
      } else {
        results.push_back(expect_right(context, spec));
      }
    }
    return results;
  }

  static std::vector<std::string> kernel_names(const std::shared_ptr<clattn::Context>& context,
                                               const CaseSpec& spec) {
    std::vector<std::string> names;
    const auto& backend =
        *clattn::get_attn_backend(spec.config, &context->capabilities(), spec.backend);
    for (const clattn::KernelInfo& kernel : backend.make_impl(context, spec.config)->kernels())
      names.push_back(kernel.name);
    return names;
  }

  /// Whether the family's kernels run where users would run them.
  static bool at_home() {
    return GetParam() == KernelFamily::kAuto ||
           std::ranges::any_of(all_contexts(), [](const auto& context) {
             const bool cpu = context->capabilities().kind == clattn::DeviceKind::kCpu;
             return cpu == (GetParam() == KernelFamily::kCpu);
           });
  }

  /// Every one, or every third of kernels that CPUs run only to be compared.
  void check_head_sizes(std::int32_t first, std::int32_t last) {
    for (std::int32_t head_size = first; head_size <= last; head_size += at_home() ? 8 : 24) {
      CaseSpec spec = small_case(head_size % 16 == 0 ? DType::kF16 : DType::kBF16);
      spec.config.head_size = head_size;
      spec.config.num_heads = 4;
      spec.requests = {{1, 37}, {3, 21}, {18, 2}};
      check(spec);
    }
  }

  /// The devices that run the family; on the others it is refused.
  std::vector<std::shared_ptr<clattn::Context>> devices() const {
    std::vector<std::shared_ptr<clattn::Context>> able;
    for (const auto& context : all_contexts()) {
      CaseSpec spec = small_case();
      spec.config.kernel_family = GetParam();
      const auto& backend = *clattn::get_attn_backend(spec.config, nullptr, "FLASHINFER");
      if (backend.validate_configuration(spec.config, &context->capabilities()).empty()) {
        able.push_back(context);
      } else {
        expect_refused(context, spec);
      }
    }
    return able;
  }
};

TEST_P(AttentionOnDevice, MixedBatchInEveryTypeAndLayout) {
  for (const DType dtype : kDTypes) {
    for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
      CaseSpec spec = small_case(dtype);
      spec.layout = layout;
      spec.write_cache = true;
      check(spec);
    }
  }
}

TEST_P(AttentionOnDevice, XFormersCache) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    CaseSpec spec = small_case(dtype);
    spec.backend = "XFORMERS";
    spec.layout = KVCacheLayout::kNHD;
    spec.write_cache = true;
    check(spec);
  }
}

// In parts, since every head size has kernels of its own to build.
TEST_P(AttentionOnDevice, EveryHeadSizeTo64) {
  check_head_sizes(8, 64);
}
TEST_P(AttentionOnDevice, EveryHeadSizeTo128) {
  check_head_sizes(72, 128);
}
TEST_P(AttentionOnDevice, EveryHeadSizeTo192) {
  check_head_sizes(136, 192);
}
TEST_P(AttentionOnDevice, EveryHeadSizeTo256) {
  check_head_sizes(200, 256);
}

// Every third of the large ones, in all types by turns; of kernels that are not at home the
// smallest and the largest.
TEST_P(AttentionOnDevice, HeadSizesTo512) {
  constexpr std::array kCaches = {DType::kF32,     DType::kF16,     DType::kBF16,
                                  DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8};
  for (std::int32_t head_size = 264; head_size <= 512; head_size += at_home() ? 24 : 248) {
    const auto turn = static_cast<std::size_t>((head_size - 264) / 24);
    CaseSpec spec = small_case(kDTypes.at(turn % kDTypes.size()));
    spec.config.head_size = head_size;
    spec.config.kv_cache_dtype = kCaches.at(turn % kCaches.size());
    spec.config.num_heads = 4;
    spec.requests = {{1, 37}, {18, 2}};
    check(spec);
  }
}

TEST_P(AttentionOnDevice, EveryKindOfGroup) {
  for (const std::int32_t group : {1, 2, 3, 4, 5, 7, 8, 9, 16, 71}) {
    CaseSpec spec = small_case();
    spec.config.num_heads = 2 * group;
    spec.config.head_size = 32;
    spec.requests = {{1, 50}, {2, 17}, {20, 3}};
    check(spec);
  }
}

// CPUs take several KV heads in one work-group, the last of which may be short of some.
TEST_P(AttentionOnDevice, EveryNumberOfKVHeads) {
  for (const std::int32_t num_kv_heads : {1, 3, 8, 9, 19}) {
    for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
      CaseSpec spec = small_case();
      spec.layout = layout;
      spec.config.num_kv_heads = num_kv_heads;
      spec.config.num_heads = 2 * num_kv_heads;
      spec.config.head_size = 32;
      spec.requests = {{1, 330}, {1, 7}, {3, 100}, {20, 3}};
      spec.num_splits = num_kv_heads % 2 == 0 ? 2 : 0;
      check(spec);
    }
  }
}

TEST_P(AttentionOnDevice, EveryKindOfPage) {
  for (const std::int32_t block_size : {1, 3, 5, 8, 16, 17, 32, 48, 256}) {
    CaseSpec spec = small_case();
    spec.config.block_size = block_size;
    check(spec);
  }
}

TEST_P(AttentionOnDevice, LengthsAroundAPage) {
  CaseSpec spec = small_case();
  spec.requests = {{1, 0}, {1, 14}, {1, 15}, {1, 16}, {1, 31}, {1, 32}, {15, 0}, {16, 0}, {17, 0}};
  check(spec);
}

TEST_P(AttentionOnDevice, EmptyRequestsAndEmptyBatch) {
  CaseSpec spec = small_case();
  spec.requests = {{0, 0}, {1, 20}, {0, 33}, {7, 9}, {0, 0}};
  check(spec);
  spec.requests = {{0, 0}, {0, 5}};
  check(spec);
  spec.requests = {};
  check(spec);
}

TEST_P(AttentionOnDevice, NotCausal) {
  CaseSpec spec = small_case();
  spec.causal = false;
  check(spec);
}

TEST_P(AttentionOnDevice, ForcedSplits) {
  for (const std::int32_t splits : {1, 2, 3, 7, 1000}) {
    CaseSpec spec = small_case();
    spec.num_splits = splits;
    spec.requests = {{1, 400}, {1, 15}, {4, 250}, {16, 100}, {40, 300}};
    for (const CaseResult& result : check(spec)) {
      const bool merged = result.kernels.back().starts_with("merge");
      EXPECT_EQ(merged, splits > 1) << result.kernels.back();
    }
  }
}

// A work-group that stays goes from one request to the next, with and without keys, whole and
// split.
TEST_P(AttentionOnDevice, MorePromptsThanADeviceServesAtOnce) {
  for (const std::int32_t head_size : {64, 128, 256}) {
    CaseSpec spec = small_case();
    spec.config.head_size = head_size;
    spec.config.num_heads = 2;
    spec.last_token_overflows = head_size == 128;
    spec.num_splits = head_size == 64 ? 3 : 1;
    spec.requests.clear();
    constexpr std::int32_t kTokens[] = {2, 40, 17, 130};
    for (std::int32_t i = 0; i < 80; ++i) spec.requests.push_back({kTokens[i % 4], i % 3 * 9});
    check(spec);
  }
}

TEST_P(AttentionOnDevice, AnOverflowedTokenHarmsNoEarlierRow) {
  for (const DType dtype : kDTypes) {
    CaseSpec spec = small_case(dtype);
    spec.last_token_overflows = true;
    spec.requests = {{2, 40}, {7, 20}, {33, 0}, {70, 3}};
    check(spec);
  }
}

TEST_P(AttentionOnDevice, KeysAreReadOncePerKVHead) {
  for (const std::int32_t group : {8, 17, 32, 64, 71, 300}) {
    CaseSpec spec = small_case();
    spec.config.num_heads = 2 * group;
    spec.config.head_size = 32;
    spec.num_splits = 1;
    spec.requests = {{1, 50}};
    for (const CaseResult& result : check(spec)) {
      ASSERT_EQ(result.tasks.size(), 1U);
      // A GPU's tile holds 64 or 128 heads of a KV head; a CPU's grows with them.
      const auto ran =
          std::find_if(clattn::detail::variants().begin(), clattn::detail::variants().end(),
                       [&](const Variant& variant) { return variant.name == result.kernels[0]; });
      const bool cpu = ran->family() == KernelFamily::kCpu;
      const std::int32_t tile = cpu ? group : ran->block_rows;
      const bool takes_both = cpu && ran->role == Role::kDecode;  // KV heads
      EXPECT_EQ(result.tasks[0], (takes_both ? 1 : 2) * ((group + tile - 1) / tile))
          << "group " << group;
      EXPECT_TRUE(cpu || group < 64 || tile >= 64) << ran->name;
    }
  }
}

TEST_P(AttentionOnDevice, SharpLogitsAndStridedQueries) {
  CaseSpec spec = small_case();
  spec.sharpness = 6.0;
  spec.query_padding = 256;
  check(spec);
}

TEST_P(AttentionOnDevice, BitsDoNotDependOnPlaceOrLayout) {
  for (const auto& context : devices()) {
    CaseSpec spec = with_identities(small_case());
    spec.config.kernel_family = GetParam();
    const CaseResult base = expect_right(context, spec);
    spec.page_seed = 99;
    EXPECT_EQ(expect_right(context, spec).out, base.out);
    spec.layout = KVCacheLayout::kNHD;
    EXPECT_EQ(expect_right(context, spec).out, base.out);
    spec.backend = "XFORMERS";
    EXPECT_EQ(expect_right(context, spec).out, base.out);
  }
}

/// A request's bits are the same alone and among others.
void expect_batch_invariant(const std::shared_ptr<clattn::Context>& context, CaseSpec spec) {
  spec.requests = {{1, 1500, 7}};
  const CaseResult one = expect_right(context, spec);
  spec.requests = {{1, 1500, 7}, {1, 20, 8}, {1, 3000, 9}, {60, 40, 10}};
  const CaseResult many = expect_right(context, spec);
  EXPECT_TRUE(std::equal(one.out.begin(), one.out.end(), many.out.begin()));
  EXPECT_TRUE(std::equal(one.lse.begin(), one.lse.end(), many.lse.begin()));
}

TEST_P(AttentionOnDevice, DeterministicBitsDoNotDependOnTheBatch) {
  for (const auto& context : devices()) {
    CaseSpec spec = small_case();
    spec.config.kernel_family = GetParam();
    spec.split_policy = clattn::SplitPolicy::kDeterministic;
    expect_batch_invariant(context, spec);
  }
}

// A6.11: disable_split_kv.
TEST_P(AttentionOnDevice, UnsplitBitsDoNotDependOnTheBatch) {
  for (const auto& context : devices()) {
    CaseSpec spec = small_case();
    spec.config.kernel_family = GetParam();
    spec.num_splits = 1;
    expect_batch_invariant(context, spec);
  }
}

TEST(AttentionThreads, ShareOneImplAndGetTheBitsOfOne) {
  for (const auto& context : all_contexts()) {
    const CaseSpec spec = with_identities(small_case());
    const CaseResult alone = expect_right(context, spec);
    std::vector<std::thread> threads;
    std::atomic<int> same{0};
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 5; ++i)
          same += attention_test::run_case(context, spec).out == alone.out;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(same, 20);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, AttentionOnDevice, testing::ValuesIn(clattn::kKernelFamilies),
                         attention_test::family_name<testing::TestParamInfo<KernelFamily>>);

}  // namespace test_attention
