// Handlers that run another one with other operands: DPP, SDWA and dual issue.
#pragma once
#include "exec/registers.hpp"

namespace amdemu {

// Registers for operands that were moved there.
constexpr u16 kDppSource = kTemporaryVgpr;       // two
constexpr u16 kSdwaSource = kTemporaryVgpr + 2;  // two
constexpr u16 kSdwaResult = kTemporaryVgpr + 4;
constexpr u16 kDualResult = kTemporaryVgpr + 5;

/// Lanes without a source keep their destination, or get 0 with bound_ctrl.
template <int W>
void with_dpp(Wave& w, const Instruction& i) {
  const DppControl& dpp = *i.dpp;
  Instruction moved = i;
  const u64 exec = exec_of<W>(w);
  u64 enabled = exec & dpp.enabled;
  const int words = i.src[0].dwords;
  for (int l = 0; l < W; ++l) {
    const int from = dpp.lane[l];
    const bool valid = from >= 0 && (dpp.fetch_inactive || (exec >> from & 1) != 0);
    for (int n = 0; n < words; ++n)
      w.v[(kDppSource + n) * W + l] = valid ? w.v[(i.src[0].reg + n) * W + from] : 0;
    if (!valid && !dpp.bound_zero) enabled &= ~(1ULL << l);
  }
  moved.src[0].reg = kDppSource;
  write_mask<W>(w, kExec, enabled);
  i.inner(w, moved);
  write_mask<W>(w, kExec, exec);
}

/// A byte or a half of a word, sign-extended where the operand asks for it.
inline u32 sdwa_part(u32 word, int select, bool sign) {
  if (select < 4) {
    const u32 byte = word >> (8 * select) & 0xff;
    return sign ? static_cast<u32>(i32(static_cast<i8>(byte))) : byte;
  }
  if (select == SdwaControl::kAll) return word;
  const u32 half = word >> (16 * (select - 4)) & 0xffff;
  return sign ? static_cast<u32>(i32(static_cast<i16>(half))) : half;
}
/// The result in its byte or half, the rest of the register as dst_unused says.
inline u32 sdwa_merged(const SdwaControl& sdwa, u32 result, u32 old) {
  const bool is_byte = sdwa.dst < 4;
  const int shift = is_byte ? 8 * sdwa.dst : 16 * (sdwa.dst - 4);
  const u32 mask = (is_byte ? 0xffU : 0xffffU) << shift, value = (result << shift) & mask;
  if (sdwa.unused == SdwaControl::kPreserve) return value | (old & ~mask);
  const bool negative = (value >> (shift + (is_byte ? 7 : 15)) & 1) != 0;
  if (sdwa.unused == SdwaControl::kSignExtend && negative)
    return value | ~(mask | ((1U << shift) - 1));
  return value;
}
template <int W>
void with_sdwa(Wave& w, const Instruction& i) {
  const SdwaControl& sdwa = *i.sdwa;
  Instruction moved = i;
  alignas(64) u32 words[W];
  for (int k = 0; k < 2 && k < i.num_src; ++k) {
    Operand whole = i.src[k];
    if (sdwa.src[k] == SdwaControl::kAll) continue;
    whole.neg = whole.abs = false;  // they work on the part, so on the moved operand
    raw32<W>(w, whole, words);
    const auto reg = static_cast<u16>(kSdwaSource + k);
    for (int l = 0; l < W; ++l) w.v[reg * W + l] = sdwa_part(words[l], sdwa.src[k], whole.sext);
    moved.src[k].kind = Operand::kVgpr;
    moved.src[k].reg = reg;
  }
  if (sdwa.dst == SdwaControl::kAll) {
    i.inner(w, moved);
    return;
  }
  moved.dst[0].reg = kSdwaResult;
  i.inner(w, moved);
  const u32* result = w.v + kSdwaResult * W;
  const u32* old = w.v + i.dst[0].reg * W;
  for (int l = 0; l < W; ++l) words[l] = sdwa_merged(sdwa, result[l], old[l]);
  put32<W>(w, i.dst[0].reg, words);
}

/// Both halves read before either writes.
template <int W>
void dual(Wave& w, const Instruction& i) {
  Instruction first = i;
  first.dst[0].reg = kDualResult;
  i.inner(w, first);
  i.second->handler(w, *i.second);
  alignas(64) u32 r[W];
  std::memcpy(r, w.v + kDualResult * W, sizeof(r));
  put32<W>(w, i.dst[0].reg, r);
}

}  // namespace amdemu
