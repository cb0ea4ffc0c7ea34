#pragma once

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// A new in-order queue, the caller's to release.
cl_command_queue create_command_queue(cl_context context, cl_device_id device,
                                      QueueProfiling profiling);

}  // namespace clattn::detail
