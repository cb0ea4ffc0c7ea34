#include "kernels/launch/workspace.hpp"

#include <algorithm>
#include <utility>

#include "base/checked.hpp"
#include "opencl/device/device_info.hpp"
#include "shared/work_item.h"

namespace clattn::detail {

namespace {

constexpr std::size_t kAlignment = 256;  // at least a tensor map's, 128
constexpr std::size_t kTensorMapBytes = round_up(2 * sizeof(cl_int) * CLA_MAP_INTS, kAlignment);
constexpr std::size_t kQueueBytes = CLA_QUEUE_INTS * sizeof(cl_int);

std::size_t results_at(const AttentionWorkspace& workspace) {
  return workspace.counter_bytes + kTensorMapBytes;
}

/// A workspace with room for these, but no buffer yet, and the size of its buffer.
std::pair<AttentionWorkspace, std::size_t> sized(const WorkspaceBytes& room) {
  AttentionWorkspace workspace;
  workspace.counter_bytes = round_up(kQueueBytes + room.counters, kAlignment);
  workspace.partial_lse2_bytes = round_up(room.partial_lse2, kAlignment);
  return {workspace, results_at(workspace) + workspace.partial_lse2_bytes + room.partial_out};
}

}  // namespace

WorkspaceLayout layout_of(const AttentionWorkspace& workspace) {
  const auto in_words = [](std::size_t bytes) {
    return static_cast<cl_int>(bytes / sizeof(cl_int));
  };
  const std::size_t results = results_at(workspace);
  return {.tensor_maps_at = in_words(workspace.counter_bytes),
          .partial_lse2_at = in_words(results),
          .partial_out_at = in_words(results + workspace.partial_lse2_bytes)};
}

WorkspaceBytes room_of(const AttentionWorkspace& workspace) {
  if (!workspace.buffer) return {};
  return {.counters = workspace.counter_bytes - kQueueBytes,
          .partial_lse2 = workspace.partial_lse2_bytes,
          .partial_out =
              workspace.buffer.size_bytes() - results_at(workspace) - workspace.partial_lse2_bytes};
}

std::size_t most_workspace_overhead() {
  return 3 * kAlignment + kQueueBytes + kTensorMapBytes;
}

WorkspaceBytes grown_room(const WorkspaceBytes& room, const WorkspaceBytes& wanted,
                          std::size_t most_bytes) {
  const WorkspaceBytes both{.counters = std::max(room.counters, wanted.counters),
                            .partial_lse2 = std::max(room.partial_lse2, wanted.partial_lse2),
                            .partial_out = std::max(room.partial_out, wanted.partial_out)};
  return sized(both).second <= most_bytes ? both : wanted;
}

void grow_workspace(AttentionWorkspace& workspace, const Runtime& runtime,
                    const WorkspaceBytes& wanted) {
  const WorkspaceBytes room = room_of(workspace);
  const bool counts = wanted.counters > 0 || takes_single_items(runtime.capabilities());
  if (workspace.buffer && (workspace.counters_ready || !counts) &&
      room.counters >= wanted.counters && room.partial_lse2 >= wanted.partial_lse2 &&
      room.partial_out >= wanted.partial_out) {
    return;
  }
  auto [grown, bytes] = sized(grown_room(room, wanted, runtime.capabilities().max_alloc_bytes));
  grown.buffer = runtime.allocate(bytes);
  grown.counters_ready = counts || workspace.counters_ready;
  if (grown.counters_ready) {
    const Queue queue = runtime.create_queue(QueueProfiling::kOff);
    queue.fill(grown.buffer, 0, 0, grown.counter_bytes);
    queue.finish();
  }
  workspace = std::move(grown);
}

}  // namespace clattn::detail
