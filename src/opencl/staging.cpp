#include "opencl/staging.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {
namespace {

void require_queue_of(cl_context context, cl_command_queue queue) {
  throw_invalid_if(queue == nullptr, "queue: null, legal: a queue of the builder's context");
  cl_context owner = nullptr;
  check(clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof(cl_context), &owner, nullptr),
        "reading the context of the command queue");
  throw_invalid_if(owner != context,
                   "queue: of another context, legal: a queue of the builder's context");
}

}  // namespace

void StagedUpload::release() noexcept {
  for (Slot& slot : slots_) {
    if (slot.mapped != nullptr) {
      // An upload still under way, on whatever queue, reads this memory.
      if (const cl_event done = slot.uploaded.handle()) clWaitForEvents(1, &done);
      clEnqueueUnmapMemObject(queue_, slot.pinned.handle(), slot.mapped, 0, nullptr, nullptr);
    }
    slot = Slot{};
  }
  if (queue_ != nullptr) clFinish(queue_);
}

void StagedUpload::grow(cl_command_queue queue, std::size_t size_bytes) {
  constexpr std::size_t kSmallest = std::size_t{64} << 10;
  const std::size_t wanted =
      std::max({size_bytes, capacity_bytes_ + capacity_bytes_ / 2, kSmallest});
  release();
  capacity_bytes_ = 0;
  queue_ = Queue::adopt(queue);
  for (Slot& slot : slots_) {
    slot.pinned = runtime_->allocate_pinned(wanted);
    cl_int status = CL_SUCCESS;
    slot.mapped =
        clEnqueueMapBuffer(queue, slot.pinned.handle(), CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0,
                           wanted, 0, nullptr, nullptr, &status);
    check(status, "clEnqueueMapBuffer of the metadata staging memory");
  }
  device_ = runtime_->allocate(wanted);
  capacity_bytes_ = wanted;
}

std::span<std::byte> StagedUpload::host(cl_command_queue queue, std::size_t size_bytes) {
  throw_invalid_if(Recorder::of(queue) != nullptr,
                   "queue: it is being recorded; legal: metadata built before the capture");
  if (queue == nullptr || queue != in_order_) {
    require_queue_of(runtime_->context(), queue);
    require_in_order(queue);
    in_order_ = queue;
  }
  if (size_bytes > capacity_bytes_) grow(queue, size_bytes);
  current_ = (current_ + 1) % kRing;
  Slot& slot = slots_.at(current_);
  if (slot.uploaded) slot.uploaded.wait();
  return {static_cast<std::byte*>(slot.mapped), capacity_bytes_};
}

void StagedUpload::upload(cl_command_queue queue, std::size_t size_bytes, Event* event) {
  if (event != nullptr) event->reset();
  if (size_bytes == 0) return;  // an empty batch
  Slot& slot = slots_.at(current_);
  enqueue_write(queue, device_, {static_cast<const std::byte*>(slot.mapped), size_bytes},
                {.event = &slot.uploaded});
  if (event != nullptr) *event = slot.uploaded;
}

}  // namespace clattn::detail
