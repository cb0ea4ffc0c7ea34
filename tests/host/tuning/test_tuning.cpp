#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/error.hpp>
#include <clattn/tuning.hpp>
#include <set>
#include <utility>

#include "kernels/choose/attention_kernels.hpp"
#include "kernels/choose/tuned.hpp"
#include "kernels/choose/variants.hpp"
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
  const auto add = [&](const auto& row) {
    if (!named.emplace(row.device, row.driver).second) return;
    all.push_back(gpu(row.device.substr(0, row.device.find('*')).c_str()));
    all.back().driver_version = row.driver;
  };
  for (const TuningRow& row : shipped_tuning().rows) add(row);
  for (const CostRow& row : shipped_tuning().costs) add(row);
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
  CostRow row;
  row.device = "gpu";
  row.costs.read_gbs = 77;
  const TuningTable users(TuningText{.costs = {row}});
  const TuningTable none(TuningText{});
  TuningQuery query = query_for(gpu("NVIDIA H200", true, 90), "decode");
  query.kernel = "decode_ring__r8";
  EXPECT_EQ(users.find_costs(query)->costs.read_gbs, 77);
  EXPECT_EQ(none.find_costs(query)->costs.read_gbs, 95);
  query.classes = device_classes(cpu(8));
  EXPECT_EQ(users.find_costs(query)->device.substr(0, 3), "cpu");
}

/// The one that a table of `rows` finds for a kernel of head size 128, 4 query heads a KV head.
const CostRow* costs_for(const TuningTable& table, const char* kernel) {
  TuningQuery query = query_for(gpu("NVIDIA H200", true, 90), "");
  query.kernel = kernel;
  return table.find_costs(query);
}

TEST(TuningTable, TheClosestCostsWin) {
  std::vector<CostRow> rows;  // each closer than the one before
  for (const char* name : {"gpu", "gpu:ptx", "gpu:sm_90", "NVIDIA*", "NVIDIA H200"}) {
    rows.emplace_back().device = name;
    rows.emplace_back(rows.back()).head_size = 128;
    for (const char* kernel : {"d*", "decode*", "decode_ring*", "decode_ring__r8"}) {
      rows.emplace_back(rows.back()).kernel = kernel;
      rows.back().head_size = 0;
      rows.emplace_back(rows.back()).head_size = 128;
    }
    rows.emplace_back(rows.back()).group = 4;
    rows.emplace_back(rows.back()).dtype = DType::kF16;
    rows.emplace_back(rows.back()).cache_dtype = DType::kF16;
  }
  rows.emplace_back(rows.back()).date = "later";
  while (!rows.empty()) {
    const CostRow best = rows.back();
    EXPECT_EQ(*costs_for(TuningTable(TuningText{.costs = rows}), "decode_ring__r8"), best);
    if (best.date.empty()) {
      const TuningTable turned(TuningText{.costs = {rows.rbegin(), rows.rend()}});
      EXPECT_EQ(*costs_for(turned, "decode_ring__r8"), best);
    }
    rows.pop_back();
  }
}

TEST(TuningTable, ANamedDriverBeatsANamedKernel) {
  std::vector<CostRow> rows(2);
  rows[0].device = rows[1].device = "gpu";
  rows[0].driver = "1";
  rows[1].kernel = "merge__wg32";
  const TuningTable table(TuningText{.costs = rows});
  TuningQuery query = query_for(gpu("some GPU"), "");
  query.kernel = "merge__wg32";
  EXPECT_EQ(*table.find_costs(query), rows[1]);
  query.driver = "1";
  EXPECT_EQ(*table.find_costs(query), rows[0]);
}

