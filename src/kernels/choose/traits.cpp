#include "kernels/choose/traits.hpp"

namespace clattn::detail {

namespace {

using enum Tasks;
using enum StepKeys;

constexpr auto kUnits = std::to_array<Unit>({
#define UNIT(name, family, needs, queries, cache, ...) \
  {KernelFamily::k##family, Needs::k##needs, queries, cache, {__VA_ARGS__}},
#include "kernels/choose/units.inc"
});

constexpr auto kKernels = std::to_array<Kernel>({
#define KERNEL(name, file, entry, ...) {file, entry, {__VA_ARGS__}},
#include "kernels/choose/units.inc"
});

}  // namespace

const Unit& unit_of(UnitId id) {
  return kUnits.at(static_cast<std::size_t>(id));
}

const Kernel& kernel_of(KernelId id) {
  return kKernels.at(static_cast<std::size_t>(id));
}

std::optional<std::string_view> unmet_need(Needs needs, const DeviceCapabilities& device) {
  struct Answer {
    bool has;
    std::string_view reason;
  };
  const Answer answers[] = {
      {true, {}},
      {device.kind != DeviceKind::kGpu,
       "needs a CPU: it keeps its tiles in private memory, which a GPU spills"},
      {device.inline_ptx || device.sub_groups_of_32,
       "needs inline PTX, or sub-groups of 32 that run in step"},
      {device.warpgroup_products, "needs warpgroup products (compute capability 9.0)"},
      {device.bf16_products, "needs products of bf16 pairs (AVX512_BF16, AVX512_VBMI)"}};
  const Answer& answer = answers[static_cast<std::size_t>(needs)];
  return answer.has ? std::nullopt : std::optional(answer.reason);
}

}  // namespace clattn::detail
