#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/attn_utils.hpp>
#include <clattn/cascade.hpp>
#include <clattn/graph.hpp>
#include <utility>

#include "base/error.hpp"
#include "kernels/paged_impl.hpp"
#include "kv_cache/spec.hpp"

namespace clattn {

namespace {

using detail::throw_invalid, detail::throw_invalid_if;

KVCacheSpec spec_of(const AttentionConfig& config) {
  KVCacheSpec spec = detail::page_spec(config);
  if (config.sliding_window > 0) {
    spec.kind = KVCacheKind::kSlidingWindow;
    spec.sliding_window = config.sliding_window;
  } else if (config.attention_chunk_size > 0) {
    spec.kind = KVCacheKind::kChunkedLocal;
    spec.attention_chunk_size = config.attention_chunk_size;
  }
  return spec;
}

Attention& layer_of(const LayerRegistry& layers, const std::string& name) {
  Attention* layer = layers.find(name);
  if (layer == nullptr) throw_invalid("KVCacheConfig: there is no layer '{}'", name);
  return *layer;
}

void check_member(const Attention& layer, const Attention& first, const KVCacheSpec& spec) {
  throw_invalid_if(layer.get_attn_backend() != first.get_attn_backend(),
                   "KVCacheConfig: layer '{}' has backend {}, legal: its group's, {}",
                   layer.layer_name(), layer.get_attn_backend()->name(),
                   first.get_attn_backend()->name());
  const AttentionConfig &config = layer.config(), &common = first.config();
  const auto require_same = [&](std::string_view field, const auto& own, const auto& groups) {
    throw_invalid_if(own != groups, "KVCacheConfig: layer '{}' has {} {}, legal: its group's {}",
                     layer.layer_name(), field, own, groups);
  };
  throw_invalid_if(config.num_heads != common.num_heads,
                   "KVCacheConfig: layer '{}' has {} query heads, legal: its group's {}",
                   layer.layer_name(), config.num_heads, common.num_heads);
  require_same("dtype", to_string(config.dtype), to_string(common.dtype));
  require_same("attn_type", to_string(config.attn_type), to_string(common.attn_type));
  if (config.use_mla) require_same("rope_dim", config.rope_dim, common.rope_dim);
  const KVCacheSpec own = spec_of(layer.config());
  require_same("use_mla", own.use_mla, spec.use_mla);
  // The allocator's blocks may be several of the kernels'.
  const bool whole_blocks = own.block_size == spec.block_size ||
                            (spec.page_size_padded == 0 && spec.block_size % own.block_size == 0);
  throw_invalid_if(
      !whole_blocks || own.num_kv_heads != spec.num_kv_heads || own.head_size != spec.head_size ||
          own.dtype != spec.dtype,
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

/// Whether the plan of `a` is the likelier one to be run by every layer of a group: the smaller
/// tile, and of equal ones that of the portable kernels, which leaves no merge to the kernels.
bool plans_for_more(const Attention* a, const Attention* b) {
  const auto rank = [](const Attention* layer) {
    return std::pair(largest_tile(*layer), layer->config().kernel_family != KernelFamily::kGpu);
  };
  return rank(a) < rank(b);
}

/// Widens the configuration that a builder plans for to what another layer of the group sees.
void widen(AttentionConfig& plan, const AttentionConfig& layer) {
  const bool unbounded = plan.sliding_window == 0 || layer.sliding_window == 0;
  plan.sliding_window = unbounded ? 0 : std::max(plan.sliding_window, layer.sliding_window);
  if (plan.attention_chunk_size != layer.attention_chunk_size) plan.attention_chunk_size = 0;
}

/// The configuration that a group's builder plans for: that of a layer, widened to what all see,
/// whose plan every layer runs. A plan may leave the joining of splits to kernels that another
/// layer does not have, where its driver spilled them; that layer's plan suits both.
AttentionConfig shared_plan(std::vector<const Attention*> members, Context& context) {
  std::ranges::stable_sort(members, plans_for_more);
  const auto widened = [&](const Attention* candidate) {
    AttentionConfig plan = candidate->config();
    for (const Attention* layer : members) widen(plan, layer->config());
    return plan;
  };
  for (const Attention* candidate : members) {
    AttentionConfig plan = widened(candidate);
    const bool suits = std::ranges::all_of(members, [&](const Attention* layer) {
      const auto* paged = dynamic_cast<const detail::PagedAttentionImpl*>(&layer->impl());
      return paged == nullptr || paged->runs_plan_of(context, plan);
    });
    if (suits) return plan;
  }
  return widened(members.front());
}

/// The group's layers and, behind them, those that attend to the cache of one of them.
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

AttentionGroup make_group(const KVCacheGroupSpec& wanted, const LayerRegistry& layers,
                          const std::shared_ptr<Context>& context, BuilderOptions options) {
  AttentionGroup group;
  group.spec = wanted.spec;
  if (wanted.spec.kind == KVCacheKind::kMamba) {
    group.layer_names = wanted.layer_names;
    return group;
  }
  const auto members = members_of(wanted, layers);
  if (members.empty()) throw_invalid("KVCacheConfig: a group without layers");
  group.backend = members.front()->get_attn_backend();
  for (const Attention* layer : members) {
    check_member(*layer, *members.front(), wanted.spec);
    if (!validate_cascade_configuration(layer->config()).empty())
      options.disable_cascade_attn = true;  // one plan for all, with a cascade or without
    group.layer_names.push_back(layer->layer_name());
  }
  group.config = shared_plan(members, *context);
  group.builder = group.backend->make_builder(context, group.config, options);
  return group;
}

/// The group's pages as its kernels read them.
KVCacheSpec kernel_pages(const AttentionGroup& group) {
  KVCacheSpec spec = group.spec;
  spec.block_size = group.config.block_size;
  return spec;
}

/// A tensor's pages must be in one piece where states lie beside the layer's keys and values.
void require_pages_in_one_piece(const KVCacheTensor& tensor, const StatesByLayer& states,
                                const std::map<std::string, KVCache>& caches) {
  const auto has_states = [&](const std::string& name) { return states.contains(name); };
  if (std::ranges::none_of(tensor.shared_by, has_states)) return;
  for (const std::string& name : tensor.shared_by) {
    if (!caches.contains(name)) continue;
    const KVCache& cache = caches.at(name);
    const std::int64_t values =
        std::int64_t{cache.block_size} * cache.num_kv_heads * cache.head_size;
    const bool latent = cache.k_offset == cache.v_offset;
    throw_invalid_if(cache.block_stride < (latent ? values : 2 * values),
                     "KVCacheConfig: layer '{}' shares a tensor with states, but keeps all keys in "
                     "front of all values; legal: a spec with page_size_padded",
                     name);
  }
}

/// What was set, else NHD, or what the backend prefers where it does not take that.
KVCacheLayout usual_layout(const AttentionGroup& group, const DeviceCapabilities& capabilities) {
  const KVCacheLayout order = AttentionState::get_kv_cache_layout();
  const bool takes = group.backend->validate_layout(order, group.config, &capabilities).empty();
  return takes || get_kv_cache_layout() ? order : group.backend->preferred_layout(capabilities);
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
  groups.reserve(config.groups.size());
  for (const KVCacheGroupSpec& group : config.groups) {
    groups.push_back(make_group(group, layers, context, shared));
  }
  return groups;
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
  throw_invalid_if(groups.size() != config.groups.size(),
                   "groups: {} given, legal: one for each of the configuration's {}", groups.size(),
                   config.groups.size());
  std::vector<KVCacheLayout> orders(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {  // before memory is taken
    throw_invalid_if(groups[i].backend == nullptr && states == nullptr,
                     "states: null, legal: where to put the states of '{}'",
                     fmt::join(groups[i].layer_names, "', '"));
    if (groups[i].backend == nullptr) continue;
    orders[i] = layout ? *layout : usual_layout(groups[i], context.capabilities());
    const auto reasons =
        groups[i].backend->validate_layout(orders[i], groups[i].config, &context.capabilities());
    detail::throw_unsupported_if(!reasons.empty(), "KVCacheConfig: {}", fmt::join(reasons, "; "));
  }
  const std::map<std::string, Buffer> raw = allocate_kv_cache(context, queue, config);
  std::map<std::string, KVCache> caches;
  StatesByLayer views;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (const std::string& name : config.groups[i].layer_names) {
      if (groups[i].backend == nullptr) {
        views.emplace(name, view_state_pages(raw.at(name), groups[i].spec));
        continue;
      }
      caches.emplace(name, reshape_kv_cache(raw.at(name), kernel_pages(groups[i]),
                                            *groups[i].backend, orders[i]));
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
  throw_invalid_if(pages.size() != groups.size(),
                   "pages: {} given, legal: one for each of the {} groups", pages.size(),
                   groups.size());
  std::map<std::string, const AttentionMetadata*> metadata;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].builder == nullptr) continue;  // states
    CommonAttentionMetadata batch = common;
    batch.max_query_len = 0;  // derived: an upper bound would hide that all requests are decodes
    batch.block_table = pages[i].block_table;
    batch.block_table_stride = pages[i].block_table_stride;
    batch.slot_mapping = pages[i].slot_mapping;
    const AttentionMetadata& built = groups[i].builder->build(queue, batch);
    for (const std::string& name : groups[i].layer_names) metadata.emplace(name, &built);
  }
  return metadata;
}

}  // namespace clattn
