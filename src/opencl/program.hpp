#pragma once

#include <optional>
#include <string>

#include "opencl/handle.hpp"
#include "opencl/program_cache.hpp"

namespace clattn::detail {

/// What the driver made of a text or a binary. `program` is empty unless status is CL_SUCCESS.
struct Compilation {
  ProgramHandle program;
  cl_int status = CL_SUCCESS;
  std::string log;
};

/// Builds `text` for one device of the context, instructions behind marks included
/// (opencl/ptx.hpp). Throws only for failures that are not the source's.
Compilation compile_program(cl_context context, cl_device_id device, const std::string& text,
                            const std::string& options);

/// The device's binary of a built program; nothing when the driver has none to give.
std::optional<Bytes> program_binary(cl_program program, cl_device_id device);

/// A program from a binary, or why the driver does not take it.
Compilation load_program(cl_context context, cl_device_id device, const Bytes& binary,
                         const std::string& options);

}  // namespace clattn::detail
