// Instructions by which lanes read one another: reads and writes of one lane, permutes of rows and
// of the wave, swizzles, swaps.
#pragma once
#include <bit>

#include "exec/registers.hpp"

namespace amdemu {

template <int W>
void readfirstlane(Wave& w, const Instruction& i) {
  const u64 exec = exec_of<W>(w);
  const int lane = exec == 0 ? 0 : std::countr_zero(exec);
  const Operand& o = i.src[0];
  w.s[i.dst[0].reg] = o.kind == Operand::kVgpr ? w.v[o.reg * W + lane] : scalar32(w, o);
}
template <int W>
void readlane(Wave& w, const Instruction& i) {
  const u32 lane = scalar32(w, i.src[1]) % W;
  w.s[i.dst[0].reg] = w.v[i.src[0].reg * W + lane];
}
template <int W>
void writelane(Wave& w, const Instruction& i) {
  const u32 lane = scalar32(w, i.src[1]) % W;
  w.v[i.dst[0].reg * W + lane] = scalar32(w, i.src[0]);
}
template <int W, int kHigh>
void mbcnt(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], b[W];
  raw32<W>(w, i.src[0], a);
  raw32<W>(w, i.src[1], b);
  for (int l = 0; l < W; ++l) {
    u32 below = 0;
    if (kHigh == 0)
      below = l >= 32 ? 0xffffffffU : (1U << l) - 1;
    else
      below = l < 32 ? 0 : (1U << (l - 32)) - 1;
    b[l] += static_cast<u32>(std::popcount(a[l] & below));
  }
  put32<W>(w, i.dst[0].reg, b);
}
/// Lanes of rows of 16 read one another, or the row beside.
template <int W, bool kOtherRow, bool kPerLane>
void permlane16(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], b[W] = {}, r[W];
  raw32<W>(w, i.src[0], a);
  u64 selectors = 0;
  if (kPerLane)
    raw32<W>(w, i.src[1], b);
  else
    selectors = scalar32(w, i.src[1]) | (u64(scalar32(w, i.src[2])) << 32);
  const u32* d = w.v + i.dst[0].reg * W;
  const u64 exec = exec_of<W>(w);
  const bool fetch_inactive = (i.op_sel & 1) != 0, bound = (i.op_sel & 2) != 0;
  for (int l = 0; l < W; ++l) {
    const int within =
        kPerLane ? static_cast<int>(b[l] & 15) : static_cast<int>(selectors >> (4 * (l & 15)) & 15);
    const int from = ((l & ~15) ^ (kOtherRow ? 16 : 0)) | within;
    r[l] = fetch_inactive || (exec >> from & 1) != 0 ? a[from] : bound ? 0 : d[l];
  }
  put32<W>(w, i.dst[0].reg, r);
}
template <int W>
void permlane64(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], r[W];
  raw32<W>(w, i.src[0], a);
  for (int l = 0; l < W; ++l) r[l] = W == 64 ? a[l ^ 32] : a[l];
  put32<W>(w, i.dst[0].reg, r);
}
template <int W>
void swap(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], b[W];
  std::memcpy(a, w.v + i.dst[0].reg * W, sizeof(a));
  std::memcpy(b, w.v + i.src[0].reg * W, sizeof(b));
  put32<W>(w, i.dst[0].reg, b);
  put32<W>(w, i.src[0].reg, a);
}
/// gfx950: the odd rows (of kRow lanes) of one register change places with the even rows of
/// another.
template <int W, int kRow>
void permlane_swap(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], b[W];
  std::memcpy(a, w.v + i.dst[0].reg * W, sizeof(a));
  std::memcpy(b, w.v + i.src[0].reg * W, sizeof(b));
  for (int l = 0; l < W; ++l)
    if ((l & kRow) != 0) std::swap(a[l], b[l - kRow]);
  put32<W>(w, i.dst[0].reg, a);
  put32<W>(w, i.src[0].reg, b);
}
template <int W>
void bpermute(Wave& w, const Instruction& i) {  // r[l] = data[addr[l] / 4]
  alignas(64) u32 a[W], d[W], r[W];
  raw32<W>(w, i.src[0], a);
  raw32<W>(w, i.src[1], d);
  const u64 exec = exec_of<W>(w);
  for (int l = 0; l < W; ++l) {
    const u32 from = ((a[l] + static_cast<u32>(i.offset)) >> 2) % W;
    r[l] = (exec >> from & 1) != 0 ? d[from] : 0;
  }
  put32<W>(w, i.dst[0].reg, r);
}
template <int W>
void permute(Wave& w, const Instruction& i) {  // r[addr[l] / 4] = data[l]
  alignas(64) u32 a[W], d[W], r[W] = {};
  raw32<W>(w, i.src[0], a);
  raw32<W>(w, i.src[1], d);
  const u64 exec = exec_of<W>(w);
  for (int l = 0; l < W; ++l) {
    if ((exec >> l & 1) != 0) r[((a[l] + static_cast<u32>(i.offset)) >> 2) % W] = d[l];
  }
  put32<W>(w, i.dst[0].reg, r);
}
template <int W>
void swizzle(Wave& w, const Instruction& i) {
  alignas(64) u32 d[W], r[W];
  raw32<W>(w, i.src[0], d);
  const u64 exec = exec_of<W>(w);
  const u32 pattern = static_cast<u32>(i.offset);
  for (int l = 0; l < W; ++l) {
    int from = 0;
    if ((pattern & 0x8000) != 0) {
      if ((pattern & 0xff00) == 0x8000)
        from = (l & ~3) | static_cast<int>(pattern >> (2 * (l & 3)) & 3);
      else
        fault(i, "this swizzle is not emulated");
    } else {
      const int in = l & 31;
      const int x = ((in & static_cast<int>(pattern & 31)) | static_cast<int>(pattern >> 5 & 31)) ^
                    static_cast<int>(pattern >> 10 & 31);
      from = (l & 32) | x;
    }
    r[l] = (exec >> from & 1) != 0 ? d[from] : 0;
  }
  put32<W>(w, i.dst[0].reg, r);
}

}  // namespace amdemu
