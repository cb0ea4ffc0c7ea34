#include "device/failing_builds.hpp"

#include <dlfcn.h>

#include <atomic>
#include <string_view>
#include <utility>

static std::atomic<std::size_t> counter = 0;
static cl_int failure = CL_SUCCESS;
static std::string failing_part;
static std::size_t num_spared = 0;

std::size_t test::num_builds() {
  return counter;
}

test::FailingBuilds::FailingBuilds(cl_int status, std::string part, std::size_t spared) {
  failure = status;
  num_spared = spared;
  failing_part = std::move(part);
}

test::FailingBuilds::~FailingBuilds() {
  failure = CL_SUCCESS;
}

extern "C" cl_int clBuildProgram(cl_program program, cl_uint num_devices,
                                 const cl_device_id* devices, const char* options,
                                 void(CL_CALLBACK* notify)(cl_program, void*), void* user_data) {
  static auto* const build =
      reinterpret_cast<decltype(&clBuildProgram)>(dlsym(RTLD_NEXT, "clBuildProgram"));
  ++counter;
  if (failure != CL_SUCCESS &&
      std::string_view(options).find(failing_part) != std::string_view::npos) {
    if (num_spared == 0) return failure;
    --num_spared;
  }
  return build(program, num_devices, devices, options, notify, user_data);
}
