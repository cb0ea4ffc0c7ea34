// Scalar integers, logic and masks. S: both sources and the result of 32 bits; D: of 64; N: 64 bits
// to 32; B: a source of 64 bits by one of 32. Each row computes of a, b and may set scc.
#include "exec/scalar.hpp"
#include "exec/table.hpp"

namespace amdemu {
namespace {

#define S1(NAME, EXPR) \
  t.add(NAME, &scalar_unary<false, false, decltype([](u32 a, UNUSED u32& scc) { return EXPR; })>)
#define D1(NAME, EXPR) \
  t.add(NAME, &scalar_unary<true, true, decltype([](u64 a, UNUSED u32& scc) { return EXPR; })>)
#define N1(NAME, EXPR) \
  t.add(NAME, &scalar_unary<false, true, decltype([](u64 a, UNUSED u32& scc) { return EXPR; })>)
#define S2(NAME, EXPR)                            \
  t.add(NAME, &scalar_binary<false, false, false, \
                             decltype([](u32 a, u32 b, UNUSED u32& scc) { return EXPR; })>)
#define D2(NAME, EXPR)                         \
  t.add(NAME, &scalar_binary<true, true, true, \
                             decltype([](u64 a, u64 b, UNUSED u32& scc) { return EXPR; })>)
#define B2(NAME, EXPR)                          \
  t.add(NAME, &scalar_binary<true, true, false, \
                             decltype([](u64 a, u32 b, UNUSED u32& scc) { return EXPR; })>)
#define SC(NAME, EXPR) \
  t.add(NAME, &scalar_compare<false, decltype([](u32 a, u32 b) { return EXPR; })>, 0)
#define DC(NAME, EXPR) \
  t.add(NAME, &scalar_compare<true, decltype([](u64 a, u64 b) { return EXPR; })>, 0)

i32 s(u32 a) {
  return static_cast<i32>(a);
}
u64 first_bit(u64 a, int where) {
  return a == 0 ? 0xffffffffU : static_cast<u64>(where);
}
/// A bit field: its first bit in bits 0 and up of `where`, its size in bits 16 to 22.
u32 size_of_field(u32 where) {
  return where >> 16 & 127;
}
u64 field64(u64 a, u32 where) {
  const u32 size = size_of_field(where);
  const u64 shifted = a >> (where & 63);
  return size >= 64 ? shifted : shifted & ((1ULL << size) - 1);
}
u64 signed_field64(u64 a, u32 where) {
  const u32 size = std::min(size_of_field(where), 64U);
  if (size == 0) return 0;
  const u64 shifted = a >> (where & 63);
  return static_cast<u64>(static_cast<i64>(shifted << (64 - size)) >> (64 - size));
}
u32 field32(u32 a, u32 where) {
  const u32 size = std::min(size_of_field(where), 32U);
  return static_cast<u32>((u64(a) >> (where & 31)) & ((1ULL << size) - 1));
}
i32 signed_field32(u32 a, u32 where) {
  if (size_of_field(where) >= 32) return s(a) >> (where & 31);
  return bfe_signed(a, where & 31, size_of_field(where));
}
u32 sum_with_carry(u32 a, u32 b, u32& scc) {
  const u64 sum = u64(a) + b + scc;
  scc = sum >> 32 & 1;
  return static_cast<u32>(sum);
}
u32 difference_with_carry(u32 a, u32 b, u32& scc) {
  const u64 difference = u64(a) - b - scc;
  scc = difference >> 32 & 1;
  return static_cast<u32>(difference);
}
u32 shifted_sum(u32 a, u32 b, int shift, u32& scc) {
  const u64 sum = (u64(a) << shift) + b;
  scc = sum >> 32 != 0;
  return static_cast<u32>(sum);
}
u32 choose(bool first, u32 a, u32 b, u32& scc) {
  scc = first;
  return first ? a : b;
}

void add_moves_and_counts(Table& t) {
  S1("s_mov_b32", a);
  D1("s_mov_b64", a);
  S1("s_movk_i32", a);
  S1("s_not_b32", with_scc(~a, scc));
  D1("s_not_b64", with_scc(~a, scc));
  S1("s_brev_b32", __builtin_bitreverse32(a));
  D1("s_brev_b64", __builtin_bitreverse64(a));
  S1("s_bcnt0_i32_b32", with_scc(32 - std::popcount(a), scc));
  S1("s_bcnt1_i32_b32", with_scc(std::popcount(a), scc));
  N1("s_bcnt0_i32_b64", with_scc(64 - std::popcount(a), scc));
  N1("s_bcnt1_i32_b64", with_scc(std::popcount(a), scc));
  S1("s_ff0_i32_b32", ctz_or_minus1(~a));
  S1("s_ff1_i32_b32", ctz_or_minus1(a));
  N1("s_ff1_i32_b64", first_bit(a, std::countr_zero(a)));
  S1("s_flbit_i32_b32", clz_or_minus1(a));
  N1("s_flbit_i32_b64", first_bit(a, std::countl_zero(a)));
  S1("s_flbit_i32", sign_run(a));
  t.alias("s_ctz_i32_b32", "s_ff1_i32_b32");
  t.alias("s_ctz_i32_b64", "s_ff1_i32_b64");
  t.alias("s_clz_i32_u32", "s_flbit_i32_b32");
  t.alias("s_clz_i32_u64", "s_flbit_i32_b64");
  t.alias("s_cls_i32", "s_flbit_i32");
  S1("s_sext_i32_i8", i32(static_cast<i8>(a)));
  S1("s_sext_i32_i16", i32(static_cast<i16>(a)));
  S1("s_abs_i32", with_scc(s(a) < 0 ? 0U - a : a, scc));
  S2("s_cselect_b32", scc != 0 ? a : b);
  D2("s_cselect_b64", scc != 0 ? a : b);
  S2("s_cmov_b32", scc != 0 ? a : b).accumulates = true;
  D2("s_cmov_b64", scc != 0 ? a : b).accumulates = true;
  t.alias("s_cmovk_i32", "s_cmov_b32");
  S2("s_bitset0_b32", b & ~(1U << (a & 31))).accumulates = true;
  S2("s_bitset1_b32", b | (1U << (a & 31))).accumulates = true;
  S2("s_pack_ll_b32_b16", (a & 0xffff) | (b << 16));
  S2("s_pack_lh_b32_b16", (a & 0xffff) | (b & 0xffff0000U));
  S2("s_pack_hh_b32_b16", (a >> 16) | (b & 0xffff0000U));
  S2("s_pack_hl_b32_b16", (a >> 16) | (b << 16));
}

void add_arithmetic(Table& t) {
  S2("s_add_u32", (scc = 0, sum_with_carry(a, b, scc)));
  S2("s_sub_u32", (scc = 0, difference_with_carry(a, b, scc)));
  S2("s_addc_u32", sum_with_carry(a, b, scc));
  S2("s_subb_u32", difference_with_carry(a, b, scc));
  S2("s_add_i32", (scc = (~(a ^ b) & (a ^ (a + b))) >> 31, a + b));  // overflow
  S2("s_sub_i32", (scc = ((a ^ b) & (a ^ (a - b))) >> 31, a - b));
  for (const std::string op : {"add", "sub"}) {
    t.alias("s_" + op + "_co_u32", "s_" + op + "_u32");
    t.alias("s_" + op + "_co_i32", "s_" + op + "_i32");
  }
  t.alias("s_add_co_ci_u32", "s_addc_u32");
  t.alias("s_sub_co_ci_u32", "s_subb_u32");
  t.alias("s_addk_i32", "s_add_i32").accumulates = true;
  t.alias("s_addk_co_i32", "s_addk_i32");
  D2("s_add_nc_u64", a + b);
  D2("s_sub_nc_u64", a - b);
  t.alias("s_add_u64", "s_add_nc_u64");
  t.alias("s_sub_u64", "s_sub_nc_u64");
  S2("s_mul_i32", a * b);
  S2("s_mulk_i32", a * b).accumulates = true;
  S2("s_mul_hi_u32", (u64(a) * b) >> 32);
  S2("s_mul_hi_i32", (i64(s(a)) * s(b)) >> 32);
  D2("s_mul_u64", a * b);
  S2("s_min_i32", choose(s(a) < s(b), a, b, scc));
  S2("s_max_i32", choose(s(a) > s(b), a, b, scc));
  S2("s_min_u32", choose(a < b, a, b, scc));
  S2("s_max_u32", choose(a > b, a, b, scc));
  S2("s_absdiff_i32", with_scc(s(a) > s(b) ? a - b : b - a, scc));
  S2("s_lshl1_add_u32", shifted_sum(a, b, 1, scc));
  S2("s_lshl2_add_u32", shifted_sum(a, b, 2, scc));
  S2("s_lshl3_add_u32", shifted_sum(a, b, 3, scc));
  S2("s_lshl4_add_u32", shifted_sum(a, b, 4, scc));
}

void add_logic(Table& t) {
#define LOGIC(NAME, EXPR)               \
  S2(NAME "_b32", with_scc(EXPR, scc)); \
  D2(NAME "_b64", with_scc(EXPR, scc))
  LOGIC("s_and", a & b);
  LOGIC("s_or", a | b);
  LOGIC("s_xor", a ^ b);
  LOGIC("s_andn2", a & ~b);
  LOGIC("s_orn2", a | ~b);
  LOGIC("s_nand", ~(a & b));
  LOGIC("s_nor", ~(a | b));
  LOGIC("s_xnor", ~(a ^ b));
#undef LOGIC
  for (const std::string bits : {"_b32", "_b64"}) {
    t.alias("s_and_not1" + bits, "s_andn2" + bits);
    t.alias("s_or_not1" + bits, "s_orn2" + bits);
  }
  S2("s_lshl_b32", with_scc(a << (b & 31), scc));
  S2("s_lshr_b32", with_scc(a >> (b & 31), scc));
  S2("s_ashr_i32", with_scc(s(a) >> (b & 31), scc));
  B2("s_lshl_b64", with_scc(a << (b & 63), scc));
  B2("s_lshr_b64", with_scc(a >> (b & 63), scc));
  B2("s_ashr_i64", with_scc(static_cast<i64>(a) >> (b & 63), scc));
  S2("s_bfm_b32", ((1U << (a & 31)) - 1) << (b & 31));
  t.add("s_bfm_b64", &scalar_binary<true, false, false, decltype([](u32 a, u32 b, u32&) {
                                      return ((1ULL << (a & 63)) - 1) << (b & 63);
                                    })>);
  S2("s_bfe_u32", with_scc(field32(a, b), scc));
  S2("s_bfe_i32", with_scc(signed_field32(a, b), scc));
  B2("s_bfe_u64", with_scc(field64(a, b), scc));
  B2("s_bfe_i64", with_scc(signed_field64(a, b), scc));
}

void add_scalar_compares(Table& t) {
#define COMPARE(OP, SIGN)                           \
  SC("s_cmp_" OP "_u32", a SIGN b);                 \
  SC("s_cmp_" OP "_i32", s(a) SIGN s(b));           \
  t.alias("s_cmpk_" OP "_u32", "s_cmp_" OP "_u32"); \
  t.alias("s_cmpk_" OP "_i32", "s_cmp_" OP "_i32")
  COMPARE("eq", ==);
  COMPARE("lg", !=);
  COMPARE("gt", >);
  COMPARE("ge", >=);
  COMPARE("lt", <);
  COMPARE("le", <=);
#undef COMPARE
  DC("s_cmp_eq_u64", a == b);
  DC("s_cmp_lg_u64", a != b);
  SC("s_bitcmp0_b32", (a >> (b & 31) & 1) == 0);
  SC("s_bitcmp1_b32", (a >> (b & 31) & 1) != 0);
  DC("s_bitcmp0_b64", (a >> (b & 63) & 1) == 0);
  DC("s_bitcmp1_b64", (a >> (b & 63) & 1) != 0);
}

/// s: the source, e: exec.
void add_exec_changes(Table& t) {
#define EXEC(OP, RESULT, EXPR)                                                                    \
  t.add("s_" OP "_b64", &change_exec<true, RESULT, decltype([](u64 s, u64 e) { return EXPR; })>); \
  t.add("s_" OP "_b32", &change_exec<false, RESULT, decltype([](u64 s, u64 e) { return EXPR; })>)
  EXEC("and_saveexec", false, s & e);
  EXEC("or_saveexec", false, s | e);
  EXEC("xor_saveexec", false, s ^ e);
  EXEC("andn2_saveexec", false, s & ~e);
  EXEC("andn1_saveexec", false, ~s & e);
  EXEC("orn2_saveexec", false, s | ~e);
  EXEC("orn1_saveexec", false, ~s | e);
  EXEC("nand_saveexec", false, ~(s & e));
  EXEC("nor_saveexec", false, ~(s | e));
  EXEC("xnor_saveexec", false, ~(s ^ e));
  EXEC("andn2_wrexec", true, s & ~e);
  EXEC("andn1_wrexec", true, ~s & e);
#undef EXEC
  for (const std::string rest : {"_saveexec_b32", "_saveexec_b64", "_wrexec_b32", "_wrexec_b64"}) {
    t.alias("s_and_not1" + rest, "s_andn2" + rest);
    t.alias("s_and_not0" + rest, "s_andn1" + rest);
  }
  for (const std::string rest : {"_saveexec_b32", "_saveexec_b64"}) {
    t.alias("s_or_not1" + rest, "s_orn2" + rest);
    t.alias("s_or_not0" + rest, "s_orn1" + rest);
  }
}

}  // namespace

void add_scalars(Table& t) {
  add_moves_and_counts(t);
  add_arithmetic(t);
  add_logic(t);
  add_scalar_compares(t);
  add_exec_changes(t);
}

}  // namespace amdemu
