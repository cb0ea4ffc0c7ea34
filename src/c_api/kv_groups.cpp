#include <clattn/attn_utils.hpp>
#include <map>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

struct ClattnGroups {
  static constexpr const char* kName = "groups";
  std::shared_ptr<LayerRegistry> registry;
  std::shared_ptr<Context> context;
  KVCacheConfig config;
  std::vector<AttentionGroup> held;
  StatesByLayer states = {};
  std::map<std::string, ClattnStep, std::less<>> steps = {};
};
CLATTN_DESTROYS(clattn_groups_destroy, ClattnGroups)

namespace {

/// Those of the states are `like`'s.
void give_spec(const KVCacheSpec& spec, const ClattnKVCacheSpec& like, ClattnKVCacheSpec* to,
               const char* name) {
  fill(to, name,
       {.struct_size = 0,
        .block_size = spec.block_size,
        .kind = to_string(spec.kind).data(),
        .dtype = to_string(spec.dtype).data(),
        .num_kv_heads = spec.num_kv_heads,
        .head_size = spec.head_size,
        .head_size_v = spec.head_size_v,
        .sliding_window = spec.sliding_window,
        .attention_chunk_size = spec.attention_chunk_size,
        .use_mla = spec.use_mla ? 1 : 0,
        .per_token_head_scales = spec.kv_quant_mode == KVQuantMode::kPerTokenHead ? 1 : 0,
        .num_speculative_blocks = spec.num_speculative_blocks,
        .page_size_padded = spec.page_size_padded,
        .states = like.states,
        .num_states = like.num_states,
        .mamba_cache_mode = to_string(spec.mamba_cache_mode).data()});
}

void give_view(std::span<const StateView> views, std::size_t index, ClattnStateView* view) {
  detail::throw_invalid_if(index >= views.size(), "index is {}, legal: < {} states", index,
                           views.size());
  const StateView& of = views[index];
  fill(view, "view", {0, 0, of.buffer.handle(), of.num_blocks, of.offset, of.block_stride});
}

std::vector<std::string> names_of(const char* const* names, std::size_t count, const char* field) {
  return each_of(names, count, field,
                 [&](const char* name) { return std::string(&deref(name, field)); });
}

KVCacheTensor cache_tensor_of(const ClattnCacheTensor& given) {
  return {given.size_bytes,
          names_of(given.shared_by, given.num_shared_by, "config: tensors: shared_by")};
}

KVCacheGroupSpec group_of(const ClattnCacheGroup& given) {
  KVCacheGroupSpec group{
      names_of(given.layer_names, given.num_layers, "config: groups: layer_names"),
      spec_of(given.spec, "config: groups: spec")};
  for (std::size_t i = 0; given.layer_specs != nullptr && i < given.num_layers; ++i) {
    if (given.layer_specs[i] == nullptr) continue;
    group.layer_specs[group.layer_names[i]] =
        spec_of(given.layer_specs[i], "config: groups: layer_specs");
  }
  return group;
}

StateTensor state_of(const ClattnStateTensor& given) {
  const auto shape = elements(given.shape, given.num_dims, "spec: states: shape");
  return {.shape = {shape.begin(), shape.end()}, .dtype = dtype_of(given.dtype, DType::kF32)};
}

template <typename Pointer>
std::vector<KVCacheSpec> specs_of(Pointer const* specs, std::size_t num_specs) {
  return each_of(specs, num_specs, "specs",
                 [](Pointer spec) { return spec_of(spec, "specs: an element"); });
}

}  // namespace

KVCacheSpec clattn::c_api::spec_of(const ClattnKVCacheSpec* spec, const char* name) {
  const ClattnKVCacheSpec& given = read(spec, name);
  KVCacheSpec made;
  made.kind = parse_kv_cache_kind(text_or(given.kind, "full"));
  take(given.block_size, made.block_size);
  take(given.num_kv_heads, made.num_kv_heads);
  take(given.head_size, made.head_size);
  made.dtype = dtype_of(given.dtype);
  made.sliding_window = given.sliding_window;
  made.attention_chunk_size = given.attention_chunk_size;
  made.use_mla = given.use_mla != 0;
  made.head_size_v = given.head_size_v;
  if (given.per_token_head_scales != 0) made.kv_quant_mode = KVQuantMode::kPerTokenHead;
  made.page_size_padded = given.page_size_padded;
  made.states = each_of(given.states, given.num_states, "spec: states", state_of);
  made.num_speculative_blocks = given.num_speculative_blocks;
  made.mamba_cache_mode = parse_mamba_cache_mode(text_or(given.mamba_cache_mode, "none"));
  return made;
}

ClattnResult clattn_get_kv_cache_layout(const char** layout) {
  return give(layout, "layout", [] {
    const auto found = get_kv_cache_layout();
    return found ? to_string(*found).data() : nullptr;
  });
}

ClattnResult clattn_set_kv_cache_layout(const char* layout) {
  return guarded([&] { set_kv_cache_layout(layout_of(layout)); });
}

ClattnResult clattn_kv_cache_spec_page_size_bytes(const ClattnKVCacheSpec* spec,
                                                  uint64_t* size_bytes) {
  return give(size_bytes, "size_bytes", [&] { return spec_of(spec, "spec").page_size_bytes(); });
}

