#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/error.hpp>
#include <clattn/tuning.hpp>
#include <set>
#include <utility>

#include "kernels/tuned.hpp"
#include "kernels/variants.hpp"
#include "tuning/tuning_table.hpp"

namespace clattn::detail {
namespace {

DeviceCapabilities cpu(int width) {
  DeviceCapabilities device;
  device.name = fmt::format("cpu-{}", width);
  device.driver_version = "5.0";
  device.kind = DeviceKind::kCpu;
  device.float_vector_width = width;
  device.max_work_group_size = 4096;
  return device;
}

DeviceCapabilities gpu(const char* name, bool ptx = false, int arch = 0) {
  DeviceCapabilities device;
  device.name = name;
  device.kind = DeviceKind::kGpu;
  device.max_work_group_size = 1024;
  device.inline_ptx = ptx;
  device.ptx_arch = arch;
  return device;
}

/// A device of each class, and those that shipped rows name.
std::vector<DeviceCapabilities> devices() {
  std::vector<DeviceCapabilities> all = {
      cpu(16),
      cpu(8),
      cpu(4),
      cpu(1),
      gpu("some GPU"),
      gpu("NVIDIA T4", true, 75),
      gpu("NVIDIA A100", true, 80),
      gpu("NVIDIA L4", true, 89),
      gpu("NVIDIA H100", true, 90),
      gpu("NVIDIA B200", true, 100),
      gpu("an NVIDIA GPU whose driver is silent", true),
  };
  all.emplace_back().name = "an accelerator";
  std::set<std::pair<std::string, std::string>> named;
  for (const TuningRow& row : shipped_tuning().rows) {
    if (!named.emplace(row.device, row.driver).second) continue;
    all.push_back(gpu(row.device.substr(0, row.device.find('*')).c_str()));
    all.back().driver_version = row.driver;
  }
  return all;
}

TuningQuery query_for(const DeviceCapabilities& device, std::string_view role) {
  return {.device = device.name,
          .driver = device.driver_version,
          .classes = device_classes(device),
          .role = role,
          .head_size = 128,
          .group = 4,
          .dtype = DType::kF16,
          .cache_dtype = DType::kF16,
          .pages = page_class(16)};
}

bool any(const TuningRow& /*row*/) {
  return true;
}

/// Calls f with every query of the test matrix: devices, roles, sizes, types, pages.
template <typename Function>
void each_query(Function&& f) {
  constexpr std::pair<DType, DType> kTypes[] = {
      {DType::kF32, DType::kF32},     {DType::kF16, DType::kF16},      {DType::kBF16, DType::kBF16},
      {DType::kF16, DType::kFp8E4M3}, {DType::kBF16, DType::kFp8E5M2}, {DType::kF16, DType::kInt8}};
  std::set<std::int32_t> head_sizes = {8, 64, 96, 128, 256, 512};
  std::set<std::int32_t> groups = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64, 128};
  for (const TuningRow& row : shipped_tuning().rows) {
    if (row.head_size > 0) head_sizes.insert(row.head_size);
    if (row.group > 0) groups.insert(row.group);
  }
  for (const DeviceCapabilities& device : devices()) {
    for (const Role role : {Role::kDecode, Role::kPrefill, Role::kMerge, Role::kCacheWrite,
                            Role::kCacheWritePacked, Role::kMLADecode, Role::kPackedDecode}) {
      TuningQuery query = query_for(device, to_string(role));
      for (const std::int32_t head_size : head_sizes) {
        for (const std::int32_t group : groups) {
          for (const auto& [dtype, cache_dtype] : kTypes) {
            for (const std::int32_t block_size : {0, 1, 16, 256}) {
              query.head_size = head_size;
              query.group = group;
              query.dtype = dtype;
              query.cache_dtype = cache_dtype;
              query.pages = page_class(block_size);
              f(query);
            }
          }
        }
      }
    }
  }
}

TEST(TuningTable, UsersRowsBeatShippedOnes) {
  TuningRow row;
  row.device = "gpu";
  row.items_per_compute_unit = 9;
  row.min_split_keys = 77;
  const TuningTable users(TuningText{.rows = {row}, .problems = {}});
  const TuningTable none(TuningText{});
  const TuningQuery query = query_for(gpu("some GPU"), "decode");
  EXPECT_EQ(users.find(query, any)->min_split_keys, 77);
  EXPECT_EQ(none.find(query, any)->min_split_keys, 256);
  EXPECT_EQ(users.find(query_for(cpu(8), "decode"), any)->min_split_keys, 32);
}

TEST(TuningTable, TheClosestRowWins) {
  const DeviceCapabilities device = gpu("NVIDIA H200", true, 90);
  const TuningQuery query = query_for(device, "decode");
  std::vector<TuningRow> rows;  // each closer than the one before
  for (const char* name : {"gpu", "gpu:ptx", "gpu:sm_90", "NVIDIA*", "NVIDIA H200"}) {
    rows.emplace_back().device = name;
    rows.emplace_back(rows.back()).role = "decode";
    rows.emplace_back(rows.back()).head_size = 128;
  }
  rows.emplace_back(rows.back()).group = 4;
  rows.emplace_back(rows.back()).dtype = DType::kF16;
  rows.emplace_back(rows.back()).cache_dtype = DType::kF16;
  rows.emplace_back(rows.back()).pages = "medium";
  rows.emplace_back(rows.back()).date = "later";
  while (!rows.empty()) {
    const TuningRow best = rows.back();
    EXPECT_EQ(*TuningTable(TuningText{.rows = rows, .problems = {}}).find(query, any), best);
    std::vector<TuningRow> turned(rows.rbegin(), rows.rend());
    if (best.date.empty()) {
      EXPECT_EQ(*TuningTable(TuningText{.rows = turned, .problems = {}}).find(query, any), best);
    }
    rows.pop_back();
  }
}

TEST(TuningTable, RowsForOthersAreNotFound) {
  const TuningQuery query = query_for(gpu("NVIDIA H200", true, 90), "decode");
  TuningRow fits;
  fits.device = "NVIDIA H200";
  EXPECT_TRUE(covers(fits, query));
  const auto refused = [&](auto&& change) {
    TuningRow row = fits;
    change(row);
    return !covers(row, query);
  };
  EXPECT_TRUE(refused([](TuningRow& row) { row.device = "NVIDIA H2000"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.device = "NVIDIA"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.device = "*"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.device = "cpu"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.driver = "another"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.role = "prefill"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.head_size = 64; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.group = 8; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.dtype = DType::kF32; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.cache_dtype = DType::kInt8; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.pages = "large"; }));
}

TEST(ShippedTuning, IsReadWithoutProblemsAndCanBeFollowed) {
  EXPECT_EQ(shipped_tuning().problems, std::vector<std::string>{});
  EXPECT_FALSE(shipped_tuning().rows.empty());
  for (const TuningRow& row : shipped_tuning().rows) {
    if (row.variant.empty()) continue;
    bool found = false;
    for (const Variant& variant : variants()) {
      found |= to_string(variant.role) == row.role && variant_of(row, variant.role).has_value();
    }
    EXPECT_TRUE(found) << format_tuning_row(row);
  }
}

TEST(ShippedTuning, EveryConfigurationFindsAPlanAndNoRowIsUnreachable) {
  const TuningTable table(TuningText{});
  std::vector<bool> reached(shipped_tuning().rows.size());
  const auto reach = [&](const TuningRow* row) {
    if (row != nullptr)
      reached[static_cast<std::size_t>(row - shipped_tuning().rows.data())] = true;
  };
  std::size_t without_plan = 0;
  each_query([&](const TuningQuery& query) {
    const TuningRow* plan = table.find(query, [](const TuningRow& row) {
      return row.items_per_compute_unit > 0 && row.min_split_keys > 0;
    });
    without_plan += plan == nullptr ? 1 : 0;
    reach(plan);
    reach(table.find(query, [](const TuningRow& row) { return !row.variant.empty(); }));
  });
  EXPECT_EQ(without_plan, 0U);
  for (std::size_t i = 0; i < reached.size(); ++i) {
    EXPECT_TRUE(reached[i]) << format_tuning_row(shipped_tuning().rows[i]);
  }
}

TEST(TunedVariants, ConstantsOutsideTheKernelsRangeAreRefused) {
  TuningRow row;
  row.role = "decode";
  row.variant = "decode_gpu__r4_local";
  EXPECT_EQ(variant_of(row, Role::kDecode)->block_kv, 4);
  row.block_kv = 8;
  row.work_group_size = 64;
  EXPECT_EQ(variant_of(row, Role::kDecode)->block_kv, 8);
  EXPECT_EQ(variant_of(row, Role::kDecode)->work_group_size, 64);
  EXPECT_EQ(variant_of(row, Role::kDecode)->block_rows, 4);
  EXPECT_FALSE(variant_of(row, Role::kPrefill));
  for (const std::int32_t wrong : {3, 5, 16, 48, 512, 1 << 20}) {
    TuningRow bad = row;
    bad.block_rows = wrong;
    EXPECT_FALSE(variant_of(bad, Role::kDecode)) << wrong;
    bad = row;
    bad.work_group_size = wrong;
    EXPECT_FALSE(variant_of(bad, Role::kDecode)) << wrong;
  }
  row.variant = "gone";
  EXPECT_FALSE(variant_of(row, Role::kDecode));
}

TuningRow row_of(const char* role, const char* variant) {
  TuningRow row;
  row.role = role;
  row.variant = variant;
  return row;
}

/// Cuts that come to the same plan are not worth timing twice.
TEST(TuningPlans, NoTwoAreTheSamePlan) {
  const DeviceCapabilities device = gpu("NVIDIA H200", true, 90);
  EXPECT_EQ(tuning_plans(device, row_of("decode", "decode_gpu__r4_local"), 16).size(), 12U);
  // Its plans fill waves of a known size: only the shortest split is left to choose.
  const auto waves = tuning_plans(device, row_of("decode", "decode_mma__r8"), 16);
  EXPECT_EQ(waves, (std::vector<TuningPlan>{{4, 128}, {4, 256}, {4, 512}}));
  EXPECT_EQ(tuning_plans(device, row_of("decode", "decode_ring__r8"), 16), waves);
  // 128 and 256 keys are one page of 256 each, halved by kernels that join their splits.
  EXPECT_EQ(tuning_plans(device, row_of("decode", "decode_gpu__r4_local"), 256).size(), 8U);
  EXPECT_EQ(tuning_plans(device, row_of("decode", "decode_mma__r8"), 256).size(), 1U);
}

TEST(TuningPlans, OfFewCoresStartAtTheShortestSplitThatFillsThem) {
  DeviceCapabilities device = cpu(8);
  device.compute_units = 64;
  EXPECT_EQ(tuning_plans(device, row_of("decode", "decode_cpu__r16"), 16).size(), 12U);
  device.compute_units = 2;  // 256 keys at least
  EXPECT_EQ(tuning_plans(device, row_of("decode", "decode_cpu__r16"), 16).size(), 4U);
}

TEST(TuningPlans, RolesThatOthersCutHaveNone) {
  const DeviceCapabilities device = cpu(8);
  EXPECT_TRUE(tuning_plans(device, row_of("prefill", "prefill_cpu__r256_kv64"), 16).empty());
  EXPECT_TRUE(
      tuning_plans(device, row_of("packed_decode", "paged_attention_packed__r16"), 16).empty());
  EXPECT_TRUE(tuning_plans(device, row_of("merge", "merge__vec"), 16).empty());
  EXPECT_THROW(tuning_plans(device, row_of("decode", "gone"), 16), Error);
}

TEST(TunedVariants, RowsThemselvesAreLegal) {
  for (const Variant& variant : variants()) EXPECT_TRUE(is_legal_tile(variant)) << variant.name;
}

}  // namespace
}  // namespace clattn::detail
