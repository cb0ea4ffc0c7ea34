#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <clattn/attn_utils.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/session.hpp>
#include <limits>
#include <map>
#include <utility>

#include "attention/session_pools.hpp"
#include "attention/session_recurrent.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"
#include "capture/capture_pause.hpp"
#include "kv_cache/spec.hpp"

// A session's layers and their caches.

namespace clattn {

using detail::throw_invalid_if, detail::to_size;

namespace {

std::int32_t to_int(std::size_t count) {
  return static_cast<std::int32_t>(count);
}

/// Tokens that rows of layers like this one see at most, 0 = all that a request has.
std::int32_t reach_of(const KVCacheSpec& spec) {
  return std::max(spec.sliding_window, spec.attention_chunk_size);
}

/// Blocks with which a group serves as many requests as a step may have: what a window reaches
/// between steps, the tokens of a step, and for each request a block that is partly full and one
/// that is copied.
std::int64_t blocks_in_use(const KVCacheSpec& spec, const BatchLimits& limits) {
  const std::int64_t block_size = spec.block_size;
  const std::int64_t reached = detail::ceil_div(std::int64_t{reach_of(spec)}, block_size) + 3;
  return std::max(limits.max_num_reqs, 1) * reached +
         detail::ceil_div(std::int64_t{limits.max_num_batched_tokens}, block_size);
}

/// What a layer's cache holds where those of layers that keep all tokens have `num_blocks`: all
/// tokens, too, unless it saves memory to keep those that a window reaches.
KVCacheSpec kept_by(const AttentionConfig& config, const KVCacheSpec& spec,
                    const BatchLimits& limits, std::int64_t num_blocks) {
  const bool unclipped = config.use_spans && config.span_rule == SpanRule::kWhole;
  const bool saves = !unclipped && blocks_in_use(spec, limits) < num_blocks;
  return reach_of(spec) > 0 && saves ? spec : detail::whole_spec(spec);
}

/// The session's groups of layers: those that keep all tokens first, then one for each window. All
/// are in the first where no layer sees all keys, as only blocks that are kept say what is known.
std::vector<KVCacheGroupSpec> group_layers(const LayerRegistry& registry, const BatchLimits& limits,
                                           std::int64_t num_blocks) {
  std::map<std::string, KVCacheSpec> specs = get_kv_cache_spec(registry);
  for (auto& [name, spec] : specs)
    spec = kept_by(registry.find(name)->config(), spec, limits, num_blocks);
  const bool windows_only =
      std::ranges::none_of(specs, [](const auto& each) { return reach_of(each.second) == 0; });
  std::vector<KVCacheGroupSpec> groups(1);
  for (const auto& [name, each] : specs) {
    const KVCacheSpec spec = windows_only ? detail::whole_spec(each) : each;
    auto group = groups.begin();
    if (reach_of(spec) > 0)
      group = std::find_if(groups.begin() + 1, groups.end(), [&](const KVCacheGroupSpec& other) {
        return other.spec.kind == spec.kind && reach_of(other.spec) == reach_of(spec);
      });
    if (group == groups.end()) group = groups.emplace(groups.end());
    if (group->layer_names.empty()) group->spec = spec;
    group->layer_names.push_back(name);
    group->layer_specs.emplace(name, spec);
  }
  return groups;
}

/// Blocks of each group's caches where those of the first have `num_blocks`.
std::vector<std::int64_t> blocks_of(std::span<const KVCacheGroupSpec> groups,
                                    const BatchLimits& limits, std::int64_t num_blocks) {
  std::vector<std::int64_t> blocks = {num_blocks};
  for (const KVCacheGroupSpec& group : groups.subspan(1))
    blocks.push_back(std::min(num_blocks, blocks_in_use(group.spec, limits)));
  return blocks;
}

/// The most blocks of the first group's caches with which those of all take at most `bytes`.
std::int64_t blocks_within(std::size_t bytes, std::span<const KVCacheGroupSpec> groups,
                           const BatchLimits& limits) {
  const auto fits = [&](std::int64_t num_blocks) {
    const std::vector<std::int64_t> blocks = blocks_of(groups, limits, num_blocks);
    std::size_t left = bytes;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const std::size_t page = groups[i].page_size_bytes();
      if (to_size(blocks[i]) > left / page) return false;
      left -= to_size(blocks[i]) * page;
    }
    return true;
  };
  std::int64_t fitting = 0, too_many = std::int64_t{BlockPool::kMaxBlocks} + 1;
  while (too_many - fitting > 1) {
    const std::int64_t middle = fitting + (too_many - fitting) / 2;
    (fits(middle) ? fitting : too_many) = middle;
  }
  return fitting;
}

/// Caches and groups of a session. `config.num_blocks` is 0: each tensor has its own number.
KVCacheConfig plan_caches(const SessionConfig& wanted, const LayerRegistry& registry) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  const BatchLimits& limits = wanted.builder.limits;
  KVCacheConfig config{.groups = group_layers(registry, limits, kAny)};
  const std::int64_t num_blocks = wanted.num_blocks == 0
                                      ? blocks_within(wanted.cache_bytes, config.groups, limits)
                                      : wanted.num_blocks;
  std::size_t block_bytes = 0;
  for (const KVCacheGroupSpec& group : config.groups)
    block_bytes = detail::checked_add(block_bytes, group.page_size_bytes(), "bytes of a block");
  throw_invalid_if(num_blocks < 1 || num_blocks > BlockPool::kMaxBlocks,
                   "Session: num_blocks is {} and cache_bytes {}, legal: 1 to {} blocks; a block "
                   "takes {} bytes over all layers",
                   wanted.num_blocks, wanted.cache_bytes, BlockPool::kMaxBlocks, block_bytes);
  config.groups = group_layers(registry, limits, num_blocks);
  const std::vector<std::int64_t> blocks = blocks_of(config.groups, limits, num_blocks);
  for (std::size_t i = 0; i < blocks.size(); ++i)
    for (const auto& [name, spec] : config.groups[i].layer_specs)
      config.tensors.push_back({detail::checked_mul(to_size(blocks[i]), spec.page_size_bytes(),
                                                    "Session: bytes of a layer's cache"),
                                {name}});
  return config;
}

}  // namespace

