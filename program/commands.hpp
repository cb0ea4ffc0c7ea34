#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace clattn::cli {

/// How the program ends; main.cpp has a table of what each means, which every --help prints.
enum class Status : std::uint8_t { kDone, kFailed, kMalformed, kUnsupported, kOpenCL };

/// Thrown by a command to end the program so, once everything has been said.
struct ExitCode {
  Status status;
};

/// Every command adds its subcommand, options and callback. A callback prints its report to
/// standard output and throws to fail; main() turns exceptions into one line and an exit code.
void add_devices_command(CLI::App& app);
void add_explain_command(CLI::App& app);
void add_options_command(CLI::App& app);
void add_check_command(CLI::App& app);
void add_fuzz_command(CLI::App& app);
void add_run_command(CLI::App& app);
void add_replay_command(CLI::App& app);
void add_bench_command(CLI::App& app);
void add_tune_command(CLI::App& app);

/// Writes a report to a file, or to standard output for "-". Throws kIo naming the file.
void write_text(const std::string& path, const std::string& text);
/// Throws what write_text() would, before the work for the text; leaves no file behind.
void check_writable(const std::string& path);

}  // namespace clattn::cli
