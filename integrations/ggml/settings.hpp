#pragma once

#include <cstdint>
#include <string>

namespace ggml_clattn {

/// What a user sets by environment variables (docs/integrations.md), read once.
struct Settings {
  bool accelerator = false;      ///< CLATTN_GGML_TYPE: "accel" in place of "igpu"
  std::int64_t min_keys = 1024;  ///< CLATTN_GGML_MIN_KEYS: the fewest keys that CLAttn attends to
  bool counts = false;           ///< CLATTN_GGML_COUNTS: print at the end who computed how much
};

/// Throws std::invalid_argument that names variable, value and what is legal.
Settings read_settings();

/// Says one line through ggml's log, as information or as a warning.
///@{
void log_info(const std::string& line);
void log_warning(const std::string& line);
///@}

}  // namespace ggml_clattn
