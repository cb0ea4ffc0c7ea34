#pragma once

#include <cstddef>

namespace test {

/// Device buffers that this program, its libraries included, has created so far:
/// counting_buffers.cpp stands before the loader's clCreateBuffer.
std::size_t num_buffers();
/// The same of writes to buffers.
std::size_t num_writes();

/// While it lives, new buffers hold 0xFF, as memory that was used before may.
struct DirtyBuffers {
  DirtyBuffers();
  ~DirtyBuffers();
  DirtyBuffers(const DirtyBuffers&) = delete;
  DirtyBuffers& operator=(const DirtyBuffers&) = delete;
};

}  // namespace test
