#pragma once

#include <clattn/opencl.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace test {

/// Programs that this process, the library included, has had built so far: failing_builds.cpp
/// stands before the loader's clBuildProgram.
std::size_t num_builds();

/// While it lives, the programs that are built, one at a time: source or binary, and options.
class BuildLog {
 public:
  BuildLog();
  ~BuildLog();
  BuildLog(const BuildLog&) = delete;
  BuildLog& operator=(const BuildLog&) = delete;
  std::vector<std::string> programs = {};
};

/// While it lives, builds whose options hold `part` end with `status` before the driver sees them,
/// all but the first `spared` of them and no more than `most`.
class FailingBuilds {
 public:
  FailingBuilds(cl_int status, std::string part, std::size_t spared = 0,
                std::size_t most = SIZE_MAX);
  ~FailingBuilds();
  FailingBuilds(const FailingBuilds&) = delete;
  FailingBuilds& operator=(const FailingBuilds&) = delete;
};

/// While it lives, the driver is short of resources: it makes none of the first `kernels` kernels,
/// and retains nothing if `retains` says so.
class ShortDriver {
 public:
  explicit ShortDriver(std::size_t kernels, bool retains = false);
  ~ShortDriver();
  ShortDriver(const ShortDriver&) = delete;
  ShortDriver& operator=(const ShortDriver&) = delete;
};

/// While it lives, devices are GPUs whose kernels answer a query with so many bytes of private
/// memory: `bytes` where their build options hold `part`, else `others`.
class SpillingKernels {
 public:
  SpillingKernels(std::string part, cl_ulong bytes, cl_ulong others,
                  cl_kernel_work_group_info query = CL_KERNEL_PRIVATE_MEM_SIZE);
  ~SpillingKernels();
  SpillingKernels(const SpillingKernels&) = delete;
  SpillingKernels& operator=(const SpillingKernels&) = delete;
};

}  // namespace test
