#include "recurrent/rule_tiles.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "kernels/choose/traits.hpp"
#include "kernels/choose/variants.hpp"

namespace clattn::detail {

namespace {

// Best first. A device has one of the matrix units. Smaller groups are for values with fewer
// elements than a larger group has rows, or with a number that those rows do not divide.
constexpr auto kTiles = std::to_array<RuleTile>({
    {UnitId::sm80, 64, 128, 128},
    {UnitId::sm80, 32, 128, 256},
    {UnitId::sm80, 32, 64, 256},
    {UnitId::sm80, 32, 32, 256},
    {UnitId::mfma, 32, 256, 256},
    {UnitId::mfma, 32, 128, 256},
    {UnitId::mfma, 32, 64, 256},
    {UnitId::wmma, 32, 128, 256},
    {UnitId::wmma, 32, 64, 256},
    {UnitId::wmma, 32, 32, 256},
    {UnitId::dpas16, 32, 64, 128},
    {UnitId::dpas16, 16, 64, 128},
    {UnitId::dpas16, 16, 16, 128},
    {UnitId::dpas8, 16, 64, 128},
    {UnitId::dpas8, 16, 16, 128},
});

/// Local memory of a tile, bytes; the kernel takes no more.
std::int64_t tile_bytes(const RuleTile& tile, std::int64_t k_dim) {
  const UnitTraits& unit = unit_of(tile.unit).traits;
  const std::int64_t block = std::max(unit.tile_rows, 16), chunk = tile.chunk;
  const auto units = [](std::int64_t rows, std::int64_t elements) {
    return rows * (elements / 8 + elements / 128 + 1);
  };
  // Keys and queries; units other than those of PTX have keys in two forms.
  const std::int64_t keys =
      2 * units(chunk, k_dim) + (unit.ptx ? 0 : std::max(units(chunk, k_dim), units(k_dim, chunk)));
  const std::int64_t matrices =
      (chunk > block ? 3 : 1) * units(chunk, chunk) + 2 * units(chunk, block);
  const std::int64_t sums = std::max<std::int64_t>(tile.group_size, 2 * chunk);
  return 16 * (keys + matrices) + 4 * (2 * chunk * block + sums + 9 * chunk + 1);
}

bool takes(const DeltaRuleCall& rule) {
  // States, values and what is added to states may leave the range of f16.
  return rule.dtype == DType::kBF16 && rule.rule == RecurrentRule::kDelta && !rule.by_channel &&
         !rule.d && rule.z == nullptr && rule.aligned_keys;
}

bool fits(const RuleTile& tile, const DeltaRuleCall& rule, const DeviceCapabilities& device) {
  const Unit& unit = unit_of(tile.unit);
  return (unit.queries & type_set(rule.dtype)) != 0 &&
         serves_family(rule.kernel_family, unit.family, device) && !unmet_need(unit, device) &&
         rule.head_k_dim <= tile.most_k && rule.head_v_dim % tile.rows() == 0 &&
         rule.head_k_dim % std::max(unit.traits.tile_rows, 16) == 0 &&
         std::cmp_less_equal(tile.group_size, device.max_work_group_size) &&
         std::cmp_less_equal(tile_bytes(tile, rule.head_k_dim), device.static_local_mem_bytes);
}

}  // namespace

std::int32_t RuleTile::rows() const {
  const UnitTraits& of = unit_of(unit).traits;
  return group_size / of.lanes * of.tile_rows;
}

std::vector<RuleTile> rule_tiles(const DeviceCapabilities& device, const DeltaRuleCall& rule) {
  std::vector<RuleTile> fitting;
  if (!takes(rule)) return fitting;
  std::ranges::copy_if(kTiles, std::back_inserter(fitting),
                       [&](const RuleTile& tile) { return fits(tile, rule, device); });
  return fitting;
}

}  // namespace clattn::detail
