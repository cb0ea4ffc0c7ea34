#include "random_calls/driver_faults.hpp"

#include <dlfcn.h>
// The function types of provisional extensions are in the headers only on request.
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#define CL_ENABLE_BETA_EXTENSIONS
#include <clattn/opencl.hpp>

#include <CL/cl_ext.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <map>
#include <random>
#include <string>

static std::atomic<std::uint64_t> calls = 0, faults = 0;
static std::atomic<std::int64_t> references = 0;
static std::uint64_t fault_one_in = 0;
static thread_local std::minstd_rand generator;

void test::driver::set_faults(std::uint64_t one_in, std::uint64_t seed) {
  fault_one_in = one_in;
  if (seed != 0) seed_thread(seed);
}
void test::driver::seed_thread(std::uint64_t seed) {
  generator.seed(static_cast<std::minstd_rand::result_type>(seed));
}
std::uint64_t test::driver::num_calls() {
  return calls;
}
std::uint64_t test::driver::num_faults() {
  return faults;
}
std::int64_t test::driver::num_references() {
  return references;
}

// The status of a call that fails, CL_SUCCESS for one that the driver gets.
static cl_int draw_status() {
  static constexpr std::array kStatuses = {CL_OUT_OF_RESOURCES, CL_OUT_OF_HOST_MEMORY,
                                           CL_MEM_OBJECT_ALLOCATION_FAILURE, CL_INVALID_VALUE};
  ++calls;
  if (fault_one_in == 0 || generator() % fault_one_in != 0) return CL_SUCCESS;
  ++faults;
  return kStatuses.at(generator() % kStatuses.size());
}

/// The driver's functions that the loader does not export, once somebody has asked for them.
static std::map<std::string, void*>& extension_functions() {
  static std::map<std::string, void*> functions;
  return functions;
}

template <typename Function>
static Function* next_of(const char* name) {
  void* const exported = dlsym(RTLD_NEXT, name);
  return reinterpret_cast<Function*>(exported != nullptr ? exported
                                                         : extension_functions().at(name));
}

#define NEXT(name) static auto* const next = next_of<decltype(name)>(#name)

// A query, or a command without an event: its status is all that it returns.
#define STATUS(name, parameters, arguments)                \
  extern "C" cl_int name parameters {                      \
    NEXT(name);                                            \
    const cl_int status = draw_status();                   \
    return status == CL_SUCCESS ? next arguments : status; \
  }

// A command whose last argument, `event`, may want an event.
#define COMMAND(name, parameters, arguments)                                      \
  extern "C" cl_int name parameters {                                             \
    NEXT(name);                                                                   \
    if (const cl_int status = draw_status(); status != CL_SUCCESS) return status; \
    const cl_int status = next arguments;                                         \
    if (status == CL_SUCCESS && event != nullptr) ++references;                   \
    return status;                                                                \
  }

#define WAIT(name, parameters, arguments)         \
  extern "C" cl_int name parameters {             \
    NEXT(name);                                   \
    const cl_int status = next arguments;         \
    const cl_int drawn = draw_status();           \
    return status == CL_SUCCESS ? drawn : status; \
  }

#define CREATE(type, name, parameters, arguments)                  \
  extern "C" type name parameters {                                \
    NEXT(name);                                                    \
    if (const cl_int drawn = draw_status(); drawn != CL_SUCCESS) { \
      if (status != nullptr) *status = drawn;                      \
      return nullptr;                                              \
    }                                                              \
    const type made = next arguments;                              \
    if (made != nullptr) ++references;                             \
    return made;                                                   \
  }

#define REFERENCES(kind, type)                                                    \
  extern "C" cl_int clRetain##kind(type object) {                                 \
    NEXT(clRetain##kind);                                                         \
    if (const cl_int status = draw_status(); status != CL_SUCCESS) return status; \
    const cl_int status = next(object);                                           \
    if (status == CL_SUCCESS) ++references;                                       \
    return status;                                                                \
  }                                                                               \
  extern "C" cl_int clRelease##kind(type object) {                                \
    NEXT(clRelease##kind);                                                        \
    const cl_int status = next(object);                                           \
    if (status == CL_SUCCESS) --references;                                       \
    return status;                                                                \
  }

