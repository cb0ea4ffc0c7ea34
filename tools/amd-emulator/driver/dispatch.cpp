// The table by which the loader calls the driver, and what the loader asks for by name.
#include <cstring>

#include "driver/answers.hpp"
#include "driver/api.hpp"
#include "driver/objects.hpp"

namespace amdemu {
namespace {

cl_int refuse() {
  return CL_INVALID_OPERATION;
}

/// For a function that would make an object: null, and the reason where its last parameter asks.
template <class R, class... Parameters>
R* refuse_object(Parameters... parameters) {
  cl_int* status = nullptr;
  (
      [&](auto parameter) {
        if constexpr (std::is_same_v<decltype(parameter), cl_int*>) status = parameter;
      }(parameters),
      ...);
  return fail(CL_INVALID_OPERATION, status);
}
template <class R, class... Parameters>
void set_refusal(R* (*&entry)(Parameters...)) {
  entry = &refuse_object<R, Parameters...>;
}

cl_icd_dispatch make_table() {
  cl_icd_dispatch table;
  auto** entries = reinterpret_cast<void**>(&table);
  for (std::size_t n = 0; n < sizeof(table) / sizeof(void*); ++n)
    entries[n] = reinterpret_cast<void*>(&refuse);
  set_refusal(table.clCreateImage);
  set_refusal(table.clCreateImage2D);
  set_refusal(table.clCreateImage3D);
  set_refusal(table.clCreateSampler);
  set_refusal(table.clCreateSamplerWithProperties);
  set_refusal(table.clCreatePipe);
  set_refusal(table.clCreateProgramWithBuiltInKernels);
  set_refusal(table.clCreateProgramWithIL);
  set_refusal(table.clLinkProgram);
  set_refusal(table.clEnqueueMapImage);
  set_refusal(table.clSVMAlloc);
#define AMDEMU_FUNCTION(NAME) table.cl##NAME = NAME;
#include "driver/functions.inc"
#undef AMDEMU_FUNCTION
  return table;
}

}  // namespace

cl_icd_dispatch* dispatch_table() {
  static cl_icd_dispatch table = make_table();
  return &table;
}

void* CL_API_CALL GetExtensionFunctionAddress(const char*) {
  return nullptr;
}
void* CL_API_CALL GetExtensionFunctionAddressForPlatform(cl_platform_id, const char*) {
  return nullptr;
}

}  // namespace amdemu

#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED cl_int CL_API_CALL clIcdGetPlatformIDsKHR(cl_uint count, cl_platform_id* platforms,
                                                   cl_uint* number) {
  return amdemu::GetPlatformIDs(count, platforms, number);
}
EXPORTED cl_int CL_API_CALL clGetPlatformInfo(cl_platform_id platform, cl_platform_info what,
                                              std::size_t given, void* value, std::size_t* needed) {
  return amdemu::GetPlatformInfo(platform, what, given, value, needed);
}
EXPORTED void* CL_API_CALL clGetExtensionFunctionAddress(const char* name) {
  if (std::strcmp(name, "clIcdGetPlatformIDsKHR") == 0)
    return reinterpret_cast<void*>(&clIcdGetPlatformIDsKHR);
  if (std::strcmp(name, "clGetPlatformInfo") == 0)
    return reinterpret_cast<void*>(&clGetPlatformInfo);
  return nullptr;
}
