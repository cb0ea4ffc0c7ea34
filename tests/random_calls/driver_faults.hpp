#pragma once

#include <cstdint>

/// driver_faults.cpp stands before the loader's OpenCL functions: calls of this process, the
/// library's included, fail at random before the driver sees them, and objects are counted.
namespace test::driver {

/// From now on about one call in `one_in` fails, with a status that the function may return; 0 =
/// none does. Only while no other thread calls. Waits, too, fail only once the work has ended: the
/// host's memory is in use till then.
void set_faults(std::uint64_t one_in, std::uint64_t seed = 0);
/// The faults of this thread's calls follow from it.
void seed_thread(std::uint64_t seed);
std::uint64_t num_calls();
std::uint64_t num_faults();
/// References to OpenCL objects that were created or retained and not released.
std::int64_t num_references();

}  // namespace test::driver
