#include "device/failing_builds.hpp"

#include <dlfcn.h>

#include <atomic>
#include <string_view>
#include <utility>

static std::atomic<std::size_t> builds = 0;
static cl_int failure = CL_SUCCESS;
static std::string failing_part;
static std::size_t num_spared = 0, num_failing = 0;

std::size_t test::num_builds() {
  return builds;
}

static test::BuildLog* build_log = nullptr;

test::BuildLog::BuildLog() {
  build_log = this;
}

test::BuildLog::~BuildLog() {
  build_log = nullptr;
}

// A program's source, or its binary where it is made from one for one device.
static std::string text_of(cl_program program) {
  std::size_t size = 0;
  clGetProgramInfo(program, CL_PROGRAM_SOURCE, 0, nullptr, &size);
  std::string text(size, '\0');
  clGetProgramInfo(program, CL_PROGRAM_SOURCE, size, text.data(), nullptr);
  if (size > 1) return text;
  clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof(size), &size, nullptr);
  text.resize(size);
  char* binary = text.data();
  clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof(binary), &binary, nullptr);
  return text;
}

test::FailingBuilds::FailingBuilds(cl_int status, std::string part, std::size_t spared,
                                   std::size_t most) {
  failure = status;
  num_failing = most;
  num_spared = spared;
  failing_part = std::move(part);
}

test::FailingBuilds::~FailingBuilds() {
  failure = CL_SUCCESS;
}

static std::size_t kernels_not_made = 0;
static bool retains_fail = false;

test::ShortDriver::ShortDriver(std::size_t kernels, bool retains) {
  kernels_not_made = kernels;
  retains_fail = retains;
}

test::ShortDriver::~ShortDriver() {
  kernels_not_made = 0;
  retains_fail = false;
}

extern "C" cl_kernel clCreateKernel(cl_program program, const char* name, cl_int* status) {
  static auto* const create =
      reinterpret_cast<decltype(&clCreateKernel)>(dlsym(RTLD_NEXT, "clCreateKernel"));
  if (kernels_not_made == 0) return create(program, name, status);
  --kernels_not_made;
  *status = CL_OUT_OF_RESOURCES;
  return nullptr;
}

extern "C" cl_int clRetainMemObject(cl_mem memory) {
  static auto* const retain =
      reinterpret_cast<decltype(&clRetainMemObject)>(dlsym(RTLD_NEXT, "clRetainMemObject"));
  return retains_fail ? CL_OUT_OF_RESOURCES : retain(memory);
}

extern "C" cl_int clRetainCommandQueue(cl_command_queue queue) {
  static auto* const retain =
      reinterpret_cast<decltype(&clRetainCommandQueue)>(dlsym(RTLD_NEXT, "clRetainCommandQueue"));
  return retains_fail ? CL_OUT_OF_RESOURCES : retain(queue);
}

extern "C" cl_int clRetainEvent(cl_event event) {
  static auto* const retain =
      reinterpret_cast<decltype(&clRetainEvent)>(dlsym(RTLD_NEXT, "clRetainEvent"));
  return retains_fail ? CL_OUT_OF_RESOURCES : retain(event);
}

static std::string spilling_part;
static cl_ulong spilled_bytes = 0, spilled_by_others = 0;
static cl_kernel_work_group_info spill_query = CL_KERNEL_PRIVATE_MEM_SIZE;
static bool spilling = false;

test::SpillingKernels::SpillingKernels(std::string part, cl_ulong bytes, cl_ulong others,
                                       cl_kernel_work_group_info query) {
  spill_query = query;
  spilling_part = std::move(part);
  spilled_bytes = bytes;
  spilled_by_others = others;
  spilling = true;
}

test::SpillingKernels::~SpillingKernels() {
  spilling = false;
}

static std::string build_options(cl_kernel kernel, cl_device_id device) {
  cl_program program = nullptr;
  clGetKernelInfo(kernel, CL_KERNEL_PROGRAM, sizeof(cl_program), &program, nullptr);
  std::size_t size = 0;
  clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_OPTIONS, 0, nullptr, &size);
  std::string options(size, '\0');
  clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_OPTIONS, size, options.data(), nullptr);
  return options;
}

extern "C" cl_int clGetDeviceInfo(cl_device_id device, cl_device_info what, std::size_t size,
                                  void* value, std::size_t* size_needed) {
  static auto* const get =
      reinterpret_cast<decltype(&clGetDeviceInfo)>(dlsym(RTLD_NEXT, "clGetDeviceInfo"));
  const cl_int status = get(device, what, size, value, size_needed);
  if (spilling && what == CL_DEVICE_TYPE && value != nullptr)
    *static_cast<cl_device_type*>(value) = CL_DEVICE_TYPE_GPU;
  return status;
}

extern "C" cl_int clGetKernelWorkGroupInfo(cl_kernel kernel, cl_device_id device,
                                           cl_kernel_work_group_info what, std::size_t size,
                                           void* value, std::size_t* size_needed) {
  static auto* const get = reinterpret_cast<decltype(&clGetKernelWorkGroupInfo)>(
      dlsym(RTLD_NEXT, "clGetKernelWorkGroupInfo"));
  if (spilling && what == spill_query && value != nullptr) {
    const bool named = build_options(kernel, device).find(spilling_part) != std::string::npos;
    *static_cast<cl_ulong*>(value) = named ? spilled_bytes : spilled_by_others;
    return CL_SUCCESS;
  }
  return get(kernel, device, what, size, value, size_needed);
}

extern "C" cl_int clBuildProgram(cl_program program, cl_uint num_devices,
                                 const cl_device_id* devices, const char* options,
                                 void(CL_CALLBACK* notify)(cl_program, void*), void* user_data) {
  static auto* const build =
      reinterpret_cast<decltype(&clBuildProgram)>(dlsym(RTLD_NEXT, "clBuildProgram"));
  ++builds;
  if (build_log != nullptr) build_log->programs.push_back(text_of(program) + options);
  if (failure != CL_SUCCESS &&
      std::string_view(options).find(failing_part) != std::string_view::npos) {
    if (num_spared > 0) {
      --num_spared;
    } else if (num_failing > 0) {
      --num_failing;
      return failure;
    }
  }
  return build(program, num_devices, devices, options, notify, user_data);
}
