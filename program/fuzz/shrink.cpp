#include <algorithm>
#include <clattn/config_fields.hpp>
#include <utility>
#include <vector>

#include "program/fuzz/recipe.hpp"

namespace clattn::cli {
namespace {

/// Sets a value; whether that changed it.
template <typename Value, typename To = Value>
bool set(Value& value, const To& to) {
  if (value == static_cast<Value>(to)) return false;
  value = static_cast<Value>(to);
  return true;
}

bool set_group(AttentionConfig& config, std::int32_t kv_heads, std::int32_t group) {
  const bool fewer = kv_heads < config.num_kv_heads || group < config.num_queries_per_kv();
  config.num_kv_heads = kv_heads;
  config.num_heads = kv_heads * group;
  return fewer;
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
    [](Recipe& r) { return set(r.stores, false); },
    [](Recipe& r) { return set(r.batch.num_splits, 0); },
    [](Recipe& r) { return r.batch.num_splits > 1 && set(r.batch.num_splits, 1); },
    [](Recipe& r) { return set(r.plan.split_policy, SplitPolicy::kBalanced); },
    [](Recipe& r) { return set(r.plan.fast_build, false); },
    [](Recipe& r) { return set(r.plan.side_by_side, true); },
    [](Recipe& r) { return set(r.plan.decode_threshold, 1); },
    [](Recipe& r) { return r.plan.limits && (r.plan.limits.reset(), true); },
    [](Recipe& r) { return set(r.batch.padding, 0); },
    [](Recipe& r) { return set(r.batch.scales_per_head, false); },
    [](Recipe& r) { return set(r.batch.causal, true); },
    [](Recipe& r) { return set(r.batch.size, 1); },
    [](Recipe& r) { return set(r.config.use_spans, false); },
    [](Recipe& r) { return set(r.config.use_directions, false); },
    [](Recipe& r) { return set(r.config.use_first_keys, false); },
    [](Recipe& r) { return set(r.config.use_keep_keys, false); },
    [](Recipe& r) { return set(r.config.use_trees, false); },
    [](Recipe& r) { return set(r.config.span_rule, SpanRule::kWhole); },
    [](Recipe& r) { return !r.backend.empty() && (r.backend.clear(), true); },
    [](Recipe& r) { return r.layout && (r.layout.reset(), true); },
    [](Recipe& r) { return set(r.repeat, 1); },
    [](Recipe& r) { return set(r.config.head_size_v, 0); },
    [](Recipe& r) { return set_group(r.config, 1, 1); },
    [](Recipe& r) { return set_group(r.config, 1, r.config.num_queries_per_kv()); },
    [](Recipe& r) { return set_group(r.config, r.config.num_kv_heads, 1); },
    [](Recipe& r) { return shrink_head(r, 16); },
    [](Recipe& r) { return shrink_head(r, 64); },
    [](Recipe& r) { return r.config.block_size > 0 && set(r.config.block_size, 16); },
};

/// The options that rows of the configuration leave to chance: each without a value, and lengths
/// shorter.
void add_simpler_options(const Recipe& recipe, std::vector<Recipe>& result) {
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    if (!row.is_set(recipe.config) || (row.random.percent == 0 && row.name != "kv_cache_dtype"))
      return;
    const auto add = [&](const Value& value) {
      result.push_back(recipe);
      result.back().config.*row.member = value;
    };
    add(row.standard);
    if constexpr (std::is_same_v<Value, std::int32_t>) {
      const Value length = recipe.config.*row.member;
      if (length > 1) add(length / 2);
      if (length > 2) add(length - 1);
    }
  });
}

/// The recipe without requests [first, first + count).
Recipe without(Recipe recipe, std::size_t first, std::size_t count) {
  auto& requests = recipe.batch.requests;
  const auto begin = requests.begin() + static_cast<std::ptrdiff_t>(first);
  requests.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
  return recipe;
}

