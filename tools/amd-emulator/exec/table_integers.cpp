// Vector arithmetic of integers, logic and shifts.
#include "exec/shapes.hpp"
#include "exec/special.hpp"
#include "exec/table.hpp"

namespace amdemu {

#define SATURATING(NAME, D, EXPR) \
  t.add(NAME, &saturating<W, D, decltype([](i64 a, i64 b) { return EXPR; })>)
#define CARRY(NAME, DIFFERENCE, EXPR) \
  t.add(NAME, &carry<W, DIFFERENCE, decltype([](u64 a, u64 b, u64 c) { return EXPR; })>, 2)

template <int W>
void add_integers(Table& t) {
  SATURATING("v_add_u32", U32, a + b);
  SATURATING("v_add_i32", I32, a + b);
  SATURATING("v_add_u16", U16, a + b);
  SATURATING("v_add_i16", I16, a + b);
  SATURATING("v_sub_u32", U32, a - b);
  SATURATING("v_sub_i32", I32, a - b);
  SATURATING("v_sub_u16", U16, a - b);
  SATURATING("v_sub_i16", I16, a - b);
  SATURATING("v_subrev_u32", U32, b - a);
  SATURATING("v_subrev_i32", I32, b - a);
  SATURATING("v_subrev_u16", U16, b - a);
  SATURATING("v_subrev_i16", I16, b - a);
  for (const std::string type : {"_u32", "_i32", "_u16", "_i16"})
    for (const std::string op : {"v_add", "v_sub", "v_subrev"})
      t.alias(op + "_nc" + type, op + type);
  CARRY("v_add_co_u32", false, a + b + c);
  CARRY("v_addc_co_u32", false, a + b + c);
  CARRY("v_sub_co_u32", true, a - b - c);
  CARRY("v_subb_co_u32", true, a - b - c);
  CARRY("v_subrev_co_u32", true, b - a - c);
  CARRY("v_subbrev_co_u32", true, b - a - c);
  t.alias("v_add_co_ci_u32", "v_addc_co_u32");
  t.alias("v_sub_co_ci_u32", "v_subb_co_u32");
  t.alias("v_subrev_co_ci_u32", "v_subbrev_co_u32");
  V2("v_and_b32", U32, U32, U32, a & b);
  V2("v_or_b32", U32, U32, U32, a | b);
  V2("v_xor_b32", U32, U32, U32, a ^ b);
  V2("v_xnor_b32", U32, U32, U32, ~(a ^ b));
  V2("v_and_b16", U16, U16, U16, a & b);
  V2("v_or_b16", U16, U16, U16, a | b);
  V2("v_xor_b16", U16, U16, U16, a ^ b);
  V1("v_not_b16", U16, U16, ~a);
  V2("v_lshlrev_b32", U32, U32, U32, b << (a & 31));
  V2("v_lshrrev_b32", U32, U32, U32, b >> (a & 31));
  V2("v_ashrrev_i32", I32, U32, I32, b >> (a & 31));
  V2("v_lshlrev_b64", U64, U32, U64, b << (a & 63));
  V2("v_lshrrev_b64", U64, U32, U64, b >> (a & 63));
  V2("v_ashrrev_i64", I64, U32, I64, b >> (a & 63));
  V2("v_lshlrev_b16", U16, U16, U16, b << (a & 15));
  V2("v_lshrrev_b16", U16, U16, U16, b >> (a & 15));
  V2("v_ashrrev_i16", I16, U16, I16, b >> (a & 15));
  V2("v_min_i32", I32, I32, I32, std::min(a, b));
  V2("v_max_i32", I32, I32, I32, std::max(a, b));
  V2("v_min_u32", U32, U32, U32, std::min(a, b));
  V2("v_max_u32", U32, U32, U32, std::max(a, b));
  V2("v_min_i16", I16, I16, I16, std::min(a, b));
  V2("v_max_i16", I16, I16, I16, std::max(a, b));
  V2("v_min_u16", U16, U16, U16, std::min(a, b));
  V2("v_max_u16", U16, U16, U16, std::max(a, b));
  V2("v_mul_lo_u16", U16, U16, U16, u32(a) * b);
  V3("v_mad_u16", U16, U16, U16, U16, u32(a) * b + c);
  t.alias("v_mad_i16", "v_mad_u16");
  t.alias("v_mad_legacy_u16", "v_mad_u16");
  V3("v_mad_u32_u16", U32, U16, U16, U32, u32(a) * b + c);
  V3("v_mad_i32_i16", I32, I16, I16, I32, i32(a) * b + c);
  V2("v_mul_lo_u32", U32, U32, U32, a * b);
  V2("v_mul_hi_u32", U32, U32, U32, (u64(a) * b) >> 32);
  V2("v_mul_hi_i32", I32, I32, I32, (i64(a) * b) >> 32);
  V2("v_mul_u32_u24", U32, U32, U32, u24(a) * u24(b));
  V2("v_mul_i32_i24", U32, U32, U32, static_cast<u32>(s24(a)) * static_cast<u32>(s24(b)));
  V2("v_mul_hi_u32_u24", U32, U32, U32, (u64(u24(a)) * u24(b)) >> 32);
  V2("v_mul_hi_i32_i24", I32, U32, U32, (i64(s24(a)) * s24(b)) >> 32);
  V3("v_mad_u32_u24", U32, U32, U32, U32, u24(a) * u24(b) + c);
  V3("v_mad_i32_i24", U32, U32, U32, U32, static_cast<u32>(s24(a)) * static_cast<u32>(s24(b)) + c);
  t.add("v_mad_u64_u32", &mad_wide<W, false>, 2);
  t.add("v_mad_i64_i32", &mad_wide<W, true>, 2);
  t.alias("v_mad_co_u64_u32", "v_mad_u64_u32");
  t.alias("v_mad_co_i64_i32", "v_mad_i64_i32");
  V3("v_bfe_u32", U32, U32, U32, U32, bfe(a, b, c));
  V3("v_bfe_i32", I32, U32, U32, U32, bfe_signed(a, b, c));
  V3("v_bfi_b32", U32, U32, U32, U32, (a & b) | (~a & c));
  V2("v_bfm_b32", U32, U32, U32, ((1U << (a & 31)) - 1) << (b & 31));
  V2("v_bcnt_u32_b32", U32, U32, U32, static_cast<u32>(std::popcount(a)) + b);
  V3("v_alignbit_b32", U32, U32, U32, U32, ((u64(a) << 32) | b) >> (c & 31));
  V3("v_alignbyte_b32", U32, U32, U32, U32, ((u64(a) << 32) | b) >> (8 * (c & 3)));
  V3("v_perm_b32", U32, U32, U32, U32, perm(a, b, c));
  V3("v_add3_u32", U32, U32, U32, U32, a + b + c);
  V3("v_lshl_add_u32", U32, U32, U32, U32, (a << (b & 31)) + c);
  V3("v_add_lshl_u32", U32, U32, U32, U32, (a + b) << (c & 31));
  V3("v_lshl_or_b32", U32, U32, U32, U32, (a << (b & 31)) | c);
  V3("v_and_or_b32", U32, U32, U32, U32, (a & b) | c);
  V3("v_or3_b32", U32, U32, U32, U32, a | b | c);
  V3("v_xor3_b32", U32, U32, U32, U32, a ^ b ^ c);
  V3("v_xad_u32", U32, U32, U32, U32, (a ^ b) + c);
  V3("v_lshl_add_u64", U64, U64, U32, U64, (a << (b & 7)) + c);
  V3("v_max3_i32", I32, I32, I32, I32, std::max(std::max(a, b), c));
  V3("v_min3_i32", I32, I32, I32, I32, std::min(std::min(a, b), c));
  V3("v_med3_i32", I32, I32, I32, I32, med3(a, b, c));
  V3("v_max3_u32", U32, U32, U32, U32, std::max(std::max(a, b), c));
  V3("v_min3_u32", U32, U32, U32, U32, std::min(std::min(a, b), c));
  V3("v_med3_u32", U32, U32, U32, U32, med3(a, b, c));
  V3("v_maxmin_i32", I32, I32, I32, I32, std::min(std::max(a, b), c));
  V3("v_minmax_i32", I32, I32, I32, I32, std::max(std::min(a, b), c));
  V3("v_maxmin_u32", U32, U32, U32, U32, std::min(std::max(a, b), c));
  V3("v_minmax_u32", U32, U32, U32, U32, std::max(std::min(a, b), c));
  V3("v_sad_u32", U32, U32, U32, U32, (a > b ? a - b : b - a) + c);
}
template void add_integers<32>(Table& t);
template void add_integers<64>(Table& t);

}  // namespace amdemu