ClattnResult clattn_kv_cache_spec_max_memory_usage_bytes(const ClattnKVCacheSpec* spec,
                                                         int64_t max_model_len,
                                                         int64_t max_num_batched_tokens,
                                                         int64_t encoder_len,
                                                         uint64_t* size_bytes) {
  return give(size_bytes, "size_bytes", [&] {
    return spec_of(spec, "spec")
        .max_memory_usage_bytes(max_model_len, max_num_batched_tokens, encoder_len);
  });
}

ClattnResult clattn_kv_cache_spec_merge(const ClattnKVCacheSpec* const* specs, size_t num_specs,
                                        ClattnKVCacheSpec* merged) {
  return guarded([&] {
    const KVCacheSpec of_all = KVCacheSpec::merge(specs_of(specs, num_specs));
    give_spec(of_all, *specs[0], merged, "merged");
  });
}

ClattnResult clattn_unify_kv_cache_spec_page_size(ClattnKVCacheSpec* const* specs,
                                                  size_t num_specs) {
  return guarded([&] {
    std::map<std::string, KVCacheSpec> by_index;
    const auto given = specs_of(specs, num_specs);
    for (std::size_t i = 0; i < num_specs; ++i) by_index[std::to_string(i)] = given[i];
    unify_kv_cache_spec_page_size(by_index);
    for (std::size_t i = 0; i < num_specs; ++i) {
      const KVCacheSpec& spec = by_index.at(std::to_string(i));
      specs[i]->block_size = spec.block_size;
      specs[i]->page_size_padded = spec.page_size_padded;
    }
  });
}

ClattnResult clattn_layer_kv_cache_spec(const ClattnLayer* layer, ClattnKVCacheSpec* spec) {
  return guarded([&] {
    const std::string& name = held(layer).layer_name();
    const auto specs = get_kv_cache_spec(*layer->registry);
    const auto found = specs.find(name);
    detail::throw_invalid_if(found == specs.end(), "layer: it shares the cache of another layer");
    give_spec(found->second, {}, spec, "spec");
  });
}

ClattnResult clattn_view_state_pages(const ClattnBuffer* buffer, const ClattnKVCacheSpec* spec,
                                     size_t index, ClattnStateView* view) {
  return guarded(
      [&] { give_view(view_state_pages(held(buffer), spec_of(spec, "spec")), index, view); });
}

ClattnResult clattn_groups_create(const ClattnContext* context, const ClattnModel* model,
                                  const ClattnKVCacheConfig* config,
                                  const ClattnStepOptions* options, ClattnGroups** groups) {
  return make_handle(groups, [&] {
    const auto& in = held(context);
    const auto& layers = held(model);
    const ClattnKVCacheConfig& given = read(config, "config");
    KVCacheConfig caches{
        given.num_blocks,
        each_of(given.tensors, given.num_tensors, "config: tensors", cache_tensor_of),
        each_of(given.groups, given.num_groups, "config: groups", group_of)};
    auto made = init_attn_backend(caches, *layers, in, builder_options_of(options));
    return ClattnGroups{layers, in, std::move(caches), std::move(made)};
  });
}

ClattnResult clattn_groups_init_kv_cache(ClattnGroups* groups, const ClattnQueue* queue,
                                         const char* layout) {
  return guarded([&] {
    ClattnGroups& of = deref(groups, "groups");
    init_kv_cache(of.config, *of.registry, of.held, *of.context, held(queue), layout_of(layout),
                  &of.states);
  });
}

ClattnResult clattn_groups_state(const ClattnGroups* groups, const char* layer_name, size_t index,
                                 ClattnStateView* view) {
  return guarded([&] {
    const ClattnGroups& of = deref(groups, "groups");
    const auto found = of.states.find(&deref(layer_name, "layer_name"));
    detail::throw_invalid_if(found == of.states.end(), "layer {} has no state", layer_name);
    give_view(found->second, index, view);
  });
}

ClattnResult clattn_groups_build(ClattnGroups* groups, const ClattnQueue* queue,
                                 const ClattnBatchInfo* batch, const ClattnGroupPages* pages,
                                 size_t num_pages) {
  return guarded([&] {
    ClattnGroups& of = deref(groups, "groups");
    const Queue& on = held(queue);
    const CommonAttentionMetadata next = plain_batch_of(batch);
    const auto each = each_of(pages, num_pages, "pages", [&](const ClattnGroupPages& given) {
      return pages_of(given, next.num_reqs);
    });
    for (auto& [name, step] : of.steps) step.metadata = nullptr;  // a build that fails leaves none
    for (const auto& [name, metadata] : build_attn_metadata(on, of.held, next, each)) {
      of.steps[name].metadata = metadata;
    }
  });
}

ClattnResult clattn_groups_step(const ClattnGroups* groups, const char* layer_name,
                                const ClattnStep** step) {
  return guarded([&] {
    const ClattnGroups& of = deref(groups, "groups");
    const auto found = of.steps.find(&deref(layer_name, "layer_name"));
    const ClattnStep*& given = deref(step, "step");
    detail::throw_invalid_if(found == of.steps.end(),
                             "layer {} has no step, legal: a layer of the groups, after "
                             "clattn_groups_build()",
                             layer_name);
    given = &found->second;
  });
}
