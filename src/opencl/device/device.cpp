#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <clattn/device.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "opencl/device/device_info.hpp"

namespace clattn {
namespace detail {
namespace {

std::string trimmed(std::string text) {
  constexpr std::string_view kBlank("\0 \t\n", 4);
  text.erase(text.find_last_not_of(kBlank) + 1);
  text.erase(0, text.find_first_not_of(kBlank));
  return text;
}

template <typename Object, typename Getter>
std::string info_string(Object object, cl_uint what, Getter get) {
  std::size_t size = 0;
  check(get(object, what, 0, nullptr, &size), "reading a device's description");
  std::string text(size, '\0');
  check(get(object, what, size, text.data(), nullptr), "reading a device's description");
  return trimmed(std::move(text));
}

// A driver that is installed without hardware has no devices, and one that is broken answers with
// an error: both leave the other platforms usable.
std::vector<cl_device_id> devices_of(cl_platform_id platform, cl_int* status) {
  cl_uint count = 0;
  *status = clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, nullptr, &count);
  if (*status != CL_SUCCESS || count == 0) return {};
  std::vector<cl_device_id> devices(count);
  *status = clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, count, devices.data(), nullptr);
  if (*status != CL_SUCCESS) return {};
  return devices;
}

std::vector<cl_platform_id> platforms() {
  cl_uint count = 0;
  // The loader answers "none" with an error code of its own.
  if (clGetPlatformIDs(0, nullptr, &count) != CL_SUCCESS || count == 0) return {};
  std::vector<cl_platform_id> result(count);
  check(clGetPlatformIDs(count, result.data(), nullptr), "clGetPlatformIDs");
  return result;
}

std::vector<BarePlatform> bare_platforms() {
  std::vector<BarePlatform> bare;
  for (cl_platform_id platform : platforms()) {
    cl_int status = CL_SUCCESS;
    if (devices_of(platform, &status).empty())
      bare.push_back({platform_string(platform, CL_PLATFORM_NAME), status});
  }
  return bare;
}

DeviceSummary summarize(const Device& device) {
  return {.platform_index = device.platform_index,
          .device_index = device.device_index,
          .name = device_string(device.id, CL_DEVICE_NAME),
          .platform_name = platform_string(device.platform, CL_PLATFORM_NAME),
          .kind = device_kind(device.id),
          .compute_units =
              static_cast<int>(device_value<cl_uint>(device.id, CL_DEVICE_MAX_COMPUTE_UNITS))};
}

std::string lower(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

/// "P:D" as a pair of numbers.
std::optional<std::pair<int, int>> parse_indices(std::string_view selector) {
  std::pair<int, int> indices;
  const char* end = selector.data() + selector.size();
  const auto platform = std::from_chars(selector.data(), end, indices.first);
  if (platform.ec != std::errc{} || platform.ptr == end || *platform.ptr != ':') return {};
  const auto device = std::from_chars(platform.ptr + 1, end, indices.second);
  if (device.ec != std::errc{} || device.ptr != end) return {};
  return indices;
}

bool fits(std::string_view selector, const DeviceSummary& device) {
  if (const auto indices = parse_indices(selector)) {
    return *indices == std::pair(device.platform_index, device.device_index);
  }
  const std::string wanted = lower(selector);
  if (wanted == "gpu" || wanted == "cpu") return wanted == to_string(device.kind);
  return lower(device.name).find(wanted) != std::string::npos ||
         lower(device.platform_name).find(wanted) != std::string::npos;
}

/// Larger is better: GPUs before CPUs before the rest, then compute units.
std::tuple<int, int> rank(const DeviceSummary& device) {
  const int kind = device.kind == DeviceKind::kGpu ? 2 : device.kind == DeviceKind::kCpu ? 1 : 0;
  return {kind, device.compute_units};
}

std::string describe(const DeviceSummary& device) {
  return fmt::format("{}:{} {} ({}, {} compute units, {})", device.platform_index,
                     device.device_index, device.name, to_string(device.kind), device.compute_units,
                     device.platform_name);
}

/// "; platforms without a device: A, B (CL_OUT_OF_HOST_MEMORY)", or nothing.
std::string told(std::span<const BarePlatform> platforms) {
  std::vector<std::string> names;
  for (const auto& [name, status] : platforms) {
    const bool usual = status == CL_DEVICE_NOT_FOUND || status == CL_SUCCESS;
    names.push_back(usual ? name : fmt::format("{} ({})", name, status_name(status)));
  }
  if (names.empty()) return {};
  return fmt::format("; platforms without a device: {}", fmt::join(names, ", "));
}

[[noreturn]] void throw_no_device(std::string_view origin,
                                  std::span<const BarePlatform> platforms) {
  std::string advice;
  if (platforms.empty()) {
    advice =
        "; no driver is installed where the OpenCL loader looks (/etc/OpenCL/vendors, or what "
        "OCL_ICD_VENDORS names); for a CPU, PoCL is one (package pocl-opencl-icd)";
  } else if (std::ranges::find(platforms, kPoclName, &BarePlatform::name) != platforms.end()) {
    advice =
        "; PoCL has none where it cannot write to its cache folder (POCL_CACHE_DIR, else "
        "$XDG_CACHE_HOME/pocl, else $HOME/.cache/pocl)";
  }
  throw Error(ErrorCode::kOpenCL,
              fmt::format("{}: no OpenCL device was found{}{}", origin, told(platforms), advice),
              CL_DEVICE_NOT_FOUND);
}

}  // namespace

std::string device_string(cl_device_id device, cl_device_info what) {
  return info_string(device, what, clGetDeviceInfo);
}

std::string platform_string(cl_platform_id platform, cl_platform_info what) {
  return info_string(platform, what, clGetPlatformInfo);
}

bool has_extension(cl_device_id device, std::string_view name) {
  const std::string all = ' ' + device_string(device, CL_DEVICE_EXTENSIONS) + ' ';
  return all.find(fmt::format(" {} ", name)) != std::string::npos;
}

DeviceKind device_kind(cl_device_id device) {
  const auto type = device_value<cl_device_type>(device, CL_DEVICE_TYPE);
  if ((type & CL_DEVICE_TYPE_GPU) != 0) return DeviceKind::kGpu;
  return (type & CL_DEVICE_TYPE_CPU) != 0 ? DeviceKind::kCpu : DeviceKind::kOther;
}

bool is_pocl(cl_device_id device) {
  const auto platform = device_value<cl_platform_id>(device, CL_DEVICE_PLATFORM);
  return platform_string(platform, CL_PLATFORM_NAME) == kPoclName;
}

DeviceCapabilities query_capabilities(cl_device_id device) {
  const auto platform = device_value<cl_platform_id>(device, CL_DEVICE_PLATFORM);
  DeviceCapabilities record;
  record.name = device_string(device, CL_DEVICE_NAME);
  record.vendor = device_string(device, CL_DEVICE_VENDOR);
  record.driver_version = device_string(device, CL_DRIVER_VERSION);
  record.device_version = device_string(device, CL_DEVICE_VERSION);
  record.opencl_c_version = device_string(device, CL_DEVICE_OPENCL_C_VERSION);
  record.platform_name = platform_string(platform, CL_PLATFORM_NAME);
  record.platform_version = platform_string(platform, CL_PLATFORM_VERSION);
  record.kind = device_kind(device);
  record.compute_units =
      static_cast<int>(device_value<cl_uint>(device, CL_DEVICE_MAX_COMPUTE_UNITS));
  record.max_work_group_size = device_value<std::size_t>(device, CL_DEVICE_MAX_WORK_GROUP_SIZE);
  record.global_mem_bytes = device_value<cl_ulong>(device, CL_DEVICE_GLOBAL_MEM_SIZE);
  record.max_alloc_bytes = device_value<cl_ulong>(device, CL_DEVICE_MAX_MEM_ALLOC_SIZE);
  record.local_mem_bytes = device_value<cl_ulong>(device, CL_DEVICE_LOCAL_MEM_SIZE);
  // A CPU's compiler that joins work-items into vectors prefers to be given single floats. Groups
  // of one work-item leave it nothing to join.
  const auto preferred = device_value<cl_uint>(device, CL_DEVICE_PREFERRED_VECTOR_WIDTH_FLOAT);
  const auto native = device_value<cl_uint>(device, CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT);
  record.float_vector_width =
      static_cast<int>(record.kind == DeviceKind::kCpu ? std::max(preferred, native) : preferred);
  record.reports_fp16 = has_extension(device, "cl_khr_fp16");
  record.reports_subgroups =
      has_extension(device, "cl_khr_subgroups") || has_extension(device, "cl_intel_subgroups");
  if (has_extension(device, "cl_nv_device_attribute_query")) {
    constexpr cl_device_info kMajor = 0x4000, kMinor = 0x4001;  // of NVIDIA's compute capability
    record.ptx_arch = static_cast<int>(10 * device_value<cl_uint>(device, kMajor) +
                                       device_value<cl_uint>(device, kMinor));
  }
  return record;
}

std::string device_macros(const DeviceCapabilities& capabilities) {
  // Weights that are off by 2^-21 move a result by less than half of what summing it in f32 may,
  // 18 * 2^-24 where there is one key. GPUs' instructions are off by 2^-22 to 2^-24.
  constexpr float kErrorAllowed = 0x1p-21F;
  return fmt::format(" -DCLA_NATIVE_EXP2={} -DCLA_NATIVE={}{}{}",
                     capabilities.native_exp2_error <= kErrorAllowed ? 1 : 0,
                     capabilities.native_builtins ? 1 : 0,
                     capabilities.x86_prefetch ? " -DCLA_X86_PREFETCH=1" : "",
                     capabilities.flushes_f16 ? " -DCLA_F16_FLUSHED=1" : "");
}

std::size_t choose_device(std::string_view selector, std::span<const DeviceSummary> devices,
                          std::string_view origin,
                          const std::function<std::vector<BarePlatform>()>& bare_platforms) {
  if (devices.empty()) throw_no_device(origin, bare_platforms());
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (fits(selector, devices[i]) && (!best || rank(devices[i]) > rank(devices[*best]))) best = i;
  }
  if (best) return *best;
  std::vector<std::string> present;
  for (const DeviceSummary& device : devices) present.push_back(describe(device));
  throw_invalid("{}: no device fits '{}'; there is {}{}", origin, selector,
                fmt::join(present, "; "), told(bare_platforms()));
}

}  // namespace detail

