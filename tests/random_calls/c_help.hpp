#pragma once

#include <cstdint>
#include <stdexcept>

#include "random_calls/world.hpp"

// What random calls of the C API have in common.
namespace test::c {

/// A status as the exception that main() counts. Checks that there is an error text wherever one is
/// promised.
void tell(ClattnResult status);

/// Puts what `make` gives in the place of an old handle; failure must give none.
template <typename Owner, typename Make>
void remake(Owner& owner, const Make& make) {
  typename Owner::pointer made = nullptr;
  const ClattnResult status = make(&made);
  if ((status == CLATTN_SUCCESS) != (made != nullptr))
    throw std::runtime_error("a handle and a status that do not fit");
  if (made != nullptr) owner.reset(made);
  tell(status);
}

/// The handle, or, seldom, null.
template <typename Owner>
typename Owner::pointer maybe(Dice& dice, const Owner& owner) {
  return dice.one_in(40) ? nullptr : owner.get();
}

/// A struct whose size is told, seldom too small, but never larger than the struct.
template <typename Struct>
Struct sized(Dice& dice) {
  Struct made{};
  const auto size = static_cast<std::int64_t>(sizeof(Struct));
  made.struct_size = static_cast<std::uint32_t>(dice.one_in(60) ? dice.below(size) : size);
  return made;
}

/// Of `buffer`, with an offset or a stride that is seldom legal.
ClattnTensorRef tensor_of(Dice& dice, const ClattnBuffer* buffer);

/// A layer of 4 heads on 2 of 32, pages of 16.
ClattnLayerConfig layer_config(Dice& dice);
/// The limits that every batch of World::batch() keeps, now and then one that is odd.
ClattnStepOptions step_options(Dice& dice);

/// A batch and the arrays that it points into, which are as long as its counts say.
struct Batch {
  RandomBatch drawn;
  ClattnBatchInfo info;
};
Batch batch(World& world);

}  // namespace test::c
