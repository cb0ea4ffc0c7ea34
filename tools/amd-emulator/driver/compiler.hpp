// OpenCL C to code objects with clang, and code objects to assembly with llvm-objdump; both cached.
#pragma once
#include <string>

#include "machine/chips.hpp"

namespace amdemu {

struct Compiled {
  bool ok = false;
  std::string binary, assembly, log;
};
/// `options`: as given to clBuildProgram.
Compiled compile(const Chip& chip, const std::string& source, const std::string& options);
Compiled disassemble(const Chip& chip, const std::string& binary);

}  // namespace amdemu
