#pragma once

#include <cstddef>

namespace test {

/// Calls of operator new so far, in the whole program: counting_new.cpp replaces it.
std::size_t num_allocations();

template <typename Call>
std::size_t allocations_of(const Call& call) {
  const std::size_t before = num_allocations();
  call();
  return num_allocations() - before;
}

}  // namespace test
