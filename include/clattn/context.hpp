#pragma once

#include <clattn/opencl.hpp>

#include <clattn/types.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace CLATTN_API clattn {

struct Device;              // device.hpp
struct DeviceCapabilities;  // device.hpp

/// A buffer of device memory, counted by reference: copies share the cl_mem.
class Buffer {
 public:
  Buffer() = default;
  /// Retains an application's cl_mem.
  static Buffer adopt(cl_mem memory);
  /// Takes over one reference to `memory`, which holds at least `size_bytes`.
  static Buffer own(cl_mem memory, std::size_t size_bytes) noexcept { return {memory, size_bytes}; }
  Buffer(const Buffer& other);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(const Buffer& other);
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  /// Null if empty; the reference stays the buffer's.
  cl_mem handle() const noexcept { return memory_; }
  /// 0 if empty.
  std::size_t size_bytes() const noexcept { return size_bytes_; }
  /// Whether it has a cl_mem.
  explicit operator bool() const noexcept { return memory_ != nullptr; }

 private:
  Buffer(cl_mem owned, std::size_t size_bytes) noexcept : memory_(owned), size_bytes_(size_bytes) {}
  cl_mem memory_ = nullptr;
  std::size_t size_bytes_ = 0;
};

/// A completion event, counted by reference. Every call that enqueues can fill one.
class Event {
 public:
  Event() = default;
  Event(const Event& other);
  Event(Event&& other) noexcept;
  Event& operator=(const Event& other);
  Event& operator=(Event&& other) noexcept;
  ~Event();

  /// Null if empty; the reference stays the event's.
  cl_event handle() const noexcept { return event_; }
  /// Whether a call has filled it.
  explicit operator bool() const noexcept { return event_ != nullptr; }
  /// Blocks until the command has ended; returns at once for an empty event. Throws kOpenCL, also
  /// if the command failed.
  void wait() const;
  /// Device time from start to end; the queue must have been created with profiling.
  std::uint64_t duration_ns() const;
  /// Takes over one reference to `event` (what an enqueue call returned).
  void reset(cl_event event = nullptr) noexcept;

 private:
  cl_event event_ = nullptr;
};

/// What the host does with mapped memory.
enum class HostAccess : std::uint8_t { kRead, kWrite, kReadWrite };

class HostView;

/// An in-order command queue, counted by reference. Converts to the cl_command_queue that every
/// call takes.
class Queue {
 public:
  Queue() = default;
  /// Retains an application's queue.
  static Queue adopt(cl_command_queue queue);
  /// Takes over one reference to `queue`.
  static Queue own(cl_command_queue queue) noexcept;
  Queue(const Queue& other);
  Queue(Queue&& other) noexcept;
  Queue& operator=(const Queue& other);
  Queue& operator=(Queue&& other) noexcept;
  ~Queue();

  /// Null if empty; the reference stays the queue's.
  // NOLINTNEXTLINE(google-explicit-constructor): every call takes a cl_command_queue
  operator cl_command_queue() const noexcept { return queue_; }
  /// Hands what was enqueued to the device, without waiting.
  void flush() const;
  /// Blocks until everything enqueued has ended. Throws kOpenCL.
  void finish() const;
  /// Blocking copies between host and device; the range must lie inside the buffer.
  void write(const Buffer& destination, std::span<const std::byte> source,
             std::size_t offset_bytes = 0) const;
  /// As write(), from the device.
  void read(const Buffer& source, std::span<std::byte> destination,
            std::size_t offset_bytes = 0) const;
  /// The same without waiting. The host memory must stay alive, and unchanged by others, until
  /// `event` or a later synchronisation of the queue.
  void write_async(const Buffer& destination, std::span<const std::byte> source,
                   std::size_t offset_bytes = 0, Event* event = nullptr) const;
  /// As write_async(), from the device.
  void read_async(const Buffer& source, std::span<std::byte> destination,
                  std::size_t offset_bytes = 0, Event* event = nullptr) const;
  /// Lets the host see a whole buffer in place, after the queue's earlier commands; blocks. Devices
  /// whose memory the host cannot reach copy it here and back.
  HostView map(const Buffer& buffer, HostAccess access) const;
  /// Fills a range with a repeated 4-byte pattern; offset and size are multiples of 4.
  /// Asynchronous.
  void fill(const Buffer& destination, std::uint32_t pattern, std::size_t offset_bytes,
            std::size_t size_bytes) const;