TEST(TuningTable, CostsOfOthersAreNotFound) {
  const auto found = [](auto&& change) {
    CostRow row;
    row.device = "NVIDIA H200";
    row.kernel = "decode*";
    change(row);
    const TuningTable table(TuningText{.costs = {row}});
    return *costs_for(table, "decode_ring__r8") == row;
  };
  EXPECT_TRUE(found([](CostRow&) {}));
  EXPECT_FALSE(found([](CostRow& row) { row.device = "NVIDIA H100"; }));
  EXPECT_FALSE(found([](CostRow& row) { row.driver = "another"; }));
  EXPECT_FALSE(found([](CostRow& row) { row.kernel = "decode"; }));
  EXPECT_FALSE(found([](CostRow& row) { row.kernel = "ring*"; }));
  EXPECT_FALSE(found([](CostRow& row) { row.head_size = 64; }));
  EXPECT_FALSE(found([](CostRow& row) { row.group = 8; }));
  EXPECT_FALSE(found([](CostRow& row) { row.dtype = DType::kF32; }));
  EXPECT_FALSE(found([](CostRow& row) { row.cache_dtype = DType::kInt8; }));
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
    EXPECT_EQ(*TuningTable(TuningText{.rows = rows}).find(query, any), best);
    std::vector<TuningRow> turned(rows.rbegin(), rows.rend());
    if (best.date.empty()) {
      EXPECT_EQ(*TuningTable(TuningText{.rows = turned}).find(query, any), best);
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
  EXPECT_FALSE(shipped_tuning().costs.empty());
  for (const TuningRow& row : shipped_tuning().rows) {
    bool found = false;
    for (const Variant& variant : variants()) {
      found |= to_string(variant.role) == row.role && variant_of(row, variant.role).has_value();
    }
    EXPECT_TRUE(found) << format_tuning_row(row);
  }
}

/// Whether plans count by a variant's costs.
bool is_planned(const Variant& variant) {
  return variant.role != Role::kCacheWrite && variant.role != Role::kCacheWritePacked;
}

TEST(ShippedTuning, EveryKernelFindsItsCostsAndNoRowIsUnreachable) {
  const TuningTable table(TuningText{});
  const TuningText& shipped = shipped_tuning();
  std::vector<bool> rows(shipped.rows.size()), costs(shipped.costs.size());
  std::size_t without_costs = 0;
  each_query([&](TuningQuery query) {
    const TuningRow* const row = table.find(query, any);
    if (row != nullptr) rows[static_cast<std::size_t>(row - shipped.rows.data())] = true;
    for (const Variant& variant : variants()) {
      if (to_string(variant.role) != query.role || !is_planned(variant)) continue;
      const auto is_found = [&](const std::string& kernel) {
        query.kernel = kernel;
        const CostRow* const found = table.find_costs(query);
        const bool usable = found != nullptr && cost_fault(found->costs).empty();
        if (usable) costs[static_cast<std::size_t>(found - shipped.costs.data())] = true;
        return usable;
      };
      without_costs += is_found(std::string(variant.name)) ? 0U : 1U;
      if (variant.kernel().few_rows > 0) is_found("few:" + std::string(variant.name));
    }
  });
  EXPECT_EQ(without_costs, 0U);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_TRUE(rows[i]) << format_tuning_row(shipped.rows[i]);
  }
  for (std::size_t i = 0; i < costs.size(); ++i) {
    EXPECT_TRUE(costs[i]) << format_cost_row(shipped.costs[i]);
  }
}

// 64 rows of four heads are 16 tokens; keys of 8 bits and those without pages come otherwise.
TEST(ShippedTuning, TasksOfFewRowsCostOtherwiseWhereTensorMapsCopyTheirKeys) {
  DeviceCapabilities device = gpu("NVIDIA H200", true, 90);
  device.driver_version = "580.159.04";
  device.warpgroup_products = true;
  device.compute_units = 132;
  const auto few_tokens = [&](const KernelShape& shape, const TuningTable& table) {
    const auto kernels = imagined_kernels({device, table}, shape, KernelFamily::kGpuPtx);
    return kernels->planner.tiles.at(kernels->planner.longest_class()).few_tokens;
  };
  KernelShape shape;
  shape.num_heads = 32;
  shape.num_kv_heads = 8;
  shape.head_size = 128;
  shape.block_size = 16;
  shape.dtype = shape.cache_dtype = DType::kBF16;
  const TuningTable table(TuningText{});
  EXPECT_EQ(few_tokens(shape, table), 16);
  KernelShape other = shape;
  other.block_size = 8;
  EXPECT_EQ(few_tokens(other, table), 0);
  other = shape;
  other.cache_dtype = DType::kFp8E4M3;
  EXPECT_EQ(few_tokens(other, table), 0);
  CostRow any_kernel;  // says nothing of such tasks
  any_kernel.device = "NVIDIA H200";
  any_kernel.costs.read_gbs = 1;
  EXPECT_EQ(few_tokens(shape, TuningTable({.costs = {any_kernel}})), 0);
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

TEST(TunedVariants, RowsThemselvesAreLegal) {
  for (const Variant& variant : variants()) EXPECT_TRUE(is_legal_tile(variant)) << variant.name;
}

}  // namespace
}  // namespace clattn::detail
