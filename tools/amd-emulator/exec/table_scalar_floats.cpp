// Scalar floats: of gfx12 and gfx11.5, and the v_s_ instructions of gfx12.
#include "exec/scalar.hpp"
#include "exec/table.hpp"

namespace amdemu {
namespace {

// Of the bits of floats, to a float; N: to an integer's bits; C: to the status bit.
template <class F>
void float_unary(Wave& w, const Instruction& i) {
  w.s[i.dst[0].reg] = as<u32>(F{}(as<float>(scalar32(w, i.src[0]))));
}
template <class F>
void float_binary(Wave& w, const Instruction& i) {
  const float a = as<float>(scalar32(w, i.src[0])), b = as<float>(scalar32(w, i.src[1]));
  w.s[i.dst[0].reg] = as<u32>(F{}(a, b));
}
template <class F>
void float_ternary(Wave& w, const Instruction& i) {
  const float a = as<float>(scalar32(w, i.src[0])), b = as<float>(scalar32(w, i.src[1])),
              c = as<float>(scalar32(w, i.src[2]));
  w.s[i.dst[0].reg] = as<u32>(F{}(a, b, c));
}
template <class F>
void float_compare(Wave& w, const Instruction& i) {
  w.s[kScc] = F{}(as<float>(scalar32(w, i.src[0])), as<float>(scalar32(w, i.src[1]))) ? 1 : 0;
}
#define F1(NAME, EXPR) t.add(NAME, &float_unary<decltype([](float a) { return EXPR; })>)
#define F2(NAME, EXPR) t.add(NAME, &float_binary<decltype([](float a, float b) { return EXPR; })>)
#define FC(NAME, EXPR) \
  t.add(NAME, &float_compare<decltype([](float a, float b) { return EXPR; })>, 0)
#define BITS(NAME, EXPR) \
  t.add(NAME, &scalar_unary<false, false, decltype([](u32 a, u32&) { return EXPR; })>)

void add_conversions(Table& t) {
  BITS("s_cvt_f32_i32", as<u32>(static_cast<float>(static_cast<i32>(a))));
  BITS("s_cvt_f32_u32", as<u32>(static_cast<float>(a)));
  BITS("s_cvt_i32_f32", to_i32(as<float>(a)));
  BITS("s_cvt_u32_f32", to_u32(as<float>(a)));
  BITS("s_cvt_f16_f32", bits_of(static_cast<f16>(as<float>(a))));
  BITS("s_cvt_f32_f16", as<u32>(static_cast<float>(half_of(a))));
  BITS("s_cvt_hi_f32_f16", as<u32>(static_cast<float>(half_of(a >> 16))));
  F2("s_cvt_pk_rtz_f16_f32", as<float>(rtz_pair(a, b)));
}

void add_compares(Table& t) {
  FC("s_cmp_lt_f32", a < b);
  FC("s_cmp_eq_f32", a == b);
  FC("s_cmp_le_f32", a <= b);
  FC("s_cmp_gt_f32", a > b);
  FC("s_cmp_ge_f32", a >= b);
  FC("s_cmp_lg_f32", a < b || a > b);
  FC("s_cmp_o_f32", a == a && b == b);
  FC("s_cmp_u_f32", a != a || b != b);
  FC("s_cmp_nlt_f32", !(a < b));
  FC("s_cmp_neq_f32", !(a == b));
  FC("s_cmp_nle_f32", !(a <= b));
  FC("s_cmp_ngt_f32", !(a > b));
  FC("s_cmp_nge_f32", !(a >= b));
  FC("s_cmp_nlg_f32", !(a < b || a > b));
}

}  // namespace

void add_scalar_floats(Table& t) {
  F2("s_add_f32", a + b);
  F2("s_sub_f32", a - b);
  F2("s_mul_f32", a * b);
  F2("s_min_num_f32", min_num(a, b));
  F2("s_max_num_f32", max_num(a, b));
  t.alias("s_min_f32", "s_min_num_f32");
  t.alias("s_max_f32", "s_max_num_f32");
  using Fma = decltype([](float a, float b, float c) { return __builtin_fmaf(a, b, c); });
  t.add("s_fmac_f32", &float_ternary<Fma>).accumulates = true;
  t.add("s_fmamk_f32", &float_ternary<Fma>);
  t.add("s_fmaak_f32", &float_ternary<Fma>);
  F1("s_ceil_f32", std::ceil(a));
  F1("s_floor_f32", std::floor(a));
  F1("s_trunc_f32", std::trunc(a));
  F1("s_rndne_f32", std::nearbyint(a));
  F1("v_s_exp_f32", flushed(std::exp2(a)));
  F1("v_s_log_f32", std::log2(flushed(a)));
  F1("v_s_rcp_f32", flushed(1.0F / flushed(a)));
  F1("v_s_rsq_f32", static_cast<float>(1.0 / std::sqrt(static_cast<double>(flushed(a)))));
  F1("v_s_sqrt_f32", std::sqrt(flushed(a)));
  add_conversions(t);
  add_compares(t);
}

}  // namespace amdemu
