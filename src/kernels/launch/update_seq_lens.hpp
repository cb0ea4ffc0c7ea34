#pragma once

#include <clattn/cache_ops.hpp>
#include <memory>

#include "kernels/choose/attention_kernels.hpp"

namespace clattn::detail {

/// Throws what update_seq_lens() would throw for these arguments; enqueues nothing.
void check_update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                           const DeviceLengths& lengths, const DeviceErrors& errors);
/// Who wrote the lengths. A row without a slot attends to nothing if advance_step() wrote them,
/// since it left that row out; an application's row may attend without storing.
enum class LengthsFrom : std::uint8_t { kApplication, kAdvanceStep };
/// update_seq_lens() for arguments that have passed check_update_seq_lens().
void enqueue_update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                             const DeviceLengths& lengths, const DeviceErrors& errors, Event* event,
                             LengthsFrom from);
/// Launches update_seq_lens()'s kernel once without work and waits
/// (AttentionMetadataBuilder::warm_up()).
void warm_up_seq_lens(cl_command_queue queue, const AttentionKernels& kernels,
                      const PlannerConfig& planner, const std::shared_ptr<KernelPool>& cut_tiles);

}  // namespace clattn::detail
