#include "kernels/choose/traits.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "opencl/device/matrix_units.hpp"

namespace clattn::detail {

namespace {

using enum Tasks;
using enum StepKeys;

constexpr auto kUnits = std::to_array<Unit>({
#define UNIT(name, header, family, needs, queries, cache, ...) \
  {header, KernelFamily::k##family, Needs::k##needs, queries, cache, {__VA_ARGS__}},
#include "kernels/choose/units.inc"
});

constexpr auto kKernels = std::to_array<Kernel>({
#define KERNEL(name, file, entry, ...) {file, entry, {__VA_ARGS__}},
#include "kernels/choose/units.inc"
});

/// The matrix unit with its self-test, or null.
constexpr const MatrixUnit* matrix_unit_of(const Unit& unit) {
  for (const MatrixUnit& tested : kMatrixUnits) {
    if (tested.header == unit.header) return &tested;
  }
  return nullptr;
}
static_assert(std::ranges::all_of(kUnits,
                                  [](const Unit& unit) {
                                    return unit.needs != Needs::kMatrixUnit ||
                                           matrix_unit_of(unit) != nullptr;
                                  }),
              "a unit is missing in opencl/device/matrix_units.hpp");

bool contains(const std::vector<std::string>& headers, std::string_view header) {
  return std::ranges::find(headers, header) != headers.end();
}

}  // namespace

const Unit& unit_of(UnitId id) {
  return kUnits.at(static_cast<std::size_t>(id));
}

bool runs_by_sub_groups(const Unit& unit, const DeviceCapabilities& device) {
  if (unit.needs == Needs::kLanes) return !(unit.traits.ptx && device.inline_ptx);
  return unit.traits.by_sub_groups && device.kind != DeviceKind::kGpu;
}

std::string_view unit_options(const Unit& unit) {
  const MatrixUnit* const tested = matrix_unit_of(unit);
  return tested == nullptr ? std::string_view{} : tested->options;
}

const Kernel& kernel_of(KernelId id) {
  return kKernels.at(static_cast<std::size_t>(id));
}

std::optional<std::string> unmet_need(const Unit& unit, const DeviceCapabilities& device) {
  const auto lanes = static_cast<std::uint32_t>(unit.traits.lanes);
  const bool by_ptx = unit.traits.ptx && device.inline_ptx;
  const bool in_step = (device.sub_groups_in_step & lanes) != 0;
  const std::string no_lanes =
      fmt::format("needs {}sub-groups of {} that run in lockstep, independently of each other",
                  unit.traits.ptx ? "inline PTX, or " : "", unit.traits.lanes);
  const MatrixUnit* matrix_unit = matrix_unit_of(unit);
  const std::string no_unit =
      fmt::format("needs {}, {}", matrix_unit != nullptr ? matrix_unit->instructions : "",
                  contains(device.wrong_matrix_units, unit.header)
                      ? "which was seen to compute wrong here"
                      : "for which this driver's compiler has no built-ins");
  const std::pair<bool, std::string_view> answers[] = {
      {true, {}},
      {device.kind != DeviceKind::kGpu,
       "needs a CPU: it keeps its tiles in private memory, which a GPU spills"},
      {by_ptx || in_step, no_lanes},
      {device.warpgroup_products, "needs warpgroup products (compute capability 9.0)"},
      {device.bf16_products, "needs products of bf16 pairs (AVX512_BF16, AVX512_VBMI)"},
      {device.x86_tiles, "needs x86's matrix tiles (AMX), granted to the process"},
      {contains(device.matrix_units, unit.header) || (runs_by_sub_groups(unit, device) && in_step),
       no_unit}};
  const auto& [has, reason] = answers[static_cast<std::size_t>(unit.needs)];
  return has ? std::nullopt : std::optional<std::string>(reason);
}

std::optional<std::string> unmet_need(KernelFamily family, const DeviceCapabilities& device) {
  std::optional<std::string> first;
  for (const Unit& unit : kUnits) {
    if (unit.family != family) continue;
    std::optional<std::string> need = unmet_need(unit, device);
    if (!need) return need;
    if (!first) first = need;
  }
  return first;
}

}  // namespace clattn::detail
