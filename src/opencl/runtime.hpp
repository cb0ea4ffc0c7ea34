#pragma once

#include <clattn/device.hpp>
#include <clattn/opencl.hpp>

#include <atomic>
#include <clattn/context.hpp>
#include <clattn/error.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "opencl/call_memory.hpp"
#include "opencl/driver.hpp"
#include "opencl/program/program_cache.hpp"
#include "opencl/program/source.hpp"
#include "opencl/queue_memory.hpp"

namespace clattn::detail {

/// Of every program. -w: PoCL counts a build's warnings on the application's stderr; lint reads
/// them.
inline constexpr std::string_view kBuildOptions = "-cl-std=CL1.2 -w";

/// Which kernel to build: an entry of an embedded (or CLATTN_KERNEL_DIR) file under a set of
/// options.
struct KernelSource {
  std::string file;       ///< "attention/cpu/decode_cpu.cl"
  std::string entry;      ///< "clattn_decode_cpu"
  std::string options;    ///< "-DCLA_HEAD_DIM=128 …"; kBuildOptions stand before
  std::string unit = {};  ///< what it includes as tile/unit.clh: "tile/sm80.clh"
};

class KernelPool;

/// Exclusive use of one cl_kernel, returned to its pool on destruction.
class KernelLease {
 public:
  KernelLease(KernelPool& pool, KernelHandle kernel) noexcept
      : pool_(&pool), kernel_(std::move(kernel)) {}
  KernelLease(KernelLease&& other) noexcept = default;
  KernelLease& operator=(KernelLease&&) = delete;
  ~KernelLease();

  /// Sets the next argument, in order from 0. T: cl_mem, cl_int, cl_uint, cl_long, cl_ulong or
  /// cl_float.
  template <typename T>
  KernelLease& arg(const T& value) {
    if constexpr (std::is_same_v<T, cl_mem>) keep_if_recording(value);
    set(sizeof(T), &value);  // NOLINT(bugprone-sizeof-expression): a cl_mem's own size is meant
    return *this;
  }
  KernelLease& arg(const Buffer& buffer) { return arg(buffer.handle()); }
  /// The same of several, in their order.
  template <typename... T>
  KernelLease& args(const T&... values) {
    (arg(values), ...);
    return *this;
  }
  /// Enqueues `groups` work-groups of `group_size` items; the next arg() is argument 0 again. Zero
  /// groups enqueue nothing. While this thread records the queue (recorder.hpp), the launch goes
  /// there together with the kernel. `event` stays empty in both cases.
  void enqueue(cl_command_queue queue, std::size_t groups, std::size_t group_size,
               Event* event = nullptr);
  cl_kernel handle() const noexcept { return kernel_.get(); }

 private:
  void set(std::size_t size, const void* value);
  /// Launches that may be recorded keep their buffers alive: drivers do not.
  void keep_if_recording(cl_mem buffer);
  KernelPool* pool_;
  KernelHandle kernel_;  ///< none once moved from
  cl_uint next_arg_ = 0;
  std::vector<Buffer> kept_;
};

/// The cl_kernel objects of one entry: grows to the number of threads that use it at once, never
/// shares one.
class KernelPool : public std::enable_shared_from_this<KernelPool> {
 public:
  KernelPool(cl_program program, cl_device_id device, std::string entry);  ///< retains the program

  KernelLease acquire();
  const std::string& entry() const noexcept { return entry_; }
  /// As built. Private memory: with what Intel's driver reports as spilled, both per hardware
  /// thread there.
  std::size_t work_group_size() const noexcept { return work_group_size_; }
  std::uint64_t private_mem_bytes() const noexcept { return private_mem_bytes_; }
  std::uint64_t local_mem_bytes() const noexcept { return local_mem_bytes_; }

