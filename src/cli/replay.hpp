#pragma once

#include <CLI/CLI.hpp>

namespace clattn::cli {

/// `clattn replay`: continuous batching over a trace, every step executed and some verified.
void add_replay_command(CLI::App& app);

}  // namespace clattn::cli
