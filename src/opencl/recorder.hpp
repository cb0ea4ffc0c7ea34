#pragma once

#include <clattn/opencl.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <clattn/graph.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// What the memory that recorded launches read holds by now, as its builder says to replays.
struct PreparedStep {
  std::atomic<std::int32_t> batch_size = 0;  ///< of the recorded steps that it was laid out for
  /// Work entries of each of the step's launches; those after them in the memory are padding.
  std::array<std::atomic<std::int32_t>, 5> num_used{};
};

/// Launches with their arguments bound, enqueued again as often as wanted: through one
/// cl_khr_command_buffer where that pays or is wanted, else one by one, without the padding.
/// Immutable; holds its kernels for itself and the buffers that they are bound to.
class Recording {
 public:
  struct Launch {
    std::shared_ptr<KernelPool> pool;
    KernelLease kernel;
    std::size_t items;
    std::size_t group_size;
    /// Work entries that this step needs, each worth `items_per_entry` as far as `items` go; null =
    /// all of `items`.
    const std::atomic<std::int32_t>* num_used = nullptr;
    std::size_t items_per_entry = 0;

    std::size_t items_needed() const noexcept {
      if (num_used == nullptr) return items;
      return std::min(items, static_cast<std::size_t>(num_used->load()) * items_per_entry);
    }
  };
  /// Memory that must be prepared for this size before a replay.
  struct Requirement {
    std::shared_ptr<const PreparedStep> step;
    std::int32_t batch_size;
  };

  Recording(cl_command_queue queue, std::vector<Launch> launches,
            std::vector<Requirement> requirements, ReplayMode mode);
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
  std::vector<Requirement> requirements_;
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
  /// What is recorded reads the memory of `step` as it is laid out now.
  void require(const std::shared_ptr<const PreparedStep>& step);
  /// Replays need no more work-groups of the last launch than `groups_each` of `num_used` entries.
  void limit_last(const std::atomic<std::int32_t>& num_used, std::size_t groups_each);
  /// Memory that launches of one call leave to each other, shared by all that is recorded.
  Buffer& memory() noexcept { return memory_; }
  /// Ends recording.
  std::unique_ptr<Recording> finish(ReplayMode mode);

 private:
  cl_command_queue queue_;
  std::vector<Recording::Launch> launches_;
  std::vector<Recording::Requirement> requirements_;
  Buffer memory_;
};

/// Throws kUnsupported naming `what` if this thread records the queue: for work that cannot be
/// replayed, because it uses memory of the call alone or changes with the batch.
void refuse_recording(cl_command_queue queue, std::string_view what);

/// Runs what adds a call's results to its case, once the call is enqueued. A recorded call has run
/// nothing yet.
inline void add_results(const std::function<void()>& add, cl_command_queue queue) {
  if (add && Recorder::of(queue) == nullptr) add();
}

}  // namespace clattn::detail
