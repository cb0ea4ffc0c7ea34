#include "base/environment.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "base/checked.hpp"
#include "base/log.hpp"

namespace clattn::detail {
namespace {

/// A place of ours: the one that `own` names, else under $XDG_..., else under its default in home.
std::string choose_path(const std::string& own, const std::string& xdg, const std::string& home,
                        const char* default_folder, const char* name) {
  if (!own.empty()) return own;
  // The XDG specification: a relative path is invalid and ignored.
  if (xdg.starts_with('/')) return xdg + name;
  return home.empty() ? std::string{} : home + default_folder + name;
}

/// The parts of "a:b:c"; empty ones are left out.
std::vector<std::string> split_paths(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(':'), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

float positive_number(const char* name, const std::string& text, float unset) {
  if (text.empty()) return unset;
  float value = 0;
  throw_invalid_if(!parse_number(text, value) || !(value > 0) || std::isinf(value),
                   "{} is '{}', legal: a finite number > 0", name, text);
  return value;
}

/// Switches are on when unset, but for those that the caller asks about first.
bool is_on(const char* name, std::string_view text) {
  constexpr std::array<std::string_view, 5> kOn = {"", "1", "on", "true", "yes"};
  constexpr std::array<std::string_view, 4> kOff = {"0", "off", "false", "no"};
  if (std::ranges::find(kOn, text) != kOn.end()) return true;
  if (std::ranges::find(kOff, text) != kOff.end()) return false;
  throw_invalid("{} is '{}', legal: 0, off, false, no, 1, on, true, yes", name, text);
}

LogLevel log_level(std::string_view text) {
  if (text.empty()) return LogLevel::kOff;
  const auto* const found = std::ranges::find(kLogLevels, text);
  throw_invalid_if(found == kLogLevels.end(), "CLATTN_LOG is '{}', legal: {}", text,
                   fmt::join(kLogLevels, ", "));
  return static_cast<LogLevel>(found - kLogLevels.begin());
}

}  // namespace

Environment parse_environment(const std::function<const char*(const char*)>& get) {
  const auto text = [&](const char* name) {
    const char* value = get(name);
    return std::string(value == nullptr ? "" : value);
  };
  Environment result;
  result.device = text("CLATTN_DEVICE");
  result.backend = text("CLATTN_BACKEND");
  result.kv_cache_layout = text("CLATTN_KV_CACHE_LAYOUT");
  result.kernel_dir = text("CLATTN_KERNEL_DIR");
  result.cache_dir = choose_path(text("CLATTN_CACHE_DIR"), text("XDG_CACHE_HOME"), text("HOME"),
                                 "/.cache", "/clattn");
  result.tuning_file = choose_path(text("CLATTN_TUNING_FILE"), text("XDG_CONFIG_HOME"),
                                   text("HOME"), "/.config", "/clattn/tuning.txt");
  result.capture_dir = text("CLATTN_CAPTURE_DIR");
  result.plugins = split_paths(text("CLATTN_PLUGINS"));
  const auto number = [&](const char* name, float& value) {
    value = positive_number(name, text(name), value);
  };
  number("CLATTN_Q_SCALE_CONSTANT", result.q_scale_constant);
  number("CLATTN_K_SCALE_CONSTANT", result.k_scale_constant);
  number("CLATTN_V_SCALE_CONSTANT", result.v_scale_constant);
  result.amx_enabled = is_on("CLATTN_AMX", text("CLATTN_AMX"));
  result.cache_enabled = is_on("CLATTN_CACHE", text("CLATTN_CACHE"));
  const std::string debug = text("CLATTN_DEBUG");
  result.debug = !debug.empty() && is_on("CLATTN_DEBUG", debug);
  result.log_level = log_level(text("CLATTN_LOG"));
  result.pocl_defaults =
      text("POCL_WORK_GROUP_METHOD").empty() && text("POCL_WORK_GROUP_SPECIALIZATION").empty();
  result.tuning_enabled = is_on("CLATTN_TUNING", text("CLATTN_TUNING"));
  return result;
}

const Environment& environment() {
  static const Environment variables = parse_environment([](const char* name) {
    return secure_getenv(name);  // NOLINT(concurrency-mt-unsafe): once, under the static's lock
  });
  return variables;
}

}  // namespace clattn::detail
