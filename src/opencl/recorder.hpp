#pragma once

#include <clattn/opencl.hpp>

#include <cstddef>
#include <memory>
#include <vector>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// Launches with their arguments bound, enqueued again as often as wanted: through one
/// cl_khr_command_buffer where the device has them, else one by one. Immutable; holds its kernels
/// for itself and the buffers that they are bound to.
class Recording {
 public:
  struct Launch {
    std::shared_ptr<KernelPool> pool;
    KernelLease kernel;
    std::size_t items;
    std::size_t group_size;
  };

  Recording(cl_command_queue queue, std::vector<Launch> launches);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void replay(cl_command_queue queue, Event* event) const;
  std::size_t num_launches() const noexcept { return launches_.size(); }
  bool uses_command_buffer() const noexcept { return buffer_ != nullptr; }

 private:
  struct CommandBuffer;
  static std::unique_ptr<CommandBuffer> make_command_buffer(cl_command_queue queue,
                                                            const std::vector<Launch>& launches);
  Queue queue_;  ///< that the command buffer is for
  std::vector<Launch> launches_;
  std::unique_ptr<CommandBuffer> buffer_;
};

/// While it lives, launches that its thread makes on `queue` are kept instead of enqueued.
class Recorder {
 public:
  /// Throws kInvalidArgument if this thread records already.
  explicit Recorder(cl_command_queue queue);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// Whether this thread records any queue.
  static bool active() noexcept;
  /// This thread's recorder if it records `queue`, else null.
  static Recorder* of(cl_command_queue queue) noexcept;
  void add(Recording::Launch launch) { launches_.push_back(std::move(launch)); }
  /// Ends recording.
  std::unique_ptr<Recording> finish();

 private:
  cl_command_queue queue_;
  std::vector<Recording::Launch> launches_;
};

/// Throws kUnsupported naming `what` if this thread records the queue: for work that cannot be
/// replayed, because it uses memory of the call alone or changes with the batch.
void refuse_recording(cl_command_queue queue, std::string_view what);

}  // namespace clattn::detail
