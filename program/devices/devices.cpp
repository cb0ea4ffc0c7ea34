#include "program/devices/devices.hpp"

#include "program/commands.hpp"

namespace clattn::cli {

void add_devices_command(CLI::App& app) {
  add_report_command(app, "devices",
                     "List devices, their capabilities and the kernels that a model's layer gets",
                     false);
}

}  // namespace clattn::cli
