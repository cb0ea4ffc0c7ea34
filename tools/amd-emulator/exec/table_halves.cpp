// Vector arithmetic of f16; packed instructions of all types, dot products.
#include "exec/packed.hpp"
#include "exec/shapes.hpp"
#include "exec/table.hpp"

namespace amdemu {
namespace {

float f(f16 value) {
  return static_cast<float>(value);
}

// Packed f16; packed 16-bit integers of a C++ type, computed in 64 bits; pairs of f32.
#define PH(NAME, N, EXPR) \
  t.add(                  \
      NAME,               \
      &packed_f16<W, N, decltype([](UNUSED f16 a, UNUSED f16 b, UNUSED f16 c) { return EXPR; })>)
#define PI(NAME, T, N, EXPR)                                                                 \
  t.add(NAME, &packed_int16<W, T, N, decltype([](UNUSED i64 a, UNUSED i64 b, UNUSED i64 c) { \
                              return EXPR;                                                   \
                            })>)
#define PF(NAME, N, EXPR)                                                                   \
  t.add(NAME, &packed32<W, N, decltype([](UNUSED float a, UNUSED float b, UNUSED float c) { \
                          return EXPR;                                                      \
                        })>)

template <int W>
void add_packed(Table& t) {
  PH("v_pk_fma_f16", 3, half_fma(a, b, c));
  PH("v_pk_add_f16", 2, static_cast<f16>(a + b));
  PH("v_pk_mul_f16", 2, static_cast<f16>(a * b));
  PH("v_pk_min_f16", 2, min_num(a, b));
  PH("v_pk_max_f16", 2, max_num(a, b));
  t.alias("v_pk_min_num_f16", "v_pk_min_f16");
  t.alias("v_pk_max_num_f16", "v_pk_max_f16");
  PI("v_pk_add_u16", u16, 2, a + b);
  PI("v_pk_add_i16", i16, 2, a + b);
  PI("v_pk_sub_u16", u16, 2, a - b);
  PI("v_pk_sub_i16", i16, 2, a - b);
  PI("v_pk_mul_lo_u16", u16, 2, a * b);
  PI("v_pk_mad_u16", u16, 3, a * b + c);
  PI("v_pk_mad_i16", i16, 3, a * b + c);
  PI("v_pk_lshlrev_b16", u16, 2, b << (a & 15));
  PI("v_pk_lshrrev_b16", u16, 2, b >> (a & 15));
  PI("v_pk_ashrrev_i16", i16, 2, b >> (a & 15));
  PI("v_pk_min_u16", u16, 2, std::min(a, b));
  PI("v_pk_max_u16", u16, 2, std::max(a, b));
  PI("v_pk_min_i16", i16, 2, std::min(a, b));
  PI("v_pk_max_i16", i16, 2, std::max(a, b));
  PF("v_pk_fma_f32", 3, __builtin_fmaf(a, b, c));
  PF("v_pk_mul_f32", 2, a * b);
  PF("v_pk_add_f32", 2, a + b);
  t.add("v_fma_mix_f32", &fma_mix<W, 0>);
  t.add("v_fma_mixlo_f16", &fma_mix<W, 1>);
  t.add("v_fma_mixhi_f16", &fma_mix<W, 2>);
  t.alias("v_mad_mix_f32", "v_fma_mix_f32");
  t.alias("v_mad_mixlo_f16", "v_fma_mixlo_f16");
  t.alias("v_mad_mixhi_f16", "v_fma_mixhi_f16");
}

template <int W>
void add_dots(Table& t) {
  t.add("v_dot2_f32_f16", &dot2_f32<W, false>);
  t.add("v_dot2_f32_bf16", &dot2_f32<W, true>);
  for (const char* name : {"v_dot2c_f32_f16", "v_dot2acc_f32_f16"})
    t.alias(name, "v_dot2_f32_f16").accumulates = true;
  for (const char* name : {"v_dot2c_f32_bf16", "v_dot2acc_f32_bf16"})
    t.alias(name, "v_dot2_f32_bf16").accumulates = true;
  V3("v_dot4_i32_i8", I32, U32, U32, I32, dot4_signed(a, b) + c);
  VACC("v_dot4c_i32_i8", I32, U32, U32, I32, dot4_signed(a, b) + c);
  V3("v_dot4_u32_u8", U32, U32, U32, U32, dot4_unsigned(a, b) + c);
  t.add("v_dot4_i32_iu8", &dot4_iu8<W>);
}

}  // namespace

template <int W>
void add_halves(Table& t) {
  V1("v_fract_f16", F16, F16, static_cast<f16>(fraction(f(a))));
  V1("v_trunc_f16", F16, F16, static_cast<f16>(std::trunc(f(a))));
  V1("v_ceil_f16", F16, F16, static_cast<f16>(std::ceil(f(a))));
  V1("v_rndne_f16", F16, F16, static_cast<f16>(std::nearbyint(f(a))));
  V1("v_floor_f16", F16, F16, static_cast<f16>(std::floor(f(a))));
  V1("v_exp_f16", F16, F16, static_cast<f16>(std::exp2(f(a))));
  V1("v_log_f16", F16, F16, static_cast<f16>(std::log2(f(a))));
  V1("v_rcp_f16", F16, F16, static_cast<f16>(1.0F / f(a)));
  V1("v_rsq_f16", F16, F16, static_cast<f16>(1.0F / std::sqrt(f(a))));
  V1("v_sqrt_f16", F16, F16, static_cast<f16>(std::sqrt(f(a))));
  V1("v_frexp_mant_f16", F16, F16, static_cast<f16>(mantissa(f(a))));
  V1("v_frexp_exp_i16_f16", I16, F16, exponent(f(a)));
  V2("v_ldexp_f16", F16, F16, I16, static_cast<f16>(std::ldexp(f(a), b)));
  V2("v_add_f16", F16, F16, F16, a + b);
  V2("v_sub_f16", F16, F16, F16, a - b);
  V2("v_subrev_f16", F16, F16, F16, b - a);
  V2("v_mul_f16", F16, F16, F16, a * b);
  V2("v_min_f16", F16, F16, F16, min_num(a, b));
  V2("v_max_f16", F16, F16, F16, max_num(a, b));
  V3("v_fma_f16", F16, F16, F16, F16, half_fma(a, b, c));
  V3("v_fmaak_f16", F16, F16, F16, F16, half_fma(a, b, c));
  V3("v_fmamk_f16", F16, F16, F16, F16, half_fma(a, b, c));
  VACC("v_fmac_f16", F16, F16, F16, F16, half_fma(a, b, c));
  V3("v_max3_f16", F16, F16, F16, F16, max_num(max_num(a, b), c));
  V3("v_min3_f16", F16, F16, F16, F16, min_num(min_num(a, b), c));
  V3("v_med3_f16", F16, F16, F16, F16, med3(a, b, c));
  V3("v_div_fixup_f16", F16, F16, F16, F16, static_cast<f16>(f(c) / f(b)));
  for (const std::string op : {"min", "max", "min3", "max3", "med3"})
    t.alias("v_" + op + "_num_f16", "v_" + op + "_f16");
  add_packed<W>(t);
  add_dots<W>(t);
}
template void add_halves<32>(Table& t);
template void add_halves<64>(Table& t);

}  // namespace amdemu
