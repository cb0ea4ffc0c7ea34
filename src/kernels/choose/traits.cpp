#include "kernels/choose/traits.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace clattn::detail {

namespace {

using enum Tasks;
using enum StepKeys;

constexpr auto kKernels = std::to_array<Kernel>({
#define KERNEL(name, file, entry, ...) {file, entry, {__VA_ARGS__}},
#include "kernels/choose/kernels.inc"
});

bool contains(const std::vector<std::string>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

bool runs_by_sub_groups(const Unit& unit, const DeviceCapabilities& device) {
  if (unit.needs == Needs::kLanes) return !(unit.traits.ptx && device.inline_ptx);
  return unit.traits.by_sub_groups && device.kind != DeviceKind::kGpu;
}

std::string unit_options(const Unit& unit, const DeviceCapabilities& device) {
  if (runs_by_sub_groups(unit, device))
    return fmt::format("-DCLA_PTX=2 -DCLA_SUB_GROUP={}", unit.traits.lanes);
  return fmt::format("-DCLA_PTX={}{}", unit.traits.ptx && device.inline_ptx ? 1 : 0,
                     unit.compiler_options());
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
  const std::string no_unit =
      fmt::format("needs {}, {}", unit.traits.instructions,
                  contains(device.wrong_matrix_units, unit.name)
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
      {contains(device.matrix_units, unit.name) || (runs_by_sub_groups(unit, device) && in_step),
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
