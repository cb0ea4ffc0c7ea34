// Vector arithmetic of f32 and f64.
#include "exec/shapes.hpp"
#include "exec/special.hpp"
#include "exec/table.hpp"

namespace amdemu {
namespace {

constexpr double kTurn = 6.283185307179586;
float turn_sin(float turns) {
  return static_cast<float>(std::sin(kTurn * double(turns)));
}
float turn_cos(float turns) {
  return static_cast<float>(std::cos(kTurn * double(turns)));
}
float inverse_root(float a) {
  return static_cast<float>(1.0 / std::sqrt(double(a)));
}

}  // namespace

template <int W>
void add_floats(Table& t) {
  V1("v_fract_f32", F32, F32, fraction(a));
  V1("v_trunc_f32", F32, F32, std::trunc(a));
  V1("v_ceil_f32", F32, F32, std::ceil(a));
  V1("v_rndne_f32", F32, F32, std::nearbyint(a));
  V1("v_floor_f32", F32, F32, std::floor(a));
  V1("v_exp_f32", F32, F32, flushed(std::exp2(a)));
  V1("v_log_f32", F32, F32, std::log2(flushed(a)));
  V1("v_rcp_f32", F32, F32, flushed(1.0F / flushed(a)));
  t.alias("v_rcp_iflag_f32", "v_rcp_f32");
  V1("v_rsq_f32", F32, F32, inverse_root(flushed(a)));
  V1("v_sqrt_f32", F32, F32, std::sqrt(flushed(a)));
  V1("v_sin_f32", F32, F32, turn_sin(a));
  V1("v_cos_f32", F32, F32, turn_cos(a));
  V1("v_frexp_mant_f32", F32, F32, mantissa(a));
  V1("v_frexp_exp_i32_f32", I32, F32, exponent(a));
  V1("v_fract_f64", F64, F64, fraction(a));
  V1("v_trunc_f64", F64, F64, std::trunc(a));
  V1("v_ceil_f64", F64, F64, std::ceil(a));
  V1("v_rndne_f64", F64, F64, std::nearbyint(a));
  V1("v_floor_f64", F64, F64, std::floor(a));
  V1("v_rcp_f64", F64, F64, 1.0 / a);
  V1("v_rsq_f64", F64, F64, 1.0 / std::sqrt(a));
  V1("v_sqrt_f64", F64, F64, std::sqrt(a));
  V1("v_frexp_mant_f64", F64, F64, mantissa(a));
  V1("v_frexp_exp_i32_f64", I32, F64, exponent(a));
  V2("v_add_f32", F32, F32, F32, a + b);
  V2("v_sub_f32", F32, F32, F32, a - b);
  V2("v_subrev_f32", F32, F32, F32, b - a);
  V2("v_mul_f32", F32, F32, F32, a * b);
  V2("v_mul_legacy_f32", F32, F32, F32, a == 0 || b == 0 ? 0.0F : a * b);
  t.alias("v_mul_dx9_zero_f32", "v_mul_legacy_f32");
  V2("v_min_f32", F32, F32, F32, min_num(a, b));
  V2("v_max_f32", F32, F32, F32, max_num(a, b));
  V2("v_minimum_f32", F32, F32, F32, minimum(a, b));
  V2("v_maximum_f32", F32, F32, F32, maximum(a, b));
  V2("v_ldexp_f32", F32, F32, I32, std::ldexp(a, std::clamp(b, -1000, 1000)));
  V2("v_ldexp_f64", F64, F64, I32, std::ldexp(a, std::clamp(b, -5000, 5000)));
  V3("v_fma_f32", F32, F32, F32, F32, __builtin_fmaf(a, b, c));
  V3("v_mad_f32", F32, F32, F32, F32, a * b + c);
  V3("v_madmk_f32", F32, F32, F32, F32, a * b + c);
  V3("v_madak_f32", F32, F32, F32, F32, a * b + c);
  V3("v_fmaak_f32", F32, F32, F32, F32, __builtin_fmaf(a, b, c));
  V3("v_fmamk_f32", F32, F32, F32, F32, __builtin_fmaf(a, b, c));
  VACC("v_fmac_f32", F32, F32, F32, F32, __builtin_fmaf(a, b, c));
  VACC("v_mac_f32", F32, F32, F32, F32, a * b + c);
  V3("v_max3_f32", F32, F32, F32, F32, max_num(max_num(a, b), c));
  V3("v_min3_f32", F32, F32, F32, F32, min_num(min_num(a, b), c));
  V3("v_med3_f32", F32, F32, F32, F32, med3(a, b, c));
  V3("v_maxmin_f32", F32, F32, F32, F32, min_num(max_num(a, b), c));
  V3("v_minmax_f32", F32, F32, F32, F32, max_num(min_num(a, b), c));
  V3("v_maximum3_f32", F32, F32, F32, F32, maximum(maximum(a, b), c));
  V3("v_minimum3_f32", F32, F32, F32, F32, minimum(minimum(a, b), c));
  V2("v_add_f64", F64, F64, F64, a + b);
  V2("v_mul_f64", F64, F64, F64, a * b);
  V2("v_min_f64", F64, F64, F64, min_num(a, b));
  V2("v_max_f64", F64, F64, F64, max_num(a, b));
  V3("v_fma_f64", F64, F64, F64, F64, __builtin_fma(a, b, c));
  VACC("v_fmac_f64", F64, F64, F64, F64, __builtin_fma(a, b, c));
  t.add("v_div_scale_f32", &div_scale<W, F32>, 2);
  t.add("v_div_scale_f64", &div_scale<W, F64>, 2);
  V3("v_div_fmas_f32", F32, F32, F32, F32, __builtin_fmaf(a, b, c));
  V3("v_div_fmas_f64", F64, F64, F64, F64, __builtin_fma(a, b, c));
  V3("v_div_fixup_f32", F32, F32, F32, F32, c / b);
  V3("v_div_fixup_f64", F64, F64, F64, F64, c / b);

  for (const std::string op : {"min", "max", "min3", "max3", "med3", "maxmin", "minmax"})
    t.alias("v_" + op + "_num_f32", "v_" + op + "_f32");
  t.alias("v_min_num_f64", "v_min_f64");
  t.alias("v_max_num_f64", "v_max_f64");
}
template void add_floats<32>(Table& t);
template void add_floats<64>(Table& t);

}  // namespace amdemu