/// Adds the recipe with request `r` changed to what `change` makes of it.
template <typename Change>
void add_changed(const Recipe& recipe, std::size_t r, std::vector<Recipe>& result, Change change) {
  result.push_back(recipe);
  change(result.back().batch.requests[r]);
}

/// Fewer and shorter spans of a request, an earlier first key, fewer kept ones, and none of what it
/// says.
void add_simpler_lists(const Recipe& recipe, std::size_t r, std::vector<Recipe>& result) {
  const RequestShape& request = recipe.batch.requests[r];
  const auto add = [&](auto change) { add_changed(recipe, r, result, change); };
  if (request.direction != Direction::kCausal)
    add([](RequestShape& q) { q.direction = Direction::kCausal; });
  for (std::int32_t RequestShape::*const keys :
       {&RequestShape::first_key, &RequestShape::keep_keys}) {
    if (request.*keys == 0) continue;
    add([keys](RequestShape& q) { q.*keys = 0; });
    add([keys](RequestShape& q) { q.*keys /= 2; });
    add([keys](RequestShape& q) { --(q.*keys); });
  }
  if (!request.parents.empty()) add([](RequestShape& q) { q.parents.clear(); });
  if (!request.spans.empty()) add([](RequestShape& q) { q.spans.clear(); });
  for (std::size_t i = 0; i < request.spans.size(); ++i) {
    const auto at = static_cast<std::ptrdiff_t>(i);
    add([&](RequestShape& q) { q.spans.erase(q.spans.begin() + at); });
    const auto [first, end] = request.spans[i];
    for (const KeySpan& shorter : {KeySpan{first, first + (end - first) / 2},
                                   KeySpan{end - (end - first) / 2, end}, KeySpan{first, end - 1}})
      if (shorter.first <= shorter.end) add([&](RequestShape& q) { q.spans[i] = shorter; });
  }
}

/// Moves the spans by so many positions to the front, with the queries behind a shorter history.
void move_spans(RequestShape& request, std::int32_t by) {
  for (KeySpan& span : request.spans)
    span = {std::max(span.first - by, 0), std::max(span.end - by, 0)};
}

void add_shorter_lengths(const Recipe& recipe, std::size_t r, std::vector<Recipe>& result) {
  const std::int32_t query = recipe.batch.requests[r].query_len;
  const std::int32_t keys = recipe.batch.requests[r].seq_len;
  struct Lengths {
    std::int32_t query, keys;
  };
  const Lengths shorter[] = {{query / 2, query / 2 + (keys - query)},
                             {query, query + (keys - query) / 2},
                             {query - 1, keys - 1},
                             {query, keys - 1}};
  for (const Lengths& made : shorter) {
    if (made.query < 0 || made.keys < 0) continue;
    const auto shorten = [&](RequestShape& request) {
      request.query_len = made.query;
      request.seq_len = made.keys;
    };
    add_changed(recipe, r, result, shorten);
    if (recipe.batch.requests[r].spans.empty()) continue;
    add_changed(recipe, r, result, [&](RequestShape& request) {
      move_spans(request, (keys - query) - (made.keys - made.query));
      shorten(request);
    });
  }
}

/// Simpler ones, those that drop most first.
std::vector<Recipe> simpler(const Recipe& recipe) {
  std::vector<Recipe> result;
  const std::size_t count = recipe.batch.requests.size();
  for (std::size_t part = count / 2; part > 0; part /= 2) {
    for (std::size_t first = 0; first + part <= count; first += part)
      result.push_back(without(recipe, first, part));
  }
  add_simpler_options(recipe, result);
  for (const Change change : kChanges) {
    Recipe changed = recipe;
    if (change(changed)) result.push_back(std::move(changed));
  }
  for (std::size_t r = 0; r < count; ++r) {
    add_simpler_lists(recipe, r, result);
    add_shorter_lengths(recipe, r, result);
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