 private:
  friend class KernelLease;
  KernelHandle create();
  ProgramHandle program_;
  std::string entry_;
  std::mutex mutex_;
  std::atomic<bool> launched_ = false;
  std::vector<KernelHandle> free_;  // has room for all of them: giving back cannot fail
  std::size_t created_ = 0;
  std::size_t work_group_size_ = 0;
  std::uint64_t private_mem_bytes_ = 0;
  std::uint64_t local_mem_bytes_ = 0;
};

/// Where a Runtime finds kernels and keeps what it learned and built.
struct RuntimeOptions {
  std::string kernel_dir;          ///< files here replace the embedded ones; empty = none
  std::string cache_dir;           ///< empty = no disk cache
  std::string tuning_file;         ///< the user's rows; empty = none
  bool keep_all_binaries = false;  ///< even on drivers whose own cache is the better one
};
/// As the environment says.
RuntimeOptions default_runtime_options();

/// Where a Runtime's programs came from so far.
struct BuildCounts {
  std::uint64_t from_source = 0;
  std::uint64_t from_cache = 0;
};

class TuningTable;

/// A context's tuning rows. Every set_tuning() has a revision of its own.
struct RuntimeTuning {
  std::shared_ptr<const TuningTable> table;
  std::uint64_t revision = 0;
};

/// One shared object per key, made by the first who asks while the others wait. A Stored of
/// shared_ptr keeps objects for good, one of weak_ptr shares them while someone else keeps them.
/// When making throws, the next one who asks tries again.
template <typename Stored>
class OnceMap {
 public:
  using Pointer = std::shared_ptr<typename Stored::element_type>;

  template <typename Make>
  Pointer get(const std::string& key, const Make& make) {
    const std::shared_ptr<Slot> slot = slot_of(key);
    const std::lock_guard lock(slot->mutex);
    if (Pointer live = alive(slot->stored)) return live;
    Pointer made = make();
    slot->stored = made;
    return made;
  }
  /// The object of a key, null where it is not there.
  Pointer find(const std::string& key) {
    const std::shared_ptr<Slot> slot = slot_of(key);
    const std::lock_guard lock(slot->mutex);
    return alive(slot->stored);
  }

 private:
  struct Slot {
    std::mutex mutex;
    Stored stored;
  };

  static Pointer alive(const Pointer& pointer) { return pointer; }
  static Pointer alive(const std::weak_ptr<typename Stored::element_type>& pointer) {
    return pointer.lock();
  }

  std::shared_ptr<Slot> slot_of(const std::string& key) {
    const std::scoped_lock lock(mutex_);
    std::shared_ptr<Slot>& slot = slots_[key];
    if (!slot) slot = std::make_shared<Slot>();
    return slot;
  }

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Slot>> slots_;
};

/// The state behind a Context: the driver's handles, capabilities, built programs.
class Runtime {
 public:
  static std::unique_ptr<Runtime> create(const Device& device,
                                         const RuntimeOptions& options = default_runtime_options());
  static std::unique_ptr<Runtime> adopt(cl_context context, cl_device_id device,
                                        const RuntimeOptions& options = default_runtime_options());

  cl_context context() const noexcept { return context_.get(); }
  cl_device_id device() const noexcept { return device_; }
  const DeviceCapabilities& capabilities() const noexcept { return capabilities_; }

  /// The pool of a kernel, from disk cache or compiler on first use. Throws kOpenCL with the build
  /// log in our files and lines; what the compiler refused once is refused again without asking it.
  /// Thread-safe. `bundle`: the result of expect(), if it was called.
  std::shared_ptr<KernelPool> kernel(const KernelSource& source, const std::string& bundle = {});
  /// Announces kernels that are about to be requested. Where every program adds a fixed cost
  /// (PoCL), builds them as one and returns its name for kernel(); else, and where they do not
  /// build together, returns "". The program depends on the sources alone, not on what was built
  /// before, so that drivers find it in the cache that another process filled. Thread-safe.
  std::string expect(std::span<const KernelSource> sources);
  BuildCounts build_counts() const noexcept {
    return {.from_source = from_source_, .from_cache = from_cache_};
  }
  /// Builds that somebody did without: the first of each kernel is kept. Thread-safe.
  void note_build_failure(std::string_view kernel, std::string_view why);
  std::vector<std::string> build_failures() const;
  std::string program_cache_problem() const { return cache_.problem(); }

  /// What kernels are chosen by; thread-safe.
  RuntimeTuning tuning() const;
  void set_tuning(std::shared_ptr<const TuningTable> table);

