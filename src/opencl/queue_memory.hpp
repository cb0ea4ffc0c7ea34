#pragma once

#include <clattn/opencl.hpp>

#include <atomic>
#include <clattn/context.hpp>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>

namespace clattn::detail {

class Runtime;

/// Device memory that the launches of one call leave to each other. Calls on an in-order queue
/// follow one another, so that they share one buffer without waiting, however far the host is
/// ahead; it grows to what the largest call needs. Thread-safe.
class QueueMemory {
  struct Entry {
    std::mutex in_use;
    Buffer memory;
  };

 public:
  explicit QueueMemory(const Runtime& runtime) : runtime_(&runtime) {}

  /// The queue's memory, of any content. While it lives no other thread gets it, so that no call's
  /// launches come between those of another one.
  class Lease {
   public:
    const Buffer& buffer() const noexcept { return memory_; }

   private:
    friend class QueueMemory;
    std::shared_ptr<Entry> entry_;
    std::unique_lock<std::mutex> in_use_;
    Buffer memory_;
  };

  /// At least so many bytes. What a thread records (recorder.hpp) shares a buffer of its own, since
  /// it may be replayed on another queue.
  Lease reserve(cl_command_queue queue, std::size_t size_bytes);

  /// What a call should stay within, as far as it can do its work in turns.
  std::size_t most_bytes() const noexcept;
  void set_most_bytes(std::size_t bytes) noexcept { most_bytes_ = bytes; }

 private:
  struct OfQueue {
    cl_command_queue queue;
    std::shared_ptr<Entry> entry;
  };
  std::shared_ptr<Entry> entry_of(cl_command_queue queue);
  void grow(Buffer& memory, std::size_t size_bytes) const;

  const Runtime* runtime_;
  std::atomic<std::size_t> most_bytes_ = std::size_t{256} << 20;
  std::mutex mutex_;
  std::list<OfQueue> entries_;  ///< the last used first
};

}  // namespace clattn::detail
