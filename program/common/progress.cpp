#include "program/common/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace clattn::cli {

bool on_terminal() {
  static const bool result = isatty(STDERR_FILENO) == 1;
  return result;
}

void show_progress(std::string_view text) {
  if (!on_terminal()) return;
  fmt::print(stderr, "\r\033[K{}", text);
  std::fflush(stderr);
}

void show_stage(std::string_view text) {
  if (on_terminal()) return show_progress(text);
  fmt::print(stderr, "{}\n", text);
}

}  // namespace clattn::cli
