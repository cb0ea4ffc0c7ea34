#include <CL/cl_ext.h>

#include <atomic>
#include <utility>

#include "base/checked.hpp"
#include "opencl/recorder.hpp"
#include "opencl/runtime.hpp"

namespace clattn::detail {
namespace {

std::atomic<std::uint64_t> dispatches{0};
std::atomic<std::uint64_t> first_launches{0};

template <typename T>
T work_group_info(cl_kernel kernel, cl_device_id device, cl_kernel_work_group_info what) {
  return driver_value<T>("clGetKernelWorkGroupInfo", clGetKernelWorkGroupInfo, kernel, device,
                         what);
}

/// What Intel's driver reports apart from private memory; 0 where a driver does not know the query.
cl_ulong spilled_bytes(cl_kernel kernel, cl_device_id device) {
  cl_ulong bytes = 0;
  const cl_int status = clGetKernelWorkGroupInfo(kernel, device, CL_KERNEL_SPILL_MEM_SIZE_INTEL,
                                                 sizeof(bytes), &bytes, nullptr);
  return status == CL_SUCCESS ? bytes : 0;
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
    : entry_(std::move(entry)) {
  check(clRetainProgram(program), "clRetainProgram");
  program_.reset(program);
  KernelHandle first = create();
  work_group_size_ = work_group_info<std::size_t>(first.get(), device, CL_KERNEL_WORK_GROUP_SIZE);
  private_mem_bytes_ = work_group_info<cl_ulong>(first.get(), device, CL_KERNEL_PRIVATE_MEM_SIZE) +
                       spilled_bytes(first.get(), device);
  local_mem_bytes_ = work_group_info<cl_ulong>(first.get(), device, CL_KERNEL_LOCAL_MEM_SIZE);
  free_.push_back(std::move(first));
}

KernelHandle KernelPool::create() {
  free_.reserve(created_ + 1);
  cl_int status = CL_SUCCESS;
  KernelHandle kernel(clCreateKernel(program_.get(), entry_.c_str(), &status));
  check(status, fmt::format("creating kernel '{}'", entry_));
  ++created_;
  return kernel;
}

KernelLease KernelPool::acquire() {
  const std::scoped_lock lock(mutex_);
  if (free_.empty()) return {*this, create()};
  KernelHandle kernel = std::move(free_.back());
  free_.pop_back();
  return {*this, std::move(kernel)};
}

KernelLease::~KernelLease() {
  if (!kernel_) return;
  const std::scoped_lock lock(pool_->mutex_);
  pool_->free_.push_back(std::move(kernel_));
}

void KernelLease::keep_if_recording(cl_mem buffer) {
  if (buffer != nullptr && Recorder::active()) kept_.push_back(Buffer::adopt(buffer));
}

void KernelLease::set(std::size_t size, const void* value) {
  const cl_int status = clSetKernelArg(kernel_.get(), next_arg_, size, value);
  if (status != CL_SUCCESS) {
    check(status, fmt::format("setting argument {} of kernel '{}'", next_arg_, pool_->entry()));
  }
  ++next_arg_;
}

void KernelLease::enqueue(cl_command_queue queue, std::size_t groups, std::size_t group_size,
                          Event* event) {
  next_arg_ = 0;
  NewEvent done(event);
  if (groups == 0) return;
  const std::size_t items = checked_mul(groups, group_size, "work-items of a launch");
  if (Recorder* recorder = Recorder::of(queue)) {
    return recorder->add({pool_->shared_from_this(), std::move(*this), items, group_size});
  }
  const cl_int status = clEnqueueNDRangeKernel(queue, kernel_.get(), 1, nullptr, &items,
                                               &group_size, 0, nullptr, done.slot());
  if (status != CL_SUCCESS) {
    check(status, fmt::format("enqueueing {} groups of {} of kernel '{}'", groups, group_size,
                              pool_->entry()));
  }
  count_dispatches(1);
  if (!pool_->launched_.load(std::memory_order_relaxed) && !pool_->launched_.exchange(true))
    ++first_launches;
}

}  // namespace clattn::detail