  Buffer allocate(std::size_t size_bytes) const { return allocate(size_bytes, CL_MEM_READ_WRITE); }
  /// A buffer that starts out with a copy of `content`.
  Buffer allocate_copy(std::span<const std::byte> content) const {
    return allocate(content.size(), CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, content.data());
  }
  /// Host memory that the device reaches fastest; to be mapped.
  Buffer allocate_pinned(std::size_t size_bytes) const {
    return allocate(size_bytes, CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR);
  }
  Buffer share(std::span<std::byte> memory) const;
  /// Where single calls upload their host arrays.
  CallMemory& call_memory() const noexcept { return call_memory_; }
  /// What the launches of a call leave to each other.
  QueueMemory& queue_memory() const noexcept { return queue_memory_; }
  Queue create_queue(QueueProfiling profiling) const {
    return detail::create_queue(context_.get(), device_, profiling);
  }
  /// One object per key for other rooms (compiled impls): the live one, or what `make` returns,
  /// which must not ask for its own key. It is not kept alive, so it may hold the Context.
  /// Thread-safe.
  template <typename T = void, typename Make>
  std::shared_ptr<T> shared_object(const std::string& key, const Make& make) {
    return std::static_pointer_cast<T>(shared_objects_.get(key, make));
  }

 private:
  /// Without a handle where it could not be built; with the compiler's refusal where that is why.
  struct Program {
    ProgramHandle handle;
    std::optional<Error> refusal;
  };

  Runtime(ContextHandle context, cl_device_id device, const RuntimeOptions& options);
  CacheKey key_of(std::string_view what, const std::string& text, std::string_view options) const;
  void self_test();
  std::shared_ptr<Program> build(const KernelSource& wanted);
  std::shared_ptr<Program> build_bundle(std::span<const KernelSource> sources);
  Buffer allocate(std::size_t size_bytes, cl_mem_flags flags, const void* content = nullptr) const;

  ContextHandle context_;
  cl_device_id device_;
  DeviceCapabilities capabilities_;
  std::string macros_;  ///< of every kernel: device_macros()
  ReadKernelFile read_file_;
  ProgramCache cache_;
  mutable std::mutex tuning_mutex_;
  RuntimeTuning tuning_;
  bool cache_binaries_;
  OnceMap<std::shared_ptr<Program>> programs_;
  OnceMap<std::shared_ptr<KernelPool>> pools_;
  OnceMap<std::weak_ptr<void>> shared_objects_;
  mutable CallMemory call_memory_{*this};
  mutable QueueMemory queue_memory_{*this};
  mutable std::mutex failures_mutex_;
  std::map<std::string, std::string> failures_;
  std::atomic<std::uint64_t> from_source_{0};
  std::atomic<std::uint64_t> from_cache_{0};
};

/// Kernels that all leases of the process have enqueued so far: a test run that dispatched nothing
/// has proved nothing.
std::uint64_t dispatch_count() noexcept;
void count_dispatches(std::uint64_t kernels) noexcept;
/// Those among them that were their kernel's first, to which drivers leave work (PoCL compiles).
std::uint64_t first_launch_count() noexcept;

/// Drivers keep it at hand: no round trip.
inline std::size_t size_bytes_of(cl_mem memory) {
  return memory_value<std::size_t>(memory, CL_MEM_SIZE);
}
/// Refuses out-of-order queues: uploads and kernels of one call rely on the queue's order alone.
void require_in_order(cl_command_queue queue);
/// Where a copy lies in the buffer, whether the call waits for it, and the event that it gets.
struct Transfer {
  std::size_t offset_bytes = 0;
  cl_bool blocking = CL_FALSE;
  Event* event = nullptr;
};
/// Queue::write() and write_async() of a queue that need not be retained.
void enqueue_write(cl_command_queue queue, const Buffer& buffer, std::span<const std::byte> source,
                   const Transfer& transfer);
/// Whether an event's work has ended, with success or an error; false if the driver cannot tell. An
/// empty event stands for no work, which has ended.
bool has_ended(const Event& event) noexcept;
/// What `queue` is given from now on waits for the event: of another queue, which was flushed, or
/// its own. `passed`, if given, completes when that wait is over.
void enqueue_wait(cl_command_queue queue, const Event& event, Event* passed = nullptr);
/// The same for an event of its own, which an in-order queue waits for anyway.
void keep_order(cl_command_queue queue, const Event& event);
/// Flushes the queue. The event completes with all that it holds now.
Event flush_marked(cl_command_queue queue);
/// Waits until the queue is empty, whatever the driver answers.
void drain(cl_command_queue queue) noexcept;

}  // namespace clattn::detail

namespace clattn {
inline auto& Context::runtime() const noexcept {
  return *static_cast<detail::Runtime*>(runtime_.get());
}
}  // namespace clattn