std::string_view to_string(DeviceKind kind) {
  if (kind == DeviceKind::kGpu) return "gpu";
  if (kind == DeviceKind::kCpu) return "cpu";
  if (kind == DeviceKind::kOther) return "other";
  detail::throw_invalid("device kind: {} is none", static_cast<int>(kind));
}

std::vector<Device> list_devices() {
  std::vector<Device> result;
  int platform_index = 0;
  for (cl_platform_id platform : detail::platforms()) {
    int device_index = 0;
    cl_int ignored = CL_SUCCESS;
    for (cl_device_id id : detail::devices_of(platform, &ignored)) {
      result.push_back({platform, id, platform_index, device_index++});
    }
    ++platform_index;
  }
  return result;
}

Device select_device(std::string_view selector) {
  std::string_view origin = "device";
  if (selector.empty() && !detail::environment().device.empty()) {
    selector = detail::environment().device;
    origin = "CLATTN_DEVICE";
  }
  const std::vector<Device> devices = list_devices();
  std::vector<detail::DeviceSummary> summaries;
  summaries.reserve(devices.size());
  for (const Device& device : devices) summaries.push_back(detail::summarize(device));
  return devices[detail::choose_device(selector, summaries, origin, detail::bare_platforms)];
}

}  // namespace clattn
