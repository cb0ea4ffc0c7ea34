// A wave in flight: its registers and where it stands.
#pragma once
#include <cstdint>
#include <string>

#include "machine/chips.hpp"
#include "machine/instruction.hpp"

namespace amdemu {

// Scalar registers are numbered as in the ISA manuals; what has no number of its own there gets one
// above 127.
enum : std::uint16_t {
  kVcc = 106,
  kTtmp = 108,
  kM0 = 124,
  kExec = 126,
  kScc = 128,
  kNullSink = 130,  // writes to `null`
  kFlatScratch = 132,
  kXnackMask = 134,
  kSharedBase = 136,
  kPrivateBase = 138,
  kNumSgprs = 140,
};
constexpr int kNumVgprs = 520;  // v0-v255, a0-a255, and 8 for intermediate results
constexpr int kAccBase = 256;
constexpr int kTemporaryVgpr = 512;

// Generic addresses of local and private memory: above every address of user space.
constexpr std::uint32_t kSharedApertureHigh = 0x00010000U;
constexpr std::uint32_t kPrivateApertureHigh = 0x00020000U;

struct Image;

/// One work-group in flight.
struct Group {
  unsigned char* local = nullptr;
  std::uint32_t local_bytes = 0;
  std::uint32_t id[3] = {0, 0, 0};
};

struct Wave {
  alignas(64) std::uint32_t v[kNumVgprs * 64];  // [register][lane]: 32 or 64 words a register
  alignas(64) std::uint32_t lane_mask[64];      // all ones where exec is set
  std::uint32_t s[kNumSgprs + 4];
  std::uint64_t mask_of_lanes = 0;  // the exec that lane_mask was made from
  const Image* image = nullptr;
  const Chip* chip = nullptr;
  Group* group = nullptr;
  unsigned char* scratch = nullptr;  // private bytes of every lane
  std::uint64_t scratch_bytes = 0;   // per lane
  std::int32_t pc = 0;               // index in Image::code
  enum State : std::uint8_t { kRunning, kAtBarrier, kDone } state = kRunning;
  std::uint32_t mode = 0;   // the MODE register
  std::uint32_t index = 0;  // in its group

  std::uint64_t s64(int r) const { return s[r] | (std::uint64_t(s[r + 1]) << 32); }
  void set64(int r, std::uint64_t value) {
    s[r] = static_cast<std::uint32_t>(value);
    s[r + 1] = static_cast<std::uint32_t>(value >> 32);
  }
};

// Bits of Wave::mode.
constexpr std::uint32_t kModeRounding = 15;              // 0: to nearest even
constexpr std::uint32_t kModeDenormals32 = 3U << 4;      // 0: flushed
constexpr std::uint32_t kModeOverflowClamps = 1U << 23;  // FP16_OVFL

/// Raised by an instruction that cannot go on; ends the launch with an error.
struct Fault {
  std::string what;
};

}  // namespace amdemu
