#include "tuning/tuning_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <clattn/error.hpp>
#include <filesystem>
#include <tuple>

#include "files/files.hpp"

namespace clattn {

std::vector<std::string> device_classes(const DeviceCapabilities& capabilities) {
  if (capabilities.kind == DeviceKind::kCpu) {
    const int width = capabilities.float_vector_width;
    return {fmt::format("cpu:{}", width >= 16 ? 16 : width >= 8 ? 8 : 4), "cpu"};
  }
  std::vector<std::string> classes;
  if (capabilities.ptx_arch > 0) classes.push_back(fmt::format("gpu:sm_{}", capabilities.ptx_arch));
  if (capabilities.inline_ptx) classes.emplace_back("gpu:ptx");
  classes.emplace_back("gpu");
  return classes;
}

std::string_view page_class(std::int32_t block_size) {
  if (block_size <= 0) return "none";
  if (block_size < 16) return "small";
  return block_size < 64 ? "medium" : "large";
}

}  // namespace clattn

namespace clattn::detail {
namespace {

constexpr std::string_view kShipped =
#include "tuning/shipped.inc"
    ;

constexpr int kWhole = 1000, kBeginning = 900;  // ranks above all numbers of classes

/// Whether a pattern is the beginning of a name with '*' behind it.
bool begins(const std::string& pattern, std::string_view name) {
  const bool open = pattern.size() > 1 && pattern.back() == '*';
  return open && name.starts_with(std::string_view{pattern.data(), pattern.size() - 1});
}

/// How closely a row names the device: 0 = not at all.
int device_rank(const std::string& pattern, const TuningQuery& query) {
  if (!query.device.empty()) {
    if (pattern == query.device) return kWhole;
    if (begins(pattern, query.device)) return kBeginning;
  }
  const auto found = std::ranges::find(query.classes, pattern);
  return static_cast<int>(query.classes.end() - found);
}

/// How closely a row of costs names the kernel: -1 = another one, 0 = any.
int kernel_rank(const std::string& pattern, std::string_view kernel) {
  if (pattern.empty()) return 0;
  if (pattern == kernel) return kWhole;
  return begins(pattern, kernel) ? static_cast<int>(pattern.size()) : -1;
}

template <typename Key, typename Value>
bool fits(const Key& key, const Value& value) {
  return key == Key{} || key == value;
}

/// What both kinds of row say of the layer.
template <typename Row>
bool fits_layer(const Row& row, const TuningQuery& query) {
  return device_rank(row.device, query) > 0 && fits(row.driver, query.driver) &&
         fits(row.head_size, query.head_size) && fits(row.group, query.group) &&
         fits(row.dtype, query.dtype) && fits(row.cache_dtype, query.cache_dtype);
}

template <typename Row>
int num_layer_keys(const Row& row) {
  return (row.head_size == 0 ? 0 : 1) + (row.group == 0 ? 0 : 1) + (row.dtype ? 1 : 0) +
         (row.cache_dtype ? 1 : 0);
}

/// Device, driver, kernel, then the number of named fields.
using Rank = std::tuple<int, bool, int, int>;

Rank rank_of(const TuningRow& row, const TuningQuery& query) {
  const int keys = num_layer_keys(row) + (row.role.empty() ? 0 : 1) + (row.pages.empty() ? 0 : 1);
  return {device_rank(row.device, query), !row.driver.empty(), 0, keys};
}

Rank rank_of(const CostRow& row, const TuningQuery& query) {
  return {device_rank(row.device, query), !row.driver.empty(),
          kernel_rank(row.kernel, query.kernel), num_layer_keys(row)};
}

/// The last of the closest rows that `usable` takes; null when none fits.
template <typename Row, typename Usable>
const Row* closest(const std::vector<Row>& rows, const TuningQuery& query, const Usable& usable) {
  const Row* best = nullptr;
  Rank best_rank{};
  for (const Row& row : rows) {
    if (!covers(row, query) || !usable(row)) continue;
    const Rank rank = rank_of(row, query);
    if (best != nullptr && rank < best_rank) continue;
    best = &row;
    best_rank = rank;
  }
  return best;
}

template <typename Row>
auto layer_key(const Row& row) {
  return std::tie(row.device, row.driver, row.head_size, row.group, row.dtype, row.cache_dtype);
}

}  // namespace

bool covers(const TuningRow& row, const TuningQuery& query) {
  return fits_layer(row, query) && fits(row.role, query.role) && fits(row.pages, query.pages);
}

bool covers(const CostRow& row, const TuningQuery& query) {
  return fits_layer(row, query) && names_kernel(row, query.kernel);
}

bool names_kernel(const CostRow& row, std::string_view kernel) {
  return kernel_rank(row.kernel, kernel) >= 0;
}

bool same_key(const TuningRow& a, const TuningRow& b) {
  return layer_key(a) == layer_key(b) && a.role == b.role && a.pages == b.pages;
}

bool same_key(const CostRow& a, const CostRow& b) {
  return layer_key(a) == layer_key(b) && a.kernel == b.kernel;
}

std::string cost_fault(const KernelCosts& costs) {
  for (const double cost : {costs.launch_us, costs.task_us, costs.split_us, costs.read_gbs,
                            costs.math_gflops, costs.groups}) {
    if (!(cost >= 0 && cost <= kMostMeasured)) {
      return fmt::format("a cost is {:g}, legal: 0 to {:g}", cost, kMostMeasured);
    }
  }
  constexpr double kLeastRate = 1e-6;  // or keys would take for ever
  for (const double rate : {costs.read_gbs, costs.math_gflops, costs.groups}) {
    if (rate > 0 && rate < kLeastRate) {
      return fmt::format("a rate is {:g}, legal: 0 or at least {:g}", rate, kLeastRate);
    }
  }
  if (costs.read_gbs > 0 || costs.math_gflops > 0) return {};
  return "neither read_gbs nor math_gflops: keys would cost nothing";
}

const TuningText& shipped_tuning() {
  static const TuningText shipped = parse_tuning(kShipped.substr(1), "shipped.inc");
  return shipped;
}

TuningTable TuningTable::load(const std::string& path) {
  std::error_code error;
  if (path.empty() || !std::filesystem::exists(path, error)) return TuningTable({});
  try {
    return TuningTable(parse_tuning(files::read_file(path, kLargestTuningFile), path));
  } catch (const Error& failure) {
    return TuningTable({.problems = {fmt::format("{}; ignored", failure.what())}});
  }
}

const TuningRow* TuningTable::find(const TuningQuery& query,
                                   const std::function<bool(const TuningRow&)>& usable) const {
  const TuningRow* const users = closest(user_.rows, query, usable);
  return users != nullptr ? users : closest(shipped_tuning().rows, query, usable);
}

const CostRow* TuningTable::find_costs(const TuningQuery& query) const {
  const auto any = [](const CostRow& /*row*/) { return true; };
  const CostRow* const users = closest(user_.costs, query, any);
  return users != nullptr ? users : closest(shipped_tuning().costs, query, any);
}

}  // namespace clattn::detail
