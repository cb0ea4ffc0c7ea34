#pragma once

#include <cstddef>

namespace test {

/// Calls of operator new so far on this thread: counting_new.cpp replaces it in every program that
/// links it.
std::size_t num_allocations();

template <typename Call>
std::size_t allocations_of(const Call& call) {
  const std::size_t before = num_allocations();
  call();
  return num_allocations() - before;
}

}  // namespace test
