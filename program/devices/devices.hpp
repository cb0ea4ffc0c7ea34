#pragma once

#include <CLI/CLI.hpp>
#include <clattn/device.hpp>
#include <nlohmann/json.hpp>

namespace clattn::cli {

/// Adds a command that lists devices, their capabilities, and the backends and kernels that take a
/// model's layer; to `explain`, of one device, and why others are not taken. It throws ExitCode
/// where no device serves the layer.
void add_report_command(CLI::App& app, const char* name, const char* help, bool explain);

/// The capability record as reports carry it: sizes in bytes.
nlohmann::json capabilities_json(const DeviceCapabilities& capabilities);

}  // namespace clattn::cli
