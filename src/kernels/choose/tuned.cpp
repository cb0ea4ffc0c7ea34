#include "kernels/choose/tuned.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <utility>

#include "base/error.hpp"

namespace clattn::detail {
namespace {

using Values = std::array<std::int32_t, 5>;  // 0 = none

bool contains(const Values& values, std::int32_t value) {
  return value > 0 && std::ranges::find(values, value) != values.end();
}

/// The constants that a kernel takes besides those of their rows.
struct TileRange {
  KernelId kernel;
  Values block_rows, block_kv, work_group_size;
  bool (*tiles)(const Variant& tile) = nullptr;  // null: all of these
};

// Its lanes sum rows * keys scores at a time: 32 fit the registers.
bool tiles_decode_gpu(const Variant& tile) {
  return tile.block_rows * tile.block_kv <= 32;
}
// 8, 16 or 32 columns of work-items, each with one to eight keys.
bool tiles_prefill_gpu(const Variant& tile) {
  const std::int32_t keys = tile.block_kv;
  const std::int32_t columns = 4 * tile.work_group_size / tile.block_rows;
  return tile.work_group_size >= keys && columns >= 8 && columns <= 32 && keys % columns == 0 &&
         keys / columns <= 8;
}
// A warp owns one or two fragments of the unit's rows.
bool tiles_prefill_mma(const Variant& tile) {
  const UnitTraits& unit = tile.unit();
  const std::int32_t rows = unit.tile_rows * (tile.work_group_size / unit.lanes);
  return tile.block_rows % rows == 0 && tile.block_rows / rows <= 2 && tile.block_kv <= 128;
}
// 32 lanes own one, two or four rows and share their scores evenly.
bool tiles_mla_gpu(const Variant& tile) {
  const std::int32_t warps = tile.work_group_size / 32;
  const std::int32_t each = tile.block_rows / warps;
  return tile.block_rows % warps == 0 && each >= 1 && each <= 4 && each * tile.block_kv <= 32;
}

constexpr auto kRanges = std::to_array<TileRange>({
    {KernelId::decode_cpu, {4, 8, 16, 24, 32}, {16, 32, 64}, {1}},
    {KernelId::decode_pairs, {4, 8, 16, 24, 32}, {16, 32, 64}, {1}},
    {KernelId::prefill_cpu, {64, 128, 256, 512}, {32, 64, 128}, {1}},
    {KernelId::mla_cpu, {64, 128, 256}, {32, 64}, {1}},
    {KernelId::packed_cpu, {8, 16, 32}, {16, 32, 64}, {1}},
    {KernelId::decode_gpu, {1, 2, 4, 8}, {1, 2, 4, 8}, {32, 64, 128, 256}, tiles_decode_gpu},
    {KernelId::prefill_gpu, {16, 32, 64, 128}, {32, 64}, {64, 128, 256, 512}, tiles_prefill_gpu},
    {KernelId::prefill_mma,
     {16, 32, 64, 128},
     {32, 64, 128},
     {32, 64, 128, 256},
     tiles_prefill_mma},
    {KernelId::mla_gpu, {4, 8, 16, 32}, {2, 4, 8}, {32, 64, 128, 256}, tiles_mla_gpu},
    {KernelId::packed_gpu, {4, 8, 16}, {8, 16, 32}, {32, 64, 128, 256}},
});

/// Null for a kernel that takes no other constants than its rows'.
const TileRange* range_of(const Variant& variant) {
  const auto found = std::ranges::find(kRanges, variant.kernel_id, &TileRange::kernel);
  return found == kRanges.end() ? nullptr : &*found;
}

bool same_kernel(const Variant& a, const Variant& b) {
  return a.role == b.role && a.unit_id == b.unit_id && a.kernel_id == b.kernel_id;
}

/// Whether two are built alike, names aside.
bool same_build(const Variant& a, const Variant& b) {
  return same_kernel(a, b) && a.block_rows == b.block_rows && a.block_kv == b.block_kv &&
         a.work_group_size == b.work_group_size;
}

std::optional<Role> parse_role(std::string_view name) {
  const auto role_of = [](const Variant& variant) { return to_string(variant.role); };
  const auto found = std::ranges::find(variants(), name, role_of);
  return found == variants().end() ? std::nullopt : std::optional(found->role);
}

/// Why a row can never be followed; empty if it can.
std::string row_fault(const TuningRow& row) {
  const bool has_tile = row.block_rows > 0 || row.block_kv > 0 || row.work_group_size > 0;
  if (row.variant.empty()) return has_tile ? "a tile without a variant" : "";
  if (row.role.empty()) return "a variant without a role";
  const std::optional<Role> role = parse_role(row.role);
  if (!role) return fmt::format("role is '{}', which no kernel has", row.role);
  if (variant_of(row, *role)) return "";
  return fmt::format("no {} kernel '{}' takes rows {}, keys {}, work-group {}", row.role,
                     row.variant, row.block_rows, row.block_kv, row.work_group_size);
}

std::string row_fault(const CostRow& row) {
  const auto named = [&](const Variant& variant) {
    return names_kernel(row, variant.name) ||
           (variant.kernel().few_rows > 0 && names_kernel(row, few_rows_name(variant)));
  };
  if (std::ranges::any_of(variants(), named)) return cost_fault(row.costs);
  return fmt::format("there is no kernel '{}'", row.kernel);
}

/// The kernel of `row` with every tile that its file takes, but for those of other rows' rows.
void add_tiles(const Variant& row, const KernelShape& shape, const DeviceCapabilities& device,
               std::vector<Variant>& tiles) {
  const TileRange* range = range_of(row);
  if (range == nullptr) return;
  Variant tile = row;
  const auto is_tile = [&](const Variant& other) { return same_build(other, tile); };
  const auto has_its_rows = [&](const Variant& other) {
    return same_kernel(other, tile) && other.block_rows == tile.block_rows;
  };
  for (const std::int32_t rows : range->block_rows) {
    tile.block_rows = rows;
    if (rows != row.block_rows && std::ranges::any_of(variants(), has_its_rows)) continue;
    for (const std::int32_t keys : range->block_kv) {
      tile.block_kv = keys;
      for (const std::int32_t wg : range->work_group_size) {
        tile.work_group_size = wg;
        if (is_legal_tile(tile) && takes_shape(tile, shape) && why_not(tile, device).empty() &&
            std::ranges::none_of(tiles, is_tile))
          tiles.push_back(tile);
      }
    }
  }
}

/// Of the first family on the device's ladder that has any: the rows, then their other tiles.
std::vector<Variant> tiles_for(Role role, const KernelShape& shape,
                               const DeviceCapabilities& device) {
  std::vector<Variant> rows;
  use_best_family(role, KernelFamily::kAuto, device, [&](const Variant& row) {
    const bool usable = takes_types(row, shape) && why_not(row, device).empty();
    if (usable) rows.push_back(row);
    return usable;
  });
  std::vector<Variant> tiles;
  std::ranges::copy_if(rows, std::back_inserter(tiles),
                       [&](const Variant& row) { return takes_shape(row, shape); });
  for (const Variant& row : rows) add_tiles(row, shape, device, tiles);
  return tiles;
}

}  // namespace

TuningQuery tuning_query(const DeviceCapabilities& device, const KernelShape& shape,
                         KernelFamily family) {
  TuningQuery query{.device = device.name,
                    .driver = device.driver_version,
                    .classes = device_classes(device),
                    .head_size = shape.head_size,
                    .group = shape.group(),
                    .dtype = shape.dtype,
                    .cache_dtype = shape.cache_dtype,
                    .pages = page_class(shape.block_size)};
  const bool cpu = family == KernelFamily::kCpu;
  if (family != KernelFamily::kAuto && cpu != (device.kind == DeviceKind::kCpu)) {
    query.device.clear();
    query.classes = {cpu ? "cpu" : "gpu"};
  }
  return query;
}

bool is_legal_tile(const Variant& variant) {
  const auto has_it = [&](const Variant& row) { return same_build(row, variant); };
  if (std::ranges::any_of(variants(), has_it)) return true;
  const TileRange* range = range_of(variant);
  return range != nullptr && contains(range->block_rows, variant.block_rows) &&
         contains(range->block_kv, variant.block_kv) &&
         contains(range->work_group_size, variant.work_group_size) &&
         (range->tiles == nullptr || range->tiles(variant));
}

std::optional<Variant> variant_of(const TuningRow& row, Role role) {
  for (const Variant& variant : variants()) {
    if (variant.role != role || variant.name != row.variant) continue;
    Variant tuned = variant;
    if (row.block_rows > 0) tuned.block_rows = row.block_rows;
    if (row.block_kv > 0) tuned.block_kv = row.block_kv;
    if (row.work_group_size > 0) tuned.work_group_size = row.work_group_size;
    if (is_legal_tile(tuned)) return tuned;
  }
  return std::nullopt;
}

std::optional<Variant> tuned_variant(const TunedDevice& device, const KernelShape& shape,
                                     KernelFamily family, Role role) {
  TuningQuery query = tuning_query(device.capabilities, shape, family);
  query.role = to_string(role);
  const TuningRow* row = device.table.find(query, [&](const TuningRow& candidate) {
    const std::optional<Variant> variant = variant_of(candidate, role);
    return variant && takes_shape(*variant, shape) &&
           serves_family(family, variant->family(), device.capabilities);
  });
  return row == nullptr ? std::nullopt : variant_of(*row, role);
}

}  // namespace clattn::detail

