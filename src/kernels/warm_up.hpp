#pragma once

#include "capture/capture.hpp"
#include "kernels/launch/step_launch.hpp"

namespace clattn::detail {

/// Memory of nobody's, for launches that have nothing to do.
struct IdleMemory {
  /// Refuses a queue that is being recorded.
  IdleMemory(cl_command_queue queue, const AttentionKernels& kernels);

  CapturePause pause;  ///< its launches are no calls of the application's
  Buffer zeros;  ///< stands for every tensor: a page of the cache and a token's row fit into it
  Buffer slots;  ///< i64 [1]: kPadSlotId
  AttentionWorkspace workspace;  ///< without room for partial results
};

/// Launches every kernel of the layer's steps over padding alone: no tensor is read or written.
void launch_idle_step(cl_command_queue queue, const AttentionKernels& kernels, LayerCall layer,
                      const IdleMemory& memory);

}  // namespace clattn::detail