std::vector<std::unique_ptr<Attention>> Session::make_layers() {
  throw_invalid_if(config_.layers.empty(), "Session: layers is empty, legal: one for each layer");
  throw_invalid_if(config_.builder.graph_batch_size != 0,
                   "Session: builder.graph_batch_size is {}, legal: 0",
                   config_.builder.graph_batch_size);
  const auto progress = std::exchange(config_.progress, nullptr);
  std::vector<std::unique_ptr<Attention>> layers;
  const auto tell = [&] {
    if (progress) progress(to_int(layers.size()), to_int(config_.layers.size()));
  };
  tell();
  for (AttentionOptions options : config_.layers) {
    if (options.prefix.empty()) options.prefix = fmt::format("layers.{}", layers.size());
    if (options.config.custom_mask) config_.prefix_caching = false;
    layers.push_back(std::make_unique<Attention>(context_, registry_, std::move(options)));
    tell();
  }
  return layers;
}

/// Makes the groups, too.
std::vector<Session::LayerCaches> Session::make_caches() {
  const KVCacheConfig config = plan_caches(config_, registry_);
  BuilderOptions options = config_.builder;
  options.limits.num_blocks = -1;  // each group has its own number
  groups_ = init_attn_backend(config, registry_, context_, options);
  const auto group_of = [&](const std::string& name) {
    const auto holds = [&](const AttentionGroup& group) {
      return std::ranges::find(group.layer_names, name) != group.layer_names.end();
    };
    return to_size(std::ranges::find_if(groups_, holds) - groups_.begin());
  };
  for (const std::unique_ptr<Attention>& layer : layers_)
    group_of_.push_back(group_of(layer->layer_name()));
  init_kv_cache(config, registry_, groups_, *context_, queue_, config_.layout);
  std::vector<LayerCaches> all;
  for (std::size_t id = 0; id < config.groups.size(); ++id) {
    for (const std::string& name : config.groups[id].layer_names) {
      const KVCache& cache = *registry_.find(name)->kv_cache();
      const auto like = std::ranges::find_if(all, [&](const LayerCaches& others) {
        const KVCache& other = others.caches[0];
        return others.group == id && other.dtype == cache.dtype && other.shape == cache.shape &&
               other.strides == cache.strides;
      });
      (like == all.end() ? all.emplace_back(LayerCaches{id, {}}) : *like).caches.push_back(cache);
    }
  }
  return all;
}

std::unique_ptr<Session::Pools> Session::make_pools() const {
  std::vector<Pools::Group> groups;
  for (const LayerCaches& each : caches_) {
    if (each.group < groups.size()) continue;
    const auto of_group = [&](const AttentionGroup& group) {
      return std::cmp_equal(group.kv_cache_group_id, each.group);
    };
    const KVCacheSpec& spec = std::ranges::find_if(groups_, of_group)->spec;
    groups.push_back({static_cast<std::int32_t>(each.caches[0].num_blocks), reach_of(spec)});
  }
  return std::make_unique<Pools>(groups, caches_[0].caches[0].block_size,
                                 states_ == nullptr ? nullptr : &states_->pool());
}

const BlockPool& Session::blocks() const noexcept {
  return pools_->pool(0);
}

std::vector<WindowBlocks> Session::window_blocks() const {
  std::vector<WindowBlocks> all;
  for (std::size_t group = 1; group < pools_->num_groups(); ++group)
    all.push_back({pools_->window(group), &pools_->pool(group)});
  return all;
}

void Session::warm_up(const std::function<void(std::int32_t, std::int32_t)>& progress) {
  const detail::CapturePause pause;  // no calls of the application's
  const auto takes_trees = [](const auto& layer) { return layer->config().use_trees; };
  const bool moves = std::ranges::all_of(layers_, takes_trees);
  const std::array slot{std::int64_t{0}};
  for (std::size_t group = 0; group < pools_->num_groups(); ++group) {
    if (next_id_ == 0 && pools_->pool(group).num_blocks() > 1)  // no block holds anything yet
      copy_blocks(group, std::array{BlockPair{0, 1}});
  }
  for (const LayerCaches& each : caches_)
    if (moves)  // a token onto itself
      move_tokens(*context_, queue_, each.caches, {slot, slot, std::array{0, 1}});
  if (next_id_ == 0 && states_ != nullptr) states_->warm_up(*context_, queue_);
  for (std::int32_t done = 0; done < num_layers(); ++done) {
    if (progress) progress(done, num_layers());
    layer(done).warm_up(queue_);
  }
  queue_.finish();
  if (progress) progress(num_layers(), num_layers());
}

void Session::copy_blocks(std::size_t group, std::span<const BlockPair> pairs) const {
  for (const LayerCaches& each : caches_)
    if (each.group == group) clattn::copy_blocks(*context_, queue_, each.caches, pairs);
}

}  // namespace clattn
