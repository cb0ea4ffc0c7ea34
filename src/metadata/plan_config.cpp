#include <string_view>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/planner.hpp"

namespace clattn::detail {

ClaSight sight_of(const PlannerConfig& config, bool causal) {
  return {.page_size = config.block_size,
          .causal = causal && !config.bidirectional ? 1 : 0,
          .window_left = config.window.left,
          .window_right = config.window.right,
          .chunk = config.window.chunk};
}

void check_config(const PlannerConfig& config) {
  struct Field {
    std::string_view name;
    std::int32_t value;
  };
  const Field fields[] = {
      {"num_tiles", config.num_tiles},
      {"block_size", config.block_size},
      {"max_split_query_len", config.max_split_query_len},
      {"deterministic_split_keys", config.deterministic_split_keys},
  };
  for (const Field& field : fields) {
    check_at_least(field.name, field.value, 1);
  }
  throw_invalid_if(config.num_tiles > kMaxTileClasses, "num_tiles is {}, legal: 1 … {}",
                   config.num_tiles, kMaxTileClasses);
  throw_invalid_if(config.last_is_wide && config.num_tiles < 2,
                   "last_is_wide is true, legal with num_tiles {}: false", config.num_tiles);
  for (std::size_t c = 0; c < to_size(config.num_tiles); ++c) {
    const TileClass& tile = config.tiles[c];
    const Field of_tile[] = {{"max_item_tokens", tile.max_item_tokens},
                             {"groups_per_item", tile.groups_per_item},
                             {"step_keys", tile.step_keys},
                             {"workers", tile.workers}};
    throw_invalid_if(tile.ends_at_padding && tile.dealing != Dealing::kDealt,
                     "tiles[{}].ends_at_padding is true, legal where tasks are taken: false", c);
    for (const Field& field : of_tile) {
      throw_invalid_if(field.value < 1, "tiles[{}].{} is {}, legal: at least 1", c, field.name,
                       field.value);
    }
    // So that a tile's whole time is a number, too.
    constexpr double kMostKeyNs = 1e15;
    const auto check_costs = [&](std::string_view name, const TaskCosts& costs) {
      throw_invalid_if(!(costs.key_ns > 0 && costs.key_ns <= kMostKeyNs &&
                         costs.token_key_ns >= 0 && costs.token_key_ns <= kMostKeyNs),
                       "tiles[{}].{}: a key takes {} ns and {} ns a token, legal: above 0 … {:g}",
                       c, name, costs.key_ns, costs.token_key_ns, kMostKeyNs);
    };
    check_costs("costs", tile.costs);
    if (tile.few_tokens > 0) check_costs("few", tile.few);
  }
  throw_invalid_if(config.num_splits < 0, "num_splits is {}, legal: at least 0 (0 = planned)",
                   config.num_splits);
}

}  // namespace clattn::detail
