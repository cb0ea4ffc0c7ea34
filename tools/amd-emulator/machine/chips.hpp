// The GPUs that are emulated. Sizes and counts are those of one board of each chip.
#pragma once
#include <cstdint>
#include <vector>

namespace amdemu {

struct Chip {
  const char* gfx;    // what clang's -mcpu takes
  const char* name;   // CL_DEVICE_NAME
  const char* board;  // CL_DEVICE_BOARD_NAME_AMD
  int wave;           // lanes of a wave
  int compute_units;
  int generation;   // 9, 10, 11, 12
  bool packed_ids;  // work-item ids in v0 alone, 10 bits each
  bool mfma_flush;  // f16 and bf16 matrix products flush denormals (MI200)
  bool fnuz;        // fp8 is the FNUZ kind: no infinities, 0x80 is NaN
  std::uint64_t memory;
  int clock_mhz;
  std::uint32_t local_bytes = 65536;
  int llvm = 19;  // the first clang of Debian 12 that knows it
};

const std::vector<Chip>& chips();

}  // namespace amdemu
