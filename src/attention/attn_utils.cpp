#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/attn_utils.hpp>
#include <clattn/cascade.hpp>
#include <clattn/explain.hpp>
#include <clattn/graph.hpp>
#include <utility>

#include "backends/registry.hpp"
#include "base/checked.hpp"
#include "kernels/choose/attention_kernels.hpp"
#include "kernels/paged_impl.hpp"
#include "kv_cache/spec.hpp"

namespace clattn {

namespace {

using detail::throw_invalid, detail::throw_invalid_if;

KVCacheSpec spec_of(const AttentionConfig& config) {
  KVCacheSpec spec = detail::page_spec(config);
  const std::int32_t left = detail::window_of(config).left;
  if (left >= 0) {
    spec.kind = KVCacheKind::kSlidingWindow;
    spec.sliding_window = left < INT32_MAX ? left + 1 : INT32_MAX;
  } else if (config.attention_chunk_size > 0) {
    spec.kind = KVCacheKind::kChunkedLocal;
    // A request keeps the tokens of all chunks that it sees.
    const std::int64_t chunks = std::int64_t{config.chunk_lookback} + 1;
    spec.attention_chunk_size = static_cast<std::int32_t>(
        std::min<std::int64_t>(config.attention_chunk_size * chunks, INT32_MAX));
  }
  return spec;
}

Attention& layer_of(const LayerRegistry& layers, const std::string& name) {
  Attention* layer = layers.find(name);
  if (layer == nullptr) throw_invalid("KVCacheConfig: there is no layer '{}'", name);
  return *layer;
}

void check_member(const Attention& layer, const Attention& first, const KVCacheSpec& spec) {
  const AttentionConfig &config = layer.config(), &common = first.config();
  const auto require_same = [&](std::string_view field, const auto& own, const auto& groups) {
    throw_invalid_if(own != groups, "KVCacheConfig: layer '{}' has {} {}, legal: its group's {}",
                     layer.layer_name(), field, own, groups);
  };
  require_same("dtype", to_string(config.dtype), to_string(common.dtype));
  require_same("attn_type", to_string(config.attn_type), to_string(common.attn_type));
  if (config.use_mla && common.use_mla) require_same("rope_dim", config.rope_dim, common.rope_dim);
  const KVCacheSpec own = spec_of(layer.config());
  require_same("use_mla", own.use_mla, spec.use_mla);
  // The allocator's blocks may be several of the kernels'.
  const bool whole_blocks = own.block_size == spec.block_size ||
                            (spec.page_size_padded == 0 && spec.block_size % own.block_size == 0);
  throw_invalid_if(
      !whole_blocks || own.num_kv_heads != spec.num_kv_heads || own.head_size != spec.head_size ||
          own.value_size() != spec.value_size() || own.dtype != spec.dtype,
      "KVCacheConfig: layer '{}' keeps {} tokens x {} heads x {} of {}, legal: its group's {} x "
      "{} x {} of {}",
      layer.layer_name(), own.block_size, own.num_kv_heads, own.head_size, to_string(own.dtype),
      spec.block_size, spec.num_kv_heads, spec.head_size, to_string(spec.dtype));
  require_same("block_size", config.block_size, common.block_size);
}

/// Rows of the layer's largest tile: what its driver spilled may leave it smaller ones than others
/// of its group have, and those run its plan, not it theirs.
std::int32_t largest_tile(const Attention& layer) {
  std::int32_t rows = 0;
  for (const KernelInfo& kernel : layer.impl().kernels()) rows = std::max(rows, kernel.block_rows);
  return rows;
}

/// Widens the configuration that a builder plans for to what another layer of the group sees.
void widen(AttentionConfig& plan, const AttentionConfig& layer) {
  const auto wider = [](std::int32_t a, std::int32_t b) {
    return a < 0 || b < 0 ? -1 : std::max(a, b);
  };
  const detail::KeyWindow own = detail::window_of(plan), other = detail::window_of(layer);
  plan.window_left = wider(own.left, other.left);
  plan.window_right = wider(own.right, other.right);
  plan.sliding_window = 0;
  if (plan.window_left >= 0 && plan.window_left == plan.window_right &&
      plan.window_left < INT32_MAX) {  // as most configurations give it
    plan.sliding_window = plan.window_left + 1;
    plan.window_left = plan.window_right = -1;
  }
  if (plan.attention_chunk_size != layer.attention_chunk_size) plan.attention_chunk_size = 0;
  const bool chunked = plan.attention_chunk_size > 0;
  plan.chunk_lookback = chunked ? std::max(plan.chunk_lookback, layer.chunk_lookback) : 0;
}

/// The configuration that a group's builder plans for: that of a layer, widened to what all see,
/// whose plan every layer runs. A plan may leave the joining of splits to kernels that another
/// layer does not have, where its driver spilled them; that layer's plan suits both.
AttentionConfig shared_plan(std::vector<const Attention*> members, Context& context) {
  // First the plan that every layer most likely can run: the smaller tile, and of equal ones that
  // of the portable kernels, which leaves no merge to the kernels.
  std::ranges::stable_sort(members, {}, [](const Attention* layer) {
    return std::pair(largest_tile(*layer), layer->config().kernel_family != KernelFamily::kGpu);
  });
  std::vector<AttentionConfig> plans;
  for (const Attention* candidate : members) {
    AttentionConfig& plan = plans.emplace_back(candidate->config());
    for (const Attention* layer : members) widen(plan, layer->config());
    const bool suits = std::ranges::all_of(members, [&](const Attention* layer) {
      return detail::runs_plan_of(context, layer->impl(), plan);
    });
    if (suits) return plan;
  }
  return plans.front();
}

/// The group's layers and, after them, those that attend to the cache of one of them.
std::vector<const Attention*> members_of(const KVCacheGroupSpec& group,
                                         const LayerRegistry& layers) {
  std::vector<const Attention*> members;
  members.reserve(group.layer_names.size());
  for (const std::string& name : group.layer_names) members.push_back(&layer_of(layers, name));
  for (const Attention* layer : layers.layers()) {
    if (!layer->shares_kv_cache()) continue;
    const std::string& target = layer->options().kv_sharing_target_layer_name;
    const bool ours = std::ranges::any_of(
        members, [&](const Attention* member) { return member->layer_name() == target; });
    const bool listed = std::ranges::find(members, layer) != members.end();
    if (ours && !listed) members.push_back(layer);
  }
  return members;
}

/// A group of these layers, which have one backend.
AttentionGroup make_group(const KVCacheSpec& spec, std::span<const Attention* const> members,
                          const std::shared_ptr<Context>& context, BuilderOptions options) {
  AttentionGroup group;
  group.spec = spec;
  group.backend = members.front()->get_attn_backend();
  for (const Attention* layer : members) {
    if (!validate_cascade_configuration(layer->config()).empty())
      options.disable_cascade_attn = true;  // one plan for all, with a cascade or without
    group.layer_names.push_back(layer->layer_name());
  }
  group.config = shared_plan({members.begin(), members.end()}, *context);
  group.builder = group.backend->make_builder(context, group.config, options);
  return group;
}

/// The spec of the cache that the layer attends to.
const KVCacheSpec& spec_in(const KVCacheGroupSpec& group, const Attention& layer) {
  const bool targets = layer.shares_kv_cache() && !group.layer_specs.contains(layer.layer_name());
  return group.spec_of(targets ? layer.options().kv_sharing_target_layer_name : layer.layer_name());
}

/// Whether two layers may share a plan, which is made for one shape of heads, and whose listed rows
/// are made for one window and one choice of lists.
bool may_share_plan(const Attention& a, const Attention& b) {
  const AttentionConfig &one = a.config(), &other = b.config();
  if (a.get_attn_backend() != b.get_attn_backend() || one.num_heads != other.num_heads ||
      detail::page_spec(one) != detail::page_spec(other) || one.rope_dim != other.rope_dim ||
      detail::lists_of(one) != detail::lists_of(other)) {
    return false;
  }
  return !detail::lists_of(one).any() || detail::window_of(one) == detail::window_of(other);
}

/// The groups of a KV cache group of states: one for each spec.
std::vector<AttentionGroup> state_groups(const KVCacheGroupSpec& wanted) {
  std::vector<AttentionGroup> groups;
  for (const std::string& layer : wanted.layer_names) {
    const KVCacheSpec& spec = wanted.spec_of(layer);
    auto group = std::ranges::find(groups, spec, &AttentionGroup::spec);
    if (group == groups.end()) {
      groups.emplace_back().spec = spec;
      group = groups.end() - 1;
    }
    group->layer_names.push_back(layer);
  }
  return groups;
}

/// The groups of one KV cache group: one for each backend, spec and number of query heads of its
/// layers, and for each way in which they look at what a batch says of its requests.
std::vector<AttentionGroup> make_groups(const KVCacheGroupSpec& wanted, const LayerRegistry& layers,
                                        const std::shared_ptr<Context>& context,
                                        const BuilderOptions& options) {
  if (wanted.spec.kind == KVCacheKind::kMamba) return state_groups(wanted);
  std::vector<AttentionGroup> groups;
  auto members = members_of(wanted, layers);
  if (members.empty()) throw_invalid("KVCacheConfig: a group without layers");
  for (const Attention* layer : members)
    check_member(*layer, *members.front(), spec_in(wanted, *layer));
  for (auto first = members.begin(); first != members.end();) {
    const Attention& leader = **first;
    const auto end = std::stable_partition(first, members.end(), [&](const Attention* layer) {
      return may_share_plan(*layer, leader);
    });
    groups.push_back(make_group(spec_in(wanted, leader), {first, end}, context, options));
    first = end;
  }
  return groups;
}

/// Which of the groups a layer of the configuration's group `id` is in.
std::size_t index_of(std::span<const AttentionGroup> groups, std::size_t id,
                     const std::string& layer) {
  const auto found = std::ranges::find_if(groups, [&](const AttentionGroup& group) {
    return std::cmp_equal(group.kv_cache_group_id, id) &&
           std::ranges::find(group.layer_names, layer) != group.layer_names.end();
  });
  throw_invalid_if(found == groups.end(),
                   "groups: none holds layer '{}' of the configuration's group {}, legal: those "
                   "that init_attn_backend() made from it",
                   layer, id);
  return static_cast<std::size_t>(found - groups.begin());
}

/// A tensor's pages must be in one piece where states lie beside the layer's keys and values.
void require_pages_in_one_piece(const KVCacheTensor& tensor, const StatesByLayer& states,
                                const std::map<std::string, KVCache>& caches) {
  const auto has_states = [&](const std::string& name) { return states.contains(name); };
  if (std::ranges::none_of(tensor.shared_by, has_states)) return;
  for (const std::string& name : tensor.shared_by) {
    if (!caches.contains(name)) continue;
    const KVCache& cache = caches.at(name);
    const bool latent = cache.k_offset == cache.v_offset;
    const std::int64_t elements = std::int64_t{cache.head_size} + (latent ? 0 : cache.value_size());
    throw_invalid_if(
        cache.block_stride < std::int64_t{cache.block_size} * cache.num_kv_heads * elements,
        "KVCacheConfig: layer '{}' shares a tensor with states, but keeps all keys in "
        "front of all values; legal: a spec with page_size_padded",
        name);
  }
}

}  // namespace

std::map<std::string, KVCacheSpec> get_kv_cache_spec(const LayerRegistry& layers) {
  std::map<std::string, KVCacheSpec> specs;
  for (const Attention* layer : layers.layers()) {
    throw_invalid_if(layer->config().attn_type != AttentionType::kDecoder,
                     "layer {}: attn_type is {}, legal: decoder", layer->layer_name(),
                     to_string(layer->config().attn_type));
    if (!layer->shares_kv_cache()) specs.emplace(layer->layer_name(), spec_of(layer->config()));
  }
  return specs;
}

std::vector<AttentionGroup> init_attn_backend(const KVCacheConfig& config,
                                              const LayerRegistry& layers,
                                              const std::shared_ptr<Context>& context,
                                              const BuilderOptions& options) {
  BuilderOptions shared = options;
  if (shared.workspace == nullptr) shared.workspace = std::make_shared<AttentionWorkspace>();
  std::vector<AttentionGroup> groups;
  for (std::size_t id = 0; id < config.groups.size(); ++id) {
    for (AttentionGroup& group : make_groups(config.groups[id], layers, context, shared)) {
      group.kv_cache_group_id = static_cast<std::int32_t>(id);
      groups.push_back(std::move(group));
    }
  }
  return groups;
}

AttentionCGSupportInfo get_attn_cg_support(std::span<const AttentionGroup> groups) {
  AttentionCGSupportInfo least;
  for (const AttentionGroup& group : groups) {
    if (group.backend == nullptr) continue;
    const AttentionCGSupport support = group.backend->get_cudagraph_support(group.config);
    if (!least.min_cg_attn_backend.empty() && support >= least.min_cg_support) continue;
    least = {support, group.backend->name()};
  }
  return least;
}

std::int32_t select_common_block_size(
    std::int32_t block_size, std::span<const std::shared_ptr<const AttentionBackend>> backends) {
  detail::check_at_least("block_size", block_size, 1);
  const auto all_take = [&](std::int32_t size) {
    return std::ranges::all_of(backends, [&](const auto& backend) {
      return std::ranges::any_of(backend->get_supported_kernel_block_sizes(),
                                 [&](const auto& pages) { return detail::takes(pages, size); });
    });
  };
  if (all_take(block_size)) return block_size;
  std::int32_t largest = 0;
  for (const auto& backend : backends) {
    for (const auto& [size, multiples] : backend->get_supported_kernel_block_sizes()) {
      if (!multiples && size > largest && block_size % size == 0 && all_take(size)) largest = size;
    }
  }
  throw_invalid_if(largest == 0, "No common block size for {}.", block_size);
  return largest;
}

std::vector<const KVCache*> bind_kv_cache(const std::map<std::string, KVCache>& kv_caches,
                                          const LayerRegistry& layers) {
  for (const auto& [name, cache] : kv_caches) layer_of(layers, name).check_kv_cache(cache);
  for (const auto& [name, cache] : kv_caches) layer_of(layers, name).bind_kv_cache(cache);
  std::vector<Attention*> owners;
  for (Attention* layer : layers.layers()) {
    if (kv_caches.contains(layer->layer_name())) owners.push_back(layer);
  }
  std::ranges::stable_sort(
      owners, {}, [](const Attention* layer) { return extract_layer_index(layer->layer_name()); });
  std::vector<const KVCache*> caches;
  caches.reserve(owners.size());
  for (const Attention* layer : owners) caches.push_back(layer->kv_cache());
  return caches;
}

std::vector<const KVCache*> init_kv_cache(const KVCacheConfig& config, const LayerRegistry& layers,
                                          std::span<const AttentionGroup> groups,
                                          const Context& context, cl_command_queue queue,
                                          std::optional<KVCacheLayout> layout,
                                          StatesByLayer* states) {
  std::vector<KVCacheLayout> orders(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {  // before memory is taken
    throw_invalid_if(groups[i].backend == nullptr && states == nullptr,
                     "states: null, legal: where to put the states of '{}'",
                     fmt::join(groups[i].layer_names, "', '"));
    if (groups[i].backend != nullptr)
      orders[i] = detail::supported_layout(*groups[i].backend, context.capabilities(), layout);
  }
  const std::map<std::string, Buffer> raw = allocate_kv_cache(context, queue, config);
  std::map<std::string, KVCache> caches;
  StatesByLayer views;
  for (std::size_t id = 0; id < config.groups.size(); ++id) {
    for (const std::string& name : config.groups[id].layer_names) {
      const std::size_t i = index_of(groups, id, name);
      if (groups[i].backend == nullptr) {
        views.emplace(name, view_state_pages(raw.at(name), groups[i].spec));
        continue;
      }
      KVCacheSpec pages = groups[i].spec;
      pages.block_size = groups[i].config.block_size;  // as the kernels read them
      caches.emplace(name, reshape_kv_cache(raw.at(name), pages, *groups[i].backend, orders[i]));
    }
  }
  for (const KVCacheTensor& tensor : config.tensors)
    require_pages_in_one_piece(tensor, views, caches);
  auto bound = bind_kv_cache(caches, layers);
  if (states != nullptr) *states = std::move(views);
  return bound;
}

std::map<std::string, const AttentionMetadata*> build_attn_metadata(
    cl_command_queue queue, std::span<const AttentionGroup> groups,
    const CommonAttentionMetadata& common, std::span<const GroupPages> pages) {
  std::int32_t wanted = 0;
  for (const AttentionGroup& group : groups) wanted = std::max(wanted, group.kv_cache_group_id + 1);
  throw_invalid_if(std::cmp_not_equal(pages.size(), wanted),
                   "pages: {} given, legal: one for each of the {} KV cache groups", pages.size(),
                   wanted);
  std::map<std::string, const AttentionMetadata*> metadata;
  for (const AttentionGroup& group : groups) {
    if (group.builder == nullptr) continue;  // states
    const GroupPages& own = pages[static_cast<std::size_t>(group.kv_cache_group_id)];
    CommonAttentionMetadata batch = common;
    batch.max_query_len = 0;  // derived: an upper bound would hide that all requests are decodes
    batch.block_table = own.block_table;
    batch.block_table_stride = own.block_table_stride;
    batch.slot_mapping = own.slot_mapping;
    const AttentionMetadata& built = group.builder->build(queue, batch);
    for (const std::string& name : group.layer_names) metadata.emplace(name, &built);
  }
  return metadata;
}

}  // namespace clattn
