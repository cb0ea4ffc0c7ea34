// MFMA and WMMA: shape and types stand in the name, as in v_mfma_f32_32x32x8_f16 and
// v_wmma_f32_16x16x16_bf16_w32.
#include <cstdio>
#include <unordered_map>

#include "decode/decoder.hpp"
#include "decode/text.hpp"

namespace amdemu {
namespace {

using Type = MatrixControl::Type;

struct NamedType {
  const char* name;
  Type type;
  int bits;
};
constexpr NamedType kTypes[] = {
    {"bf16", MatrixControl::kBF16, 16}, {"f16", MatrixControl::kF16, 16},
    {"xf32", MatrixControl::kXf32, 32}, {"f32", MatrixControl::kF32, 32},
    {"f64", MatrixControl::kF64, 64},   {"iu4", MatrixControl::kU4, 4},
    {"iu8", MatrixControl::kU8, 8},     {"i8", MatrixControl::kI8, 8},
    {"fp8", MatrixControl::kFp8, 8},    {"bf8", MatrixControl::kBf8, 8},
    {"i32", MatrixControl::kI32, 32},
};
/// Takes a type from the front, and the underscore behind it.
const NamedType* take_type(std::string_view& text) {
  for (const NamedType& each : kTypes) {
    if (!take(text, each.name)) continue;
    take(text, "_");
    return &each;
  }
  return nullptr;
}
/// Integers are unsigned unless neg_lo says otherwise.
Type by_sign(Type type, bool is_signed) {
  if (type == MatrixControl::kU8 && is_signed) return MatrixControl::kI8;
  if (type == MatrixControl::kU4 && is_signed) return MatrixControl::kI4;
  return type;
}

}  // namespace

void decode_matrix(const std::string& name, const Chip& chip, const std::vector<Operand>& operands,
                   Instruction& i) {
  const std::string what = "matrix instruction " + name;
  std::string_view rest = name;
  MatrixControl m;
  const bool is_wmma = take(rest, "v_wmma_");
  if (!is_wmma && !take(rest, "v_mfma_")) not_understood(what);
  if (is_wmma) m.kind = chip.generation >= 12 ? MatrixControl::kWmma12 : MatrixControl::kWmma11;
  const NamedType* d = take_type(rest);
  int used = 0;
  if (d == nullptr ||
      std::sscanf(std::string(rest).c_str(), "%dx%dx%d%n", &m.m, &m.n, &m.k, &used) != 3)
    not_understood(what);
  rest.remove_prefix(static_cast<std::size_t>(used));
  take(rest, "_");
  const std::size_t separator = rest.find("b_");  // 2b_, 4b_, 16b_: blocks
  const bool names_blocks = separator <= 2 && rest[0] >= '0' && rest[0] <= '9';
  const int blocks = names_blocks ? static_cast<int>(number(rest)) : 0;
  if (names_blocks) rest.remove_prefix(separator + 2);
  const NamedType* a = take_type(rest);
  if (a == nullptr) not_understood(what);
  const NamedType* b = take_type(rest);  // where it differs, or is fp8 or bf8
  m.d = d->type;
  m.a = by_sign(a->type, (i.neg_lo & 1) != 0);
  m.b = by_sign(b == nullptr ? a->type : b->type, (i.neg_lo & 2) != 0);
  m.fnuz = chip.fnuz;
  i.num_dst = 1, i.num_src = 3;
  i.dst[0] = operands.at(0);
  for (std::size_t k = 0; k < 3; ++k) i.src[k] = operands.at(k + 1);
  if (!is_wmma) {
    m.per_lane = i.src[0].dwords * 32 / a->bits;
    m.blocks = blocks != 0 ? blocks : 64 * m.per_lane / (m.m * m.k);
    m.flush = chip.mfma_flush && a->bits == 16;
  }
  i.matrix = std::make_shared<MatrixControl>(m);
}

}  // namespace amdemu
