#include "program/commands.hpp"
#include "program/devices/devices.hpp"

namespace clattn::cli {

void add_explain_command(CLI::App& app) {
  add_report_command(
      app, "explain",
      "List every backend and kernel for a model's layer, and why each is taken or not", true);
}

}  // namespace clattn::cli
