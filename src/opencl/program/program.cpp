#include "opencl/program/program.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "opencl/device/device_info.hpp"

namespace clattn::detail {
namespace {

std::string build_log(cl_program program, cl_device_id device) {
  std::size_t size = 0;
  if (clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, 0, nullptr, &size) != CL_SUCCESS)
    return {};
  std::string log(size, '\0');
  if (clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, size, log.data(), nullptr) !=
      CL_SUCCESS)
    return {};
  log.erase(log.find_last_not_of(std::string_view("\0 \n", 3)) + 1);
  return log;
}

Compilation build(ProgramHandle program, cl_device_id device, const std::string& options) {
  Compilation result;
  result.status = clBuildProgram(program.get(), 1, &device, options.c_str(), nullptr, nullptr);
  result.log = build_log(program.get(), device);
  if (result.status == CL_SUCCESS) result.program = std::move(program);
  return result;
}

/// The device's binary of a built program; CL_INVALID_BINARY when the driver has none to give.
cl_int read_binary(cl_program program, cl_device_id device, std::string& binary) {
  const auto get = [&](cl_program_info what, auto& values) {
    const auto bytes = std::as_writable_bytes(std::span(values));
    return clGetProgramInfo(program, what, bytes.size(), bytes.data(), nullptr);
  };
  // An adopted context may have several devices; the driver answers for all of them at once.
  std::array<cl_uint, 1> count{};
  cl_int status = get(CL_PROGRAM_NUM_DEVICES, count);
  std::vector<cl_device_id> devices(count[0]);
  std::vector<std::size_t> sizes(count[0]);
  std::vector<char*> targets(count[0], nullptr);  // null: not wanted
  if (status == CL_SUCCESS) status = get(CL_PROGRAM_DEVICES, devices);
  if (status == CL_SUCCESS) status = get(CL_PROGRAM_BINARY_SIZES, sizes);
  if (status != CL_SUCCESS) return status;
  const auto index = static_cast<std::size_t>(std::ranges::find(devices, device) - devices.begin());
  if (index == devices.size() || sizes[index] == 0) return CL_INVALID_BINARY;
  binary.resize(sizes[index]);
  targets[index] = binary.data();
  return get(CL_PROGRAM_BINARIES, targets);
}

/// Gives a built program back to its driver with its marked instructions in force.
Compilation with_marked_instructions(cl_context context, cl_device_id device, cl_program program,
                                     const std::string& options) {
  std::string binary;
  Compilation result{.program = {}, .status = read_binary(program, device, binary), .log = {}};
  if (result.status == CL_SUCCESS)
    result = load_program(context, device, enable_marked_instructions(binary), options);
  if (result.status == CL_SUCCESS) return result;
  result.log = "the driver does not take back the program with its marked instructions in force\n" +
               result.log;
  return result;
}

}  // namespace

Compilation compile_program(cl_context context, cl_device_id device, const std::string& text,
                            const std::string& options) {
  cl_int status = CL_SUCCESS;
  const char* string = text.data();
  const std::size_t size = text.size();
  ProgramHandle program(clCreateProgramWithSource(context, 1, &string, &size, &status));
  check(status, "creating a program from source");
  Compilation result = build(std::move(program), device, options);
  // Asked for a binary, PoCL compiles kernels for groups of any size, and its versions 5 and 6
  // abort over assembly in those.
  if (!result.program || device_kind(device) != DeviceKind::kGpu ||
      text.find(kPtxMark) == std::string::npos)
    return result;
  return with_marked_instructions(context, device, result.program.get(), options);
}

std::optional<std::string> program_binary(cl_program program, cl_device_id device) {
  std::string binary;
  if (read_binary(program, device, binary) != CL_SUCCESS) return std::nullopt;
  return binary;
}

Compilation load_program(cl_context context, cl_device_id device, const std::string& binary,
                         const std::string& options) {
  cl_int status = CL_SUCCESS;
  cl_int binary_status = CL_SUCCESS;
  const std::size_t size = binary.size();
  const auto* bytes = reinterpret_cast<const unsigned char*>(binary.data());
  ProgramHandle program(
      clCreateProgramWithBinary(context, 1, &device, &size, &bytes, &binary_status, &status));
  if (status == CL_SUCCESS) status = binary_status;
  if (status != CL_SUCCESS) return {.program = {}, .status = status, .log = {}};
  return build(std::move(program), device, options);
}

}  // namespace clattn::detail
