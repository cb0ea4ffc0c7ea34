#include "base/environment.hpp"

#include <cstdlib>

namespace clattn::detail {
namespace {

std::string choose_cache_dir(const std::string& own, const std::string& xdg,
                             const std::string& home) {
  if (!own.empty()) return own;
  // The XDG specification: a relative path is invalid and ignored.
  if (xdg.starts_with('/')) return xdg + "/clattn";
  return home.empty() ? std::string{} : home + "/.cache/clattn";
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
  result.cache_dir =
      choose_cache_dir(text("CLATTN_CACHE_DIR"), text("XDG_CACHE_HOME"), text("HOME"));
  result.capture_dir = text("CLATTN_CAPTURE_DIR");
  const std::string cache = text("CLATTN_CACHE");
  result.cache_enabled = cache != "0" && cache != "off";
  return result;
}

const Environment& environment() {
  static const Environment variables = parse_environment([](const char* name) {
    return std::getenv(name);  // NOLINT(concurrency-mt-unsafe): read once, under the static's lock
  });
  return variables;
}

}  // namespace clattn::detail
