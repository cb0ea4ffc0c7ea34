// Conversions between number formats.
#include "exec/shapes.hpp"
#include "exec/special.hpp"
#include "exec/table.hpp"

namespace amdemu {
namespace {

u32 clamp16(i32 value) {
  return static_cast<u32>(std::clamp(value, -32768, 32767));
}
u32 half_bits(float value) {
  return bits_of(static_cast<f16>(value));
}
u32 with_byte(u32 word, u32 n, u32 byte) {
  return (word & ~(0xffU << (8 * n))) | byte << (8 * n);
}

}  // namespace

template <int W>
void add_conversions(Table& t) {
  V1("v_cvt_f32_i32", F32, I32, static_cast<float>(a));
  V1("v_cvt_f32_u32", F32, U32, static_cast<float>(a));
  V1("v_cvt_i32_f32", I32, F32, to_i32(a));
  V1("v_cvt_u32_f32", U32, F32, to_u32(a));
  V1("v_cvt_f16_f32", F16, F32, static_cast<f16>(a));
  V1("v_cvt_f32_f16", F32, F16, static_cast<float>(a));
  V1("v_cvt_f64_f32", F64, F32, static_cast<double>(a));
  V1("v_cvt_f32_f64", F32, F64, static_cast<float>(a));
  V1("v_cvt_f64_i32", F64, I32, static_cast<double>(a));
  V1("v_cvt_f64_u32", F64, U32, static_cast<double>(a));
  V1("v_cvt_i32_f64", I32, F64, to_i32(a));
  V1("v_cvt_u32_f64", U32, F64, to_u32(a));
  V1("v_cvt_f16_u16", F16, U16, static_cast<f16>(static_cast<float>(a)));
  V1("v_cvt_f16_i16", F16, I16, static_cast<f16>(static_cast<float>(a)));
  V1("v_cvt_u16_f16", U16, F16, std::min<u32>(to_u32(static_cast<float>(a)), 65535));
  V1("v_cvt_i16_f16", I16, F16, clamp16(to_i32(static_cast<float>(a))));
  V1("v_cvt_f32_ubyte0", F32, U32, static_cast<float>(a & 0xff));
  V1("v_cvt_f32_ubyte1", F32, U32, static_cast<float>(a >> 8 & 0xff));
  V1("v_cvt_f32_ubyte2", F32, U32, static_cast<float>(a >> 16 & 0xff));
  V1("v_cvt_f32_ubyte3", F32, U32, static_cast<float>(a >> 24));
  V1("v_cvt_rpi_i32_f32", I32, F32, to_i32(std::floor(a + 0.5F)));
  V1("v_cvt_flr_i32_f32", I32, F32, to_i32(std::floor(a)));
  t.alias("v_cvt_nearest_i32_f32", "v_cvt_rpi_i32_f32");
  t.alias("v_cvt_floor_i32_f32", "v_cvt_flr_i32_f32");
  V2("v_cvt_pkrtz_f16_f32", U32, F32, F32, rtz_pair(a, b));
  t.alias("v_cvt_pk_rtz_f16_f32", "v_cvt_pkrtz_f16_f32");
  V2("v_cvt_pk_u16_u32", U32, U32, U32, std::min(a, 65535U) | (std::min(b, 65535U) << 16));
  V2("v_cvt_pk_i16_i32", U32, I32, I32, (clamp16(a) & 0xffff) | (clamp16(b) << 16));
  V2("v_cvt_pknorm_i16_f32", U32, F32, F32, norm16(a, 32767, -1) | (norm16(b, 32767, -1) << 16));
  V2("v_cvt_pknorm_u16_f32", U32, F32, F32, norm16(a, 65535, 0) | (norm16(b, 65535, 0) << 16));
  V2("v_pack_b32_f16", U32, U16, U16, u32(a) | (u32(b) << 16));
  V3("v_cvt_pk_u8_f32", U32, F32, U32, U32, with_byte(c, b & 3, std::min(to_u32(a), 255U)));
  V2("v_cvt_pk_bf16_f32", U32, F32, F32, bf16_bits(a) | (bf16_bits(b) << 16));
  V2("v_cvt_pk_f16_f32", U32, F32, F32, half_bits(a) | (half_bits(b) << 16));
  t.add("v_cvt_pk_fp8_f32", &cvt_pk_fp8_f32<W, false>);
  t.add("v_cvt_pk_bf8_f32", &cvt_pk_fp8_f32<W, true>);
  t.add("v_cvt_f32_fp8", &cvt_f32_fp8<W, false>);
  t.add("v_cvt_f32_bf8", &cvt_f32_fp8<W, true>);
  t.add("v_cvt_pk_f32_fp8", &cvt_pk_f32_fp8<W, false>);
  t.add("v_cvt_pk_f32_bf8", &cvt_pk_f32_fp8<W, true>);
  V1("v_sext_i32_i16", I32, I16, a);
  V1("v_cvt_i32_i16", I32, I16, a);
  V1("v_cvt_u32_u16", U32, U16, a);
}
template void add_conversions<32>(Table& t);
template void add_conversions<64>(Table& t);

}  // namespace amdemu
