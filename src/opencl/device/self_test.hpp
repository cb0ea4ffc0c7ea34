#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// What selftest.cl found on a device; kept on disk as it lies in memory.
struct SelfTestResult {
  std::uint64_t static_local_mem_bytes = 0;
  std::int32_t inline_ptx = 0;
  std::int32_t wave_size = 0;
  std::int32_t warpgroup_products = 0;
  std::int32_t fp8_conversions = 0;
  std::int32_t bf16_products = 0;
  std::int32_t native_builtins = 0;
  std::int32_t long_loops = 1;
  std::int32_t struct_arguments = 1;
  std::uint32_t sub_groups_in_step = 0;
  std::uint32_t right_matrix_units = 0;  ///< bit i: matrix_units()[i] (units.hpp)
  std::uint32_t wrong_matrix_units = 0;  ///< those that are built, but compute something else
  /// Those whose products of f16 take subnormal elements as 0 (AMD's MI200).
  std::uint32_t flushing_matrix_units = 0;
  float native_exp2_error = 1;
  std::int32_t x86_tiles = 0;
  std::int32_t x86_prefetch = 0;
  std::int32_t padding = 0;  ///< else the file would hold bytes that nobody wrote
};
static_assert(sizeof(SelfTestResult) == 8 + 16 * 4, "padding bytes would be written uninitialized");

struct SelfTestReport {
  SelfTestResult result;
  /// Whether it may be remembered. Not when a built kernel could not run, or none could be built:
  /// the device may just be busy or full, or its compiler badly installed.
  bool conclusive = true;
};

/// The sources of self-tests.
struct SelfTestTexts {
  std::string device;                   ///< selftest.cl
  std::string x86_tiles = {};           ///< selftest_amx.cl; empty where the process has none
  std::vector<std::string> units = {};  ///< the self-test of each of matrix_units()
};

/// Runs the kernels of `texts` on a queue of its own. What fails to build or computes wrong is
/// absent in the result.
SelfTestReport run_self_tests(cl_context context, cl_device_id device,
                              const DeviceCapabilities& reported, const SelfTestTexts& texts);

/// Whether the driver of a CPU lives when a kernel of groups of one work-item has inline assembly.
/// PoCL from the snapshots of 3.2 to 6 takes it for a call of its own and aborts where it makes
/// loops over work-items (its WorkitemLoops.cc, handleLocalMemAllocas; mended in 7.0). Versions 5
/// and 6 were seen to make none for such groups with `defaults` (Environment::pocl_defaults). False
/// for a PoCL whose version cannot be read and for platforms other than PoCL and Intel's runtime,
/// of which none was tested.
bool survives_assembly(std::string_view platform_name, std::string_view driver_version,
                       bool defaults);

/// The wave size that clattn_selftest_wave's output proves; nothing when it contradicts itself.
std::optional<int> proven_wave_size(std::span<const cl_uint> result, cl_uint seed);

}  // namespace clattn::detail
