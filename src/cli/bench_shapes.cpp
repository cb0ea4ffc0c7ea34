#include "cli/bench_shapes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <clattn/error.hpp>
#include <sstream>

namespace clattn::cli {
namespace {

constexpr std::array<std::string_view, 6> kSuites = {"decode",   "prefill", "cache",
                                                     "metadata", "step",    "replay"};
constexpr std::array<std::string_view, 3> kSets = {"quick", "cpu", "gpu"};
constexpr std::int32_t kMaxBatch = 65536, kMaxLength = 1 << 24;

template <std::size_t N>
bool is_one_of(const std::array<std::string_view, N>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// What is wrong with a row, or nothing.
std::string fault_of(const BenchShape& shape) {
  if (!is_one_of(kSuites, shape.suite))
    return "suite: expected decode, prefill, cache, metadata, step or replay";
  if (!is_one_of(kSets, shape.set)) return "set: expected quick, cpu or gpu";
  if (shape.batch < 1 || shape.batch > kMaxBatch) return "batch: expected 1 to 65536";
  if (shape.seq_len < 1 || shape.seq_len > kMaxLength) return "seq_len: expected 1 to 16777216";
  if (shape.query_len < 1 || shape.query_len > shape.seq_len) {
    return "query_len: expected 1 to seq_len";
  }
  if (std::int64_t{shape.batch} * shape.query_len > kMaxLength) {
    return "batch * query_len: expected at most 16777216 tokens";
  }
  return {};
}

}  // namespace

std::vector<BenchShape> parse_shapes(std::string_view text, const std::string& name) {
  std::vector<BenchShape> shapes;
  std::istringstream lines{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    line.erase(std::min(line.find('#'), line.size()));
    std::istringstream fields(line);
    BenchShape shape;
    if (!(fields >> shape.suite)) continue;
    std::string rest;
    const bool complete =
        static_cast<bool>(fields >> shape.set >> shape.batch >> shape.query_len >> shape.seq_len);
    const std::string fault = !complete || fields >> rest
                                  ? "expected suite, set, batch, query_len and seq_len"
                                  : fault_of(shape);
    if (!fault.empty()) {
      throw Error(ErrorCode::kInvalidArgument, fmt::format("{}:{}: {}", name, number, fault));
    }
    shapes.push_back(shape);
  }
  return shapes;
}

}  // namespace clattn::cli
