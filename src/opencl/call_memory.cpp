#include "opencl/call_memory.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "opencl/runtime.hpp"

namespace clattn::detail {

CallMemory::Entry::~Entry() {
  // An upload still under way reads `host`.
  if (const cl_event use = last_use.handle()) clWaitForEvents(1, &use);
}

CallMemory::Lease::Lease(CallMemory& memory, Entries entry) noexcept
    : memory_(&memory), entry_(std::move(entry)) {}

CallMemory::Lease::~Lease() {
  constexpr std::size_t kMost = 16;
  Entries dropped;
  const std::scoped_lock lock(memory_->mutex_);
  Entries& free = memory_->free_;
  free.splice(free.end(), entry_);
  if (free.size() > kMost && has_ended(free.front().last_use))
    dropped.splice(dropped.end(), free, free.begin());
}

void CallMemory::Lease::used_until(const Event& last_use, Event* event) {
  entry_.front().last_use = last_use;
  if (event != nullptr) *event = last_use;
}

CallMemory::Lease CallMemory::reserve(std::size_t size_bytes) {
  Lease lease(*this, take());
  Entry& entry = lease.entry_.front();
  if (!entry.device || entry.device.size_bytes() < size_bytes) {
    constexpr std::size_t kSmallest = std::size_t{64} << 10;
    entry.device = runtime_->allocate(std::max(std::bit_ceil(size_bytes), kSmallest));
  }
  return lease;
}

CallMemory::Lease CallMemory::upload(cl_command_queue queue, std::span<const std::byte> content) {
  Lease lease = reserve(content.size());
  Entry& entry = lease.entry_.front();
  entry.host.assign(content.begin(), content.end());
  enqueue_write(queue, entry.device, entry.host, {.event = &entry.last_use});
  keep_order(queue, entry.last_use);
  return lease;
}

/// Memory that is in no use, else new one: a wait could be for what the caller has still to do.
CallMemory::Entries CallMemory::take() {
  Entries entry;
  const std::scoped_lock lock(mutex_);
  const auto ended =
      std::ranges::find_if(free_, [](const Entry& one) { return has_ended(one.last_use); });
  if (ended == free_.end()) {
    entry.emplace_back();
  } else {
    entry.splice(entry.end(), free_, ended);
    entry.front().last_use = {};
  }
  return entry;
}

}  // namespace clattn::detail
