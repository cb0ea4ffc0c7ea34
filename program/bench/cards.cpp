#include "program/bench/cards.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "program/common/error.hpp"
#include "program/common/text.hpp"

namespace clattn::cli {
namespace {

/// Memory latencies that a task takes before and after its keys (item, pages, queries, results),
/// and that a split adds (partial results, the counter): 2.9 and 2.5 us on an H200, whose memory
/// latency is 0.7 us (src/tuning/shipped.inc).
constexpr double kTaskLatencies = 4, kSplitLatencies = 3.5;
/// An estimate, as in shipped.inc for all GPUs: it does not follow from a card's facts.
constexpr double kLaunchUs = 8;
/// Share of the peak memory rate that reads reach, as measured on an H200 (docs/results.md).
constexpr double kReadShare = 0.9;
/// GB/s that a group without a counted loop reads alone: shipped.inc's estimate for all GPUs.
constexpr double kReadAlone = 10;
/// Loops of this head size, over caches of the queries' type or of 8 bits, stand for all sizes that
/// are not counted.
constexpr std::int32_t kCommonHead = 128, kCommonHead8Bit = 64;
/// Query rows of a work item that read keys from memory: of one query token, or of a few.
constexpr double kFewRows = 64;
/// Rotary elements of a latent row of 512, the only one that kernels on matrix units take.
constexpr std::int32_t kRopeDim = 64;
constexpr std::string_view kLatentRole = "mla_decode";

double number(const std::string& text, const std::string& where) {
  const auto value = parse_number<double>(text);
  throw_invalid_if(!value || !(*value >= 0 && *value <= 1e9),
                   "{}: '{}', legal: a number of 0 to 1e9", where, text);
  return *value;
}

constexpr std::pair<std::string_view, double Card::*> kNumbers[] = {
    {"compute_units", &Card::compute_units},
    {"cores", &Card::cores},
    {"simds", &Card::simds},
    {"slot", &Card::slot},
    {"mhz", &Card::mhz},
    {"tflops", &Card::tflops},
    {"gbs", &Card::gbs},
    {"local_kib", &Card::local_kib},
    {"latency_ns", &Card::latency_ns}};
constexpr std::pair<std::string_view, std::string Card::*> kTexts[] = {
    {"device", &Card::device}, {"chip", &Card::chip}, {"unit", &Card::unit}};

void set_field(Card& card, std::string_view name, std::string value, const std::string& where) {
  for (const auto& [field, at] : kNumbers) {
    if (field != name) continue;
    card.*at = number(value, where);
    return;
  }
  for (const auto& [field, at] : kTexts) {
    if (field != name) continue;
    std::ranges::replace(value, '_', at == &Card::device ? ' ' : '_');
    card.*at = std::move(value);
    return;
  }
  throw_invalid("{}: unknown, legal: the fields that the head of the file explains", where);
}

void check_card(const Card& card, std::string_view file) {
  for (const auto& [field, at] : kNumbers) {
    throw_invalid_if(card.*at <= 0, "{}: card {}: {} is {}, legal: above 0", file, card.name, field,
                     card.*at);
  }
  for (const auto& [field, at] : kTexts) {
    throw_invalid_if((card.*at).empty(), "{}: card {}: {} is missing", file, card.name, field);
  }
}

/// Parses "d128_f16_fp8_e5m2": head size, type of queries, type of the cache.
void set_shape(LoopCount& loop, const std::string& shape, const std::string& where) {
  const std::size_t first = shape.find('_'), second = shape.find('_', first + 1);
  const auto type_of = [&](std::string_view text) {
    const std::optional<DType> found = find_dtype(text);
    throw_invalid_if(!found, "{}: shape: '{}', legal: dHEAD_QUERIES_CACHE, the last two types",
                     where, shape);
    return *found;
  };
  throw_invalid_if(second == std::string::npos || shape.front() != 'd', "{}: shape: '{}'", where,
                   shape);
  loop.head_size = static_cast<std::int32_t>(number(shape.substr(1, first - 1), where));
  loop.dtype = type_of(std::string_view{shape}.substr(first + 1, second - first - 1));
  loop.cache_dtype = type_of(std::string_view{shape}.substr(second + 1));
}

/// Whether few query rows use each key, so that keys come from memory. With more rows, neighbouring
/// groups share keys and find them in a cache.
bool reads_memory(const LoopCount& loop) {
  return loop.rows <= kFewRows;
}

/// Bytes that a group reads per step: its keys and values for one KV head, or its latent rows.
double step_bytes(const LoopCount& loop) {
  const double elements =
      loop.role == kLatentRole ? loop.head_size + kRopeDim : 2.0 * loop.head_size;
  return elements * loop.keys * static_cast<double>(element_size_bytes(loop.cache_dtype));
}

/// Groups that a core holds at once.
double resident_groups(const Card& card, const LoopCount& loop) {
  const double by_registers = std::floor(loop.waves * card.simds / loop.group_waves);
  const double by_memory = std::floor(card.local_kib * 1024 / std::max(loop.local_bytes, 1.0));
  return std::max(1.0, std::min(by_registers, by_memory));
}

KernelCosts fixed_costs(const Card& card) {
  return {.launch_us = kLaunchUs,
          .task_us = kTaskLatencies * card.latency_ns * 1e-3,
          .split_us = kSplitLatencies * card.latency_ns * 1e-3};
}

/// KernelCosts::groups, if a group alone reads `alone_gbs` and all of them together `all_gbs`; 0
/// if sharing the memory slows them down by less than a thousandth.
double slowdown_groups(double alone_gbs, double all_gbs, double concurrent_groups) {
  const double slowdown = concurrent_groups * alone_gbs / all_gbs - 1;
  return slowdown > 1e-3 ? concurrent_groups / slowdown : 0;
}

/// Tasks that plans assume to run at once, for these types of queries and cache, in a role.
double concurrent_groups(const Card& card, DType dtype, DType cache_dtype, std::string_view role) {
  AttentionConfig config{.num_heads = 4,
                         .num_kv_heads = 1,
                         .head_size = 128,
                         .dtype = dtype,
                         .kv_cache_dtype = cache_dtype};
  if (role == kLatentRole) {
    config.num_heads = 16;
    config.head_size = 512 + kRopeDim;
    config.use_mla = true;
    config.rope_dim = kRopeDim;
  }
  const std::array<std::int32_t, 2> starts = {0, role == "prefill" ? 4096 : 1};
  const std::array<std::int32_t, 1> lengths = {4096};
  const CommonAttentionMetadata batch{.query_start_loc = starts,
                                      .seq_lens = lengths,
                                      .num_reqs = 1,
                                      .num_actual_tokens = starts[1]};
  return predicted_launches(config, card.capabilities(), {}, batch).front().concurrent_groups;
}

CostRow row_of(const Card& card, std::string kernel, const KernelCosts& costs) {
  CostRow row;
  row.device = card.device + "*";
  row.kernel = std::move(kernel);
  row.costs = costs;
  return row;
}

/// The row for decode kernels without a counted loop, which the memory bounds; for the most groups
/// that plans assume of them, over 8 bits.
CostRow uncounted_decode(const Card& card) {
  KernelCosts costs = fixed_costs(card);
  costs.read_gbs = kReadAlone;
  costs.groups = slowdown_groups(kReadAlone, kReadShare * card.gbs,
                                 concurrent_groups(card, DType::kF32, DType::kInt8, "decode"));
  return row_of(card, "decode_gpu*", costs);
}

}  // namespace

const Card* card_of(const std::vector<Card>& cards, const DeviceCapabilities& capabilities) {
  const Card* closest = nullptr;
  const auto distance = [&](const Card& card) {
    return std::abs(card.compute_units - capabilities.compute_units);
  };
  for (const Card& card : cards) {
    if (!capabilities.name.starts_with(card.device)) continue;
    if (closest == nullptr || distance(card) < distance(*closest)) closest = &card;
  }
  return closest;
}

DeviceCapabilities Card::capabilities() const {
  const bool nvidia = unit == "-";
  DeviceCapabilities result;
  result.name = device;
  result.kind = DeviceKind::kGpu;
  result.compute_units = static_cast<int>(compute_units);
  result.max_work_group_size = nvidia ? 1024 : 256;
  result.local_mem_bytes = static_cast<std::uint64_t>(local_kib * 1024);
  result.max_alloc_bytes = std::uint64_t{4} << 30;
  if (nvidia) {
    result.driver_version = "580";
    result.inline_ptx = result.warpgroup_products = result.fp8_conversions = true;
    result.ptx_arch = 90;
  } else {
    result.matrix_units = {unit, fmt::format("{}_decode", unit)};
  }
  return result;
}

std::vector<Card> parse_cards(std::string_view text, std::string_view name) {
  std::vector<Card> cards;
  each_line(text, name, [&](const std::vector<std::string>& words, const std::string& where) {
    if (words[0] == "card") {
      throw_invalid_if(words.size() < 3, "{}: card: its name and its title are missing", where);
      cards.push_back({.name = words[1], .title = words[2]});
      for (std::size_t i = 3; i < words.size(); ++i)
        cards.back().title.append(" ").append(words[i]);
      return;
    }
    throw_invalid_if(cards.empty(), "{}: '{}' before the first card", where, words[0]);
    for (const std::string& word : words) {
      const std::size_t at = word.find('=');
      throw_invalid_if(at == std::string::npos, "{}: '{}', legal: FIELD=VALUE", where, word);
      const std::string field = word.substr(0, at);
      set_field(cards.back(), field, word.substr(at + 1), fmt::format("{}: {}", where, field));
    }
  });
  for (const Card& card : cards) check_card(card, name);
  return cards;
}

std::vector<LoopCount> parse_loops(std::string_view text, std::string_view name) {
  constexpr std::size_t kColumns = 20;
  std::vector<LoopCount> loops;
  each_line(text, name, [&](const std::vector<std::string>& words, const std::string& where) {
    throw_invalid_if(words.size() != kColumns, "{}: {} columns, legal: {}", where, words.size(),
                     kColumns);
    LoopCount loop{.chip = words[0], .variant = words[1]};
    set_shape(loop, words[2], where);
    loop.local_bytes = number(words[5], where);
    loop.waves = number(words[6], where);
    loop.slots = number(words[13], where);
    loop.group_waves = number(words[16], where);
    loop.keys = number(words[17], where);
    loop.rows = number(words[18], where);
    loop.role = words[19];
    loops.push_back(std::move(loop));
  });
  return loops;
}

KernelCosts predicted_costs(const Card& card, const LoopCount& loop, double concurrent_groups) {
  const double bytes = step_bytes(loop);
  const double issue_ns = std::ceil(loop.group_waves / card.simds) * loop.slots * card.slot_ns();
  const double alone_ns = std::max(issue_ns, card.latency_ns);
  const double by_slots =
      card.cores * card.simds / (loop.group_waves * loop.slots * card.slot_ns());
  const double by_loads = card.cores * resident_groups(card, loop) / alone_ns;
  double all_gbs = std::min(by_slots, by_loads) * bytes;
  if (reads_memory(loop)) all_gbs = std::min(all_gbs, kReadShare * card.gbs);
  const double alone_gbs = bytes / alone_ns;
  KernelCosts costs = fixed_costs(card);
  // Plans may assume fewer concurrent groups than fit: each then stands for more than one.
  costs.read_gbs = std::max(alone_gbs, all_gbs / concurrent_groups);
  costs.groups = slowdown_groups(costs.read_gbs, all_gbs, concurrent_groups);
  return costs;
}

std::vector<CostRow> predicted_rows(const Card& card, const std::vector<LoopCount>& loops) {
  std::vector<CostRow> rows;
  for (const LoopCount& loop : loops) {
    if (loop.chip != card.chip) continue;
    if (rows.empty()) rows.push_back(uncounted_decode(card));
    const double groups = concurrent_groups(card, loop.dtype, loop.cache_dtype, loop.role);
    CostRow row = row_of(card, loop.variant, predicted_costs(card, loop, groups));
    const bool is_8bit = loop.cache_dtype != loop.dtype;
    if (loop.head_size > (is_8bit ? kCommonHead8Bit : kCommonHead)) row.head_size = loop.head_size;
    if (is_8bit) {  // one type stands for all of them
      for (const DType cache : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8}) {
        row.cache_dtype = cache;
        rows.push_back(row);
      }
      continue;
    }
    if (loop.dtype != DType::kF16 && row.head_size == 0) row.dtype = loop.dtype;
    rows.push_back(row);
  }
  return rows;
}

double decode_in_flight(const Card& card, const std::vector<LoopCount>& loops) {
  double least = 0;
  for (const LoopCount& loop : loops) {
    if (loop.chip != card.chip || loop.role != "decode") continue;
    const double bytes = card.cores * resident_groups(card, loop) * step_bytes(loop);
    const double share = bytes / (card.gbs * card.latency_ns);
    least = least == 0 ? share : std::min(least, share);
  }
  return least;
}

}  // namespace clattn::cli
