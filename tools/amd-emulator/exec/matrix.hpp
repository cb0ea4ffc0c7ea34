// Matrix instructions: MFMA of CDNA, WMMA of RDNA 3 and 4. Which lane holds what: README.md.
#pragma once
#include <algorithm>
#include <cstring>

#include "exec/registers.hpp"

namespace amdemu {

/// Element e of a lane's operand. 8-bit and 4-bit integers are exact in f32.
template <int W>
float element(const Wave& w, int reg, int lane, int e, MatrixControl::Type type,
              const MatrixControl& m) {
  const auto bits = [&](int size) {
    const int each = 32 / size;
    const u32 word = w.v[(reg + e / each) * W + lane];
    return size == 32 ? word : word >> (size * (e % each)) & ((1U << size) - 1);
  };
  switch (type) {
    case MatrixControl::kF16: {
      const float value = static_cast<float>(half_of(bits(16)));
      return m.flush ? flushed16(value) : value;
    }
    case MatrixControl::kBF16: {
      const float value = bf16_of(bits(16));
      return m.flush ? flushed(value) : value;
    }
    case MatrixControl::kF32:
      return as<float>(bits(32));
    case MatrixControl::kXf32:  // 10 bits of mantissa
      return as<float>((bits(32) + 0xfff + (bits(32) >> 13 & 1)) & 0xffffe000U);
    case MatrixControl::kI8:
      return static_cast<float>(static_cast<i8>(bits(8)));
    case MatrixControl::kU8:
      return static_cast<float>(bits(8));
    case MatrixControl::kI4:
      return static_cast<float>(static_cast<i32>(bits(4) << 28) >> 28);
    case MatrixControl::kU4:
      return static_cast<float>(bits(4));
    case MatrixControl::kFp8:
      return fp8_of(bits(8), false, m.fnuz);
    case MatrixControl::kBf8:
      return fp8_of(bits(8), true, m.fnuz);
    case MatrixControl::kF64:
    case MatrixControl::kI32:
      break;
  }
  return 0;
}

/// blgp: which lane's B a lane sees.
inline int b_lane(int blgp, int lane) {
  switch (blgp) {
    case 1:
      return lane & 31;
    case 2:
      return 32 | (lane & 31);
    case 3:
      return (lane + 16) & 63;
    case 4:
      return lane & 15;
    case 5:
      return 16 | (lane & 15);
    case 6:
      return 32 | (lane & 15);
    case 7:
      return 48 | (lane & 15);
    default:
      return lane;
  }
}

/// Where element e of a lane's operand of MFMA stands among [block][row or column][k].
struct MfmaSource {
  int row, block, group;
  MfmaSource(const MatrixControl& m, int lane)
      : row(lane % m.m), block(lane / m.m % m.blocks), group(lane / m.m / m.blocks) {}
  int index(const MatrixControl& m, int e) const {
    return (block * m.m + row) * m.k + group * m.per_lane + e;
  }
};
/// Which element of D result register `reg` of a lane holds.
struct MfmaResult {
  int block = 0, row = 0, column = 0;
  MfmaResult(const MatrixControl& m, int reg, int lane) : column(lane % m.n) {
    const int per_block = m.m * m.n / 64;  // registers of a block; 0 where it has less than a wave
    if (m.d == MatrixControl::kF64) {
      block = m.blocks == 1 ? 0 : lane / 4 % 4;
      row = m.blocks == 1 ? 4 * reg + lane / 16 : lane / 16;
    } else if (per_block == 0) {
      block = lane / 4, row = reg;
    } else {
      const int in = reg % per_block;
      block = reg / per_block;
      row = m.m == 32 ? 8 * (in / 4) + 4 * (lane / 32) + in % 4 : 4 * (lane / 16) + in;
    }
  }
  int a_index(const MatrixControl& m) const { return (block * m.m + row) * m.k; }
  int b_index(const MatrixControl& m) const { return (block * m.n + column) * m.k; }
};
inline int mfma_results(const MatrixControl& m) {
  return m.m * m.n * m.blocks / 64;
}

/// blgp negates A, B and C, by its bits.
inline void mfma_f64(Wave& w, const Instruction& i) {
  constexpr int W = 64;
  const MatrixControl& m = *i.matrix;
  const auto pair = [&](int reg, int lane) {
    return as<double>(w.v[reg * W + lane] | (u64(w.v[(reg + 1) * W + lane]) << 32));
  };
  const auto signed_by = [&](int bit, double value) {
    return (i.blgp >> bit & 1) != 0 ? -value : value;
  };
  double a[64], b[64];
  for (int lane = 0; lane < W; ++lane) {
    const int at = MfmaSource(m, lane).index(m, 0);
    a[at] = signed_by(0, pair(i.src[0].reg, lane));
    b[at] = signed_by(1, pair(i.src[1].reg, lane));
  }
  const Operand& c = i.src[2];
  u32 r[8][W];
  for (int reg = 0; reg < mfma_results(m); ++reg) {
    for (int lane = 0; lane < W; ++lane) {
      const MfmaResult d(m, reg, lane);
      const bool in_registers = c.kind == Operand::kVgpr;
      double sum = in_registers ? pair(c.reg + 2 * reg, lane) : as<double>(scalar64(w, c));
      sum = signed_by(2, sum);
      for (int k = 0; k < m.k; ++k)
        sum = __builtin_fma(a[d.a_index(m) + k], b[d.b_index(m) + k], sum);
      r[2 * reg][lane] = static_cast<u32>(as<u64>(sum));
      r[2 * reg + 1][lane] = static_cast<u32>(as<u64>(sum) >> 32);
    }
  }
  // exec is ignored, here and below.
  std::memcpy(w.v + i.dst[0].reg * W, r, sizeof(u32) * W * static_cast<u32>(2 * mfma_results(m)));
}

/// In order of k, with one rounding a product.
inline void mfma(Wave& w, const Instruction& i) {
  constexpr int W = 64;
  const MatrixControl& m = *i.matrix;
  if (m.d == MatrixControl::kF64) return mfma_f64(w, i);
  static thread_local float a[64 * 64], b[64 * 64];
  for (int lane = 0; lane < W; ++lane) {
    const MfmaSource source(m, lane);
    int block = source.block;  // cbsz: one block's A serves several
    if (i.cbsz != 0) block = (block >> i.cbsz << i.cbsz) + i.abid;
    const int a_lane = source.row + m.m * (block + m.blocks * source.group);
    for (int e = 0; e < m.per_lane; ++e) {
      a[source.index(m, e)] = element<W>(w, i.src[0].reg, a_lane, e, m.a, m);
      b[source.index(m, e)] = element<W>(w, i.src[1].reg, b_lane(i.blgp, lane), e, m.b, m);
    }
  }
  const Operand& c = i.src[2];
  static thread_local u32 r[64][W];
  for (int reg = 0; reg < mfma_results(m); ++reg) {
    for (int lane = 0; lane < W; ++lane) {
      const MfmaResult d(m, reg, lane);
      const u32 start = c.kind == Operand::kVgpr ? w.v[(c.reg + reg) * W + lane] : scalar32(w, c);
      const float* row = a + d.a_index(m);
      const float* column = b + d.b_index(m);
      if (m.d == MatrixControl::kI32) {
        u32 sum = start;
        for (int k = 0; k < m.k; ++k)
          sum += static_cast<u32>(static_cast<i32>(row[k]) * static_cast<i32>(column[k]));
        r[reg][lane] = sum;
      } else {
        float sum = m.flush ? flushed(as<float>(start)) : as<float>(start);
        for (int k = 0; k < m.k; ++k) sum = __builtin_fmaf(row[k], column[k], sum);
        r[reg][lane] = as<u32>(m.flush ? flushed(sum) : sum);
      }
    }
  }
  std::memcpy(w.v + i.dst[0].reg * W, r, sizeof(u32) * W * static_cast<u32>(mfma_results(m)));
}

/// gfx11: the other lanes must hold the same rows and columns.
template <int W>
void require_repeated(const Wave& w, const Instruction& i) {
  for (int s = 0; s < 2; ++s)
    for (int n = 0; n < i.src[0].dwords; ++n)
      for (int lane = 16; lane < W; ++lane) {
        const u32* words = w.v + (i.src[s].reg + n) * W;
        if (words[lane] != words[lane % 16])
          fault(i, "WMMA operand is not repeated in lanes 16 and up, as gfx11 demands");
      }
}

/// C of WMMA for result n of a lane: a word, or the half of one that `high` (gfx11) or n (gfx12)
/// says.
template <int W>
u32 wmma_start(const Wave& w, const Instruction& i, int n, int lane, bool high) {
  const MatrixControl& m = *i.matrix;
  const Operand& c = i.src[2];
  const bool is_half = m.d == MatrixControl::kF16 || m.d == MatrixControl::kBF16;
  if (c.kind != Operand::kVgpr) return is_half ? half_immediate(c) : c.imm;
  if (!is_half) return w.v[(c.reg + n) * W + lane];
  if (m.kind == MatrixControl::kWmma12)
    return w.v[(c.reg + n / 2) * W + lane] >> (16 * (n & 1)) & 0xffff;
  return w.v[(c.reg + n) * W + lane] >> (high ? 16 : 0) & 0xffff;
}

inline u32 wmma_integer(const Instruction& i, const float* row, const float* column, u32 start) {
  i64 sum = static_cast<i32>(start);
  for (int k = 0; k < i.matrix->k; ++k)
    sum += static_cast<i64>(row[k]) * static_cast<i64>(column[k]);
  if (i.clamp) sum = std::clamp<i64>(sum, INT32_MIN, INT32_MAX);
  return static_cast<u32>(sum);
}
/// neg_lo and neg_hi of the third source: minus C, |C|.
inline u32 wmma_float(const Instruction& i, const float* row, const float* column, u32 start) {
  const MatrixControl::Type type = i.matrix->d;
  float sum = type == MatrixControl::kF16    ? static_cast<float>(half_of(start))
              : type == MatrixControl::kBF16 ? bf16_of(start)
                                             : as<float>(start);
  if ((i.neg_hi >> 2 & 1) != 0) sum = std::fabs(sum);
  if ((i.neg_lo >> 2 & 1) != 0) sum = -sum;
  for (int k = 0; k < i.matrix->k; ++k) sum = __builtin_fmaf(row[k], column[k], sum);
  return type == MatrixControl::kF16    ? bits_of(static_cast<f16>(sum))
         : type == MatrixControl::kBF16 ? bf16_bits(sum)
                                        : as<u32>(sum);
}

/// Result n of every lane to its register, or to its half of one.
template <int W>
void wmma_write(Wave& w, const Instruction& i, int n, bool high, const u32* r) {
  const MatrixControl& m = *i.matrix;
  const int reg = i.dst[0].reg;
  if (m.d != MatrixControl::kF16 && m.d != MatrixControl::kBF16) {
    std::memcpy(w.v + (reg + n) * W, r, sizeof(u32) * W);
    return;
  }
  const bool packs = m.kind == MatrixControl::kWmma12;
  u32* words = w.v + (reg + (packs ? n / 2 : n)) * W;
  const bool upper = packs ? (n & 1) != 0 : high;
  for (int lane = 0; lane < W; ++lane)
    words[lane] =
        upper ? (words[lane] & 0xffff) | (r[lane] << 16) : (words[lane] & 0xffff0000U) | r[lane];
}

template <int W>
void wmma(Wave& w, const Instruction& i) {
  const MatrixControl& m = *i.matrix;
  const bool is_gfx12 = m.kind == MatrixControl::kWmma12, high = (i.op_sel >> 2 & 1) != 0;
  if (W == 64 && is_gfx12) fault(i, "gfx12 WMMA in waves of 64 is not emulated");
  if (!is_gfx12) require_repeated<W>(w, i);
  const int groups = is_gfx12 ? 2 : 1, per_lane = m.k / groups;
  float a[16][64], b[16][64];
  for (int lane = 0; lane < 16 * groups; ++lane) {
    for (int e = 0; e < per_lane; ++e) {
      const int k = lane / 16 * per_lane + e;
      a[lane % 16][k] = element<W>(w, i.src[0].reg, lane, e, m.a, m);
      b[lane % 16][k] = element<W>(w, i.src[1].reg, lane, e, m.b, m);
    }
  }
  constexpr int kResults = 256 / W;
  alignas(64) u32 r[kResults][W];
  for (int n = 0; n < kResults; ++n) {
    for (int lane = 0; lane < W; ++lane) {
      const int row = is_gfx12 ? n + 8 * (lane / 16) : W / 16 * n + lane / 16;
      const u32 start = wmma_start<W>(w, i, n, lane, high);
      r[n][lane] = m.d == MatrixControl::kI32 ? wmma_integer(i, a[row], b[lane % 16], start)
                                              : wmma_float(i, a[row], b[lane % 16], start);
    }
  }
  for (int n = 0; n < kResults; ++n) wmma_write<W>(w, i, n, high, r[n]);
}

template <int W>
void matrix(Wave& w, const Instruction& i) {
  if (i.matrix->kind != MatrixControl::kMfma) return wmma<W>(w, i);
  if constexpr (W == 64)
    mfma(w, i);
  else
    fault(i, "MFMA in a wave of 32");
}

}  // namespace amdemu
