#include <utility>
#include <vector>

#include "cli/fuzz/recipe.hpp"

namespace clattn::cli {
namespace {

/// Sets a value; whether that changed it.
template <typename Value, typename To = Value>
bool set(Value& value, const To& to) {
  if (value == static_cast<Value>(to)) return false;
  value = static_cast<Value>(to);
  return true;
}

bool halve(std::int32_t& size) {
  return size > 1 && set(size, size / 2);
}

bool set_group(AttentionConfig& config, std::int32_t kv_heads, std::int32_t group) {
  const bool fewer = kv_heads < config.num_kv_heads || group < config.num_queries_per_kv();
  config.num_kv_heads = kv_heads;
  config.num_heads = kv_heads * group;
  return fewer;
}

/// A window or a chunk one shorter, down to 1; 0, none, stays.
bool decrement(std::int32_t& length) {
  if (length <= 1) return false;
  --length;
  return true;
}

bool shrink_head(Recipe& r, std::int32_t to) {
  std::int32_t least = to;
  if (r.order == CacheOrder::kLatent) least += r.config.rope_dim;
  return least < r.config.head_size && set(r.config.head_size, least);
}

/// Each makes a recipe simpler in one way; false if it is so already.
using Change = bool (*)(Recipe&);
constexpr Change kChanges[] = {
    [](Recipe& r) { return set(r.batch.common_prefix_len, 0); },
    [](Recipe& r) { return set(r.config.logits_soft_cap, 0); },
    [](Recipe& r) { return set(r.config.sliding_window, 0); },
    [](Recipe& r) { return set(r.config.attention_chunk_size, 0); },
    [](Recipe& r) { return !r.config.alibi_slopes.empty() && set(r.config.alibi_slopes, {}); },
    [](Recipe& r) { return !r.config.sinks.empty() && set(r.config.sinks, {}); },
    [](Recipe& r) { return set(r.config.custom_mask, false); },
    [](Recipe& r) { return set(r.config.output_fp8, false); },
    [](Recipe& r) { return set(r.config.fp8_products, false); },
    [](Recipe& r) { return r.config.scale && (r.config.scale.reset(), true); },
    [](Recipe& r) { return r.config.kv_cache_dtype && (r.config.kv_cache_dtype.reset(), true); },
    [](Recipe& r) { return set(r.stores, false); },
    [](Recipe& r) { return set(r.batch.num_splits, 0); },
    [](Recipe& r) { return r.batch.num_splits > 1 && set(r.batch.num_splits, 1); },
    [](Recipe& r) { return set(r.plan.split_policy, SplitPolicy::kBalanced); },
    [](Recipe& r) { return set(r.plan.fast_build, false); },
    [](Recipe& r) { return set(r.plan.side_by_side, true); },
    [](Recipe& r) { return set(r.plan.decode_threshold, 1); },
    [](Recipe& r) { return r.plan.limits && (r.plan.limits.reset(), true); },
    [](Recipe& r) { return set(r.batch.scales_per_head, false); },
    [](Recipe& r) { return set(r.batch.causal, true); },
    [](Recipe& r) { return set(r.batch.size, 1); },
    [](Recipe& r) { return !r.backend.empty() && (r.backend.clear(), true); },
    [](Recipe& r) { return r.layout && (r.layout.reset(), true); },
    [](Recipe& r) { return set(r.repeat, 1); },
    [](Recipe& r) { return set_group(r.config, 1, 1); },
    [](Recipe& r) { return set_group(r.config, 1, r.config.num_queries_per_kv()); },
    [](Recipe& r) { return set_group(r.config, r.config.num_kv_heads, 1); },
    [](Recipe& r) { return shrink_head(r, 16); },
    [](Recipe& r) { return shrink_head(r, 64); },
    [](Recipe& r) { return r.config.block_size > 0 && set(r.config.block_size, 16); },
    [](Recipe& r) { return halve(r.config.sliding_window); },
    [](Recipe& r) { return halve(r.config.attention_chunk_size); },
    [](Recipe& r) { return decrement(r.config.sliding_window); },
    [](Recipe& r) { return decrement(r.config.attention_chunk_size); },
};

/// The recipe without requests [first, first + count).
Recipe without(Recipe recipe, std::size_t first, std::size_t count) {
  auto& requests = recipe.batch.requests;
  const auto begin = requests.begin() + static_cast<std::ptrdiff_t>(first);
  requests.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
  return recipe;
}

/// Simpler ones, those that drop most first.
std::vector<Recipe> simpler(const Recipe& recipe) {
  std::vector<Recipe> result;
  const std::size_t count = recipe.batch.requests.size();
  for (std::size_t part = count / 2; part > 0; part /= 2) {
    for (std::size_t first = 0; first + part <= count; first += part)
      result.push_back(without(recipe, first, part));
  }
  for (const Change change : kChanges) {
    Recipe changed = recipe;
    if (change(changed)) result.push_back(std::move(changed));
  }
  for (std::size_t r = 0; r < count; ++r) {
    const auto [query, keys] = recipe.batch.requests[r];
    const RequestShape shorter[] = {{query / 2, query / 2 + (keys - query)},
                                    {query, query + (keys - query) / 2},
                                    {query - 1, keys - 1},
                                    {query, keys - 1}};
    for (const RequestShape& request : shorter) {
      Recipe changed = recipe;
      changed.batch.requests[r] = request;
      if (request.query_len >= 0 && request.seq_len >= 0) result.push_back(std::move(changed));
    }
  }
  return result;
}

/// Whether normalise() has undone a change.
bool same(const Recipe& a, const Recipe& b) {
  return describe_layer(a) == describe_layer(b) && describe_batch(a) == describe_batch(b) &&
         a.repeat == b.repeat;
}

}  // namespace

Recipe shrink(Recipe recipe, const std::function<bool(const Recipe&)>& fails, int most_trials) {
  for (bool changed = true; changed;) {
    changed = false;
    for (Recipe& candidate : simpler(recipe)) {
      normalise(candidate);
      if (same(candidate, recipe)) continue;
      if (most_trials-- <= 0) return recipe;
      if (!fails(candidate)) continue;
      recipe = std::move(candidate);
      changed = true;
      break;
    }
  }
  return recipe;
}

}  // namespace clattn::cli
