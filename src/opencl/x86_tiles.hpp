#pragma once

#include <string>

namespace clattn::detail {

/// Why this process cannot use x86's matrix tiles of bf16 (AMX); empty = it can. Unless the
/// environment forbids it (CLATTN_AMX), asks the operating system for them at the first call, for
/// all threads of the process: from then on Linux saves their registers, and an alternate signal
/// stack must have room for them (about 11 KiB; Linux refuses both a smaller stack and, where there
/// is one already, the tiles). Thread-safe.
const std::string& why_no_x86_tiles();

}  // namespace clattn::detail
