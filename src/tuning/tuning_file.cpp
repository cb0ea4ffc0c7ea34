#include <fmt/format.h>

#include <algorithm>
#include <clattn/error.hpp>
#include <filesystem>

#include "base/environment.hpp"
#include "files/files.hpp"
#include "tuning/tuning_table.hpp"

namespace clattn {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void throw_io(const std::string& path, std::string_view what) {
  throw Error(ErrorCode::kIo, fmt::format("{}: {}", path, what));
}

/// Whether some row is for the same layers as the one of `old`, if that has one.
template <typename Row>
bool replaces(std::span<const Row> rows, const std::vector<Row>& old) {
  return !old.empty() && std::ranges::any_of(rows, [&](const Row& row) {
    return detail::same_key(row, old.front());
  });
}

/// The file's lines without those that the rows replace; a fresh file has the header.
std::string kept_lines(const std::string& path, std::span<const TuningRow> rows,
                       std::span<const CostRow> costs) {
  std::string fresh = format_tuning({});
  std::error_code error;
  if (!fs::exists(path, error)) return fresh;
  const std::string text = files::read_file(path, detail::kLargestTuningFile);
  if (text.empty()) return fresh;
  if (!text.starts_with(fresh)) throw_io(path, "not a tuning file of this version; left as it is");
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

std::string tuning_path() {
  const detail::Environment& variables = detail::environment();
  return variables.tuning_enabled ? variables.tuning_file : std::string{};
}

void save_tuning(const std::string& path, std::span<const TuningRow> rows,
                 std::span<const CostRow> costs) {
  if (path.empty()) throw_io("tuning file", "no path is given and the environment names none");
  std::string text = kept_lines(path, rows, costs);
  for (const TuningRow& row : rows) text += format_tuning_row(row);
  for (const CostRow& row : costs) text += format_cost_row(row);
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty()) fs::create_directories(folder, error);
  files::replace_file(path, text);
}

}  // namespace clattn
