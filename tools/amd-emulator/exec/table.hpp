// From mnemonics to handlers, for waves of W lanes. The rows stand in table_*.cpp, which see the
// macros below: the name, the element types of destination and sources, and what is computed of a,
// b, c.
#pragma once
#include <string>
#include <unordered_map>

#include "machine/instruction.hpp"

namespace amdemu {

struct Entry {
  Handler handler = nullptr;
  int num_dst = 1;           // -1: one where more than two operands are written
  bool accumulates = false;  // the destination is also the last source
};

class Table {
 public:
  Entry& add(const std::string& name, Handler handler, int num_dst = 1) {
    return entries_[name] = {handler, num_dst, false};
  }
  /// Another generation's name of the same.
  Entry& alias(const std::string& name, const std::string& known) {
    const Entry entry = entries_.at(known);
    return entries_[name] = entry;
  }
  const Entry* find(const std::string& name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? nullptr : &found->second;
  }

 private:
  std::unordered_map<std::string, Entry> entries_;
};

/// `wave`: 32 or 64.
const Table& table_of(int wave);

/// Handlers that are chosen otherwise than by name.
struct Handlers {
  Handler dpp, sdwa, dual, matrix, load, store, atomic, load_to_local;
};
const Handlers& handlers_of(int wave);

template <int W>
void add_moves(Table& t);
template <int W>
void add_conversions(Table& t);
template <int W>
void add_floats(Table& t);
template <int W>
void add_halves(Table& t);
template <int W>
void add_integers(Table& t);
template <int W>
void add_compares(Table& t);
template <int W>
void add_control(Table& t);
void add_scalars(Table& t);
void add_scalar_floats(Table& t);

#define UNUSED [[maybe_unused]]
// Vector instructions of one, two, three sources; VACC: the third is the destination.
#define V1(NAME, D, A, EXPR) \
  t.add(NAME, &unary<W, D, A, decltype([](UNUSED typename A::t a) { return EXPR; })>)
#define V2(NAME, D, A, B, EXPR)                                                                 \
  t.add(NAME, &binary<W, D, A, B, decltype([](UNUSED typename A::t a, UNUSED typename B::t b) { \
                        return EXPR;                                                            \
                      })>)
#define V3(NAME, D, A, B, C, EXPR)                                                 \
  t.add(NAME, &ternary<W, D, A, B, C,                                              \
                       decltype([](UNUSED typename A::t a, UNUSED typename B::t b, \
                                   UNUSED typename C::t c) { return EXPR; })>)
#define VACC(NAME, D, A, B, C, EXPR) V3(NAME, D, A, B, C, EXPR).accumulates = true

}  // namespace amdemu
