#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>
#include <tuple>
#include <vector>

#include "base/error.hpp"
#include "opencl/device_info.hpp"

namespace clattn::detail {
namespace {

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

}  // namespace

std::size_t choose_device(std::string_view selector, std::span<const DeviceSummary> devices,
                          std::string_view origin) {
  if (devices.empty()) {
    throw Error(ErrorCode::kOpenCL,
                fmt::format("{}: no OpenCL device was found; install a driver, for a CPU "
                            "pocl-opencl-icd (./dev install build)",
                            origin),
                CL_DEVICE_NOT_FOUND);
  }
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (fits(selector, devices[i]) && (!best || rank(devices[i]) > rank(devices[*best]))) best = i;
  }
  if (best) return *best;
  std::vector<std::string> present;
  for (const DeviceSummary& device : devices) present.push_back(describe(device));
  throw_invalid("{}: no device fits '{}'; there is {}", origin, selector, fmt::join(present, "; "));
}

}  // namespace clattn::detail
