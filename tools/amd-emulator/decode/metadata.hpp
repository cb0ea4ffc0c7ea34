// Kernels and their arguments, from the MessagePack document in a code object's note.
#pragma once
#include <span>
#include <vector>

#include "machine/image.hpp"

namespace amdemu {

std::vector<Kernel> read_kernels(std::span<const unsigned char> note);

}  // namespace amdemu
