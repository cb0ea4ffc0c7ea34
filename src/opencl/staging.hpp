#pragma once

#include <array>
#include <clattn/context.hpp>
#include <concepts>
#include <cstddef>
#include <span>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// A typed range inside staged bytes.
template <typename T>
std::span<T> part(std::span<std::byte> bytes, std::size_t offset, std::integral auto count) {
  return {reinterpret_cast<T*>(bytes.data() + offset), static_cast<std::size_t>(count)};
}

/// A device buffer that is rewritten by one non-blocking write a step, from pinned host memory in a
/// small ring, so that filling the next step never waits for the previous upload. Grows when asked
/// for more than it holds; never shrinks. Not thread-safe.
class StagedUpload {
 public:
  explicit StagedUpload(Runtime& runtime) : runtime_(&runtime) {}
  ~StagedUpload() { release(); }
  StagedUpload(const StagedUpload&) = delete;
  StagedUpload& operator=(const StagedUpload&) = delete;

  /// Host memory for the next upload, at least `size_bytes`, 64-byte aligned; waits only if the
  /// ring's oldest upload is still under way. Valid until the next call. Refuses out-of-order
  /// queues, those of other contexts and null.
  std::span<std::byte> host(cl_command_queue queue, std::size_t size_bytes);
  /// Uploads the first `size_bytes` of host() to the start of buffer().
  void upload(cl_command_queue queue, std::size_t size_bytes, Event* event = nullptr);
  const Buffer& buffer() const noexcept { return device_; }

 private:
  static constexpr std::size_t kRing = 3;  // one being filled, one under way, one to spare
  struct Slot {
    Buffer pinned;
    void* mapped = nullptr;
    Event uploaded;
  };
  void grow(cl_command_queue queue, std::size_t size_bytes);
  void release() noexcept;

  Runtime* runtime_;
  Buffer device_;
  std::array<Slot, kRing> slots_;
  std::size_t current_ = 0;
  std::size_t capacity_bytes_ = 0;
  cl_command_queue in_order_ = nullptr;  ///< the queue last found to be in-order
  Queue queue_;                          ///< the queue that mapped the slots
};

}  // namespace clattn::detail
