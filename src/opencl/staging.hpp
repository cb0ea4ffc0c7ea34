#pragma once

#include <clattn/context.hpp>
#include <concepts>
#include <cstddef>
#include <span>
#include <vector>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// A typed range inside staged bytes.
template <typename T>
std::span<T> part(std::span<std::byte> bytes, std::size_t offset, std::integral auto count) {
  return {reinterpret_cast<T*>(bytes.data() + offset), static_cast<std::size_t>(count)};
}

/// A device buffer that is rewritten by one non-blocking write a step, from pinned host memory that
/// no upload under way reads: what has been uploaded is used again, and where all of it still
/// waits, more is taken, so that filling the next step never waits. Grows when asked for more than
/// it holds; never shrinks. Not thread-safe. Destruction waits for uploads under way.
class StagedUpload {
 public:
  explicit StagedUpload(Runtime& runtime) : runtime_(&runtime) {}
  ~StagedUpload();
  StagedUpload(const StagedUpload&) = delete;
  StagedUpload& operator=(const StagedUpload&) = delete;

  /// Host memory for the next upload, at least `size_bytes`, 64-byte aligned. Valid until the next
  /// call. Refuses out-of-order queues, those of other contexts and null.
  std::span<std::byte> host(cl_command_queue queue, std::size_t size_bytes);
  /// Uploads the first `size_bytes` of host() to the start of buffer().
  void upload(cl_command_queue queue, std::size_t size_bytes, Event* event = nullptr);
  const Buffer& buffer() const noexcept { return device_; }

 private:
  struct Slot {
    HostView memory;
    Event uploaded;
    bool holds(std::size_t size_bytes) const { return memory.bytes().size() >= size_bytes; }
  };
  void add_slot(std::size_t size_bytes);
  void grow(std::size_t size_bytes);
  std::size_t free_slot(cl_command_queue queue, std::size_t size_bytes);

  Runtime* runtime_;
  Buffer device_;
  std::vector<Slot> slots_;
  std::size_t current_ = 0;
  cl_command_queue in_order_ = nullptr;  ///< the queue last found to be in-order
  Queue mapping_;                        ///< a queue of its own, where no work can hold up a map
};

}  // namespace clattn::detail