REFERENCES(Context, cl_context)
REFERENCES(CommandQueue, cl_command_queue)
REFERENCES(MemObject, cl_mem)
REFERENCES(Program, cl_program)
REFERENCES(Kernel, cl_kernel)
REFERENCES(Event, cl_event)

using Notify = void(CL_CALLBACK*)(const char*, const void*, size_t, void*);
using NotifyBuild = void(CL_CALLBACK*)(cl_program, void*);

CREATE(cl_context, clCreateContext,
       (const cl_context_properties* properties, cl_uint count, const cl_device_id* devices,
        Notify notify, void* user, cl_int* status),
       (properties, count, devices, notify, user, status))
CREATE(cl_command_queue, clCreateCommandQueue,
       (cl_context context, cl_device_id device, cl_command_queue_properties properties,
        cl_int* status),
       (context, device, properties, status))
CREATE(cl_mem, clCreateBuffer,
       (cl_context context, cl_mem_flags flags, size_t bytes, void* host, cl_int* status),
       (context, flags, bytes, host, status))
CREATE(cl_program, clCreateProgramWithSource,
       (cl_context context, cl_uint count, const char** sources, const size_t* lengths,
        cl_int* status),
       (context, count, sources, lengths, status))
CREATE(cl_program, clCreateProgramWithBinary,
       (cl_context context, cl_uint count, const cl_device_id* devices, const size_t* lengths,
        const unsigned char** binaries, cl_int* statuses, cl_int* status),
       (context, count, devices, lengths, binaries, statuses, status))
CREATE(cl_kernel, clCreateKernel, (cl_program program, const char* name, cl_int* status),
       (program, name, status))

extern "C" void* clEnqueueMapBuffer(cl_command_queue queue, cl_mem buffer, cl_bool blocking,
                                    cl_map_flags flags, size_t offset, size_t bytes, cl_uint waits,
                                    const cl_event* list, cl_event* event, cl_int* status) {
  NEXT(clEnqueueMapBuffer);
  if (const cl_int drawn = draw_status(); drawn != CL_SUCCESS) {
    if (status != nullptr) *status = drawn;
    return nullptr;
  }
  void* const mapped =
      next(queue, buffer, blocking, flags, offset, bytes, waits, list, event, status);
  if (mapped != nullptr && event != nullptr) ++references;
  return mapped;
}

COMMAND(clEnqueueReadBuffer,
        (cl_command_queue queue, cl_mem buffer, cl_bool blocking, size_t offset, size_t bytes,
         void* host, cl_uint waits, const cl_event* list, cl_event* event),
        (queue, buffer, blocking, offset, bytes, host, waits, list, event))
COMMAND(clEnqueueWriteBuffer,
        (cl_command_queue queue, cl_mem buffer, cl_bool blocking, size_t offset, size_t bytes,
         const void* host, cl_uint waits, const cl_event* list, cl_event* event),
        (queue, buffer, blocking, offset, bytes, host, waits, list, event))
COMMAND(clEnqueueCopyBuffer,
        (cl_command_queue queue, cl_mem source, cl_mem destination, size_t from, size_t to,
         size_t bytes, cl_uint waits, const cl_event* list, cl_event* event),
        (queue, source, destination, from, to, bytes, waits, list, event))
COMMAND(clEnqueueFillBuffer,
        (cl_command_queue queue, cl_mem buffer, const void* pattern, size_t pattern_bytes,
         size_t offset, size_t bytes, cl_uint waits, const cl_event* list, cl_event* event),
        (queue, buffer, pattern, pattern_bytes, offset, bytes, waits, list, event))
COMMAND(clEnqueueUnmapMemObject,
        (cl_command_queue queue, cl_mem buffer, void* mapped, cl_uint waits, const cl_event* list,
         cl_event* event),
        (queue, buffer, mapped, waits, list, event))
COMMAND(clEnqueueNDRangeKernel,
        (cl_command_queue queue, cl_kernel kernel, cl_uint dimensions, const size_t* offset,
         const size_t* global, const size_t* local, cl_uint waits, const cl_event* list,
         cl_event* event),
        (queue, kernel, dimensions, offset, global, local, waits, list, event))
