#pragma once

#include <dlfcn.h>
#include <fmt/format.h>

#include <string>

namespace test {

/// The reference plugin with a defect; "none" has none.
inline std::string plugin_path(const std::string& defect) {
  return fmt::format("{}/{}.so", CLATTN_PLUGIN_DIR, defect);
}

inline bool is_loaded(const std::string& path) {
  void* object = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (object != nullptr) dlclose(object);
  return object != nullptr;
}

}  // namespace test
