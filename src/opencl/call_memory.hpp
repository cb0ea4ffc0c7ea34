#pragma once

#include <clattn/context.hpp>
#include <cstddef>
#include <list>
#include <mutex>
#include <span>
#include <vector>

namespace clattn::detail {

class Runtime;

/// Device memory of single calls: what their host arrays are uploaded to, and what one kernel
/// leaves for the next. Buffers are kept for later calls, because drivers may take longer to make
/// one than the rest of the call takes. Thread-safe. Destruction waits for uploads under way.
class CallMemory {
  struct Entry {
    Entry() = default;
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    ~Entry();
    Buffer device;
    std::vector<std::byte> host;  ///< what the upload reads
    Event last_use;
  };
  using Entries = std::list<Entry>;

 public:
  explicit CallMemory(const Runtime& runtime) : runtime_(&runtime) {}
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  /// The memory of one call, given back on destruction; nobody else gets it before its upload, or
  /// what used_until() named last, has ended.
  class Lease {
   public:
    Lease(CallMemory& memory, Entries entry) noexcept;
    Lease(Lease&& other) noexcept = default;
    Lease& operator=(Lease&&) = delete;
    ~Lease();
    const Buffer& buffer() const noexcept { return entry_.front().device; }
    /// `event`: what the caller gets of `last_use`, or null.
    void used_until(const Event& last_use, Event* event = nullptr);

   private:
    friend class CallMemory;
    CallMemory* memory_;
    Entries entry_;  ///< one; none once moved from
  };

  /// A buffer of at least this many bytes, of any content.
  Lease reserve(std::size_t size_bytes);
  /// A buffer that starts with a copy of `content` for all that `queue` is given from now on.
  Lease upload(cl_command_queue queue, std::span<const std::byte> content);

 private:
  Entries take();

  const Runtime* runtime_;
  std::mutex mutex_;
  Entries free_;  ///< in the order in which they were given back
};

}  // namespace clattn::detail
