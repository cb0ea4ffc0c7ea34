#pragma once

#include <cstddef>

namespace test {

/// Device buffers that this program, its libraries included, has created so far:
/// counting_buffers.cpp stands before the loader's clCreateBuffer.
std::size_t num_buffers();

}  // namespace test
