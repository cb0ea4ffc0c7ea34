#pragma once

#include <clattn/opencl.hpp>

#include <clattn/device.hpp>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "opencl/driver.hpp"

namespace clattn::detail {

/// A text that the driver knows, without surrounding blanks.
std::string device_string(cl_device_id device, cl_device_info what);
std::string platform_string(cl_platform_id platform, cl_platform_info what);

bool has_extension(cl_device_id device, std::string_view name);
DeviceKind device_kind(cl_device_id device);
/// PoCL's platform.
inline constexpr std::string_view kPoclName = "Portable Computing Language";
/// PoCL compiles at the first launch, and has costs that no capability shows.
bool is_pocl(cl_device_id device);

/// What the choice of a device looks at.
struct DeviceSummary {
  int platform_index = 0;
  int device_index = 0;
  std::string name;
  std::string platform_name;
  DeviceKind kind = DeviceKind::kOther;
  int compute_units = 1;
};

/// A platform that offers no device, and what its driver answered.
struct BarePlatform {
  std::string name;
  cl_int status = CL_DEVICE_NOT_FOUND;
};

/// The index in `devices` that `selector` means (see select_device). `origin` names the selector in
/// errors; only they ask for the platforms without devices.
std::size_t choose_device(std::string_view selector, std::span<const DeviceSummary> devices,
                          std::string_view origin,
                          const std::function<std::vector<BarePlatform>()>& bare_platforms);

/// The driver's half of the capability record; the self-tests' fields keep their defaults.
DeviceCapabilities query_capabilities(cl_device_id device);

/// Whether kernels make groups of a single work-item and give it all of a core's work, in loops as
/// long as that takes.
inline bool takes_single_items(const DeviceCapabilities& capabilities) {
  return capabilities.kind == DeviceKind::kCpu && capabilities.long_loops;
}

/// Why this process cannot use x86's matrix tiles of bf16 (AMX); empty = it can. The first call
/// asks the operating system for them, for all threads: from then on an alternate signal stack must
/// have room for their registers (about 11 KiB; Linux refuses both a smaller stack and, where there
/// is one already, the tiles). Thread-safe.
const std::string& why_no_x86_tiles();

/// What the capability record says to every program, as -D options with a leading space each:
/// CLA_NATIVE_EXP2 (kernels_cl/core/state.clh), CLA_NATIVE and CLA_X86_PREFETCH
/// (kernels_cl/core/native.clh), and CLA_F16_FLUSHED (kernels_cl/core/storage.clh).
std::string device_macros(const DeviceCapabilities& capabilities);

}  // namespace clattn::detail
