#include "machine/chips.hpp"

namespace amdemu {

const std::vector<Chip>& chips() {
  constexpr bool kPackedIds = true, kFlush = true, kFnuz = true;
  constexpr std::uint64_t kGiB = 1ULL << 30;
  static const std::vector<Chip> list = {
      {"gfx90a", "gfx90a:sramecc+:xnack-", "AMD Instinct MI210", 64, 104, 9, kPackedIds, kFlush,
       !kFnuz, 64 * kGiB, 1700},
      {"gfx942", "gfx942:sramecc+:xnack-", "AMD Instinct MI300X", 64, 304, 9, kPackedIds, !kFlush,
       kFnuz, 192 * kGiB, 2100},
      {"gfx1100", "gfx1100", "AMD Radeon RX 7900 XTX", 32, 48, 11, kPackedIds, !kFlush, !kFnuz,
       24 * kGiB, 2500},
      {"gfx1201", "gfx1201", "AMD Radeon RX 9070 XT", 32, 32, 12, kPackedIds, !kFlush, !kFnuz,
       16 * kGiB, 2900},
      {"gfx950", "gfx950:sramecc+:xnack-", "AMD Instinct MI350X", 64, 256, 9, kPackedIds, !kFlush,
       !kFnuz, 288 * kGiB, 2400, 163840, 22},
      {"gfx906", "gfx906:sramecc+:xnack-", "AMD Radeon VII", 64, 60, 9, !kPackedIds, !kFlush,
       !kFnuz, 16 * kGiB, 1800},
      {"gfx1030", "gfx1030", "AMD Radeon RX 6800 XT", 32, 36, 10, !kPackedIds, !kFlush, !kFnuz,
       16 * kGiB, 2250},
  };
  return list;
}

}  // namespace amdemu