 private:
  cl_command_queue queue_ = nullptr;
};

/// A buffer's bytes, mapped for the host while this object lives; destroying it returns them to the
/// queue's later commands. Kernels must not use the buffer meanwhile. Not for several threads at
/// once.
class HostView {
 public:
  HostView() = default;
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;
  HostView(HostView&& other) noexcept;
  HostView& operator=(HostView&& other) noexcept;
  ~HostView();

  /// HostAccess::kRead: not to be written to; kWrite: its content is undefined at first.
  std::span<std::byte> bytes() const noexcept {
    return {static_cast<std::byte*>(mapped_), mapped_ == nullptr ? 0 : buffer_.size_bytes()};
  }

 private:
  friend class Queue;
  Queue queue_;
  Buffer buffer_;
  void* mapped_ = nullptr;
};

/// Whether a queue measures its commands.
enum class QueueProfiling : std::uint8_t { kOff, kOn };

/// Everything slow and shared about one (cl_context, device): capabilities, compiled programs,
/// kernel pools. Create one and keep it; every member is thread-safe. Copies of the shared_ptr keep
/// it alive.
class Context {
 public:
  /// Makes an OpenCL context on the device that select_device(selector) chooses.
  static std::shared_ptr<Context> create(std::string_view selector = {});
  /// On a device of list_devices().
  static std::shared_ptr<Context> create(const Device& device);
  /// Retains an application's context; `device` must belong to it.
  static std::shared_ptr<Context> adopt(cl_context context, cl_device_id device);
  /// The Context of a queue's context and device: one that was made before and is still alive, else
  /// a new one as adopt() makes it.
  static std::shared_ptr<Context> of(cl_command_queue queue);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// The reference stays the context's.
  cl_context handle() const noexcept;
  /// The device's handle, which belongs to the driver.
  cl_device_id device() const noexcept;
  /// What the driver reports and what self-tests found.
  const DeviceCapabilities& capabilities() const noexcept;

  /// Kernels for this device that its driver has failed to build so far, and backends that cannot
  /// run without theirs; each once, with the driver's reason, file and line. Where other kernels do
  /// their work instead, it takes longer.
  std::vector<std::string> build_failures() const;
  /// Why compiled programs and self-test results are not kept in CLATTN_CACHE_DIR, although it is
  /// set; empty = they are. Without them, start-up takes longer.
  std::string program_cache_problem() const;

  /// An in-order queue on the device; with profiling, Event::duration_ns() works for its commands.
  Queue create_queue(QueueProfiling profiling = QueueProfiling::kOff) const;
  /// Uninitialised device memory. Refused with the numbers when larger than the device allows.
  Buffer allocate(std::size_t size_bytes) const;
  /// A buffer over memory of the application, which must outlive it. CPUs and GPUs that share the
  /// host's memory work on it in place, some only if it begins at a page boundary and ends at that
  /// of a cache line; others work on a copy. Either way the host reads and writes it through
  /// Queue::map() only. Throws kInvalidArgument if it is empty.
  Buffer share(std::span<std::byte> memory) const;

  /// For the library's own sources, which define it.
  auto& runtime() const noexcept;

 private:
  explicit Context(std::shared_ptr<void> runtime) noexcept : runtime_(std::move(runtime)) {}
  std::shared_ptr<void> runtime_;
};

}  // namespace clattn
