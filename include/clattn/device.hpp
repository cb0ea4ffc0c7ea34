#pragma once

#include <clattn/opencl.hpp>

#include <clattn/types.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace CLATTN_API clattn {

/// What kind of device the driver says it is.
enum class DeviceKind : std::uint8_t { kGpu, kCpu, kOther };

/// "gpu", "cpu" or "other".
std::string_view to_string(DeviceKind kind);

/// One OpenCL device as list_devices() found it. The handles belong to the driver.
struct Device {
  cl_platform_id platform = nullptr;  ///< platform that offers the device
  cl_device_id id = nullptr;          ///< handle of the device
  int platform_index = 0;             ///< position among the platforms, as in the selector "0:1"
  int device_index = 0;               ///< position among the platform's devices
};

/// What a device can do: driver queries first, then what self-tests found. Kernels are chosen by
/// this record, never by a vendor's name.
struct DeviceCapabilities {
  std::string name = {};                  ///< CL_DEVICE_NAME
  std::string vendor = {};                ///< CL_DEVICE_VENDOR
  std::string driver_version = {};        ///< CL_DRIVER_VERSION
  std::string device_version = {};        ///< CL_DEVICE_VERSION
  std::string opencl_c_version = {};      ///< CL_DEVICE_OPENCL_C_VERSION
  std::string platform_name = {};         ///< CL_PLATFORM_NAME
  std::string platform_version = {};      ///< CL_PLATFORM_VERSION
  DeviceKind kind = DeviceKind::kOther;   ///< as the driver reports it
  int compute_units = 1;                  ///< CL_DEVICE_MAX_COMPUTE_UNITS
  std::uint64_t max_work_group_size = 1;  ///< work-items
  std::uint64_t global_mem_bytes = 0;     ///< of all buffers together
  std::uint64_t max_alloc_bytes = 0;      ///< of one buffer
  std::uint64_t local_mem_bytes = 0;      ///< as the driver reports it
  int float_vector_width = 1;      ///< floats of a vector: what the driver prefers, on CPUs no
                                   ///< less than the processor has
  bool reports_fp16 = false;       ///< cl_khr_fp16 (arithmetic; storage needs nothing)
  bool reports_subgroups = false;  ///< cl_khr_subgroups or cl_intel_subgroups

  std::uint64_t static_local_mem_bytes = 0;  ///< largest static __local array seen to work
  bool inline_ptx = false;                   ///< inline PTX assembles and computes
  bool warpgroup_products = false;  ///< warpgroup matrix products of compute capability 9.0 compute
  bool fp8_conversions = false;     ///< PTX's conversions of fp8, of compute capability 8.9 on
  bool bf16_products = false;       ///< x86's products of bf16 pairs, no slower than multiply-adds
  bool x86_tiles = false;           ///< x86's matrix tiles of bf16 and int8 (AMX): it has them,
                                    ///< Linux grants them to this process, and they compute right
  float native_exp2_error = 1;      ///< largest relative error seen of native_exp2; 1 = unknown
  bool native_builtins = false;     ///< a CPU compiler's prefetch, half vectors, streaming stores
  bool x86_prefetch = false;        ///< not those, but x86's prefetch as assembly
  bool struct_arguments = true;     ///< structs passed to kernels by value arrive as they were
  std::uint32_t sub_groups_in_step =
      0;  ///< sizes of sub-groups that were seen to run in step, a bit each: 8 | 16 | 32 | 64. Size
          ///< 32 also executes kernels for NVIDIA's GPUs (family gpu_ptx): slowly, and only where
          ///< asked for
  std::vector<std::string> matrix_units = {};  ///< units (mfma, dpas16_decode) whose products of
                                               ///< matrices were seen to be right
  std::vector<std::string> wrong_matrix_units =
      {};  ///< those that the driver builds, but that compute something else: not used
  bool flushes_f16 = false;  ///< products of matrix_units treat f16 below 2^-14 as 0 (AMD MI200)
  bool long_loops = true;    ///< a work-item's loops run to their end, even if long
  int wave_size = 0;  ///< lanes that a sub-group (or a PTX warp) was seen to have, 0 = none found
  int ptx_arch = 0;   ///< compute capability as in sm_NN, where the driver says it; else 0
};

/// Every device of every platform, in the drivers' order. Empty when there is none. Thread-safe.
std::vector<Device> list_devices();

/// Chooses a device: "gpu", "cpu", "P:D" (indices), or part of a device or platform name (any
/// case). Empty: the environment's CLATTN_DEVICE, and without that the GPU with the most compute
/// units, else a CPU. Throws kInvalidArgument listing the devices if none fits. Thread-safe.
Device select_device(std::string_view selector = {});

}  // namespace clattn
