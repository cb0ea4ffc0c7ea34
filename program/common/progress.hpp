#pragma once

#include <string_view>

namespace clattn::cli {

/// Whether standard error is a terminal.
bool on_terminal();
/// Says on a terminal what is being done, in a line that the next one replaces; "" clears it.
void show_progress(std::string_view text);
/// The same of what takes long enough that a file or pipe gets a line of it too.
void show_stage(std::string_view text);

}  // namespace clattn::cli
