// Kernels and their arguments.
#include <algorithm>
#include <cstring>

#include "driver/answers.hpp"
#include "driver/launch.hpp"
#include "driver/objects.hpp"

namespace amdemu {

const Kernel* kernel_on(cl_kernel kernel, cl_device_id device, std::shared_ptr<Image>* image) {
  const auto& builds = kernel->program->builds;
  if (device == nullptr && builds.size() == 1) device = builds.begin()->first;
  const auto found = builds.find(device);
  if (found == builds.end() || found->second.image == nullptr) return nullptr;
  if (image != nullptr) *image = found->second.image;
  return found->second.image->find(kernel->name);
}

cl_kernel CL_API_CALL CreateKernel(cl_program program, const char* name, cl_int* status) {
  if (program == nullptr) return fail(CL_INVALID_PROGRAM, status);
  if (name == nullptr) return fail(CL_INVALID_VALUE, status);
  bool built = false;
  for (const auto& [device, build] : program->builds) {
    if (build.image == nullptr) continue;
    built = true;
    const Kernel* shape = build.image->find(name);
    if (shape == nullptr) continue;
    auto* kernel = new _cl_kernel;
    kernel->program = program, kernel->name = name, kernel->shape = shape;
    const auto count = std::ranges::count_if(shape->args, [](auto& a) { return !a.is_hidden(); });
    kernel->arguments.resize(static_cast<std::size_t>(count));
    RetainProgram(program);
    return done(kernel, status);
  }
  return fail(built ? CL_INVALID_KERNEL_NAME : CL_INVALID_PROGRAM_EXECUTABLE, status);
}
cl_kernel CL_API_CALL CloneKernel(cl_kernel kernel, cl_int* status) {
  if (kernel == nullptr) return fail(CL_INVALID_KERNEL, status);
  cl_kernel copy = CreateKernel(kernel->program, kernel->name.c_str(), status);
  if (copy != nullptr) copy->arguments = kernel->arguments;
  return copy;
}
cl_int CL_API_CALL RetainKernel(cl_kernel kernel) {
  return retain(kernel, CL_INVALID_KERNEL);
}
cl_int CL_API_CALL ReleaseKernel(cl_kernel kernel) {
  if (kernel == nullptr) return CL_INVALID_KERNEL;
  if (!drop(*kernel)) return CL_SUCCESS;
  ReleaseProgram(kernel->program);
  delete kernel;
  return CL_SUCCESS;
}

cl_int CL_API_CALL SetKernelArg(cl_kernel kernel, cl_uint index, std::size_t size,
                                const void* value) {
  if (kernel == nullptr) return CL_INVALID_KERNEL;
  if (index >= kernel->arguments.size()) return CL_INVALID_ARG_INDEX;
  const KernelArg& shape = kernel->shape->args[index];
  auto& argument = kernel->arguments[index];
  const auto* bytes = static_cast<const unsigned char*>(value);
  if (shape.kind == "dynamic_shared_pointer") {
    if (value != nullptr) return CL_INVALID_ARG_VALUE;
    if (size == 0) return CL_INVALID_ARG_SIZE;
    argument.local = size;
  } else if (shape.kind == "global_buffer") {
    if (size != sizeof(cl_mem)) return CL_INVALID_ARG_SIZE;
    argument.value.assign(sizeof(cl_mem), 0);
    if (value != nullptr) std::copy_n(bytes, size, argument.value.begin());
  } else {
    if (value == nullptr) return CL_INVALID_ARG_VALUE;
    if (size != shape.size) return CL_INVALID_ARG_SIZE;
    argument.value.assign(bytes, bytes + size);
  }
  argument.set = true;
  return CL_SUCCESS;
}

cl_int CL_API_CALL GetKernelInfo(cl_kernel kernel, cl_kernel_info what, std::size_t given,
                                 void* value, std::size_t* needed) {
  if (kernel == nullptr) return CL_INVALID_KERNEL;
  const Query answer{given, value, needed};
  switch (what) {
    case CL_KERNEL_FUNCTION_NAME:
      return answer.text(kernel->name);
    case CL_KERNEL_NUM_ARGS:
      return answer.is(static_cast<cl_uint>(kernel->arguments.size()));
    case CL_KERNEL_REFERENCE_COUNT:
      return answer.is<cl_uint>(kernel->references);
    case CL_KERNEL_CONTEXT:
      return answer.is(kernel->program->context);
    case CL_KERNEL_PROGRAM:
      return answer.is(kernel->program);
    case CL_KERNEL_ATTRIBUTES:
      return answer.text("");
    default:
      return CL_INVALID_VALUE;
  }
}

namespace {
cl_kernel_arg_address_qualifier address_space_of(const KernelArg& arg) {
  if (arg.address_space == "global") return CL_KERNEL_ARG_ADDRESS_GLOBAL;
  if (arg.address_space == "local") return CL_KERNEL_ARG_ADDRESS_LOCAL;
  if (arg.address_space == "constant") return CL_KERNEL_ARG_ADDRESS_CONSTANT;
  return CL_KERNEL_ARG_ADDRESS_PRIVATE;
}
cl_kernel_arg_type_qualifier qualifiers_of(const KernelArg& arg) {
  cl_kernel_arg_type_qualifier qualifiers = 0;
  if (arg.is_const) qualifiers |= CL_KERNEL_ARG_TYPE_CONST;
  if (arg.is_restrict) qualifiers |= CL_KERNEL_ARG_TYPE_RESTRICT;
  if (arg.is_volatile) qualifiers |= CL_KERNEL_ARG_TYPE_VOLATILE;
  return qualifiers;
}
}  // namespace

cl_int CL_API_CALL GetKernelArgInfo(cl_kernel kernel, cl_uint index, cl_kernel_arg_info what,
                                    std::size_t given, void* value, std::size_t* needed) {
  if (kernel == nullptr) return CL_INVALID_KERNEL;
  if (index >= kernel->arguments.size()) return CL_INVALID_ARG_INDEX;
  const KernelArg& arg = kernel->shape->args[index];
  const Query answer{given, value, needed};
  switch (what) {
    case CL_KERNEL_ARG_ADDRESS_QUALIFIER:
      return answer.is(address_space_of(arg));
    case CL_KERNEL_ARG_ACCESS_QUALIFIER:
      return answer.is<cl_kernel_arg_access_qualifier>(CL_KERNEL_ARG_ACCESS_NONE);
    case CL_KERNEL_ARG_TYPE_NAME:
      return answer.text(arg.type_name);
    case CL_KERNEL_ARG_TYPE_QUALIFIER:
      return answer.is(qualifiers_of(arg));
    case CL_KERNEL_ARG_NAME:
      return arg.name.empty() ? CL_KERNEL_ARG_INFO_NOT_AVAILABLE : answer.text(arg.name);
    default:
      return CL_INVALID_VALUE;
  }
}
cl_int CL_API_CALL GetKernelWorkGroupInfo(cl_kernel kernel, cl_device_id device,
                                          cl_kernel_work_group_info what, std::size_t given,
                                          void* value, std::size_t* needed) {
  if (kernel == nullptr) return CL_INVALID_KERNEL;
  std::shared_ptr<Image> image;
  const Kernel* shape = kernel_on(kernel, device, &image);
  if (shape == nullptr) return CL_INVALID_DEVICE;
  const Query answer{given, value, needed};
  switch (what) {
    case CL_KERNEL_WORK_GROUP_SIZE:
      return answer.is<std::size_t>(shape->max_group);
    case CL_KERNEL_COMPILE_WORK_GROUP_SIZE:
      return answer.list(std::vector<std::size_t>(shape->reqd_group, shape->reqd_group + 3));
    case CL_KERNEL_LOCAL_MEM_SIZE: {
      cl_ulong bytes = shape->local_bytes;
      for (const auto& argument : kernel->arguments) bytes += argument.local;
      return answer.is(bytes);
    }
    case CL_KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE:
      return answer.is(static_cast<std::size_t>(image->chip->wave));
    case CL_KERNEL_PRIVATE_MEM_SIZE:
      return answer.is<cl_ulong>(shape->private_bytes);
    default:
      return CL_INVALID_VALUE;
  }
}

}  // namespace amdemu
