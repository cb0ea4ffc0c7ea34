// Contexts.
#include "driver/answers.hpp"
#include "driver/objects.hpp"
#include "driver/platform.hpp"

namespace amdemu {

cl_context CL_API_CALL CreateContext(
    const cl_context_properties* properties, cl_uint count, const cl_device_id* devices,
    void(CL_CALLBACK*)(const char*, const void*, std::size_t, void*), void*, cl_int* status) {
  if (count == 0 || devices == nullptr) return fail(CL_INVALID_VALUE, status);
  auto* context = new _cl_context;
  context->devices.assign(devices, devices + count);
  if (properties != nullptr) {
    for (; *properties != 0; properties += 2)
      context->properties.insert(context->properties.end(), properties, properties + 2);
    context->properties.push_back(0);
  }
  return done(context, status);
}
cl_context CL_API_CALL CreateContextFromType(const cl_context_properties* properties,
                                             cl_device_type type,
                                             void(CL_CALLBACK* notify)(const char*, const void*,
                                                                       std::size_t, void*),
                                             void* user, cl_int* status) {
  if ((type & (CL_DEVICE_TYPE_GPU | CL_DEVICE_TYPE_DEFAULT)) == 0)
    return fail(CL_DEVICE_NOT_FOUND, status);
  const auto& devices = all_devices();
  return CreateContext(properties, static_cast<cl_uint>(devices.size()), devices.data(), notify,
                       user, status);
}
cl_int CL_API_CALL RetainContext(cl_context context) {
  return retain(context, CL_INVALID_CONTEXT);
}
cl_int CL_API_CALL ReleaseContext(cl_context context) {
  if (context == nullptr) return CL_INVALID_CONTEXT;
  if (drop(*context)) delete context;
  return CL_SUCCESS;
}
cl_int CL_API_CALL GetContextInfo(cl_context context, cl_context_info what, std::size_t given,
                                  void* value, std::size_t* needed) {
  if (context == nullptr) return CL_INVALID_CONTEXT;
  const Query answer{given, value, needed};
  switch (what) {
    case CL_CONTEXT_REFERENCE_COUNT:
      return answer.is<cl_uint>(context->references);
    case CL_CONTEXT_NUM_DEVICES:
      return answer.is(static_cast<cl_uint>(context->devices.size()));
    case CL_CONTEXT_DEVICES:
      return answer.list(context->devices);
    case CL_CONTEXT_PROPERTIES:
      return answer.list(context->properties);
    default:
      return CL_INVALID_VALUE;
  }
}

}  // namespace amdemu
