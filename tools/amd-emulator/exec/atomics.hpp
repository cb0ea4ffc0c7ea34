// Atomic instructions of local, global and flat memory.
#pragma once
#include <bit>

#include "exec/address.hpp"

namespace amdemu {

/// Two sums of 16 bits.
inline u32 packed_sum(u32 a, u32 b, bool is_bf16) {
  u32 result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const u32 x = a >> shift & 0xffff, y = b >> shift & 0xffff;
    const u32 sum = is_bf16 ? bf16_bits(bf16_of(x) + bf16_of(y)) : bits_of(half_of(x) + half_of(y));
    result |= sum << shift;
  }
  return result;
}

/// What memory holds afterwards. S and F: T's bits as a signed integer and as a float.
template <class T, class S, class F>
T combined(AtomicOp op, T old, T data, T compare) {
  switch (op) {
    case AtomicOp::kSwap:
      return data;
    case AtomicOp::kCompareSwap:
      return old == compare ? data : old;
    case AtomicOp::kAdd:
      return old + data;
    case AtomicOp::kSub:
      return old - data;
    case AtomicOp::kSignedMin:
      return static_cast<S>(old) < static_cast<S>(data) ? old : data;
    case AtomicOp::kUnsignedMin:
      return old < data ? old : data;
    case AtomicOp::kSignedMax:
      return static_cast<S>(old) > static_cast<S>(data) ? old : data;
    case AtomicOp::kUnsignedMax:
      return old > data ? old : data;
    case AtomicOp::kAnd:
      return old & data;
    case AtomicOp::kOr:
      return old | data;
    case AtomicOp::kXor:
      return old ^ data;
    case AtomicOp::kIncrement:
      return old >= data ? 0 : old + 1;
    case AtomicOp::kDecrement:
      return old == 0 || old > data ? data : old - 1;
    case AtomicOp::kAddFloat:
      return as<T>(as<F>(old) + as<F>(data));
    case AtomicOp::kMinFloat:
      return as<T>(min_num(as<F>(old), as<F>(data)));
    case AtomicOp::kMaxFloat:
      return as<T>(max_num(as<F>(old), as<F>(data)));
    case AtomicOp::kPackedAddF16:
    case AtomicOp::kPackedAddBF16:
      return packed_sum(static_cast<u32>(old), static_cast<u32>(data),
                        op == AtomicOp::kPackedAddBF16);
  }
  return old;
}

/// One lane's, on memory that other threads change too; what was there before.
template <class T, class S, class F>
T exchange(const Instruction& i, unsigned char* p, T data, T compare) {
  if (reinterpret_cast<u64>(p) % sizeof(T) != 0) fault(i, "atomic at an unaligned address");
  T* const at = reinterpret_cast<T*>(p);
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  T now;
  do {
    now = combined<T, S, F>(i.memory->op, old, data, compare);
  } while (!__atomic_compare_exchange_n(at, &old, now, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  return old;
}

template <int W>
void atomic(Wave& w, const Instruction& i) {
  const MemoryControl& m = *i.memory;
  const bool wide = m.bytes == 8, compares = m.op == AtomicOp::kCompareSwap;
  const u64 offset = m.space == MemoryControl::kLocal ? static_cast<u32>(i.offset) : 0;
  // What to compare with stands in an operand of its own or behind the new value.
  const int value = i.src[m.data].reg;
  const int compare = m.data1 >= 0 ? i.src[m.data1].reg : value + (wide ? 2 : 1);
  alignas(64) u32 lo[W], hi[W];
  for (u64 left = exec_of<W>(w); left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    const auto word = [&](int reg) { return w.v[reg * W + lane]; };
    const auto pair = [&](int reg) { return word(reg) | (u64(word(reg + 1)) << 32); };
    unsigned char* p = address_of<W>(w, i, lane, offset, m.bytes);
    lo[lane] = hi[lane] = 0;
    if (p == nullptr) continue;
    if (wide) {
      const u64 expected = compares ? pair(compare) : 0;
      const u64 old = exchange<u64, i64, double>(i, p, pair(value), expected);
      lo[lane] = static_cast<u32>(old), hi[lane] = static_cast<u32>(old >> 32);
    } else {
      const u32 expected = compares ? word(compare) : 0;
      lo[lane] = exchange<u32, i32, float>(i, p, word(value), expected);
    }
  }
  if (!m.returns) return;
  put32<W>(w, i.dst[0].reg, lo);
  if (wide) put32<W>(w, i.dst[0].reg + 1, hi);
}

}  // namespace amdemu
