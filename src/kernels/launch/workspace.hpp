#pragma once

#include <clattn/attention.hpp>
#include <cstddef>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// Bytes of the parts of an AttentionWorkspace, but for the fixed ones.
struct WorkspaceBytes {
  std::size_t counters = 0;  ///< of splits that kernels merge themselves
  std::size_t partial_lse2 = 0;
  std::size_t partial_out = 0;
};

/// Where they begin in its buffer, in words of four bytes, as ClaCall wants them. Counters come
/// first, at 0, tensor maps between them and the partial results.
struct WorkspaceLayout {
  cl_int tensor_maps_at = 0;
  cl_int partial_lse2_at = 0;
  cl_int partial_out_at = 0;
};
WorkspaceLayout layout_of(const AttentionWorkspace& workspace);

/// What a workspace has room for.
WorkspaceBytes room_of(const AttentionWorkspace& workspace);

/// Bytes that a workspace needs besides its counters of splits and partial results, at most.
std::size_t most_workspace_overhead();

/// What a new buffer gets room for: what the old one had and what is wanted, or the latter alone
/// where both need a buffer of more than `most_bytes`.
WorkspaceBytes grown_room(const WorkspaceBytes& room, const WorkspaceBytes& wanted,
                          std::size_t most_bytes);

/// Makes room: a new buffer if the old one is too small in any part. Counters are 0 in a new one
/// where they are wanted or the device has kernels that take tasks from a queue.
/// Throws kUnsupported for more than the device allocates.
void grow_workspace(AttentionWorkspace& workspace, const Runtime& runtime,
                    const WorkspaceBytes& wanted);

}  // namespace clattn::detail
