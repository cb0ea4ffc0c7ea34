#include <clattn/clattn_graph.h>
#include <clattn/cascade.hpp>
#include <memory>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

struct ClattnCascade {
  CascadeAttention cascade;
  ClattnStep step = {};  // without a builder: its metadata is the cascade's
};
struct ClattnCascadeLayer {
  CascadeImpl impl;
  std::shared_ptr<const KVCache> cache;  // the layer's, bound or not
};

namespace {

/// The cache that was bound, with its scales.
std::shared_ptr<const KVCache> bound(std::shared_ptr<const KVCache> cache) {
  detail::throw_invalid_if(!cache->buffer,
                           "layer: it has no cache, legal: after "
                           "clattn_layer_bind_cache()");
  return cache;
}

}  // namespace

ClattnResult clattn_cascade_create(const ClattnLayer* layer, const ClattnStepOptions* options,
                                   ClattnCascade** cascade) {
  return make_handle(cascade, "cascade", [&] {
    const ClattnLayer& of = deref(layer, "layer");
    return ClattnCascade{CascadeAttention(of.context, *of.layer.get_attn_backend(),
                                          of.layer.config(), builder_options_of(options))};
  });
}

void clattn_cascade_destroy(ClattnCascade* cascade) {
  delete cascade;
}

ClattnResult clattn_cascade_layer_create(const ClattnLayer* layer,
                                         ClattnCascadeLayer** cascade_layer) {
  return make_handle(cascade_layer, "cascade_layer", [&] {
    const ClattnLayer& of = deref(layer, "layer");
    return ClattnCascadeLayer{
        CascadeImpl(of.context, *of.layer.get_attn_backend(), of.layer.config()),
        of.layer.shared_kv_cache()};
  });
}

void clattn_cascade_layer_destroy(ClattnCascadeLayer* cascade_layer) {
  delete cascade_layer;
}

ClattnResult clattn_cascade_build(ClattnCascade* cascade, const ClattnQueue* queue,
                                  const ClattnBatchInfo* batch, const ClattnStep** step) {
  return guarded([&] {
    ClattnCascade& of = deref(cascade, "cascade");
    const Queue& on = deref(queue, "queue").queue;
    const ClattnBatchInfo& given = read(batch, "batch");
    const auto next = batch_of(given);
    const ClattnStep*& built = deref(step, "step");
    of.step.metadata = nullptr;  // a build that fails leaves none
    of.step.metadata = &of.cascade.build(on, next, given.common_prefix_len);
    built = &of.step;
  });
}

ClattnResult clattn_layer_store(const ClattnLayer* layer, const ClattnQueue* queue,
                                const ClattnTensors* tensors, const ClattnStep* step) {
  return guarded([&] {
    const Attention& of = deref(layer, "layer").layer;
    const Queue& on = deref(queue, "queue").queue;
    const ClattnTensors& given = read(tensors, "tensors");
    const auto cache = bound(of.shared_kv_cache());
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
  return guarded([&] {
    const ClattnCascade& of = deref(cascade, "cascade");
    const Queue& on = deref(queue, "queue").queue;
    const ClattnCascadeLayer& layer = deref(cascade_layer, "cascade_layer");
    const ClattnTensors& given = read(tensors, "tensors");
    of.cascade.forward(on, layer.impl, tensors_of(given), *bound(layer.cache),
                       event_of(given.event));
  });
}