COMMAND(clEnqueueBarrierWithWaitList,
        (cl_command_queue queue, cl_uint waits, const cl_event* list, cl_event* event),
        (queue, waits, list, event))

WAIT(clWaitForEvents, (cl_uint count, const cl_event* events), (count, events))
WAIT(clFinish, (cl_command_queue queue), (queue))

STATUS(clFlush, (cl_command_queue queue), (queue))
STATUS(clSetKernelArg, (cl_kernel kernel, cl_uint index, size_t bytes, const void* value),
       (kernel, index, bytes, value))
STATUS(clBuildProgram,
       (cl_program program, cl_uint count, const cl_device_id* devices, const char* options,
        NotifyBuild notify, void* user),
       (program, count, devices, options, notify, user))

#define QUERY(name, type, what)                                                   \
  STATUS(name, (type object, what info, size_t bytes, void* value, size_t* size), \
         (object, info, bytes, value, size))

QUERY(clGetContextInfo, cl_context, cl_context_info)
QUERY(clGetCommandQueueInfo, cl_command_queue, cl_command_queue_info)
QUERY(clGetDeviceInfo, cl_device_id, cl_device_info)
QUERY(clGetEventInfo, cl_event, cl_event_info)
QUERY(clGetEventProfilingInfo, cl_event, cl_profiling_info)
QUERY(clGetMemObjectInfo, cl_mem, cl_mem_info)
QUERY(clGetPlatformInfo, cl_platform_id, cl_platform_info)
QUERY(clGetProgramInfo, cl_program, cl_program_info)
STATUS(clGetProgramBuildInfo,
       (cl_program program, cl_device_id device, cl_program_build_info info, size_t bytes,
        void* value, size_t* size),
       (program, device, info, bytes, value, size))
STATUS(clGetKernelWorkGroupInfo,
       (cl_kernel kernel, cl_device_id device, cl_kernel_work_group_info info, size_t bytes,
        void* value, size_t* size),
       (kernel, device, info, bytes, value, size))

#if defined(cl_khr_command_buffer)

CREATE(cl_command_buffer_khr, clCreateCommandBufferKHR,
       (cl_uint count, const cl_command_queue* queues,
        const cl_command_buffer_properties_khr* properties, cl_int* status),
       (count, queues, properties, status))
COMMAND(clEnqueueCommandBufferKHR,
        (cl_uint count, cl_command_queue* queues, cl_command_buffer_khr buffer, cl_uint waits,
         const cl_event* list, cl_event* event),
        (count, queues, buffer, waits, list, event))
STATUS(clFinalizeCommandBufferKHR, (cl_command_buffer_khr buffer), (buffer))
STATUS(clCommandNDRangeKernelKHR,
       (cl_command_buffer_khr buffer, cl_command_queue queue,
        const cl_ndrange_kernel_command_properties_khr* properties, cl_kernel kernel,
        cl_uint dimensions, const size_t* offset, const size_t* global, const size_t* local,
        cl_uint waits, const cl_sync_point_khr* list, cl_sync_point_khr* point,
        cl_mutable_command_khr* handle),
       (buffer, queue, properties, kernel, dimensions, offset, global, local, waits, list, point,
        handle))

extern "C" cl_int clReleaseCommandBufferKHR(cl_command_buffer_khr buffer) {
  NEXT(clReleaseCommandBufferKHR);
  const cl_int status = next(buffer);
  if (status == CL_SUCCESS) --references;
  return status;
}

extern "C" void* clGetExtensionFunctionAddressForPlatform(cl_platform_id platform,
                                                          const char* name) {
  NEXT(clGetExtensionFunctionAddressForPlatform);
  static const std::map<std::string, void*> kInFront = {
#define IN_FRONT(function) {#function, reinterpret_cast<void*>(function)}
      IN_FRONT(clCreateCommandBufferKHR),   IN_FRONT(clEnqueueCommandBufferKHR),
      IN_FRONT(clFinalizeCommandBufferKHR), IN_FRONT(clCommandNDRangeKernelKHR),
      IN_FRONT(clReleaseCommandBufferKHR),
  };
  void* const given = next(platform, name);
  const auto found = kInFront.find(name);
  if (given == nullptr || found == kInFront.end()) return given;
  extension_functions()[name] = given;
  return found->second;
}

#endif
