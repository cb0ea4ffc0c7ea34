// From a memory instruction's operands to the byte of this process that a lane means.
#pragma once
#include <cstdio>
#include <string>

#include "exec/registers.hpp"
#include "machine/ranges.hpp"

namespace amdemu {

inline unsigned char* local_at(const Wave& w, const Instruction& i, u64 at, u32 size) {
  const u32 bytes = w.group->local_bytes;
  if (at + size > bytes) {
    fault(i, "access outside local memory (" + std::to_string(at) + " of " + std::to_string(bytes) +
                 " bytes)");
  }
  return w.group->local + at;
}
inline unsigned char* private_at(const Wave& w, const Instruction& i, int lane, u64 at, u32 size) {
  if (at + size > w.scratch_bytes)
    fault(i, "access outside private memory (" + std::to_string(at) + ")");
  return w.scratch + static_cast<u64>(lane) * w.scratch_bytes + at;
}
inline unsigned char* global_at(const Instruction& i, int lane, u64 address, u32 size) {
  if (!may_access(address, size)) {
    char text[96];
    std::snprintf(text, sizeof(text), "lane %d: access to %llx (%u bytes) outside every buffer",
                  lane, static_cast<unsigned long long>(address), size);
    fault(i, text);
  }
  return reinterpret_cast<unsigned char*>(address);
}

/// By a buffer descriptor. A null pointer: outside of the buffer, where loads yield 0 and stores go
/// nowhere.
template <int W>
unsigned char* buffer_at(const Wave& w, const Instruction& i, int lane, u64 at, u32 size) {
  const u32* v = w.s + i.src[i.memory->base].reg;
  const u32 soffset = scalar32(w, i.src[i.memory->soffset]);
  const bool is_private = (v[3] >> 23 & 1) != 0;  // ADD_TID_ENABLE
  if (is_private) return private_at(w, i, lane, (at + soffset / W) & 0xffffffffU, size);
  at += soffset;
  if (at + size > v[2]) return nullptr;
  return global_at(i, lane, (v[0] | (u64(v[1] & 0xffff) << 32)) + at, size);
}

/// `size` bytes of a lane, checked. `local_offset` counts in local memory, the instruction's own
/// offset elsewhere.
template <int W>
unsigned char* address_of(const Wave& w, const Instruction& i, int lane, u64 local_offset,
                          u32 size) {
  const MemoryControl& m = *i.memory;
  const auto vector32 = [&](int k) -> u64 {
    const Operand& o = i.src[k];
    if (o.kind == Operand::kOff) return 0;
    return o.kind == Operand::kVgpr ? w.v[o.reg * W + lane] : scalar32(w, o);
  };
  const bool has_base = m.base >= 0 && i.src[m.base].kind != Operand::kOff;
  const u64 offset = static_cast<u64>(i64(i.offset));
  switch (m.space) {
    case MemoryControl::kLocal:
      return local_at(w, i, (vector32(m.address) + local_offset) & 0xffffffffU, size);
    case MemoryControl::kScratch: {
      const u64 base = has_base ? scalar32(w, i.src[m.base]) : 0;
      return private_at(w, i, lane, (offset + vector32(m.address) + base) & 0xffffffffU, size);
    }
    case MemoryControl::kBuffer:
      return buffer_at<W>(w, i, lane, offset + (i.offen ? vector32(m.address) : 0), size);
    case MemoryControl::kFlat:
    case MemoryControl::kGlobal:
      break;
  }
  u64 address = offset;
  const Operand& a = i.src[m.address];
  if (has_base)
    address += scalar64(w, i.src[m.base]) + vector32(m.address);
  else if (a.kind == Operand::kVgpr)
    address += w.v[a.reg * W + lane] | (u64(w.v[(a.reg + 1) * W + lane]) << 32);
  if (m.space == MemoryControl::kFlat) {
    const u64 low = address & 0xffffffffU, high = address >> 32;
    if (high == kSharedApertureHigh) return local_at(w, i, low, size);
    if (high == kPrivateApertureHigh) return private_at(w, i, lane, low, size);
  }
  return global_at(i, lane, address, size);
}

}  // namespace amdemu
