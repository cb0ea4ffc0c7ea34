// Reading and writing the registers of a wave of W lanes: as words, as 16 bits that op_sel chooses,
// as pairs, and by element type (U32, F16 ...), which is how a vector instruction's row names them.
#pragma once
#include <cstring>
#include <string>
#include <type_traits>

#include "exec/numbers.hpp"
#include "machine/wave.hpp"

namespace amdemu {

[[noreturn]] inline void fault(const Instruction& i, const std::string& what) {
  throw Fault{what + " at `" + i.text + "`"};
}

// Masks have a bit a lane; a wave of 32 uses one scalar register for them.
template <int W>
constexpr u64 kAll = W == 64 ? ~0ULL : 0xffffffffULL;
template <int W>
inline u64 exec_of(const Wave& w) {
  return W == 64 ? w.s64(kExec) : w.s[kExec];
}
template <int W>
inline u64 read_mask(const Wave& w, int reg) {
  return W == 64 ? w.s64(reg) : w.s[reg];
}
template <int W>
inline void write_mask(Wave& w, int reg, u64 value) {
  if (W == 64)
    w.set64(reg, value);
  else
    w.s[reg] = static_cast<u32>(value);
}
/// exec as a word a lane, all ones or 0.
template <int W>
inline const u32* lanes(Wave& w) {
  const u64 exec = exec_of<W>(w);
  if (exec != w.mask_of_lanes) {
    for (int l = 0; l < W; ++l) w.lane_mask[l] = (exec >> l & 1) != 0 ? 0xffffffffU : 0;
    w.mask_of_lanes = exec;
  }
  return w.lane_mask;
}
// Sources that are the same for all lanes.
inline u32 scalar32(const Wave& w, const Operand& o) {
  u32 value = o.kind == Operand::kSgpr ? w.s[o.reg] : o.imm;
  if (o.abs) value &= 0x7fffffffU;
  if (o.neg) value ^= 0x80000000U;
  return value;
}
inline u64 scalar64(const Wave& w, const Operand& o) {
  if (o.kind == Operand::kSgpr) return w.s64(o.reg);
  if (o.is_float) return as<u64>(o.value);
  if (o.is_literal) return o.imm;
  return static_cast<u64>(static_cast<i64>(static_cast<i32>(o.imm)));
}
template <int W>
inline void fill(u32* out, u32 value) {
  for (int l = 0; l < W; ++l) out[l] = value;
}
// Sources of all lanes, neg and abs applied.
template <int W>
inline void raw32(const Wave& w, const Operand& o, u32* out) {
  if (o.kind == Operand::kVgpr)
    std::memcpy(out, w.v + o.reg * W, W * 4);
  else
    fill<W>(out, o.kind == Operand::kSgpr ? w.s[o.reg] : o.imm);
  if (o.abs)
    for (int l = 0; l < W; ++l) out[l] &= 0x7fffffffU;
  if (o.neg)
    for (int l = 0; l < W; ++l) out[l] ^= 0x80000000U;
}
template <int W, bool kFloat, bool kSigned>
inline void raw64(const Wave& w, const Operand& o, u64* out) {
  if (o.kind == Operand::kVgpr) {
    const u32* lo = w.v + o.reg * W;
    const u32* hi = lo + W;
    for (int l = 0; l < W; ++l) out[l] = lo[l] | (u64(hi[l]) << 32);
  } else {
    u64 value = scalar64(w, o);
    if (o.kind == Operand::kImmediate && o.is_literal) {
      if (kFloat)
        value = u64(o.imm) << 32;
      else if (kSigned)
        value = static_cast<u64>(static_cast<i64>(static_cast<i32>(o.imm)));
    }
    for (int l = 0; l < W; ++l) out[l] = value;
  }
  if (kFloat && o.abs)
    for (int l = 0; l < W; ++l) out[l] &= ~(1ULL << 63);
  if (kFloat && o.neg)
    for (int l = 0; l < W; ++l) out[l] ^= 1ULL << 63;
}
inline u32 half_immediate(const Operand& o) {
  return o.is_float ? bits_of(static_cast<f16>(o.value)) : o.imm & 0xffff;
}
/// 16 bits of source k, by op_sel.
template <int W>
inline void raw16(const Wave& w, const Instruction& i, int k, u32* out) {
  const Operand& o = i.src[k];
  if (o.kind == Operand::kImmediate)
    fill<W>(out, half_immediate(o));
  else {
    const int shift = (i.op_sel >> k & 1) != 0 ? 16 : 0;
    if (o.kind == Operand::kVgpr)
      for (int l = 0; l < W; ++l) out[l] = (w.v[o.reg * W + l] >> shift) & 0xffff;
    else
      fill<W>(out, (w.s[o.reg] >> shift) & 0xffff);
  }
  if (o.abs)
    for (int l = 0; l < W; ++l) out[l] &= 0x7fff;
  if (o.neg)
    for (int l = 0; l < W; ++l) out[l] ^= 0x8000;
}
/// To the lanes that exec enables.
template <int W>
inline void put32(Wave& w, int reg, const u32* r) {
  u32* d = w.v + reg * W;
  if (exec_of<W>(w) == kAll<W>) {
    std::memcpy(d, r, W * 4);
    return;
  }
  const u32* m = lanes<W>(w);
  for (int l = 0; l < W; ++l) d[l] = (r[l] & m[l]) | (d[l] & ~m[l]);
}
/// The other half stays, or becomes 0 as gfx9 has it.
template <int W>
inline void put16(Wave& w, const Instruction& i, const u32* r) {
  const int reg = i.dst[0].reg;
  const u32* d = w.v + reg * W;
  alignas(64) u32 out[W];
  const bool hi = i.has_op_sel && (i.op_sel >> 3 & 1) != 0;
  if (hi)
    for (int l = 0; l < W; ++l) out[l] = (d[l] & 0xffff) | (r[l] << 16);
  else if (w.chip->generation < 10 && !i.has_op_sel)
    for (int l = 0; l < W; ++l) out[l] = r[l] & 0xffff;
  else
    for (int l = 0; l < W; ++l) out[l] = (d[l] & 0xffff0000U) | (r[l] & 0xffff);
  put32<W>(w, reg, out);
}
template <class F>
inline F output_modified(const Instruction& i, F value) {
  if (i.omod == 1)
    value = value * F(2);
  else if (i.omod == 2)
    value = value * F(4);
  else if (i.omod == 3)
    value = value * F(0.5F);
  if (i.clamp) value = value > F(0) ? (value < F(1) ? value : F(1)) : F(0);
  return value;
}
/// Integers saturate where an instruction's handler does it (`saturating` in shapes.hpp) and
/// nowhere else.
inline void refuse_clamp(const Instruction& i) {
  if (i.clamp) fault(i, "clamp of this instruction is not emulated");
}
template <int W, class T>
inline void modify_output(const Instruction& i, T* r) {
  if constexpr (std::is_integral_v<T>) {
    refuse_clamp(i);
  } else if (i.clamp || i.omod != 0) {
    for (int l = 0; l < W; ++l) r[l] = output_modified(i, r[l]);
  }
}

/// Elements of 32 bits.
template <class T>
struct Word {
  using t = T;
  template <int W>
  static void get(Wave& w, const Instruction& i, int k, t* out) {
    alignas(64) u32 bits[W];
    raw32<W>(w, i.src[k], bits);
    std::memcpy(out, bits, sizeof(bits));
  }
  template <int W>
  static void put(Wave& w, const Instruction& i, t* r) {
    modify_output<W>(i, r);
    alignas(64) u32 bits[W];
    std::memcpy(bits, r, sizeof(bits));
    put32<W>(w, i.dst[0].reg, bits);
  }
};
using U32 = Word<u32>;
using I32 = Word<i32>;
using F32 = Word<float>;

/// Elements of 16 bits, of which op_sel chooses the half.
template <class T>
struct Half {
  using t = T;
  template <int W>
  static void get(Wave& w, const Instruction& i, int k, t* out) {
    alignas(64) u32 bits[W];
    raw16<W>(w, i, k, bits);
    for (int l = 0; l < W; ++l) out[l] = as<T>(static_cast<u16>(bits[l]));
  }
  template <int W>
  static void put(Wave& w, const Instruction& i, t* r) {
    modify_output<W>(i, r);
    alignas(64) u32 bits[W];
    for (int l = 0; l < W; ++l) bits[l] = as<u16>(r[l]);
    put16<W>(w, i, bits);
  }
};
using U16 = Half<u16>;
using I16 = Half<i16>;
using F16 = Half<f16>;

template <int W>
inline void put64(Wave& w, int reg, const u64* r) {
  alignas(64) u32 half[W];
  for (int l = 0; l < W; ++l) half[l] = static_cast<u32>(r[l]);
  put32<W>(w, reg, half);
  for (int l = 0; l < W; ++l) half[l] = static_cast<u32>(r[l] >> 32);
  put32<W>(w, reg + 1, half);
}
/// Elements of 64 bits, in pairs of registers.
template <class T>
struct Wide {
  using t = T;
  template <int W>
  static void get(Wave& w, const Instruction& i, int k, t* out) {
    raw64<W, std::is_same_v<T, double>, std::is_same_v<T, i64>>(w, i.src[k],
                                                                reinterpret_cast<u64*>(out));
  }
  template <int W>
  static void put(Wave& w, const Instruction& i, t* r) {
    modify_output<W>(i, r);
    put64<W>(w, i.dst[0].reg, reinterpret_cast<u64*>(r));
  }
};
using U64 = Wide<u64>;
using I64 = Wide<i64>;
using F64 = Wide<double>;

}  // namespace amdemu
