#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>

#include "opencl/program/program.hpp"

namespace clattn::detail {
namespace {

constexpr std::string_view kTarget = ".target sm_90";
constexpr std::string_view kGroupSize = ".reqntid ";
constexpr int kRegisters = 65536;  // of a multiprocessor of compute capability 9.0

/// Registers a work-item of a group of this size can have, in the steps that there are.
int registers_of(int group_size) {
  return group_size > 0 ? kRegisters / group_size / 8 * 8 : 0;
}

}  // namespace

std::string enable_marked_instructions(std::string_view ptx) {
  const bool moves_registers = ptx.find("setmaxnreg") != std::string_view::npos;
  std::string result;
  result.reserve(ptx.size() + 256);
  while (!ptx.empty()) {
    const std::size_t size = std::min(ptx.find('\n'), ptx.size() - 1) + 1;
    std::string_view line = ptx.substr(0, size);
    ptx.remove_prefix(size);
    const std::size_t mark = line.find(kPtxMark);
    if (mark != std::string_view::npos) {
      result += line.substr(0, mark);
      line.remove_prefix(mark + kPtxMark.size());
    } else if (line.starts_with(kTarget) && line.substr(kTarget.size(), 1) != "a") {
      result += kTarget;
      result += 'a';
      line.remove_prefix(kTarget.size());
    }
    result += line;
    if (!moves_registers || !line.starts_with(kGroupSize)) continue;
    int group_size = 0;
    std::from_chars(line.data() + kGroupSize.size(), line.data() + line.size(), group_size);
    fmt::format_to(std::back_inserter(result), ".maxnreg {}\n", registers_of(group_size));
  }
  return result;
}

}  // namespace clattn::detail
