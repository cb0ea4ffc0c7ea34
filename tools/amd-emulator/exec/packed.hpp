// Packed instructions: two results, each of a half (or of one of two registers) of every source
// that op_sel and op_sel_hi choose; and those that mix halves with whole registers.
#pragma once
#include "exec/registers.hpp"

namespace amdemu {

template <int W>
void packed_halves(const Wave& w, const Instruction& i, int k, u32* lo, u32* hi) {
  Operand o = i.src[k];
  const bool neg_lo = (i.neg_lo >> k & 1) != 0, neg_hi = (i.neg_hi >> k & 1) != 0;
  alignas(64) u32 raw[W];
  if (o.kind == Operand::kImmediate) {
    u32 value = o.is_float ? half_immediate(o) : o.imm;
    fill<W>(raw, value);
  } else {
    o.neg = o.abs = false;
    raw32<W>(w, o, raw);
  }
  const int shift_lo = (i.op_sel >> k & 1) != 0 ? 16 : 0,
            shift_hi = (i.op_sel_hi >> k & 1) != 0 ? 16 : 0;
  for (int l = 0; l < W; ++l) {
    lo[l] = (raw[l] >> shift_lo & 0xffff) ^ (neg_lo ? 0x8000U : 0U);
    hi[l] = (raw[l] >> shift_hi & 0xffff) ^ (neg_hi ? 0x8000U : 0U);
  }
}
/// N sources of halves; F(a, b, c) of floats, rounded to f16.
template <int W, int N, class F>
void packed_f16(Wave& w, const Instruction& i) {
  alignas(64) u32 lo[3][W] = {}, hi[3][W] = {}, r[W];
  for (int k = 0; k < N; ++k) packed_halves<W>(w, i, k, lo[k], hi[k]);
  const auto one = [&](const u32(&source)[3][W], int l) {
    const f16 value = F{}(half_of(source[0][l]), half_of(source[1][l]), half_of(source[2][l]));
    return bits_of(output_modified(i, value));
  };
  for (int l = 0; l < W; ++l) r[l] = one(lo, l) | (one(hi, l) << 16);
  put32<W>(w, i.dst[0].reg, r);
}
/// N sources of 16-bit integers T; F(a, b, c) in 64 bits, wrapped or, with clamp, held to T's
/// limits.
template <int W, class T, int N, class F>
void packed_int16(Wave& w, const Instruction& i) {
  alignas(64) u32 lo[3][W] = {}, hi[3][W] = {}, r[W];
  for (int k = 0; k < N; ++k) packed_halves<W>(w, i, k, lo[k], hi[k]);
  constexpr i64 kLowest = std::numeric_limits<T>::min(), kLargest = std::numeric_limits<T>::max();
  const auto one = [&](const u32(&source)[3][W], int l) {
    const auto of = [&](int k) { return i64(static_cast<T>(source[k][l])); };
    const i64 wide = F{}(of(0), of(1), of(2));
    return u32(static_cast<u16>(i.clamp ? std::clamp(wide, kLowest, kLargest) : wide));
  };
  for (int l = 0; l < W; ++l) r[l] = one(lo, l) | (one(hi, l) << 16);
  put32<W>(w, i.dst[0].reg, r);
}
template <int W, int N, class F>
void packed32(Wave& w, const Instruction& i) {
  alignas(64) float lo[3][W] = {}, hi[3][W] = {};
  alignas(64) u32 bits[W];
  for (int k = 0; k < N; ++k) {
    for (int half = 0; half < 2; ++half) {
      Operand o = i.src[k];
      const bool upper = ((half == 0 ? i.op_sel : i.op_sel_hi) >> k & 1) != 0;
      o.neg = o.abs = false;
      if (o.kind != Operand::kImmediate && upper) o.reg += 1;
      raw32<W>(w, o, bits);
      if (((half == 0 ? i.neg_lo : i.neg_hi) >> k & 1) != 0)
        for (int l = 0; l < W; ++l) bits[l] ^= 0x80000000U;
      std::memcpy(half == 0 ? lo[k] : hi[k], bits, W * 4);
    }
  }
  alignas(64) float r[2][W];
  for (int l = 0; l < W; ++l) r[0][l] = output_modified(i, F{}(lo[0][l], lo[1][l], lo[2][l]));
  for (int l = 0; l < W; ++l) r[1][l] = output_modified(i, F{}(hi[0][l], hi[1][l], hi[2][l]));
  std::memcpy(bits, r[0], W * 4);
  put32<W>(w, i.dst[0].reg, bits);
  std::memcpy(bits, r[1], W * 4);
  put32<W>(w, i.dst[0].reg + 1, bits);
}
template <int W>
void pk_mov(Wave& w, const Instruction& i) {
  alignas(64) u32 lo[W], hi[W];
  Operand a = i.src[0], b = i.src[1];
  if (a.kind != Operand::kImmediate) a.reg += i.op_sel & 1;
  if (b.kind != Operand::kImmediate) b.reg += i.op_sel >> 1 & 1;
  raw32<W>(w, a, lo);
  raw32<W>(w, b, hi);
  put32<W>(w, i.dst[0].reg, lo);
  put32<W>(w, i.dst[0].reg + 1, hi);
}
/// fma of sources that are each f32, or a half of a register.
template <int W, int kOut>  // 0: f32; 1: f16 low; 2: f16 high
void fma_mix(Wave& w, const Instruction& i) {
  alignas(64) float s[3][W];
  alignas(64) u32 bits[W];
  for (int k = 0; k < 3; ++k) {
    Operand o = i.src[k];
    const bool neg = o.neg || (i.neg_lo >> k & 1) != 0, abs = o.abs || (i.neg_hi >> k & 1) != 0;
    o.neg = o.abs = false;
    const bool is_half = (i.op_sel_hi >> k & 1) != 0;
    if (is_half && o.kind == Operand::kImmediate && o.is_float)
      fill<W>(bits, half_immediate(o));
    else
      raw32<W>(w, o, bits);
    if (is_half) {
      const int shift = (i.op_sel >> k & 1) != 0 ? 16 : 0;
      for (int l = 0; l < W; ++l) s[k][l] = static_cast<float>(half_of(bits[l] >> shift));
    } else {
      std::memcpy(s[k], bits, W * 4);
    }
    if (abs)
      for (int l = 0; l < W; ++l) s[k][l] = std::fabs(s[k][l]);
    if (neg)
      for (int l = 0; l < W; ++l) s[k][l] = -s[k][l];
  }
  alignas(64) float r[W];
  for (int l = 0; l < W; ++l) r[l] = __builtin_fmaf(s[0][l], s[1][l], s[2][l]);
  if (i.clamp)
    for (int l = 0; l < W; ++l) r[l] = output_modified(i, r[l]);
  if (kOut == 0) {
    std::memcpy(bits, r, W * 4);
  } else {
    const u32* d = w.v + i.dst[0].reg * W;
    for (int l = 0; l < W; ++l) {
      const u32 half = bits_of(static_cast<f16>(r[l]));
      bits[l] = kOut == 1 ? (d[l] & 0xffff0000U) | half : (d[l] & 0xffff) | (half << 16);
    }
  }
  put32<W>(w, i.dst[0].reg, bits);
}

template <int W, bool kBf16>
void dot2_f32(Wave& w, const Instruction& i) {
  alignas(64) u32 lo[2][W], hi[2][W], bits[W];
  alignas(64) float c[W];
  for (int k = 0; k < 2; ++k) packed_halves<W>(w, i, k, lo[k], hi[k]);
  F32::get<W>(w, i, 2, c);
  for (int l = 0; l < W; ++l) {
    const auto of = [&](u32 v) { return kBf16 ? bf16_of(v) : static_cast<float>(half_of(v)); };
    const float sum = __builtin_fmaf(of(hi[0][l]), of(hi[1][l]),
                                     __builtin_fmaf(of(lo[0][l]), of(lo[1][l]), c[l]));
    bits[l] = as<u32>(output_modified(i, sum));
  }
  put32<W>(w, i.dst[0].reg, bits);
}
/// Bytes are signed where neg_lo says so.
template <int W>
void dot4_iu8(Wave& w, const Instruction& i) {
  refuse_clamp(i);
  alignas(64) u32 a[W], b[W], c[W];
  Operand first = i.src[0], second = i.src[1];
  first.neg = second.neg = false;
  raw32<W>(w, first, a), raw32<W>(w, second, b), raw32<W>(w, i.src[2], c);
  const auto byte = [&](int k, u32 word, int n) {
    const u32 bits = word >> (8 * n) & 0xff;
    return (i.neg_lo >> k & 1) != 0 ? i32(static_cast<i8>(bits)) : static_cast<i32>(bits);
  };
  for (int l = 0; l < W; ++l)
    for (int n = 0; n < 4; ++n) c[l] += static_cast<u32>(byte(0, a[l], n) * byte(1, b[l], n));
  put32<W>(w, i.dst[0].reg, c);
}

}  // namespace amdemu
