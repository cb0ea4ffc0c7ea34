// Vector instructions that fit none of the shapes.
#pragma once
#include "exec/registers.hpp"

namespace amdemu {

template <int W, bool kSigned>
void mad_wide(Wave& w, const Instruction& i) {
  refuse_clamp(i);
  alignas(64) u32 a[W], b[W];
  alignas(64) u64 c[W];
  raw32<W>(w, i.src[0], a), raw32<W>(w, i.src[1], b);
  raw64<W, false, false>(w, i.src[2], c);
  u64 out = 0;
  for (int l = 0; l < W; ++l) {
    if (kSigned) {
      c[l] += static_cast<u64>(static_cast<i64>(static_cast<i32>(a[l])) * static_cast<i32>(b[l]));
    } else {
      const u64 sum = c[l] + u64(a[l]) * b[l];
      if (sum < c[l]) out |= 1ULL << l;
      c[l] = sum;
    }
  }
  put64<W>(w, i.dst[0].reg, c);
  write_mask<W>(w, i.dst[1].reg, out & exec_of<W>(w));
}
/// The division sequence: this emulator scales nothing here and divides in v_div_fixup, to the
/// correctly rounded quotient that the whole sequence yields on hardware.
template <int W, class T>
void div_scale(Wave& w, const Instruction& i) {
  alignas(64) typename T::t a[W];
  T::template get<W>(w, i, 0, a);
  T::template put<W>(w, i, a);
  write_mask<W>(w, i.dst[1].reg, 0);
}
template <int W, bool kBf8>
void cvt_pk_fp8_f32(Wave& w, const Instruction& i) {
  alignas(64) float a[W], b[W];
  alignas(64) u32 r[W];
  F32::get<W>(w, i, 0, a), F32::get<W>(w, i, 1, b);
  const u32* d = w.v + i.dst[0].reg * W;
  const bool hi = (i.op_sel >> 3 & 1) != 0, clamps = (w.mode & kModeOverflowClamps) != 0;
  const auto code = [&](float value) { return fp8_bits(value, kBf8, w.chip->fnuz, clamps); };
  for (int l = 0; l < W; ++l) {
    const u32 pair = code(a[l]) | (code(b[l]) << 8);
    r[l] = hi ? (d[l] & 0xffff) | (pair << 16) : (d[l] & 0xffff0000U) | pair;
  }
  put32<W>(w, i.dst[0].reg, r);
}
template <int W, bool kBf8>
void cvt_f32_fp8(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W];
  raw32<W>(w, i.src[0], a);
  for (int l = 0; l < W; ++l)
    a[l] = as<u32>(fp8_of(a[l] >> (8 * i.byte_sel) & 0xff, kBf8, w.chip->fnuz));
  put32<W>(w, i.dst[0].reg, a);
}
template <int W, bool kBf8>
void cvt_pk_f32_fp8(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], r[W];
  raw32<W>(w, i.src[0], a);
  const int shift = (i.op_sel & 1) != 0 ? 16 : 0;
  for (int half = 0; half < 2; ++half) {
    for (int l = 0; l < W; ++l)
      r[l] = as<u32>(fp8_of(a[l] >> (shift + 8 * half) & 0xff, kBf8, w.chip->fnuz));
    put32<W>(w, i.dst[0].reg + half, r);
  }
}

/// Of three bits, by a truth table.
template <int W>
void apply_truth_table(const Instruction& i, const u32* a, const u32* b, const u32* c, u32* r) {
  for (int n = 0; n < 8; ++n) {
    if ((i.truth_table >> n & 1) == 0) continue;
    const u32 not_a = (n & 4) != 0 ? 0 : ~0U, not_b = (n & 2) != 0 ? 0 : ~0U,
              not_c = (n & 1) != 0 ? 0 : ~0U;
    for (int l = 0; l < W; ++l) r[l] |= (a[l] ^ not_a) & (b[l] ^ not_b) & (c[l] ^ not_c);
  }
}
template <int W>
void bitop3(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], b[W], c[W], r[W] = {};
  raw32<W>(w, i.src[0], a), raw32<W>(w, i.src[1], b), raw32<W>(w, i.src[2], c);
  apply_truth_table<W>(i, a, b, c, r);
  put32<W>(w, i.dst[0].reg, r);
}
template <int W>
void bitop3_16(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], b[W], c[W], r[W] = {};
  raw16<W>(w, i, 0, a), raw16<W>(w, i, 1, b), raw16<W>(w, i, 2, c);
  apply_truth_table<W>(i, a, b, c, r);
  for (int l = 0; l < W; ++l) r[l] &= 0xffff;
  put16<W>(w, i, r);
}

}  // namespace amdemu
