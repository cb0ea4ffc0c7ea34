// The AMDEMU_* environment variables, read once. README.md says what each means.
#pragma once
#include <cstdint>
#include <string>

namespace amdemu {

enum class WaveOrder { kForward, kReverse, kRandom };

struct Settings {
  std::string gfx;    // AMDEMU_GFX
  int verbose = 0;    // AMDEMU_VERBOSE
  bool check = true;  // AMDEMU_CHECK
  WaveOrder order = WaveOrder::kForward;
  std::uint32_t slice = 0;   // AMDEMU_SLICE
  std::uint32_t poison = 0;  // AMDEMU_POISON
  unsigned threads = 1;
  std::string build_options, cache_dir, clang, objdump, bitcode;
  bool keep = false;  // AMDEMU_KEEP
};
const Settings& settings();

}  // namespace amdemu
