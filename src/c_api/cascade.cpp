#include <clattn/clattn_graph.h>
#include <clattn/cascade.hpp>
#include <memory>

#include "c_api/handles.hpp"

using clattn::CascadeAttention;
using clattn::CascadeImpl;
using clattn::c_api::deref;
using clattn::c_api::guarded;
using clattn::c_api::make_handle;
using clattn::c_api::read;

struct ClattnCascade {
  CascadeAttention cascade;
  ClattnStep step = {};  // without a builder: its metadata is the cascade's
};
struct ClattnCascadeLayer {
  CascadeImpl impl;
  std::shared_ptr<const clattn::KVCache> cache;  // the layer's, bound or not
};

namespace {

/// The cache that was bound, with its scales.
std::shared_ptr<const clattn::KVCache> bound(std::shared_ptr<const clattn::KVCache> cache) {
  clattn::detail::throw_invalid_if(!cache->buffer,
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
                                          of.layer.config(),
                                          clattn::c_api::builder_options_of(options))};
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
    const clattn::Queue& on = deref(queue, "queue").queue;
    const ClattnBatchInfo& given = read(batch, "batch");
    const auto next = clattn::c_api::batch_of(given);
    const ClattnStep*& built = deref(step, "step");
    of.step.metadata = nullptr;  // a build that fails leaves none
    of.step.metadata = &of.cascade.build(on, next, given.common_prefix_len);
    built = &of.step;
  });
}

ClattnResult clattn_layer_store(const ClattnLayer* layer, const ClattnQueue* queue,
                                const ClattnTensors* tensors, const ClattnStep* step) {
  return guarded([&] {
    const clattn::Attention& of = deref(layer, "layer").layer;
    const clattn::Queue& on = deref(queue, "queue").queue;
    const ClattnTensors& given = read(tensors, "tensors");
    const auto cache = bound(of.shared_kv_cache());
    const clattn::AttentionMetadata& metadata = clattn::c_api::metadata_of(step);
    clattn::Event* const event = clattn::c_api::event_of(given.event);
    if (of.shares_kv_cache()) {  // its target stores, as in forward()
      if (event != nullptr) event->reset();
      return;
    }
    of.impl().write_kv_cache(on, clattn::c_api::tensor_of(given.key),
                             clattn::c_api::tensor_of(given.value), *cache, metadata, event);
  });
}

ClattnResult clattn_cascade_forward(const ClattnCascade* cascade, const ClattnQueue* queue,
                                    const ClattnCascadeLayer* cascade_layer,
                                    const ClattnTensors* tensors) {
  return guarded([&] {
    const ClattnCascade& of = deref(cascade, "cascade");
    const clattn::Queue& on = deref(queue, "queue").queue;
    const ClattnCascadeLayer& layer = deref(cascade_layer, "cascade_layer");
    const ClattnTensors& given = read(tensors, "tensors");
    of.cascade.forward(on, layer.impl, clattn::c_api::tensors_of(given), *bound(layer.cache),
                       clattn::c_api::event_of(given.event));
  });
}
