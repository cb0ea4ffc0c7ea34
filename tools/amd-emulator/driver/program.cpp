// Programs: from source or a code object to an image for each device.
#include <algorithm>
#include <cstdio>

#include "driver/answers.hpp"
#include "driver/compiler.hpp"
#include "driver/objects.hpp"
#include "machine/settings.hpp"

namespace amdemu {
namespace {

bool is_code_for(const Chip& chip, const std::string& binary) {
  const std::string target = std::string("amdgcn-amd-amdhsa--") + chip.gfx;
  return binary.starts_with("\177ELF") && binary.find(target) != binary.npos;
}

void build_for(const Chip& chip, const std::string& source, _cl_program::Build& build) {
  const bool from_binary = source.empty() && !build.binary.empty();
  const Compiled compiled =
      from_binary ? disassemble(chip, build.binary) : compile(chip, source, build.options);
  build.log = compiled.log;
  build.status = CL_BUILD_ERROR;
  if (!compiled.ok) return;
  try {
    build.image = load_image(chip, compiled.binary, compiled.assembly);
    build.binary = compiled.binary;
    build.status = CL_BUILD_SUCCESS;
  } catch (const std::exception& error) {
    build.log += error.what();
  }
}

std::vector<std::string> kernel_names(const _cl_program& program) {
  std::vector<std::string> names;
  for (const auto& [device, build] : program.builds) {
    if (build.image == nullptr) continue;
    for (const Kernel& kernel : build.image->kernels) names.push_back(kernel.name);
    break;
  }
  return names;
}

/// CL_PROGRAM_BINARIES: each into the memory that the caller's array points to.
cl_int write_binaries(const _cl_program& program, const Query& answer) {
  const std::size_t size = program.builds.size() * sizeof(unsigned char*);
  if (answer.needed != nullptr) *answer.needed = size;
  if (answer.value == nullptr) return CL_SUCCESS;
  if (answer.given < size) return CL_INVALID_VALUE;
  auto** target = static_cast<unsigned char**>(answer.value);
  for (const auto& [device, build] : program.builds) {
    if (*target != nullptr) std::copy(build.binary.begin(), build.binary.end(), *target);
    ++target;
  }
  return CL_SUCCESS;
}

}  // namespace

cl_program CL_API_CALL CreateProgramWithSource(cl_context context, cl_uint count,
                                               const char** strings, const std::size_t* lengths,
                                               cl_int* status) {
  if (context == nullptr) return fail(CL_INVALID_CONTEXT, status);
  if (count == 0 || strings == nullptr) return fail(CL_INVALID_VALUE, status);
  auto* program = new _cl_program;
  program->context = context;
  for (cl_uint n = 0; n < count; ++n) {
    const bool has_length = lengths != nullptr && lengths[n] != 0;
    program->source += has_length ? std::string(strings[n], lengths[n]) : strings[n];
  }
  for (cl_device_id device : context->devices) program->builds[device];
  RetainContext(context);
  return done(program, status);
}
cl_program CL_API_CALL CreateProgramWithBinary(cl_context context, cl_uint count,
                                               const cl_device_id* devices,
                                               const std::size_t* lengths,
                                               const unsigned char** binaries, cl_int* each,
                                               cl_int* status) {
  if (context == nullptr) return fail(CL_INVALID_CONTEXT, status);
  if (count == 0 || devices == nullptr || lengths == nullptr || binaries == nullptr)
    return fail(CL_INVALID_VALUE, status);
  auto program = std::make_unique<_cl_program>();
  program->context = context;
  bool all_fit = true;
  for (cl_uint n = 0; n < count; ++n) {
    const std::string binary(binaries[n], binaries[n] + lengths[n]);
    const bool fits = is_code_for(*devices[n]->chip, binary);
    if (each != nullptr) each[n] = fits ? CL_SUCCESS : CL_INVALID_BINARY;
    all_fit = all_fit && fits;
    program->builds[devices[n]].binary = binary;
  }
  if (!all_fit) return fail(CL_INVALID_BINARY, status);
  RetainContext(context);
  return done(program.release(), status);
}
cl_int CL_API_CALL RetainProgram(cl_program program) {
  return retain(program, CL_INVALID_PROGRAM);
}
cl_int CL_API_CALL ReleaseProgram(cl_program program) {
  if (program == nullptr) return CL_INVALID_PROGRAM;
  if (!drop(*program)) return CL_SUCCESS;
  ReleaseContext(program->context);
  delete program;
  return CL_SUCCESS;
}

cl_int CL_API_CALL BuildProgram(cl_program program, cl_uint count, const cl_device_id* devices,
                                const char* options, void(CL_CALLBACK* notify)(cl_program, void*),
                                void* user) {
  if (program == nullptr) return CL_INVALID_PROGRAM;
  cl_int result = CL_SUCCESS;
  for (auto& [device, build] : program->builds) {
    if (count != 0 && std::find(devices, devices + count, device) == devices + count) continue;
    build.options = options == nullptr ? "" : options;
    build_for(*device->chip, program->source, build);
    if (build.status == CL_BUILD_SUCCESS) continue;
    result = CL_BUILD_PROGRAM_FAILURE;
    if (settings().verbose != 0)
      std::fprintf(stderr, "amdemu: build failed for %s with `%s`:\n%s\n", device->chip->gfx,
                   build.options.c_str(), build.log.c_str());
  }
  if (notify != nullptr) notify(program, user);
  return result;
}
cl_int CL_API_CALL GetProgramInfo(cl_program program, cl_program_info what, std::size_t given,
                                  void* value, std::size_t* needed) {
  if (program == nullptr) return CL_INVALID_PROGRAM;
  const Query answer{given, value, needed};
  switch (what) {
    case CL_PROGRAM_REFERENCE_COUNT:
      return answer.is<cl_uint>(program->references);
    case CL_PROGRAM_CONTEXT:
      return answer.is(program->context);
    case CL_PROGRAM_NUM_DEVICES:
      return answer.is(static_cast<cl_uint>(program->builds.size()));
    case CL_PROGRAM_DEVICES: {
      std::vector<cl_device_id> devices;
      for (const auto& [device, build] : program->builds) devices.push_back(device);
      return answer.list(devices);
    }
    case CL_PROGRAM_SOURCE:
      return answer.text(program->source);
    case CL_PROGRAM_BINARY_SIZES: {
      std::vector<std::size_t> sizes;
      for (const auto& [device, build] : program->builds) sizes.push_back(build.binary.size());
      return answer.list(sizes);
    }
    case CL_PROGRAM_BINARIES:
      return write_binaries(*program, answer);
    case CL_PROGRAM_NUM_KERNELS:
      return answer.is(kernel_names(*program).size());
    case CL_PROGRAM_KERNEL_NAMES: {
      std::string names;
      for (const std::string& name : kernel_names(*program))
        names += (names.empty() ? "" : ";") + name;
      return answer.text(names);
    }
    default:
      return CL_INVALID_VALUE;
  }
}
cl_int CL_API_CALL GetProgramBuildInfo(cl_program program, cl_device_id device,
                                       cl_program_build_info what, std::size_t given, void* value,
                                       std::size_t* needed) {
  if (program == nullptr) return CL_INVALID_PROGRAM;
  const auto found = program->builds.find(device);
  if (found == program->builds.end()) return CL_INVALID_DEVICE;
  const auto& build = found->second;
  const Query answer{given, value, needed};
  switch (what) {
    case CL_PROGRAM_BUILD_STATUS:
      return answer.is(build.status);
    case CL_PROGRAM_BUILD_OPTIONS:
      return answer.text(build.options);
    case CL_PROGRAM_BUILD_LOG:
      return answer.text(build.log);
    case CL_PROGRAM_BINARY_TYPE:
      return answer.is<cl_program_binary_type>(
          build.binary.empty() ? CL_PROGRAM_BINARY_TYPE_NONE : CL_PROGRAM_BINARY_TYPE_EXECUTABLE);
    default:
      return CL_INVALID_VALUE;
  }
}

cl_int CL_API_CALL CreateKernelsInProgram(cl_program program, cl_uint count, cl_kernel* kernels,
                                          cl_uint* number) {
  if (program == nullptr) return CL_INVALID_PROGRAM;
  const std::vector<std::string> names = kernel_names(*program);
  if (number != nullptr) *number = static_cast<cl_uint>(names.size());
  if (kernels == nullptr) return CL_SUCCESS;
  if (count < names.size()) return CL_INVALID_VALUE;
  for (const std::string& name : names) *kernels++ = CreateKernel(program, name.c_str(), nullptr);
  return CL_SUCCESS;
}

}  // namespace amdemu
