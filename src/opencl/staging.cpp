#include "opencl/staging.hpp"

#include <algorithm>
#include <bit>

#include "base/error.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {
namespace {

void require_queue_of(cl_context context, cl_command_queue queue) {
  throw_invalid_if(queue == nullptr, "queue: null, legal: a queue of the builder's context");
  throw_invalid_if(queue_value<cl_context>(queue, CL_QUEUE_CONTEXT) != context,
                   "queue: of another context, legal: a queue of the builder's context");
}

}  // namespace

StagedUpload::~StagedUpload() {
  for (const Slot& slot : slots_) {
    if (const cl_event done = slot.uploaded.handle()) clWaitForEvents(1, &done);
  }
  slots_.clear();
  if (mapping_ != nullptr) drain(mapping_);
}

void StagedUpload::add_slot(std::size_t size_bytes) {
  constexpr std::size_t kSmallest = std::size_t{64} << 10;
  if (mapping_ == nullptr) mapping_ = runtime_->create_queue(QueueProfiling::kOff);
  const Buffer pinned = runtime_->allocate_pinned(std::max(size_bytes, kSmallest));
  slots_.push_back({mapping_.map(pinned, HostAccess::kReadWrite), {}});
}

void StagedUpload::grow(std::size_t size_bytes) {
  constexpr std::size_t kAtFirst = 3;  // one being filled, one under way, one to spare
  constexpr std::size_t kExpected = 64;
  const std::size_t capacity = device_.size_bytes();
  const std::size_t wanted = std::max(size_bytes, capacity + capacity / 2);
  device_ = runtime_->allocate(wanted);
  slots_.reserve(kExpected);
  std::erase_if(slots_, [](const Slot& slot) { return has_ended(slot.uploaded); });
  for (std::size_t i = 0; i < kAtFirst; ++i) add_slot(wanted);
}

/// The slot whose upload ended longest ago, or a new one.
std::size_t StagedUpload::free_slot(cl_command_queue queue, std::size_t size_bytes) {
  for (std::size_t i = 1; i <= slots_.size(); ++i) {
    const std::size_t at = (current_ + i) % slots_.size();
    if (slots_[at].holds(size_bytes) && has_ended(slots_[at].uploaded)) return at;
  }
  // Drivers may keep back what nobody flushed; then none of these uploads would ever end.
  check(clFlush(queue), "clFlush");
  add_slot(std::bit_ceil(size_bytes));
  return slots_.size() - 1;
}

std::span<std::byte> StagedUpload::host(cl_command_queue queue, std::size_t size_bytes) {
  throw_invalid_if(Recorder::of(queue) != nullptr,
                   "queue: it is being recorded; legal: metadata built before the capture");
  if (queue == nullptr || queue != in_order_) {
    require_queue_of(runtime_->context(), queue);
    require_in_order(queue);
    in_order_ = queue;
  }
  if (size_bytes > device_.size_bytes()) grow(size_bytes);
  current_ = free_slot(queue, size_bytes);
  return slots_[current_].memory.bytes();
}

void StagedUpload::upload(cl_command_queue queue, std::size_t size_bytes, Event* event) {
  if (event != nullptr) event->reset();
  if (size_bytes == 0) return;  // an empty batch
  Slot& slot = slots_[current_];
  enqueue_write(queue, device_, slot.memory.bytes().first(size_bytes), {.event = &slot.uploaded});
  if (event != nullptr) *event = slot.uploaded;
}

}  // namespace clattn::detail
