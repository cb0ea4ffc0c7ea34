#include "settings.hpp"

#include <ggml.h>

#include <charconv>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

namespace ggml_clattn {

namespace {

std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

[[noreturn]] void refuse(const std::string& name, std::string_view value, const char* legal) {
  throw std::invalid_argument(name + " is '" + std::string(value) + "', legal: " + legal);
}

void log(ggml_log_level level, const std::string& line) {
  ggml_log_callback callback = nullptr;
  void* user = nullptr;
  ggml_log_get(&callback, &user);
  if (callback != nullptr) callback(level, ("CLAttn: " + line + "\n").c_str(), user);
}

}  // namespace

Settings read_settings() {
  Settings settings;
  const std::string_view type = variable("CLATTN_GGML_TYPE");
  if (!type.empty() && type != "igpu" && type != "accel")
    refuse("CLATTN_GGML_TYPE", type, "igpu or accel");
  settings.accelerator = type == "accel";

  if (const std::string_view keys = variable("CLATTN_GGML_MIN_KEYS"); !keys.empty()) {
    const char* const end = keys.data() + keys.size();
    const auto [stop, error] = std::from_chars(keys.data(), end, settings.min_keys);
    if (error != std::errc() || stop != end || settings.min_keys < 0)
      refuse("CLATTN_GGML_MIN_KEYS", keys, "whole numbers >= 0");
  }

  const std::string_view counts = variable("CLATTN_GGML_COUNTS");
  if (!counts.empty() && counts != "0" && counts != "1")
    refuse("CLATTN_GGML_COUNTS", counts, "0 or 1");
  settings.counts = counts == "1";
  return settings;
}

void log_info(const std::string& line) {
  log(GGML_LOG_LEVEL_INFO, line);
}

void log_warning(const std::string& line) {
  log(GGML_LOG_LEVEL_WARN, line);
}

}  // namespace ggml_clattn
