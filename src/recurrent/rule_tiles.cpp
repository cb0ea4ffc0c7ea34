#include "recurrent/rule_tiles.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/choose/traits.hpp"
#include "kernels/choose/variants.hpp"

namespace clattn::detail {

namespace {

// Chunks best first, of each the smallest groups first; of 64 tokens they lost on an H200
// (docs/performance.md). A device has one of the matrix units. The last ones of a unit are for
// values whose number of elements others do not divide.
constexpr auto kTiles = std::to_array<RuleTile>({
    {UnitId::sm80, 32, 64, 256},
    {UnitId::sm80, 32, 128, 256},
    {UnitId::sm80, 32, 256, 256},
    {UnitId::sm80, 16, 32, 256},
    {UnitId::mfma, 32, 64, 256},
    {UnitId::mfma, 32, 128, 256},
    {UnitId::mfma, 32, 256, 256},
    {UnitId::wmma, 32, 64, 256},
    {UnitId::wmma, 32, 128, 256},
    {UnitId::wmma, 16, 32, 256},
    {UnitId::dpas16, 32, 64, 128},
    {UnitId::dpas16, 16, 64, 128},
    {UnitId::dpas16, 16, 16, 128},
    {UnitId::dpas8, 16, 64, 128},
    {UnitId::dpas8, 16, 16, 128},
});

/// Tokens that are solved at once.
std::int64_t block_of(const RuleTile& tile) {
  return std::max(unit_of(tile.unit).traits.tile_rows, 16);
}

/// Units of 16 bytes of a tile in local memory, at most.
std::int64_t tile_units(std::int64_t rows, std::int64_t elements) {
  return rows * (elements / 8 + elements / 128 + 1);
}

/// Local memory of delta_rule_pairs.cl, bytes; it takes no more.
std::int64_t pair_bytes(const RuleTile& tile, std::int64_t k_dim) {
  const UnitTraits& unit = unit_of(tile.unit).traits;
  const std::int64_t block = block_of(tile), chunk = tile.chunk;
  // Units other than those of PTX may have keys in two forms.
  const std::int64_t keys =
      2 * tile_units(chunk, std::max(k_dim, chunk)) + (unit.ptx ? 0 : tile_units(chunk, k_dim));
  const std::int64_t matrices =
      (chunk > block ? 3 : 1) * tile_units(chunk, chunk) + 2 * tile_units(chunk, block);
  const std::int64_t sums = std::max<std::int64_t>(kPairItems, 2 * chunk);
  return 16 * (keys + matrices) + 4 * (2 * chunk * block + sums + 6 * chunk + 1);
}

/// Local memory of delta_rule_mma.cl, likewise.
std::int64_t chunk_bytes(const RuleTile& tile, std::int64_t k_dim) {
  const UnitTraits& unit = unit_of(tile.unit).traits;
  const std::int64_t chunk = tile.chunk, keys = tile_units(chunk, k_dim);
  const std::int64_t others = 3 * tile_units(chunk, chunk) + chunk;
  if (unit.ptx) return 32 * (2 * keys + others);
  // Keys in two forms: those of units that copy come to two stages, those that do not transpose.
  const bool copies = unit.by_sub_groups;
  return 16 * (copies ? 2 * (3 * keys + others) : 2 * keys + tile_units(k_dim, chunk) + others);
}

std::int64_t local_bytes(const RuleTile& tile, std::int64_t k_dim) {
  return std::max(pair_bytes(tile, k_dim), chunk_bytes(tile, k_dim));
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
         std::cmp_less_equal(std::max(tile.group_size, kPairItems), device.max_work_group_size) &&
         std::cmp_less_equal(local_bytes(tile, rule.head_k_dim), device.static_local_mem_bytes);
}

/// Whether the groups of so many prompts all run at once.
bool at_once(const RuleTile& tile, const DeltaRuleCall& rule, const DeviceCapabilities& device,
             std::int64_t num_prompts) {
  const std::int64_t groups = num_prompts * rule.num_v_heads * (rule.head_v_dim / tile.rows());
  const auto resident =
      static_cast<std::int64_t>(device.static_local_mem_bytes) / chunk_bytes(tile, rule.head_k_dim);
  return groups <= std::max<std::int64_t>(resident, 1) * device.compute_units;
}

}  // namespace

std::int32_t RuleTile::rows() const {
  const UnitTraits& of = unit_of(unit).traits;
  return group_size / of.lanes * of.tile_rows;
}

// A prompt's groups go from chunk to chunk, so that its time is that of a chunk. Small groups share
// local memory with fewer warps, large ones load keys and matrices for more rows. So groups are as
// small as lets all run at once, else as large as there are.
RuleTiles rule_tiles(const DeviceCapabilities& device, const DeltaRuleCall& rule,
                     std::int64_t num_prompts) {
  RuleTiles fitting;
  static_assert(kTiles.size() <= fitting.tiles.size());
  if (!takes(rule)) return fitting;
  const auto is_better = [&](const RuleTile& one, const RuleTile& other) {
    if (one.chunk != other.chunk) return one.chunk > other.chunk;
    const bool now = at_once(one, rule, device, num_prompts);
    if (now != at_once(other, rule, device, num_prompts)) return now;
    return now ? one.group_size < other.group_size : one.group_size > other.group_size;
  };
  for (const RuleTile& tile : kTiles) {
    if (!fits(tile, rule, device)) continue;
    RuleTile* const end = fitting.tiles.data() + fitting.count++;
    RuleTile* const place = std::upper_bound(fitting.tiles.data(), end, tile, is_better);
    std::move_backward(place, end, end + 1);
    *place = tile;
  }
  return fitting;
}

std::int64_t made_bytes(const RuleTile& tile) {
  const std::int64_t chunk = tile.chunk;
  return 16 * (3 * chunk * chunk / 8 + chunk);
}

std::int64_t made_chunks(const RuleTile& tile, const RecurrentMetadata& metadata,
                         std::int32_t min_tokens) {
  return metadata.num_tokens / tile.chunk + 1 +
         std::min<std::int64_t>(metadata.num_reqs - 1, metadata.num_tokens / min_tokens);
}

}  // namespace clattn::detail
