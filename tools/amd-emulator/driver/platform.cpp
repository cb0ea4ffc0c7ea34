// The platform and its devices.
#include <algorithm>

#include "driver/answers.hpp"
#include "driver/objects.hpp"
#include "driver/platform.hpp"
#include "machine/settings.hpp"

// Queries of cl_amd_device_attribute_query, which the Khronos headers name only since 2022.
namespace {
constexpr cl_device_info kPreferredWorkGroupSize = 0x4030, kMaxWorkGroupSize = 0x4031,
                         kBoardName = 0x4038, kSimdPerComputeUnit = 0x4040, kSimdWidth = 0x4041,
                         kWavefrontWidth = 0x4043, kLocalMemPerComputeUnit = 0x4047,
                         kGfxipMajor = 0x404a, kGfxipMinor = 0x404b;
constexpr std::size_t kDefaultMaxGroup = 256, kLargestGroup = 1024;
}  // namespace

namespace amdemu {
namespace {

_cl_platform_id* the_platform() {
  static _cl_platform_id platform{dispatch_table()};
  return &platform;
}

/// Those that AMDEMU_GFX names, in its order.
std::vector<cl_device_id> chosen_devices() {
  std::vector<cl_device_id> devices;
  const std::string wanted = settings().gfx + ",";
  for (std::size_t at = 0, comma; (comma = wanted.find(',', at)) != wanted.npos; at = comma + 1) {
    for (const Chip& chip : chips()) {
      if (wanted.substr(at, comma - at) == chip.gfx)
        devices.push_back(new _cl_device_id{dispatch_table(), &chip});
    }
  }
  return devices;
}

constexpr const char* kExtensions =
    "cl_khr_fp64 cl_khr_global_int32_base_atomics cl_khr_global_int32_extended_atomics "
    "cl_khr_local_int32_base_atomics cl_khr_local_int32_extended_atomics "
    "cl_khr_int64_base_atomics cl_khr_int64_extended_atomics cl_khr_3d_image_writes "
    "cl_khr_byte_addressable_store cl_khr_fp16 cl_khr_gl_sharing cl_amd_device_attribute_query "
    "cl_amd_media_ops cl_amd_media_ops2 cl_khr_image2d_from_buffer cl_khr_subgroups "
    "cl_khr_depth_images cl_amd_copy_buffer_p2p cl_amd_assembly_program ";
constexpr cl_device_fp_config kFloats = CL_FP_DENORM | CL_FP_INF_NAN | CL_FP_ROUND_TO_NEAREST |
                                        CL_FP_ROUND_TO_ZERO | CL_FP_ROUND_TO_INF | CL_FP_FMA;

cl_int strings(const Chip& chip, cl_device_info what, const Query& answer) {
  switch (what) {
    case CL_DEVICE_NAME:
      return answer.text(chip.name);
    case CL_DEVICE_VENDOR:
      return answer.text("Advanced Micro Devices, Inc.");
    case CL_DRIVER_VERSION:
      return answer.text("3625.0 (emulated,HSA1.1,LC)");
    case CL_DEVICE_PROFILE:
      return answer.text("FULL_PROFILE");
    case CL_DEVICE_VERSION:
      return answer.text("OpenCL 2.0 (emulated)");
    case CL_DEVICE_OPENCL_C_VERSION:
      return answer.text("OpenCL C 2.0 ");
    case CL_DEVICE_EXTENSIONS:
      return answer.text(kExtensions);
    case CL_DEVICE_BUILT_IN_KERNELS:
      return answer.text("");
    case kBoardName:
      return answer.text(chip.board);
    default:
      return CL_INVALID_VALUE;
  }
}

cl_int memory_sizes(const Chip& chip, cl_device_info what, const Query& answer) {
  const cl_ulong largest = largest_buffer(chip);
  switch (what) {
    case CL_DEVICE_MAX_MEM_ALLOC_SIZE:
    case CL_DEVICE_MAX_CONSTANT_BUFFER_SIZE:
      return answer.is<cl_ulong>(largest);
    case CL_DEVICE_GLOBAL_MEM_SIZE:
      return answer.is<cl_ulong>(std::min<cl_ulong>(chip.memory, 16ULL << 30));
    case CL_DEVICE_GLOBAL_MEM_CACHE_TYPE:
      return answer.is<cl_device_mem_cache_type>(CL_READ_WRITE_CACHE);
    case CL_DEVICE_GLOBAL_MEM_CACHELINE_SIZE:
      return answer.is<cl_uint>(chip.wave == 64 ? 64 : 128);
    case CL_DEVICE_GLOBAL_MEM_CACHE_SIZE:
      return answer.is<cl_ulong>(chip.wave == 64 ? 16384 : 32768);
    case CL_DEVICE_LOCAL_MEM_TYPE:
      return answer.is<cl_device_local_mem_type>(CL_LOCAL);
    case CL_DEVICE_LOCAL_MEM_SIZE:
      return answer.is<cl_ulong>(chip.local_bytes);
    case kLocalMemPerComputeUnit:
      return answer.is<cl_uint>(chip.local_bytes);
    case CL_DEVICE_MAX_PARAMETER_SIZE:
      return answer.is<std::size_t>(1024);
    case CL_DEVICE_MEM_BASE_ADDR_ALIGN:
      return answer.is<cl_uint>(kBufferAlignment * 8);
    case CL_DEVICE_MIN_DATA_TYPE_ALIGN_SIZE:
      return answer.is<cl_uint>(128);
    case CL_DEVICE_PRINTF_BUFFER_SIZE:
      return answer.is<std::size_t>(4194304);
    default:
      return CL_INVALID_VALUE;
  }
}

cl_int counts(const Chip& chip, cl_device_info what, const Query& answer) {
  const auto number = [&](auto n) { return answer.is(static_cast<cl_uint>(n)); };
  switch (what) {
    case CL_DEVICE_VENDOR_ID:
      return number(0x1002);
    case CL_DEVICE_MAX_COMPUTE_UNITS:
      return number(chip.compute_units);
    case CL_DEVICE_MAX_WORK_ITEM_DIMENSIONS:
      return number(3);
    case CL_DEVICE_MAX_WORK_GROUP_SIZE:
    case kPreferredWorkGroupSize:
      return answer.is(kDefaultMaxGroup);
    case kMaxWorkGroupSize:
      return answer.is(kLargestGroup);
    case CL_DEVICE_MAX_WORK_ITEM_SIZES:
      return answer.list(std::vector<std::size_t>(3, kLargestGroup));
    case CL_DEVICE_PREFERRED_VECTOR_WIDTH_CHAR:
    case CL_DEVICE_NATIVE_VECTOR_WIDTH_CHAR:
      return number(4);
    case CL_DEVICE_PREFERRED_VECTOR_WIDTH_SHORT:
    case CL_DEVICE_NATIVE_VECTOR_WIDTH_SHORT:
      return number(2);
    case CL_DEVICE_PREFERRED_VECTOR_WIDTH_INT:
    case CL_DEVICE_NATIVE_VECTOR_WIDTH_INT:
    case CL_DEVICE_PREFERRED_VECTOR_WIDTH_LONG:
    case CL_DEVICE_NATIVE_VECTOR_WIDTH_LONG:
    case CL_DEVICE_PREFERRED_VECTOR_WIDTH_FLOAT:
    case CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT:
    case CL_DEVICE_PREFERRED_VECTOR_WIDTH_DOUBLE:
    case CL_DEVICE_NATIVE_VECTOR_WIDTH_DOUBLE:
    case CL_DEVICE_PREFERRED_VECTOR_WIDTH_HALF:
    case CL_DEVICE_NATIVE_VECTOR_WIDTH_HALF:
      return number(1);
    case CL_DEVICE_MAX_CLOCK_FREQUENCY:
      return number(chip.clock_mhz);
    case CL_DEVICE_ADDRESS_BITS:
      return number(64);
    case CL_DEVICE_MAX_CONSTANT_ARGS:
      return number(8);
    case CL_DEVICE_PROFILING_TIMER_RESOLUTION:
      return answer.is<std::size_t>(1);
    case CL_DEVICE_PARTITION_MAX_SUB_DEVICES:
    case CL_DEVICE_MAX_READ_IMAGE_ARGS:
    case CL_DEVICE_MAX_WRITE_IMAGE_ARGS:
    case CL_DEVICE_MAX_SAMPLERS:
      return number(0);
    case CL_DEVICE_IMAGE2D_MAX_WIDTH:
    case CL_DEVICE_IMAGE2D_MAX_HEIGHT:
    case CL_DEVICE_IMAGE3D_MAX_WIDTH:
    case CL_DEVICE_IMAGE3D_MAX_HEIGHT:
    case CL_DEVICE_IMAGE3D_MAX_DEPTH:
    case CL_DEVICE_IMAGE_MAX_BUFFER_SIZE:
    case CL_DEVICE_IMAGE_MAX_ARRAY_SIZE:
      return answer.is<std::size_t>(0);
    case CL_DEVICE_REFERENCE_COUNT:
      return number(1);
    case CL_DEVICE_MAX_NUM_SUB_GROUPS:
      return number(static_cast<int>(kDefaultMaxGroup) / chip.wave);
    case kSimdPerComputeUnit:
      return number(chip.wave == 64 ? 4 : 2);
    case kSimdWidth:
      return number(chip.wave == 64 ? 16 : 32);
    case kWavefrontWidth:
      return number(chip.wave);
    case kGfxipMajor:
      return number(chip.generation);
    case kGfxipMinor: {
      const std::string gfx = chip.gfx;
      return number(gfx[gfx.size() - 2] - '0');
    }
    default:
      return CL_INVALID_VALUE;
  }
}

cl_int features(cl_device_info what, const Query& answer) {
  switch (what) {
    case CL_DEVICE_TYPE:
      return answer.is<cl_device_type>(CL_DEVICE_TYPE_GPU);
    case CL_DEVICE_IMAGE_SUPPORT:
    case CL_DEVICE_ERROR_CORRECTION_SUPPORT:
    case CL_DEVICE_HOST_UNIFIED_MEMORY:
      return answer.is<cl_bool>(CL_FALSE);
    case CL_DEVICE_ENDIAN_LITTLE:
    case CL_DEVICE_AVAILABLE:
    case CL_DEVICE_COMPILER_AVAILABLE:
    case CL_DEVICE_LINKER_AVAILABLE:
    case CL_DEVICE_PREFERRED_INTEROP_USER_SYNC:
      return answer.is<cl_bool>(CL_TRUE);
    case CL_DEVICE_SINGLE_FP_CONFIG:
      return answer.is<cl_device_fp_config>(kFloats | CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT);
    case CL_DEVICE_DOUBLE_FP_CONFIG:
    case CL_DEVICE_HALF_FP_CONFIG:
      return answer.is<cl_device_fp_config>(kFloats);
    case CL_DEVICE_EXECUTION_CAPABILITIES:
      return answer.is<cl_device_exec_capabilities>(CL_EXEC_KERNEL);
    case CL_DEVICE_QUEUE_PROPERTIES:
      return answer.is<cl_command_queue_properties>(CL_QUEUE_PROFILING_ENABLE);
    case CL_DEVICE_PLATFORM:
      return answer.is<cl_platform_id>(the_platform());
    case CL_DEVICE_PARENT_DEVICE:
      return answer.is<cl_device_id>(nullptr);
    case CL_DEVICE_PARTITION_PROPERTIES:
    case CL_DEVICE_PARTITION_TYPE:
      return answer.is<cl_device_partition_property>(0);
    case CL_DEVICE_PARTITION_AFFINITY_DOMAIN:
      return answer.is<cl_device_affinity_domain>(0);
    case CL_DEVICE_SVM_CAPABILITIES:
      return answer.is<cl_bitfield>(0);
    default:
      return CL_INVALID_VALUE;
  }
}

}  // namespace

const std::vector<cl_device_id>& all_devices() {
  static const std::vector<cl_device_id> devices = chosen_devices();
  return devices;
}
cl_ulong largest_buffer(const Chip& chip) {
  return std::min<cl_ulong>(chip.memory / 100 * 85, 8ULL << 30);
}

cl_int CL_API_CALL GetPlatformIDs(cl_uint count, cl_platform_id* platforms, cl_uint* number) {
  if (number != nullptr) *number = 1;
  if (platforms != nullptr && count > 0) platforms[0] = the_platform();
  return CL_SUCCESS;
}
cl_int CL_API_CALL GetPlatformInfo(cl_platform_id, cl_platform_info what, std::size_t given,
                                   void* value, std::size_t* needed) {
  const Query answer{given, value, needed};
  switch (what) {
    case CL_PLATFORM_PROFILE:
      return answer.text("FULL_PROFILE");
    case CL_PLATFORM_VERSION:
      return answer.text("OpenCL 2.1 AMD-APP (emulated)");
    case CL_PLATFORM_NAME:
      return answer.text("AMD Accelerated Parallel Processing (emulated)");
    case CL_PLATFORM_VENDOR:
      return answer.text("Advanced Micro Devices, Inc.");
    case CL_PLATFORM_EXTENSIONS:
      return answer.text("cl_khr_icd");
    case CL_PLATFORM_ICD_SUFFIX_KHR:
      return answer.text("AMDEMU");
    case CL_PLATFORM_HOST_TIMER_RESOLUTION:
      return answer.is<cl_ulong>(1);
    default:
      return CL_INVALID_VALUE;
  }
}

cl_int CL_API_CALL GetDeviceIDs(cl_platform_id, cl_device_type type, cl_uint count,
                                cl_device_id* out, cl_uint* number) {
  const bool wanted = (type & (CL_DEVICE_TYPE_GPU | CL_DEVICE_TYPE_DEFAULT)) != 0;
  const auto& devices = all_devices();
  const std::size_t found = wanted ? devices.size() : 0;
  if (number != nullptr) *number = static_cast<cl_uint>(found);
  if (found == 0) return CL_DEVICE_NOT_FOUND;
  if (out != nullptr) std::copy_n(devices.begin(), std::min<std::size_t>(count, found), out);
  return CL_SUCCESS;
}
cl_int CL_API_CALL GetDeviceInfo(cl_device_id device, cl_device_info what, std::size_t given,
                                 void* value, std::size_t* needed) {
  if (device == nullptr) return CL_INVALID_DEVICE;
  const Query answer{given, value, needed};
  // What one of them does not know, or has no room for, the others do not answer either.
  for (const auto part : {&strings, &memory_sizes, &counts}) {
    const cl_int status = part(*device->chip, what, answer);
    if (status == CL_SUCCESS) return status;
  }
  return features(what, answer);
}
cl_int CL_API_CALL RetainDevice(cl_device_id) {
  return CL_SUCCESS;
}
cl_int CL_API_CALL ReleaseDevice(cl_device_id) {
  return CL_SUCCESS;
}
cl_int CL_API_CALL UnloadPlatformCompiler(cl_platform_id) {
  return CL_SUCCESS;
}
cl_int CL_API_CALL UnloadCompiler() {
  return CL_SUCCESS;
}

}  // namespace amdemu
