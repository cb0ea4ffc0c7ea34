#include "exec/table.hpp"

#include "exec/atomics.hpp"
#include "exec/matrix.hpp"
#include "exec/memory.hpp"
#include "exec/modifiers.hpp"

namespace amdemu {
namespace {

template <int W>
Table make_table() {
  Table t;
  add_moves<W>(t);
  add_conversions<W>(t);
  add_floats<W>(t);
  add_halves<W>(t);
  add_integers<W>(t);
  add_compares<W>(t);
  add_control<W>(t);
  add_scalars(t);
  add_scalar_floats(t);
  return t;
}
template <int W>
constexpr Handlers kHandlers{&with_dpp<W>, &with_sdwa<W>, &dual<W>,   &matrix<W>,
                             &load<W>,     &store<W>,     &atomic<W>, &load_to_local<W>};

}  // namespace

const Table& table_of(int wave) {
  static const Table table32 = make_table<32>(), table64 = make_table<64>();
  return wave == 64 ? table64 : table32;
}
const Handlers& handlers_of(int wave) {
  return wave == 64 ? kHandlers<64> : kHandlers<32>;
}

}  // namespace amdemu
