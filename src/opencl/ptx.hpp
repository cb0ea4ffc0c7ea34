#pragma once

#include <string>
#include <string_view>

namespace clattn::detail {

/// Stands before instructions of kernels that NVIDIA's OpenCL compiler does not assemble, because
/// it aims at the architecture's portable subset; to it they are comments.
inline constexpr std::string_view kPtxMark = "//@sm_90a ";

/// The same program with the marked instructions in force, for compute capability 9.0 alone. A
/// kernel that moves registers between warps (setmaxnreg) must say with how many it starts: as many
/// as its work-group can have. Everything else stays as it is.
std::string enable_marked_instructions(std::string_view ptx);

}  // namespace clattn::detail
