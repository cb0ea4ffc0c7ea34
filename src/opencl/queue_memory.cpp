#include "opencl/queue_memory.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "opencl/recorder.hpp"
#include "opencl/runtime.hpp"

namespace clattn::detail {

std::size_t QueueMemory::most_bytes() const noexcept {
  const auto most = static_cast<std::size_t>(runtime_->capabilities().max_alloc_bytes);
  return std::min(most_bytes_.load(), most);
}

QueueMemory::Lease QueueMemory::reserve(cl_command_queue queue, std::size_t size_bytes) {
  Lease lease;
  if (Recorder* recorder = Recorder::of(queue)) {
    grow(recorder->memory(), size_bytes);
    lease.memory_ = recorder->memory();
    return lease;
  }
  lease.entry_ = entry_of(queue);
  lease.in_use_ = std::unique_lock(lease.entry_->in_use);
  grow(lease.entry_->memory, size_bytes);
  lease.memory_ = lease.entry_->memory;
  return lease;
}

/// Of a few queues: the driver keeps a buffer until the commands that use it have ended, so the one
/// of a queue that was not used for long may go at any time, and so may one that grows. A queue
/// whose handle another one had before finds what that one left, whose commands have ended.
std::shared_ptr<QueueMemory::Entry> QueueMemory::entry_of(cl_command_queue queue) {
  constexpr std::size_t kMost = 4;
  const std::scoped_lock lock(mutex_);
  const auto own =
      std::ranges::find_if(entries_, [&](const OfQueue& one) { return one.queue == queue; });
  if (own == entries_.end()) {
    entries_.push_front({queue, std::make_shared<Entry>()});
    if (entries_.size() > kMost) entries_.pop_back();
  } else {
    entries_.splice(entries_.begin(), entries_, own);
  }
  return entries_.front().entry;
}

void QueueMemory::grow(Buffer& memory, std::size_t size_bytes) const {
  if (memory && memory.size_bytes() >= size_bytes) return;
  constexpr std::size_t kSmallest = std::size_t{1} << 20;
  const auto most = static_cast<std::size_t>(runtime_->capabilities().max_alloc_bytes);
  const std::size_t rounded = std::min(std::bit_ceil(std::max(size_bytes, kSmallest)), most);
  memory = {};
  memory = runtime_->allocate(std::max(rounded, size_bytes));
}

}  // namespace clattn::detail
