#pragma once

#include <clattn/clattn.h>

#include <clattn/attention.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/layer.hpp>
#include <cstddef>
#include <memory>
#include <optional>

#include "c_api/guard.hpp"

// What the handles of the C API hold.

struct ClattnContext {
  std::shared_ptr<clattn::Context> context;
};
struct ClattnQueue {
  clattn::Queue queue;
};
struct ClattnBuffer {
  clattn::Buffer buffer;
};
struct ClattnEvent {
  clattn::Event event;
};
struct ClattnModel {
  std::shared_ptr<clattn::LayerRegistry> registry;
};
struct ClattnLayer {
  std::shared_ptr<clattn::Context> context;
  std::shared_ptr<clattn::LayerRegistry> registry;  // outlives the layer
  clattn::Attention layer;
};
struct ClattnCache {
  clattn::KVCache cache;
  std::size_t page_size_bytes = 0;
  std::shared_ptr<const clattn::KVCache> bound = nullptr;  // what the layer made of it

  /// With the scales that its contents are stored by.
  const clattn::KVCache& in_use() const {
    return bound && bound->buffer.handle() == cache.buffer.handle() ? *bound : cache;
  }
};
struct ClattnStep {
  std::shared_ptr<clattn::Context> context;
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
  const clattn::AttentionMetadata* metadata = nullptr;  // of the last build
};

namespace clattn::c_api {

inline cl_mem memory_of(const ClattnBuffer* buffer) {
  return buffer == nullptr ? nullptr : buffer->buffer.handle();
}
inline TensorRef tensor_of(const ClattnTensorRef& tensor) {
  return {memory_of(tensor.buffer), tensor.offset, tensor.token_stride};
}
inline Event* event_of(ClattnEvent* event) {
  return event == nullptr ? nullptr : &event->event;
}
/// The step's metadata. Throws if it has none.
inline const AttentionMetadata& metadata_of(const ClattnStep* step) {
  const AttentionMetadata* const metadata = deref(step, "step").metadata;
  detail::throw_invalid_if(metadata == nullptr,
                           "step: it has no batch, legal: one that clattn_step_build() built");
  return *metadata;
}
/// What a struct that was read() says, in the types of the C++ API.
AttentionOptions options_of(const ClattnLayerConfig& config);
/// Null stands for the defaults.
BuilderOptions builder_options_of(const ClattnStepOptions* options);
CommonAttentionMetadata batch_of(const ClattnBatchInfo& given);
AttentionTensors tensors_of(const ClattnTensors& given);
ForwardOptions forward_options_of(const ClattnTensors& given);
/// Loads a checkpoint's scales and logs what is odd about them.
void load_kv_scales(Attention& layer, const ClattnKVScales* scales);
inline std::optional<KVCacheLayout> layout_of(const char* name) {
  return name == nullptr ? std::nullopt : std::optional(parse_kv_cache_layout(name));
}

}  // namespace clattn::c_api
