// Where kernels may read and write: every buffer, code object and argument segment is registered.
#pragma once
#include <cstddef>
#include <cstdint>

namespace amdemu {

void register_range(const void* begin, std::size_t size);
void forget_range(const void* begin);

/// Whether all of it lies in one range, or nothing is checked (AMDEMU_CHECK=0). Takes a lock only
/// where it is not in a range that the thread met of late.
bool may_access(std::uint64_t address, std::uint64_t size);

}  // namespace amdemu
