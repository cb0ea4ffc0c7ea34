#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "opencl/driver.hpp"

namespace clattn::detail {

/// Stands before instructions of kernels that NVIDIA's OpenCL compiler does not assemble, because
/// it aims at the architecture's portable subset; to it they are comments.
inline constexpr std::string_view kPtxMark = "//@sm_90a ";

/// The same program with the marked instructions in force, for compute capability 9.0 alone. A
/// kernel that moves registers between warps (setmaxnreg) must say with how many it starts: as many
/// as its work-group can have. Everything else stays as it is.
std::string enable_marked_instructions(std::string_view ptx);

/// What the driver made of a text or a binary. `program` is empty unless status is CL_SUCCESS.
struct Compilation {
  ProgramHandle program;
  cl_int status = CL_SUCCESS;
  std::string log;
};

/// Builds `text` for one device of the context, instructions after kPtxMark included.
/// Throws only for failures that are not the source's.
Compilation compile_program(cl_context context, cl_device_id device, const std::string& text,
                            const std::string& options);

/// The device's binary of a built program; nothing when the driver has none to give.
std::optional<std::string> program_binary(cl_program program, cl_device_id device);

/// A program from a binary, or why the driver does not take it.
Compilation load_program(cl_context context, cl_device_id device, const std::string& binary,
                         const std::string& options);

}  // namespace clattn::detail
