#pragma once

#include "capture/capture.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

/// Adds what a call gave to its case, once it is enqueued. A recorded call has run nothing yet.
inline void add_results(const AddResults& add, cl_command_queue queue) {
  if (add && Recorder::of(queue) == nullptr) add();
}

}  // namespace clattn::detail