namespace clattn {

void set_tuning(Context& context, std::span<const TuningRow> rows, std::span<const CostRow> costs) {
  const auto check = [](const auto& row) {
    const std::string fault = detail::row_fault(row);
    if (!fault.empty()) detail::throw_invalid("tuning row for {}: {}", row.device, fault);
  };
  std::ranges::for_each(rows, check);
  std::ranges::for_each(costs, check);
  TuningText text{.rows = {rows.begin(), rows.end()}, .costs = {costs.begin(), costs.end()}};
  context.runtime().set_tuning(std::make_shared<const detail::TuningTable>(std::move(text)));
}

std::vector<std::string> tuning_problems(const Context& context) {
  const detail::RuntimeTuning tuning = context.runtime().tuning();
  const TuningText& user = tuning.table->user();
  std::vector<std::string> problems = user.problems;
  const auto add = [&](const std::string& fault, std::string line) {
    if (fault.empty()) return;
    line.pop_back();
    problems.push_back(fmt::format("{}; ignored: {}", fault, line));
  };
  for (const TuningRow& row : user.rows) add(detail::row_fault(row), format_tuning_row(row));
  for (const CostRow& row : user.costs) add(detail::row_fault(row), format_cost_row(row));
  return problems;
}

std::vector<TuningRow> tuning_candidates(const Context& context, const TuningRow& key) {
  const std::optional<detail::Role> role = detail::parse_role(key.role);
  if (!role) detail::throw_invalid("role is '{}', legal: those of KernelInfo", key.role);
  const DType dtype = key.dtype.value_or(DType::kF16);
  const detail::KernelShape shape{.num_heads = std::max(key.group, 1),
                                  .num_kv_heads = 1,
                                  .head_size = key.head_size,
                                  .dtype = dtype,
                                  .cache_dtype = key.cache_dtype.value_or(dtype),
                                  .options = {}};
  std::vector<TuningRow> rows;
  for (const detail::Variant& tile : detail::tiles_for(*role, shape, context.capabilities())) {
    TuningRow& row = rows.emplace_back(key);
    row.variant = tile.name;
    row.block_rows = tile.block_rows;
    row.block_kv = tile.block_kv;
    row.work_group_size = tile.work_group_size;
  }
  return rows;
}

}  // namespace clattn
