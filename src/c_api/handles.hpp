#pragma once

#include <clattn/clattn.h>

#include <algorithm>
#include <clattn/attention.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/layer.hpp>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/error.hpp"

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

/// The exception being handled as a status; this thread's error text becomes its message.
ClattnResult keep_error() noexcept;

/// Runs a call of the C API, so that no exception leaves it.
template <typename Body>
ClattnResult guarded(const Body& body) noexcept {
  try {
    body();
    return CLATTN_SUCCESS;
  } catch (...) {
    return keep_error();
  }
}

/// What a pointer argument points to; `name` is the parameter's.
template <typename T>
T& deref(T* pointer, const char* name) {
  detail::throw_invalid_if(pointer == nullptr, "{} is null, legal: a valid pointer", name);
  return *pointer;
}

/// An array argument; `name` is the parameter's. Null is legal if it has no elements.
template <typename T>
std::span<T> elements(T* array, std::size_t count, const char* name) {
  if (count > 0) deref(array, name);
  return {array, count};
}

/// Makes a handle at `place`, which is null if that fails; `name` is the parameter's.
template <typename Handle, typename Make>
ClattnResult make_handle(Handle** place, const char* name, const Make& make) {
  return guarded([&] {
    Handle*& handle = deref(place, name);
    handle = nullptr;
    handle = new Handle(make());
  });
}

/// The size that a struct of the API says it has: it is at least the one of the first version.
template <typename Struct>
std::size_t size_of(const Struct& given, const char* name) {
  detail::throw_invalid_if(given.struct_size < sizeof(Struct),
                           "{}: struct_size is {}, legal: >= {}, the struct's size", name,
                           given.struct_size, sizeof(Struct));
  return given.struct_size;
}

/// A struct that the application filled in. A later version's is good if what this one does not
/// know is zero. A struct that grows keeps `Struct`'s old size here as its least one.
template <typename Struct>
const Struct& read(const Struct* pointer, const char* name) {
  const Struct& given = deref(pointer, name);
  const auto* bytes = reinterpret_cast<const unsigned char*>(pointer);
  const bool zero = std::all_of(bytes + sizeof(Struct), bytes + size_of(given, name),
                                [](unsigned char byte) { return byte == 0; });
  detail::throw_unsupported_if(
      !zero, "{}: fields past byte {} are set, but this library ({}) does not know them", name,
      sizeof(Struct), clattn_version());
  if constexpr (requires { given.reserved; }) {
    detail::throw_unsupported_if(given.reserved != 0, "{}: reserved is {}, legal: 0", name,
                                 given.reserved);
  }
  return given;
}

/// Fills in a struct of the application, whose fields that this version does not know become zero.
template <typename Struct>
void fill(Struct* pointer, Struct values, const char* name) {
  Struct& taken = deref(pointer, name);
  const std::size_t size = size_of(taken, name);
  values.struct_size = taken.struct_size;
  std::memset(pointer, 0, size);
  std::memcpy(pointer, &values, sizeof(values));
}

/// Copies text as clattn_layer_explain() says.
void copy_text(std::string_view source, char* text, std::size_t capacity, std::size_t* size);

/// A text argument, `otherwise` for null.
inline std::string text_or(const char* text, const char* otherwise) {
  return text == nullptr ? otherwise : text;
}

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
