// The devices there are, and their limits.
#pragma once
#include <vector>

#include "driver/api.hpp"
#include "machine/chips.hpp"

namespace amdemu {

constexpr std::size_t kBufferAlignment = 256;  // bytes; sub-buffers begin at a multiple

const std::vector<cl_device_id>& all_devices();
cl_ulong largest_buffer(const Chip& chip);

}  // namespace amdemu
