// What launching and describing a kernel share.
#pragma once
#include <memory>

#include "driver/objects.hpp"

namespace amdemu {

/// The kernel as it was built for a device (null: the only one), and the image that holds it; null:
/// it was not.
const Kernel* kernel_on(cl_kernel kernel, cl_device_id device, std::shared_ptr<Image>* image);

}  // namespace amdemu
