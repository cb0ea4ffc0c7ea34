// Runs kernels: work-groups on the host's threads, the waves of a group in turns.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "machine/image.hpp"

namespace amdemu {

struct Launch {
  std::shared_ptr<Image> image;
  const Kernel* kernel = nullptr;
  std::uint32_t dims = 1;
  std::uint64_t global[3] = {1, 1, 1}, offset[3] = {0, 0, 0};
  std::uint32_t local[3] = {1, 1, 1};
  std::uint32_t dynamic_local = 0;     // bytes behind the kernel's own local memory
  std::vector<unsigned char> kernarg;  // the explicit arguments
};

/// Runs a launch to its end; an empty string, or what went wrong.
std::string run(const Launch& launch);

/// Wave instructions executed since the process started.
std::uint64_t instructions_executed();

}  // namespace amdemu
