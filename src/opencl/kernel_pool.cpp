#include <atomic>
#include <utility>

#include "base/checked.hpp"
#include "opencl/handle.hpp"
#include "opencl/recorder.hpp"
#include "opencl/runtime.hpp"

namespace clattn::detail {
namespace {

std::atomic<std::uint64_t> dispatches{0};
std::atomic<std::uint64_t> first_launches{0};

template <typename T>
T work_group_info(cl_kernel kernel, cl_device_id device, cl_kernel_work_group_info what) {
  T value{};
  check(clGetKernelWorkGroupInfo(kernel, device, what, sizeof(value), &value, nullptr),
        "clGetKernelWorkGroupInfo");
  return value;
}

}  // namespace

std::uint64_t dispatch_count() noexcept {
  return dispatches;
}

void count_dispatches(std::uint64_t kernels) noexcept {
  dispatches += kernels;
}

std::uint64_t first_launch_count() noexcept {
  return first_launches;
}

KernelPool::KernelPool(cl_program program, cl_device_id device, std::string entry)
    : program_(program), entry_(std::move(entry)) {
  KernelHandle first(create());
  work_group_size_ = work_group_info<std::size_t>(first.get(), device, CL_KERNEL_WORK_GROUP_SIZE);
  private_mem_bytes_ = work_group_info<cl_ulong>(first.get(), device, CL_KERNEL_PRIVATE_MEM_SIZE);
  local_mem_bytes_ = work_group_info<cl_ulong>(first.get(), device, CL_KERNEL_LOCAL_MEM_SIZE);
  check(clRetainProgram(program_), "clRetainProgram");
  free_.push_back(first.release());
}

KernelPool::~KernelPool() {
  for (cl_kernel kernel : free_) clReleaseKernel(kernel);
  clReleaseProgram(program_);
}

cl_kernel KernelPool::create() {
  free_.reserve(created_ + 1);
  cl_int status = CL_SUCCESS;
  cl_kernel kernel = clCreateKernel(program_, entry_.c_str(), &status);
  check(status, fmt::format("creating kernel '{}'", entry_));
  ++created_;
  return kernel;
}

KernelLease KernelPool::acquire() {
  const std::scoped_lock lock(mutex_);
  if (free_.empty()) return {*this, create()};
  cl_kernel kernel = free_.back();
  free_.pop_back();
  return {*this, kernel};
}

void KernelPool::give_back(cl_kernel kernel) noexcept {
  const std::scoped_lock lock(mutex_);
  free_.push_back(kernel);
}

KernelLease::KernelLease(KernelLease&& other) noexcept
    : pool_(other.pool_),
      kernel_(std::exchange(other.kernel_, nullptr)),
      next_arg_(other.next_arg_),
      kept_(std::move(other.kept_)) {}

KernelLease::~KernelLease() {
  if (kernel_ != nullptr) pool_->give_back(kernel_);
}

void KernelLease::keep_if_recording(cl_mem buffer) {
  if (buffer != nullptr && Recorder::active()) kept_.push_back(Buffer::adopt(buffer));
}

void KernelLease::set(std::size_t size, const void* value) {
  const cl_int status = clSetKernelArg(kernel_, next_arg_, size, value);
  if (status != CL_SUCCESS) {
    check(status, fmt::format("setting argument {} of kernel '{}'", next_arg_, pool_->entry()));
  }
  ++next_arg_;
}

void KernelLease::enqueue(cl_command_queue queue, std::size_t groups, std::size_t group_size,
                          Event* event) {
  next_arg_ = 0;
  if (event != nullptr) event->reset();
  if (groups == 0) return;
  const std::size_t items = checked_mul(groups, group_size, "work-items of a launch");
  if (Recorder* recorder = Recorder::of(queue)) {
    return recorder->add({pool_->shared_from_this(), std::move(*this), items, group_size});
  }
  cl_event done = nullptr;
  const cl_int status = clEnqueueNDRangeKernel(queue, kernel_, 1, nullptr, &items, &group_size, 0,
                                               nullptr, event == nullptr ? nullptr : &done);
  if (status != CL_SUCCESS) {
    check(status, fmt::format("enqueueing {} groups of {} of kernel '{}'", groups, group_size,
                              pool_->entry()));
  }
  if (event != nullptr) event->reset(done);
  count_dispatches(1);
  if (!pool_->launched_.load(std::memory_order_relaxed) && !pool_->launched_.exchange(true))
    ++first_launches;
}

}  // namespace clattn::detail
