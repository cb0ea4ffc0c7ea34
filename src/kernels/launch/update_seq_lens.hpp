#pragma once

#include <clattn/cache_ops.hpp>

namespace clattn::detail {

/// Throws what update_seq_lens() would throw for these arguments; enqueues nothing.
void check_update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                           const DeviceLengths& lengths, const DeviceErrors& errors);
/// update_seq_lens() for what has passed the check.
void enqueue_update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                             const DeviceLengths& lengths, const DeviceErrors& errors,
                             Event* event);

}  // namespace clattn::detail
