#include "tuning/tuning_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <tuple>

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

/// How closely a row names the device: 0 = not at all.
int device_rank(const TuningRow& row, const TuningQuery& query) {
  constexpr int kName = 1000, kPrefix = 999;
  const std::string& pattern = row.device;
  if (!query.device.empty()) {
    if (pattern == query.device) return kName;
    const bool open = pattern.size() > 1 && pattern.back() == '*';
    if (open && query.device.starts_with(pattern.substr(0, pattern.size() - 1))) return kPrefix;
  }
  const auto found = std::find(query.classes.begin(), query.classes.end(), pattern);
  return static_cast<int>(query.classes.end() - found);
}

template <typename Key, typename Value>
bool fits(const Key& key, const Value& value) {
  return key == Key{} || key == value;
}

int num_keys(const TuningRow& row) {
  return (row.role.empty() ? 0 : 1) + (row.head_size == 0 ? 0 : 1) + (row.group == 0 ? 0 : 1) +
         (row.dtype ? 1 : 0) + (row.cache_dtype ? 1 : 0) + (row.pages.empty() ? 0 : 1);
}

}  // namespace

bool covers(const TuningRow& row, const TuningQuery& query) {
  return device_rank(row, query) > 0 && fits(row.driver, query.driver) &&
         fits(row.role, query.role) && fits(row.head_size, query.head_size) &&
         fits(row.group, query.group) && fits(row.dtype, query.dtype) &&
         fits(row.cache_dtype, query.cache_dtype) && fits(row.pages, query.pages);
}

bool same_key(const TuningRow& a, const TuningRow& b) {
  const auto key = [](const TuningRow& row) {
    return std::tie(row.device, row.driver, row.role, row.head_size, row.group, row.dtype,
                    row.cache_dtype, row.pages);
  };
  return key(a) == key(b);
}

const TuningText& shipped_tuning() {
  static const TuningText shipped = parse_tuning(kShipped.substr(1), "shipped.inc");
  return shipped;
}

TuningTable::TuningTable(TuningText user) : user_(std::move(user)) {}

TuningTable TuningTable::load(const std::string& path) {
  constexpr std::uintmax_t kMostBytes = std::uintmax_t{16} << 20;
  std::error_code error;
  if (path.empty() || !std::filesystem::exists(path, error)) return TuningTable({});
  std::ifstream file;  // not of a pipe, which would wait for its other end
  if (std::filesystem::is_regular_file(path, error)) file.open(path, std::ios::binary);
  if (!file.is_open() || std::filesystem::file_size(path, error) > kMostBytes) {
    return TuningTable({{}, {path + ": not a readable file of at most 16 MiB; ignored"}});
  }
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return TuningTable(parse_tuning(text, path));
}

const TuningRow* TuningTable::find(const TuningQuery& query,
                                   const std::function<bool(const TuningRow&)>& usable) const {
  for (const TuningText* text : {&user_, &shipped_tuning()}) {
    const TuningRow* best = nullptr;
    std::tuple<int, bool, int> best_rank{};
    for (const TuningRow& row : text->rows) {
      if (!covers(row, query) || !usable(row)) continue;
      const std::tuple rank{device_rank(row, query), !row.driver.empty(), num_keys(row)};
      if (best != nullptr && rank < best_rank) continue;
      best = &row;
      best_rank = rank;
    }
    if (best != nullptr) return best;
  }
  return nullptr;
}

}  // namespace clattn::detail
