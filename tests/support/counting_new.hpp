#pragma once

#include <cstddef>
#include <exception>

#include "capture/capture_pause.hpp"

namespace test {

/// Calls of operator new so far on this thread: counting_new.cpp replaces it in every program that
/// links it.
std::size_t num_allocations();

/// While it lives, this thread's allocation of that number (from 1) fails, once.
class FailingAllocation {
 public:
  explicit FailingAllocation(std::size_t number);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;
  static bool has_failed();
};

/// Makes each allocation of `call` fail in turn, until one call meets none that does. Whatever is
/// thrown is caught; what ends the process is not.
template <typename Call>
std::size_t fail_each_allocation(const Call& call) {
  for (std::size_t number = 1;; ++number) {
    const FailingAllocation failing(number);
    try {
      call();
    } catch (const std::exception&) {
    }
    if (!FailingAllocation::has_failed()) return number - 1;
  }
}

template <typename Call>
std::size_t allocations_of(const Call& call) {
  const clattn::detail::CapturePause paused;  // captures allocate
  const std::size_t before = num_allocations();
  call();
  return num_allocations() - before;
}

}  // namespace test
