#include <clattn/cascade.hpp>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

struct ClattnCascade : Holds<CascadeAttention, "cascade"> {
  ClattnStep step = {};  // its metadata is the cascade's
};
CLATTN_DESTROYS(clattn_cascade_destroy, ClattnCascade)

struct ClattnCascadeLayer : Holds<CascadeImpl, "cascade_layer"> {
  std::shared_ptr<const KVCache> cache;  // the layer's, bound or not
};
CLATTN_DESTROYS(clattn_cascade_layer_destroy, ClattnCascadeLayer)

struct ClattnLevelCascade : Holds<MultiLevelCascadeAttentionWrapper, "cascade"> {};
CLATTN_DESTROYS(clattn_level_cascade_destroy, ClattnLevelCascade)

namespace {

CascadeLevel level_of(const ClattnCascadeLevel& given) {
  detail::throw_invalid_if(given.num_seqs < 0, "levels: num_seqs is {}, legal: >= 0",
                           given.num_seqs);
  const auto rows = static_cast<std::size_t>(given.num_seqs);
  const auto starts = elements(given.paged_kv_indptr, rows + 1, "levels: paged_kv_indptr");
  const auto pages = static_cast<std::size_t>(std::max(starts.back(), 0));
  return {elements(given.qo_indptr, rows + 1, "levels: qo_indptr"), starts,
          elements(given.paged_kv_indices, pages, "levels: paged_kv_indices"),
          elements(given.paged_kv_last_page_len, rows, "levels: paged_kv_last_page_len"),
          given.causal != 0};
}

CascadeQuery query_of(const ClattnCascadeQuery* query) {
  const ClattnCascadeQuery& given = read(query, "query");
  return {.common_prefix_len = given.common_prefix_len,
          .query_lens = elements(given.query_lens, given.num_reqs, "query: query_lens"),
          .num_query_heads = given.num_query_heads,
          .num_kv_heads = given.num_kv_heads,
          .use_alibi = given.use_alibi != 0,
          .use_sliding_window = given.use_sliding_window != 0,
          .use_local_attention = given.use_local_attention != 0,
          .num_sms = given.num_sms};
}

/// Keys and values may be set: clattn_layer_store() takes them out of the same struct.
const ClattnTensors& results_of(const ClattnTensors* tensors) {
  const ClattnTensors& given = read(tensors, "tensors");
  const auto refuse = [](bool set, const char* field) {
    detail::throw_invalid_if(set, "tensors: {} is set, legal: 0, cascades do not take it", field);
  };
  refuse(given.custom_mask != nullptr, "custom_mask");
  refuse(given.output_fp8 != nullptr || given.output_scale != nullptr, "output_fp8");
  refuse(given.num_rows != 0, "num_rows");
  return given;
}

/// Runs what a cascade has planned: `run` is its forward().
template <typename Cascade, typename Run>
ClattnResult run_cascade(const Cascade* cascade, Run run, const ClattnQueue* queue,
                         const ClattnCascadeLayer* cascade_layer, const ClattnTensors* tensors) {
  return guarded([&] {
    const CascadeImpl& layer = held(cascade_layer);
    const ClattnTensors& given = results_of(tensors);
    (held(cascade).*run)(held(queue), layer, tensors_of(given),
                         require_bound(*cascade_layer->cache), event_of(given.event), nullptr);
  });
}

}  // namespace

ClattnResult clattn_cascade_create(const ClattnLayer* layer, const ClattnStepOptions* options,
                                   ClattnCascade** cascade) {
  return make_handle(
      cascade, [&] { return made_for<CascadeAttention>(layer, builder_options_of(options)); });
}

ClattnResult clattn_cascade_layer_create(const ClattnLayer* layer,
                                         ClattnCascadeLayer** cascade_layer) {
  return make_handle(cascade_layer, [&] {
    return ClattnCascadeLayer{{made_for<CascadeImpl>(layer)}, held(layer).shared_kv_cache()};
  });
}

ClattnResult clattn_cascade_build(ClattnCascade* cascade, const ClattnQueue* queue,
                                  const ClattnBatchInfo* batch, const ClattnStep** step) {
  return guarded([&] {
    CascadeAttention& of = held(cascade);
    const ClattnBatchInfo& given = read(batch, "batch");
    give_step(cascade->step, step, &CascadeAttention::build, of, held(queue), batch_of(given),
              given.common_prefix_len);
  });
}

ClattnResult clattn_layer_store(const ClattnLayer* layer, const ClattnQueue* queue,
                                const ClattnTensors* tensors, const ClattnStep* step) {
  return guarded([&] {
    const Attention& of = held(layer);
    const Queue& on = held(queue);
    const ClattnTensors& given = read(tensors, "tensors");
    const auto cache = of.shared_kv_cache();
    require_bound(*cache);
    const AttentionMetadata& metadata = metadata_of(step);
    Event* const event = event_of(given.event);
    if (of.shares_kv_cache()) {  // its target stores, as in forward()
      if (event != nullptr) event->reset();
      return;
    }
    of.impl().write_kv_cache(on, tensor_of(given.key), tensor_of(given.value), *cache, metadata,
                             event);
  });
}

ClattnResult clattn_cascade_forward(const ClattnCascade* cascade, const ClattnQueue* queue,
                                    const ClattnCascadeLayer* cascade_layer,
                                    const ClattnTensors* tensors) {
  return run_cascade(cascade, &CascadeAttention::forward, queue, cascade_layer, tensors);
}

ClattnResult clattn_level_cascade_create(const ClattnLayer* layer, int32_t num_levels,
                                         const ClattnStepOptions* options,
                                         ClattnLevelCascade** cascade) {
  return make_handle(cascade, [&] {
    return made_for<MultiLevelCascadeAttentionWrapper>(layer, num_levels,
                                                       builder_options_of(options));
  });
}

ClattnResult clattn_level_cascade_plan(ClattnLevelCascade* cascade, const ClattnQueue* queue,
                                       const ClattnCascadeLevel* levels, size_t num_levels) {
  return guarded(
      [&] { held(cascade).plan(held(queue), each_of(levels, num_levels, "levels", level_of)); });
}

ClattnResult clattn_level_cascade_run(const ClattnLevelCascade* cascade, const ClattnQueue* queue,
                                      const ClattnCascadeLayer* cascade_layer,
                                      const ClattnTensors* tensors) {
  return run_cascade(cascade, &MultiLevelCascadeAttentionWrapper::run, queue, cascade_layer,
                     tensors);
}

ClattnResult clattn_step_use_cascade(const ClattnStep* step, const ClattnCascadeQuery* query,
                                     int32_t* use) {
  return give(use, "use",
              [&] { return builder_of(step).use_cascade_attention(query_of(query)) ? 1 : 0; });
}

ClattnResult clattn_use_cascade_attention(const ClattnCascadeQuery* query, int32_t* use) {
  return give(use, "use", [&] { return use_cascade_attention(query_of(query)) ? 1 : 0; });
}
