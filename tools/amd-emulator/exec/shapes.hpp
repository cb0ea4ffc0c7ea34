// Shapes of vector instructions: a handler for each number of sources, around a function F of one
// lane. D, A, B, C: element types of the destination and the sources (registers.hpp). A handler
// reads its sources for all lanes into arrays, computes all lanes (the compiler makes vector code
// of these loops) and writes the lanes that exec enables.
#pragma once
#include "exec/registers.hpp"

namespace amdemu {

template <int W, class D, class A, class F>
void unary(Wave& w, const Instruction& i) {
  alignas(64) typename A::t a[W];
  alignas(64) typename D::t r[W];
  A::template get<W>(w, i, 0, a);
  for (int l = 0; l < W; ++l) r[l] = static_cast<typename D::t>(F{}(a[l]));
  D::template put<W>(w, i, r);
}
template <int W, class D, class A, class B, class F>
void binary(Wave& w, const Instruction& i) {
  alignas(64) typename A::t a[W];
  alignas(64) typename B::t b[W];
  alignas(64) typename D::t r[W];
  A::template get<W>(w, i, 0, a);
  B::template get<W>(w, i, 1, b);
  for (int l = 0; l < W; ++l) r[l] = static_cast<typename D::t>(F{}(a[l], b[l]));
  D::template put<W>(w, i, r);
}
template <int W, class D, class A, class B, class C, class F>
void ternary(Wave& w, const Instruction& i) {
  alignas(64) typename A::t a[W];
  alignas(64) typename B::t b[W];
  alignas(64) typename C::t c[W];
  alignas(64) typename D::t r[W];
  A::template get<W>(w, i, 0, a);
  B::template get<W>(w, i, 1, b);
  C::template get<W>(w, i, 2, c);
  for (int l = 0; l < W; ++l) r[l] = static_cast<typename D::t>(F{}(a[l], b[l], c[l]));
  D::template put<W>(w, i, r);
}
template <int W, class A, class B, class F>
u64 compare_lanes(Wave& w, const Instruction& i) {
  alignas(64) typename A::t a[W];
  alignas(64) typename B::t b[W];
  A::template get<W>(w, i, 0, a);
  B::template get<W>(w, i, 1, b);
  u64 mask = 0;
  alignas(64) u8 r[W];
  for (int l = 0; l < W; ++l) r[l] = F{}(a[l], b[l]) ? 1 : 0;
  for (int l = 0; l < W; ++l) mask |= u64(r[l]) << l;
  return mask & exec_of<W>(w);
}
template <int W, class A, class B, class F>
void compare(Wave& w, const Instruction& i) {
  write_mask<W>(w, i.dst[0].reg, compare_lanes<W, A, B, F>(w, i));
}
template <int W, class A, class B, class F>
void compare_exec(Wave& w, const Instruction& i) {
  const u64 mask = compare_lanes<W, A, B, F>(w, i);
  if (i.num_dst != 0) write_mask<W>(w, i.dst[0].reg, mask);
  write_mask<W>(w, kExec, mask);
}
/// F(a, b) in 64 bits, wrapped to D or, with clamp, held to D's limits.
template <int W, class D, class F>
void saturating(Wave& w, const Instruction& i) {
  using T = typename D::t;
  using Wrapped = decltype([](T a, T b) { return F{}(i64(a), i64(b)); });
  if (!i.clamp) return binary<W, D, D, D, Wrapped>(w, i);
  constexpr i64 kLowest = std::numeric_limits<T>::min(), kLargest = std::numeric_limits<T>::max();
  alignas(64) T a[W];
  alignas(64) T b[W];
  alignas(64) T r[W];
  D::template get<W>(w, i, 0, a);
  D::template get<W>(w, i, 1, b);
  for (int l = 0; l < W; ++l)
    r[l] = static_cast<T>(std::clamp(F{}(i64(a[l]), i64(b[l])), kLowest, kLargest));
  Instruction clamped = i;
  clamped.clamp = false;
  D::template put<W>(w, clamped, r);
}
/// F(a, b, carry in) in 64 bits, with a carry out. The third source, where there is one, is the
/// carry in. A difference clamps to 0, a sum to all ones.
template <int W, bool kDifference, class F>
void carry(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], b[W], r[W];
  raw32<W>(w, i.src[0], a);
  raw32<W>(w, i.src[1], b);
  const bool has_in = i.num_src > 2 && i.src[2].kind == Operand::kSgpr;
  const u64 in = has_in ? read_mask<W>(w, i.src[2].reg) : 0;
  u64 out = 0;
  for (int l = 0; l < W; ++l) {
    const u64 wide = F{}(u64(a[l]), u64(b[l]), u64(in >> l & 1));
    const bool carries = (wide >> 32 & 1) != 0;
    r[l] = i.clamp && carries ? (kDifference ? 0U : 0xffffffffU) : static_cast<u32>(wide);
    out |= u64(carries) << l;
  }
  const u64 exec = exec_of<W>(w);
  put32<W>(w, i.dst[0].reg, r);
  write_mask<W>(w, i.dst[1].reg, out & exec);
}

template <int W>
void cndmask(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], b[W];
  raw32<W>(w, i.src[0], a);
  raw32<W>(w, i.src[1], b);
  u64 mask = 0;
  if (i.num_src < 3)
    mask = read_mask<W>(w, kVcc);
  else if (i.src[2].kind == Operand::kSgpr)
    mask = read_mask<W>(w, i.src[2].reg);
  else
    mask = scalar64(w, i.src[2]);
  for (int l = 0; l < W; ++l) a[l] = (mask >> l & 1) != 0 ? b[l] : a[l];
  put32<W>(w, i.dst[0].reg, a);
}
template <int W>
void cndmask16(Wave& w, const Instruction& i) {
  alignas(64) u32 a[W], b[W];
  raw16<W>(w, i, 0, a);
  raw16<W>(w, i, 1, b);
  const u64 mask = i.num_src < 3 ? read_mask<W>(w, kVcc) : read_mask<W>(w, i.src[2].reg);
  for (int l = 0; l < W; ++l) a[l] = (mask >> l & 1) != 0 ? b[l] : a[l];
  put16<W>(w, i, a);
}

}  // namespace amdemu
