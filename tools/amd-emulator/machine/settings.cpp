#include "machine/settings.hpp"

#include <algorithm>
#include <cstdlib>
#include <thread>

namespace amdemu {
namespace {

/// An empty variable counts as unset.
std::string text(const char* name, const std::string& otherwise = "") {
  const char* value = std::getenv(name);
  return value == nullptr || *value == 0 ? otherwise : value;
}
unsigned number(const char* name, unsigned otherwise) {
  const std::string value = text(name);
  return value.empty() ? otherwise : static_cast<unsigned>(std::strtoul(value.c_str(), nullptr, 0));
}

Settings from_environment() {
  Settings s;
  s.gfx = text("AMDEMU_GFX", "gfx90a,gfx942,gfx1100,gfx1201");
  s.verbose = static_cast<int>(number("AMDEMU_VERBOSE", 0));
  s.check = number("AMDEMU_CHECK", 1) != 0;
  const std::string order = text("AMDEMU_ORDER");
  if (order == "reverse") s.order = WaveOrder::kReverse;
  if (order == "random") s.order = WaveOrder::kRandom;
  s.slice = std::max(1U, number("AMDEMU_SLICE", 100000));
  s.poison = number("AMDEMU_POISON", 0xdeadbeefU);
  s.threads = std::max(1U, number("AMDEMU_THREADS", std::thread::hardware_concurrency()));
  s.build_options = text("AMDEMU_BUILD_OPTIONS");
  const std::string cache = text("XDG_CACHE_HOME", text("HOME", "/tmp") + "/.cache");
  s.cache_dir = text("AMDEMU_CACHE_DIR", cache + "/amdemu");
  s.clang = text("AMDEMU_CLANG");
  s.objdump = text("AMDEMU_OBJDUMP");
  s.bitcode = text("AMDEMU_BITCODE");
  s.keep = !text("AMDEMU_KEEP").empty();
  return s;
}

}  // namespace

const Settings& settings() {
  static const Settings once = from_environment();
  return once;
}

}  // namespace amdemu
