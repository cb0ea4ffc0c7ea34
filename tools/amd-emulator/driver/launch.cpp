// Launches of kernels.
#include "driver/launch.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "driver/commands.hpp"
#include "machine/launch.hpp"
#include "machine/settings.hpp"

namespace amdemu {
namespace {

/// The work-group where the caller names none: the largest power of two that divides the first
/// dimension.
std::uint32_t default_group(std::size_t global) {
  std::uint32_t size = 1;
  while (size < 256 && global % (2 * size) == 0) size *= 2;
  return size;
}

cl_int set_sizes(Launch& launch, const std::size_t* offset, const std::size_t* global,
                 const std::size_t* local) {
  const Kernel& kernel = *launch.kernel;
  std::uint64_t items = 1;
  for (std::uint32_t d = 0; d < launch.dims; ++d) {
    const std::uint32_t required = kernel.reqd_group[d];
    launch.global[d] = global[d];
    if (offset != nullptr) launch.offset[d] = offset[d];
    if (local != nullptr)
      launch.local[d] = static_cast<std::uint32_t>(local[d]);
    else if (required != 0)
      launch.local[d] = required;
    else if (d == 0)
      launch.local[d] = default_group(global[d]);
    if (launch.local[d] == 0 || global[d] % launch.local[d] != 0) return CL_INVALID_WORK_GROUP_SIZE;
    if (required != 0 && required != launch.local[d]) return CL_INVALID_WORK_GROUP_SIZE;
    items *= launch.local[d];
  }
  return items > kernel.max_group ? CL_INVALID_WORK_GROUP_SIZE : CL_SUCCESS;
}

/// The explicit part of the argument segment. Local memory of arguments lies behind the kernel's
/// own.
cl_int set_arguments(Launch& launch, const _cl_kernel& kernel, std::vector<cl_mem>& used) {
  const Kernel& shape = *launch.kernel;
  launch.kernarg.assign(shape.kernarg_bytes + 8, 0);
  std::size_t local_end = shape.local_bytes;
  for (std::size_t n = 0; n < kernel.arguments.size(); ++n) {
    const auto& argument = kernel.arguments[n];
    if (!argument.set) return CL_INVALID_KERNEL_ARGS;
    unsigned char* const to = launch.kernarg.data() + shape.args[n].offset;
    if (shape.args[n].kind == "dynamic_shared_pointer") {
      const auto begin = static_cast<std::uint32_t>((local_end + 15) & ~std::size_t{15});
      std::memcpy(to, &begin, sizeof(begin));
      local_end = begin + argument.local;
    } else if (shape.args[n].kind == "global_buffer") {
      cl_mem memory = nullptr;
      std::memcpy(&memory, argument.value.data(), sizeof(memory));
      if (memory == nullptr) continue;
      used.push_back(memory);
      std::memcpy(to, &memory->data, sizeof(memory->data));
    } else {
      std::copy(argument.value.begin(), argument.value.end(), to);
    }
  }
  if (local_end > launch.image->chip->local_bytes) return CL_OUT_OF_RESOURCES;
  launch.dynamic_local = static_cast<std::uint32_t>(local_end) - shape.local_bytes;
  return CL_SUCCESS;
}

void print_arguments(const Launch& launch) {
  std::fprintf(stderr, "amdemu: arguments of %s:", launch.kernel->name.c_str());
  for (const KernelArg& arg : launch.kernel->args) {
    if (arg.is_hidden()) continue;
    std::uint64_t bits = 0;
    std::memcpy(&bits, launch.kernarg.data() + arg.offset, std::min<std::size_t>(arg.size, 8));
    std::fprintf(stderr, " %s=%llx", arg.name.c_str(), static_cast<unsigned long long>(bits));
  }
  std::fprintf(stderr, "\n");
}

cl_int run_and_report(const Launch& launch) {
  if (std::find(launch.global, launch.global + launch.dims, 0U) != launch.global + launch.dims)
    return CL_SUCCESS;
  const cl_ulong begin = now();
  const std::uint64_t before = instructions_executed();
  const std::string error = run(launch);
  if (settings().verbose != 0) {
    const double seconds = static_cast<double>(now() - begin) * 1e-9;
    const auto count = static_cast<double>(instructions_executed() - before);
    const auto size = [&](int d) { return static_cast<unsigned long long>(launch.global[d]); };
    std::fprintf(stderr,
                 "amdemu: %s %s: %llu x %llu x %llu items, %.0f wave instructions, %.4f s "
                 "(%.1f M/s)\n",
                 launch.image->chip->gfx, launch.kernel->name.c_str(), size(0), size(1), size(2),
                 count, seconds, count / seconds * 1e-6);
  }
  if (error.empty()) return CL_SUCCESS;
  std::fprintf(stderr, "amdemu: FAULT in %s\n", error.c_str());
  return CL_OUT_OF_RESOURCES;
}

}  // namespace

cl_int CL_API_CALL EnqueueNDRangeKernel(cl_command_queue queue, cl_kernel kernel, cl_uint dims,
                                        const std::size_t* offset, const std::size_t* global,
                                        const std::size_t* local, cl_uint count,
                                        const cl_event* list, cl_event* event) {
  if (queue == nullptr) return CL_INVALID_COMMAND_QUEUE;
  if (kernel == nullptr) return CL_INVALID_KERNEL;
  if (dims < 1 || dims > 3) return CL_INVALID_WORK_DIMENSION;
  if (global == nullptr) return CL_INVALID_GLOBAL_WORK_SIZE;
  const auto launch = std::make_shared<Launch>();
  launch->dims = dims;
  launch->kernel = kernel_on(kernel, queue->device, &launch->image);
  if (launch->kernel == nullptr) return CL_INVALID_PROGRAM_EXECUTABLE;
  std::vector<cl_mem> used;
  cl_int status = set_sizes(*launch, offset, global, local);
  if (status == CL_SUCCESS) status = set_arguments(*launch, *kernel, used);
  if (status != CL_SUCCESS) return status;
  if (settings().verbose >= 2) print_arguments(*launch);
  return command(queue, CL_COMMAND_NDRANGE_KERNEL, false, {count, list, event},
                 [launch, kept = keep(std::move(used))] { return run_and_report(*launch); });
}
cl_int CL_API_CALL EnqueueTask(cl_command_queue queue, cl_kernel kernel, cl_uint count,
                               const cl_event* list, cl_event* event) {
  const std::size_t one = 1;
  return EnqueueNDRangeKernel(queue, kernel, 1, nullptr, &one, &one, count, list, event);
}

}  // namespace amdemu
