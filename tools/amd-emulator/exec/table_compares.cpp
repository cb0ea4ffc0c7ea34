// Vector comparisons.
#include "exec/shapes.hpp"
#include "exec/table.hpp"

namespace amdemu {
namespace {

template <int W, class A, class B, class F>
void add_compare(Table& t, const std::string& rest, F) {
  t.add("v_cmp_" + rest, &compare<W, A, B, F>);
  t.add("v_cmpx_" + rest, &compare_exec<W, A, B, F>, -1);
}
#define COMPARE(OP, EXPR)                \
  add_compare<W, T, T>(t, OP "_" + type, \
                       [](UNUSED typename T::t a, UNUSED typename T::t b) { return EXPR; })

template <int W, class T>
void add_orders(Table& t, const std::string& type) {
  COMPARE("f", false);
  COMPARE("lt", a < b);
  COMPARE("eq", a == b);
  COMPARE("le", a <= b);
  COMPARE("gt", a > b);
  COMPARE("ge", a >= b);
  COMPARE("t", true);
}
template <int W, class T>
void add_integer_compares(Table& t, const std::string& type) {
  add_orders<W, T>(t, type);
  COMPARE("ne", a != b);
}
/// With NaN, `a n.. b` is true where `a .. b` is not.
template <int W, class T>
void add_float_compares(Table& t, const std::string& type) {
  add_orders<W, T>(t, type);
  COMPARE("tru", true);
  COMPARE("lg", a < b || a > b);
  COMPARE("o", a == a && b == b);
  COMPARE("u", a != a || b != b);
  COMPARE("nge", !(a >= b));
  COMPARE("nlg", !(a < b || a > b));
  COMPARE("ngt", !(a > b));
  COMPARE("nle", !(a <= b));
  COMPARE("neq", !(a == b));
  COMPARE("nlt", !(a < b));
  const auto is_class = [](typename T::t a, u32 mask) { return in_class(a, mask); };
  add_compare<W, T, U32>(t, "class_" + type, is_class);
}

}  // namespace

template <int W>
void add_compares(Table& t) {
  add_float_compares<W, F32>(t, "f32");
  add_float_compares<W, F16>(t, "f16");
  add_float_compares<W, F64>(t, "f64");
  add_integer_compares<W, I32>(t, "i32");
  add_integer_compares<W, U32>(t, "u32");
  add_integer_compares<W, I16>(t, "i16");
  add_integer_compares<W, U16>(t, "u16");
  add_integer_compares<W, I64>(t, "i64");
  add_integer_compares<W, U64>(t, "u64");
}
template void add_compares<32>(Table& t);
template void add_compares<64>(Table& t);

}  // namespace amdemu
