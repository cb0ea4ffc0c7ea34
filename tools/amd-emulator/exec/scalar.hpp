// Shapes of scalar instructions, jumps, the MODE register, scalar loads.
#pragma once
#include <cstring>

#include "exec/registers.hpp"
#include "machine/float_mode.hpp"
#include "machine/image.hpp"
#include "machine/ranges.hpp"

namespace amdemu {

/// The status bit of most operations: whether the result is not 0.
template <class T>
T with_scc(T value, u32& scc) {
  scc = value != 0;
  return value;
}

template <bool k64>
auto read_scalar(const Wave& w, const Operand& o) {
  if constexpr (k64)
    return scalar64(w, o);
  else
    return scalar32(w, o);
}
template <bool k64, class T>
void write_scalar(Wave& w, int reg, T value) {
  if constexpr (k64)
    w.set64(reg, static_cast<u64>(value));
  else
    w.s[reg] = static_cast<u32>(value);
}

// Destination and sources of 32 or of 64 bits. F(a, b, u32& scc) yields the result.
template <bool kD64, bool kA64, class F>
void scalar_unary(Wave& w, const Instruction& i) {
  const auto a = read_scalar<kA64>(w, i.src[0]);
  write_scalar<kD64>(w, i.dst[0].reg, F{}(a, w.s[kScc]));
}
template <bool kD64, bool kA64, bool kB64, class F>
void scalar_binary(Wave& w, const Instruction& i) {
  const auto a = read_scalar<kA64>(w, i.src[0]);
  const auto b = read_scalar<kB64>(w, i.src[1]);
  write_scalar<kD64>(w, i.dst[0].reg, F{}(a, b, w.s[kScc]));
}
template <class F>
void scalar_ternary(Wave& w, const Instruction& i) {
  const u32 a = scalar32(w, i.src[0]), b = scalar32(w, i.src[1]), c = scalar32(w, i.src[2]);
  w.s[i.dst[0].reg] = F{}(a, b, c);
}
template <bool k64, class F>
void scalar_compare(Wave& w, const Instruction& i) {
  w.s[kScc] = F{}(read_scalar<k64>(w, i.src[0]), read_scalar<k64>(w, i.src[1])) ? 1 : 0;
}
/// exec = F(source, exec), the destination gets the old exec or, with kResult, the new one.
template <bool k64, bool kResult, class F>
void change_exec(Wave& w, const Instruction& i) {
  const u64 mask = k64 ? ~0ULL : 0xffffffffULL, source = read_scalar<k64>(w, i.src[0]);
  const u64 old = w.s64(kExec) & mask, now = F{}(source, old) & mask;
  write_scalar<k64>(w, i.dst[0].reg, kResult ? now : old);
  write_scalar<k64>(w, kExec, now);
  w.s[kScc] = now != 0;
}

inline void jump(Wave& w, const Instruction& i, u64 address) {
  w.pc = w.image->index_at(address);
  if (w.pc < 0) fault(i, "jump to an address that holds no instruction");
}
template <class F>
void branch_if(Wave& w, const Instruction& i) {
  if (F{}(w)) {
    if (i.target < 0) fault(i, "branch to an address that holds no instruction");
    w.pc = i.target;
  }
}
inline void getpc(Wave& w, const Instruction& i) {
  w.set64(i.dst[0].reg, i.address + i.size);
}
inline void setpc(Wave& w, const Instruction& i) {
  jump(w, i, scalar64(w, i.src[0]));
}
inline void swappc(Wave& w, const Instruction& i) {
  const u64 to = scalar64(w, i.src[0]);
  w.set64(i.dst[0].reg, i.address + i.size);
  jump(w, i, to);
}
inline void nothing(Wave&, const Instruction&) {}
inline void end_program(Wave& w, const Instruction&) {
  w.state = Wave::kDone;
}
inline void barrier(Wave& w, const Instruction&) {
  w.state = Wave::kAtBarrier;
}
inline void trap(Wave&, const Instruction& i) {
  fault(i, "trap");
}

inline void set_mode(Wave& w, const Instruction& i, u32 mask, u32 bits) {
  w.mode = (w.mode & ~mask) | (bits & mask);
  if ((w.mode & kModeRounding) != 0) fault(i, "rounding other than to nearest even");
  HostFloatMode::set(w.mode);
}
inline void round_mode(Wave& w, const Instruction& i) {
  set_mode(w, i, kModeRounding, i.src[0].imm);
}
inline void denorm_mode(Wave& w, const Instruction& i) {
  set_mode(w, i, 0xf0U, i.src[0].imm << 4);
}
inline u32 low_bits(u32 size) {
  return size >= 32 ? 0xffffffffU : (1U << size) - 1;
}
inline void setreg(Wave& w, const Instruction& i) {
  const HardwareRegister& part = i.hardware;
  if (part.id != HardwareRegister::kMode) return;
  set_mode(w, i, low_bits(part.size) << part.shift, scalar32(w, i.src[0]) << part.shift);
}
inline void getreg(Wave& w, const Instruction& i) {
  const HardwareRegister& part = i.hardware;
  const u32 value = part.id == HardwareRegister::kMode         ? w.mode
                    : part.id == HardwareRegister::kHardwareId ? w.index & 15
                                                               : 0;
  w.s[i.dst[0].reg] = (value >> part.shift) & low_bits(part.size);
}

/// The address of a scalar load: its base and what else the instruction adds, checked.
inline const void* scalar_address(const Wave& w, const Instruction& i, u64 align, u64 size) {
  u64 address = w.s64(i.src[0].reg) + static_cast<u64>(i64(i.offset));
  for (int k = 1; k < i.num_src; ++k) {
    const Operand& o = i.src[k];
    if (o.kind == Operand::kSgpr) address += w.s[o.reg];
    if (o.kind == Operand::kImmediate) address += static_cast<u64>(i64(static_cast<i32>(o.imm)));
  }
  address &= ~(align - 1);
  if (!may_access(address, size)) fault(i, "scalar load outside every buffer");
  return reinterpret_cast<const void*>(address);
}
template <int kWords>
void scalar_load(Wave& w, const Instruction& i) {
  u32 words[kWords];  // the base may be among the destinations
  std::memcpy(words, scalar_address(w, i, 4, sizeof(words)), sizeof(words));
  std::copy_n(words, kWords, w.s + i.dst[0].reg);
}
template <class T>  // 8 or 16 bits, extended by T's sign
void scalar_load_part(Wave& w, const Instruction& i) {
  T value;
  std::memcpy(&value, scalar_address(w, i, 1, sizeof(T)), sizeof(T));
  w.s[i.dst[0].reg] = static_cast<u32>(i32(value));
}

}  // namespace amdemu
