#include "tuning/tuning_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <clattn/error.hpp>
#include <concepts>
#include <filesystem>
#include <span>
#include <tuple>

#include "base/environment.hpp"
#include "files/files.hpp"

namespace clattn {

namespace fs = std::filesystem;

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

constexpr std::uintmax_t kLargestFile = std::uintmax_t{16} << 20;

constexpr int kWhole = 1000, kBeginning = 900;  // ranks above all numbers of classes

/// Whether a pattern is the beginning of a name with '*' after it.
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
int kernel_rank(const CostRow& row, std::string_view kernel) {
  if (row.kernel.empty()) return 0;
  if (row.kernel == kernel) return kWhole;
  return begins(row.kernel, kernel) ? static_cast<int>(row.kernel.size()) : -1;
}
int kernel_rank(const TuningRow& /*row*/, std::string_view /*kernel*/) {
  return 0;
}

/// Calls f for each field that says which layers a row is for, device and kernel aside, with the
/// same of `other`: a row or a query.
template <typename Row, typename Other, typename Function>
void each_key(const Row& row, const Other& other, Function&& f) {
  f(row.driver, other.driver);
  f(row.head_size, other.head_size);
  f(row.group, other.group);
  f(row.dtype, other.dtype);
  f(row.cache_dtype, other.cache_dtype);
  if constexpr (std::same_as<Row, TuningRow>) {
    f(row.role, other.role);
    f(row.pages, other.pages);
  }
}

template <typename Value>
bool is_named(const Value& value) {
  return value != Value{};
}

template <typename Row>
bool fits(const Row& row, const TuningQuery& query) {
  bool fit = device_rank(row.device, query) > 0 && kernel_rank(row, query.kernel) >= 0;
  each_key(row, query, [&](const auto& key, const auto& value) {
    fit = fit && (!is_named(key) || key == value);
  });
  return fit;
}

/// The last of the closest rows that `usable` takes; null when none fits.
template <typename Row, typename Usable>
const Row* closest(const std::vector<Row>& rows, const TuningQuery& query, const Usable& usable) {
  using Rank = std::tuple<int, bool, int, int>;  // device, driver, kernel, number of named fields
  const Row* best = nullptr;
  Rank best_rank{};
  for (const Row& row : rows) {
    if (!fits(row, query) || !usable(row)) continue;
    int named = 0;
    each_key(row, row, [&](const auto& key, const auto&) { named += is_named(key) ? 1 : 0; });
    const Rank rank = {device_rank(row.device, query), is_named(row.driver),
                       kernel_rank(row, query.kernel), named};
    if (best != nullptr && rank < best_rank) continue;
    best = &row;
    best_rank = rank;
  }
  return best;
}

/// Whether some row is for the same layers, and kernels, as the one of `old`, if that has one.
template <typename Row>
bool replaces(std::span<const Row> rows, const std::vector<Row>& old) {
  return !old.empty() && std::ranges::any_of(rows, [&](const Row& row) {
    bool same = row.device == old.front().device;
    if constexpr (std::same_as<Row, CostRow>) same = same && row.kernel == old.front().kernel;
    each_key(row, old.front(), [&](const auto& a, const auto& b) { same = same && a == b; });
    return same;
  });
}

/// The file's lines without those that the rows replace; a fresh file has the header.
std::string kept_lines(const std::string& path, std::span<const TuningRow> rows,
                       std::span<const CostRow> costs) {
  std::string fresh = format_tuning({});
  std::error_code error;
  if (!fs::exists(path, error)) return fresh;
  const std::string text = files::read_file(path, kLargestFile);
  if (text.empty()) return fresh;
  if (!text.starts_with(fresh)) {
    throw Error(ErrorCode::kIo,
                fmt::format("{}: not a tuning file of this version; left as it is", path));
  }
  std::string kept = fresh;
  for (std::size_t at = fresh.size(); at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size() - 1) + 1;
    const std::string line = text.substr(at, end - at);
    const TuningText old = parse_tuning(fresh + line, path);
    if (!replaces(rows, old.rows) && !replaces(costs, old.costs)) kept += line;
    at = end;
  }
  if (kept.back() != '\n') kept += '\n';
  return kept;
}

}  // namespace

bool covers(const TuningRow& row, const TuningQuery& query) {
  return fits(row, query);
}

bool names_kernel(const CostRow& row, std::string_view kernel) {
  return kernel_rank(row, kernel) >= 0;
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
  if (path.empty() || !fs::exists(path, error)) return TuningTable({});
  try {
    return TuningTable(parse_tuning(files::read_file(path, kLargestFile), path));
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

namespace clattn {

std::string tuning_path() {
  const detail::Environment& variables = detail::environment();
  return variables.tuning_enabled ? variables.tuning_file : std::string{};
}

void save_tuning(const std::string& path, std::span<const TuningRow> rows,
                 std::span<const CostRow> costs) {
  if (path.empty())
    throw Error(ErrorCode::kIo, "tuning file: no path is given and the environment names none");
  std::string text = detail::kept_lines(path, rows, costs);
  for (const TuningRow& row : rows) text += format_tuning_row(row);
  for (const CostRow& row : costs) text += format_cost_row(row);
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty()) fs::create_directories(folder, error);
  files::replace_file(path, text);
}

}  // namespace clattn
