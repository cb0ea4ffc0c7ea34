// The function types of provisional extensions are in the headers only on request.
#define CL_ENABLE_BETA_EXTENSIONS
#include "opencl/recorder.hpp"

#include <CL/cl_ext.h>

#include <type_traits>
#include <utility>

#include "base/error.hpp"
#include "opencl/device/device_info.hpp"

namespace clattn::detail {
namespace {

thread_local Recorder* current = nullptr;

cl_device_id device_of(cl_command_queue queue) {
  return queue_value<cl_device_id>(queue, CL_QUEUE_DEVICE);
}

/// PoCL's CPU devices take a command buffer apart when it is enqueued: each command costs what its
/// enqueueing would, one more signals the end, and the padding is launched, too.
bool command_buffers_pay(cl_device_id device) {
  return !is_pocl(device) || device_kind(device) != DeviceKind::kCpu;
}

}  // namespace

#if defined(cl_khr_command_buffer)

/// The extension's functions and one finalized buffer.
struct Recording::CommandBuffer {
  clEnqueueCommandBufferKHR_fn enqueue = nullptr;
  std::unique_ptr<std::remove_pointer_t<cl_command_buffer_khr>, clReleaseCommandBufferKHR_fn>
      handle{nullptr, nullptr};
};

namespace {

/// Steps follow each other without waiting, so a buffer must be enqueued while it still runs.
bool has_command_buffers(cl_device_id device) {
  if (!has_extension(device, "cl_khr_command_buffer")) return false;
  cl_device_command_buffer_capabilities_khr capabilities = 0;
  const cl_int status = clGetDeviceInfo(device, CL_DEVICE_COMMAND_BUFFER_CAPABILITIES_KHR,
                                        sizeof(capabilities), &capabilities, nullptr);
  return status == CL_SUCCESS &&
         (capabilities & CL_COMMAND_BUFFER_CAPABILITY_SIMULTANEOUS_USE_KHR) != 0;
}

}  // namespace

/// Null where the device has none, or refuses: the launches are then enqueued one by one.
std::unique_ptr<Recording::CommandBuffer> Recording::make_command_buffer(
    cl_command_queue queue, const std::vector<Launch>& launches) {
  cl_device_id device = device_of(queue);
  if (!has_command_buffers(device)) return nullptr;
  const auto platform = device_value<cl_platform_id>(device, CL_DEVICE_PLATFORM);
  const auto find = [&]<typename Function>(Function& function, const char* name) {
    function = reinterpret_cast<Function>(clGetExtensionFunctionAddressForPlatform(platform, name));
    return function != nullptr;
  };
  clCreateCommandBufferKHR_fn create = nullptr;
  clCommandNDRangeKernelKHR_fn add = nullptr;
  clFinalizeCommandBufferKHR_fn finalize = nullptr;
  clReleaseCommandBufferKHR_fn release = nullptr;
  auto buffer = std::make_unique<CommandBuffer>();
  if (!find(create, "clCreateCommandBufferKHR") || !find(add, "clCommandNDRangeKernelKHR") ||
      !find(finalize, "clFinalizeCommandBufferKHR") ||
      !find(release, "clReleaseCommandBufferKHR") ||
      !find(buffer->enqueue, "clEnqueueCommandBufferKHR")) {
    return nullptr;
  }
  const cl_command_buffer_properties_khr properties[] = {CL_COMMAND_BUFFER_FLAGS_KHR,
                                                         CL_COMMAND_BUFFER_SIMULTANEOUS_USE_KHR, 0};
  cl_int status = CL_SUCCESS;
  buffer->handle = {create(1, &queue, properties, &status), release};
  cl_sync_point_khr before = 0, after = 0;
  for (std::size_t i = 0; i < launches.size() && status == CL_SUCCESS; ++i) {
    const Launch& launch = launches[i];
    status = add(buffer->handle.get(), nullptr, nullptr, launch.kernel.handle(), 1, nullptr,
                 &launch.items, &launch.group_size, i == 0 ? 0 : 1, i == 0 ? nullptr : &before,
                 &after, nullptr);
    before = after;
  }
  if (status == CL_SUCCESS) status = finalize(buffer->handle.get());
  return status == CL_SUCCESS ? std::move(buffer) : nullptr;
}

#else

struct Recording::CommandBuffer {};
std::unique_ptr<Recording::CommandBuffer> Recording::make_command_buffer(
    cl_command_queue, const std::vector<Launch>&) {
  return nullptr;
}

#endif

Recording::Recording(cl_command_queue queue, std::vector<Launch> launches,
                     std::vector<Requirement> requirements, ReplayMode mode)
    : queue_(Queue::adopt(queue)),
      launches_(std::move(launches)),
      requirements_(std::move(requirements)) {
  const bool forced = mode == ReplayMode::kCommandBuffer;
  const bool wanted =
      forced || (mode == ReplayMode::kAuto && command_buffers_pay(device_of(queue)));
  if (wanted && !launches_.empty()) buffer_ = make_command_buffer(queue, launches_);
  if (forced && !launches_.empty() && buffer_ == nullptr)
    throw_unsupported(
        "graph capture: mode is kCommandBuffer, legal on this device: kAuto, kLaunchList");
}

Recording::~Recording() = default;

void Recording::replay(cl_command_queue queue, Event* event) const {
  NewEvent done(event);
  if (Recorder::of(queue) != nullptr) throw_invalid("replay: this queue is being recorded");
  for (const Requirement& required : requirements_) {
    const std::int32_t prepared = required.step->batch_size;
    throw_invalid_if(
        prepared != required.batch_size,
        "replay: the graph of batch_size {}, legal: that of {}, which its buffers are prepared "
        "for",
        required.batch_size, prepared);
  }
#if defined(cl_khr_command_buffer)
  if (buffer_ != nullptr && queue == queue_) {
    check(buffer_->enqueue(0, nullptr, buffer_->handle.get(), 0, nullptr, done.slot()),
          "clEnqueueCommandBufferKHR");
    return count_dispatches(launches_.size());
  }
#endif
  std::uint64_t enqueued = 0;
  for (const Launch& launch : launches_) {
    // The last launch runs in any case where an event is to signal its end.
    cl_event* const wanted = &launch == &launches_.back() ? done.slot() : nullptr;
    const std::size_t items = wanted != nullptr ? launch.items : launch.items_needed();
    if (items == 0) continue;
    check(clEnqueueNDRangeKernel(queue, launch.kernel.handle(), 1, nullptr, &items,
                                 &launch.group_size, 0, nullptr, wanted),
          "replaying a recorded launch");
    ++enqueued;
  }
  count_dispatches(enqueued);
}

Recorder::Recorder(cl_command_queue queue) : queue_(queue) {
  if (queue == nullptr) throw_invalid("queue: null");
  if (current != nullptr) throw_invalid("graph capture: this thread is capturing already");
  current = this;
}

Recorder::~Recorder() {
  if (current == this) current = nullptr;
}

bool Recorder::active() noexcept {
  return current != nullptr;
}

Recorder* Recorder::of(cl_command_queue queue) noexcept {
  return current != nullptr && current->queue_ == queue ? current : nullptr;
}

void Recorder::require(const std::shared_ptr<const PreparedStep>& step) {
  const bool known = std::ranges::any_of(
      requirements_, [&](const Recording::Requirement& other) { return other.step == step; });
  if (!known) requirements_.push_back({step, step->batch_size});
}

void Recorder::limit_last(const std::atomic<std::int32_t>& num_used, std::size_t groups_each) {
  Recording::Launch& launch = launches_.back();
  launch.num_used = &num_used;
  launch.items_per_entry = groups_each * launch.group_size;
}

void refuse_recording(cl_command_queue queue, std::string_view what) {
  if (Recorder::of(queue) != nullptr)
    throw_unsupported("graph capture: {} cannot be recorded", what);
}

std::unique_ptr<Recording> Recorder::finish(ReplayMode mode) {
  if (current != this) throw_invalid("graph capture: ended on another thread than it began on");
  current = nullptr;
  return std::make_unique<Recording>(queue_, std::move(launches_), std::move(requirements_), mode);
}

}  // namespace clattn::detail
