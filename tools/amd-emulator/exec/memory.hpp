// Loads and stores of vector registers.
#pragma once
#include <bit>
#include <cstring>

#include "exec/address.hpp"

namespace amdemu {

/// In local memory: the offset of element `part`, of one or two.
inline u64 local_offset(const Instruction& i, int part) {
  const MemoryControl& m = *i.memory;
  if (m.count == 1) return static_cast<u32>(i.offset);
  return u64(static_cast<u32>(part == 0 ? i.offset : i.offset1)) * m.stride;
}
/// A byte or a half, extended to a word.
inline u32 extended(const MemoryControl& m, u32 value) {
  if (!m.is_signed) return value;
  return static_cast<u32>(m.bytes == 1 ? i32(static_cast<i8>(value))
                                       : i32(static_cast<i16>(value)));
}
inline int words_of(const MemoryControl& m) {
  return m.bytes >= 4 ? m.bytes / 4 : 1;
}

template <int W>
void load(Wave& w, const Instruction& i) {
  const MemoryControl& m = *i.memory;
  const int words = words_of(m);
  // Written after every lane was read: the address registers may be among the destinations.
  alignas(64) u32 loaded[8][W];
  for (int part = 0; part < m.count; ++part) {
    for (u64 left = exec_of<W>(w); left != 0; left &= left - 1) {
      const int lane = std::countr_zero(left);
      const unsigned char* p = address_of<W>(w, i, lane, local_offset(i, part), m.bytes);
      u32 data[4] = {0, 0, 0, 0};
      if (p != nullptr) std::memcpy(data, p, m.bytes);
      data[0] = extended(m, data[0]);
      if (m.d16) {
        const u32 old = w.v[i.dst[0].reg * W + lane];
        data[0] =
            m.high ? (old & 0xffff) | (data[0] << 16) : (old & 0xffff0000U) | (data[0] & 0xffff);
      }
      for (int n = 0; n < words; ++n) loaded[part * words + n][lane] = data[n];
    }
  }
  for (int n = 0; n < m.count * words; ++n) put32<W>(w, i.dst[0].reg + n, loaded[n]);
}

template <int W>
void store(Wave& w, const Instruction& i) {
  const MemoryControl& m = *i.memory;
  const int words = words_of(m);
  for (int part = 0; part < m.count; ++part) {
    const Operand& o = i.src[part == 0 ? m.data : m.data1];
    for (u64 left = exec_of<W>(w); left != 0; left &= left - 1) {
      const int lane = std::countr_zero(left);
      u32 data[4];
      for (int n = 0; n < words; ++n) data[n] = w.v[(o.reg + n) * W + lane];
      if (m.high) data[0] >>= 16;
      unsigned char* p = address_of<W>(w, i, lane, local_offset(i, part), m.bytes);
      if (p != nullptr) std::memcpy(p, data, m.bytes);
    }
  }
}

/// From global to local memory: lane l's dwords go to M0 + offset + l times what a lane loads.
/// Bytes and halves are widened to a dword.
template <int W>
void load_to_local(Wave& w, const Instruction& i) {
  const MemoryControl& m = *i.memory;
  const u32 each = m.bytes < 4 ? 4 : m.bytes;
  const u64 base = (w.s[kM0] & 0xffffU) + static_cast<u64>(i64(i.offset));
  for (u64 left = exec_of<W>(w); left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    const unsigned char* p = address_of<W>(w, i, lane, 0, m.bytes);
    u32 data[4] = {0, 0, 0, 0};
    if (p != nullptr) std::memcpy(data, p, m.bytes);
    data[0] = extended(m, data[0]);
    std::memcpy(local_at(w, i, base + static_cast<u64>(lane) * each, each), data, each);
  }
}

/// gfx950: 64 bits a lane from local memory, transposed among 16 lanes. Element e of lane l is
/// element l % N of the lane whose number in the row is e * (16 / N) + l / N, for N elements of 64
/// / N bits.
template <int W, int kElements>
void load_transposed(Wave& w, const Instruction& i) {
  constexpr int kBits = 64 / kElements, kStep = 16 / kElements;
  constexpr u64 kMask = (1ULL << kBits) - 1;
  alignas(64) u64 read[W] = {}, r[W] = {};
  for (u64 left = exec_of<W>(w); left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    const u64 at = u64(w.v[i.src[0].reg * W + lane]) + static_cast<u64>(i.offset);
    std::memcpy(&read[lane], local_at(w, i, at, 8), 8);
  }
  for (int lane = 0; lane < W; ++lane)
    for (int e = 0; e < kElements; ++e) {
      const int within = lane & 15, from = (lane & ~15) + e * kStep + within / kElements;
      r[lane] |= (read[from] >> (kBits * (within % kElements)) & kMask) << (kBits * e);
    }
  put64<W>(w, i.dst[0].reg, r);
}

}  // namespace amdemu
