#pragma once

#include <clattn/clattn.h>
#include <clattn/clattn_ops.h>

#include <algorithm>
#include <clattn/attention.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/layer.hpp>
#include <clattn/prepare_qkv.hpp>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.hpp"

// What the handles of the C API hold, and how its arguments come in and its answers go out.

namespace clattn::c_api {

/// A text as a template's argument.
template <std::size_t kSize>
struct Literal {
  // NOLINTNEXTLINE(google-explicit-constructor): of the literal itself
  constexpr Literal(const char (&given)[kSize]) { std::ranges::copy(given, text); }
  char text[kSize] = {};
};

/// A handle of one object; parameters that take it are called `kParameter`.
template <typename T, Literal kParameter>
struct Holds {
  static constexpr const char* kName = kParameter.text;
  T held;
};

}  // namespace clattn::c_api

struct ClattnContext : clattn::c_api::Holds<std::shared_ptr<clattn::Context>, "context"> {};
struct ClattnQueue : clattn::c_api::Holds<clattn::Queue, "queue"> {};
struct ClattnBuffer : clattn::c_api::Holds<clattn::Buffer, "buffer"> {};
struct ClattnEvent : clattn::c_api::Holds<clattn::Event, "event"> {};
struct ClattnDeviceErrors : clattn::c_api::Holds<clattn::DeviceErrors, "errors"> {};
struct ClattnModel : clattn::c_api::Holds<std::shared_ptr<clattn::LayerRegistry>, "model"> {};
struct ClattnWorkspace
    : clattn::c_api::Holds<std::shared_ptr<clattn::AttentionWorkspace>, "workspace"> {};
struct ClattnLayer {
  static constexpr const char* kName = "layer";
  std::shared_ptr<clattn::Context> context;
  std::shared_ptr<clattn::LayerRegistry> registry;  // outlives the layer
  clattn::Attention held;
};
struct ClattnCache : clattn::c_api::Holds<clattn::KVCache, "cache"> {
  std::size_t page_size_bytes = 0;
  std::int32_t rope_dim = 0;                               // of latent rows; 0 = keys and values
  std::shared_ptr<const clattn::KVCache> bound = nullptr;  // what the layer made of it

  /// With the scales that its contents are stored by.
  const clattn::KVCache& in_use() const {
    return bound && bound->buffer.handle() == held.buffer.handle() ? *bound : held;
  }
};
struct ClattnStep {
  static constexpr const char* kName = "step";
  std::shared_ptr<clattn::Context> context;
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder;  // null of steps that others hold
  const clattn::AttentionMetadata* metadata = nullptr;        // of the last build
};

/// The function that ends a handle.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define CLATTN_DESTROYS(function, Handle) \
  void function(Handle* handle) {         \
    delete handle;                        \
  }
// NOLINTEND(bugprone-macro-parentheses)

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

/// What a pointer argument points to; `name` is the parameter's, here and below.
template <typename T>
T& deref(T* pointer, const char* name) {
  detail::throw_invalid_if(pointer == nullptr, "{} is null, legal: a valid pointer", name);
  return *pointer;
}

/// What a handle holds.
template <typename Handle>
auto& held(Handle* handle, const char* name = Handle::kName) {
  return deref(handle, name).held;
}

/// An array argument. Null is legal if it has no elements.
template <typename T>
std::span<T> elements(T* array, std::size_t count, const char* name) {
  if (count > 0) deref(array, name);
  return {array, count};
}

/// What a struct of the application says of each of `count` requests beyond lengths, to a struct of
/// the C++ API; both have the fields under the same names.
template <typename Given, typename Taken>
void take_lists(const Given& given, std::size_t count, const char* name, Taken& taken) {
  // Values of no enumerator are legal in an enum of bytes; the planner refuses them.
  if (given.direction != nullptr)
    taken.direction = {reinterpret_cast<const Direction*>(given.direction), count};
  if (given.first_keys != nullptr) taken.first_keys = {given.first_keys, count};
  if (given.keep_keys != nullptr) taken.keep_keys = {given.keep_keys, count};
  const auto take = [&](const char* list, const std::int32_t* starts, const char* field,
                        const std::int32_t* values, std::size_t width, bool is_optional,
                        auto& taken_starts, auto& taken_values) {
    detail::throw_invalid_if(values != nullptr && starts == nullptr,
                             "{}: {} is null, legal with {}: {} elements", name, list, field,
                             count + 1);
    if (starts == nullptr) return;
    taken_starts = {starts, count + 1};
    detail::throw_invalid_if(starts[count] < 0, "{}: {}[{}] is {}, legal: >= 0", name, list, count,
                             starts[count]);
    if (values == nullptr && is_optional) return;
    const std::string what = std::string(name) + ": " + field;
    taken_values = elements(values, width * static_cast<std::size_t>(starts[count]), what.c_str());
  };
  take("span_start_loc", given.span_start_loc, "spans", given.spans, 2, false, taken.span_start_loc,
       taken.spans);
  take("tree_start_loc", given.tree_start_loc, "tree_parents", given.tree_parents, 1, true,
       taken.tree_start_loc, taken.tree_parents);  // the device may know the parents
}

/// What `convert` makes of each element of an array argument.
template <typename T, typename Convert>
auto each_of(T* array, std::size_t count, const char* name, const Convert& convert) {
  std::vector<decltype(convert(*array))> all;
  for (T& element : elements(array, count, name)) all.push_back(convert(element));
  return all;
}

/// A call whose answer goes to `place`, which is checked before anything is done.
template <typename T, typename Make>
ClattnResult give(T* place, const char* name, const Make& make) {
  return guarded([&] {
    T& answer = deref(place, name);
    answer = make();
  });
}
/// Makes a handle, or what it holds, at `place`, which is null if that fails.
template <typename Handle, typename Make>
ClattnResult make_handle(Handle** place, const Make& make, const char* name = Handle::kName) {
  return guarded([&] {
    Handle*& handle = deref(place, name);
    handle = nullptr;
    if constexpr (std::is_same_v<decltype(make()), Handle>) {
      handle = new Handle(make());
    } else {
      handle = new Handle{{make()}};
    }
  });
}

/// Whether a struct ends in a field, not in padding: a field that a later version adds has to lie
/// after the size that an older program states. Only for structs with floats, or with padding
/// inside, the last field has to be named.
template <typename Struct>
inline constexpr bool kEndsInField = std::has_unique_object_representations_v<Struct>;
#define CLATTN_ENDS_WITH(Struct, field)        \
  template <>                                  \
  inline constexpr bool kEndsInField<Struct> = \
      (offsetof(Struct, field) + sizeof(Struct::field) == sizeof(Struct))
// NOLINTBEGIN(bugprone-sizeof-expression): of pointers themselves
CLATTN_ENDS_WITH(ClattnDeviceId, device);
CLATTN_ENDS_WITH(ClattnKVScales, fnuz);
CLATTN_ENDS_WITH(ClattnCacheWrite, event);
CLATTN_ENDS_WITH(ClattnTensors, reserved);
CLATTN_ENDS_WITH(ClattnGatedDeltaRule, event);
CLATTN_ENDS_WITH(ClattnSelectiveStateUpdate, event);
CLATTN_ENDS_WITH(ClattnLightningAttention, event);
CLATTN_ENDS_WITH(ClattnRmsNormGated, event);
CLATTN_ENDS_WITH(ClattnPrepareQKV, event);
// NOLINTEND(bugprone-sizeof-expression)
#undef CLATTN_ENDS_WITH
#define CLATTN_FIELD(kind, name, ...) &&sizeof(ClattnLayerConfig::name) == 8
template <>
inline constexpr bool kEndsInField<ClattnLayerConfig> = true
#include <clattn/attention_config.inc>
    ;
#undef CLATTN_FIELD

/// The size that a struct of the API says it has: it is at least the one of the first version.
template <typename Struct>
std::size_t size_of(const Struct& given, const char* name) {
  static_assert(kEndsInField<Struct>, "the struct ends in padding: name it reserved");
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
void fill(Struct* pointer, const char* name, Struct values) {
  Struct& taken = deref(pointer, name);
  const std::size_t size = size_of(taken, name);
  values.struct_size = taken.struct_size;
  std::memset(pointer, 0, size);
  std::memcpy(pointer, &values, sizeof(values));
}

/// Copies text as clattn_layer_explain() says.
void copy_text(std::string_view source, char* text, std::size_t capacity, std::size_t* size);
/// A call that gives such a text.
template <typename Make>
ClattnResult give_text(char* text, std::size_t capacity, std::size_t* size, const Make& make) {
  return guarded([&] { copy_text(make(), text, capacity, size); });
}
/// A line for each.
std::string lines(std::span<const std::string> texts);

/// Copies an answer to an array of the application, which is large enough.
template <typename T>
void copy_to(const std::vector<T>& answer, T* array, const char* name) {
  std::ranges::copy(answer, elements(array, answer.size(), name).begin());
}
/// The same to an array of `capacity` elements; 0 = the application only asks for the size.
template <typename T>
void copy_or_count(const std::vector<T>& answer, T* array, std::size_t capacity, const char* name) {
  if (capacity == 0) return;
  detail::throw_invalid_if(capacity < answer.size(), "{}: {} elements, legal: >= {}", name,
                           capacity, answer.size());
  copy_to(answer, array, name);
}

/// A text argument, `otherwise` for null.
inline std::string text_or(const char* text, const char* otherwise) {
  return text == nullptr ? otherwise : text;
}
/// Takes a number where one is given, not 0.
template <typename Given, typename T>
void take(Given given, T& value) {
  if (given != 0) value = given;
}

inline cl_mem memory_of(const ClattnBuffer* buffer) {
  return buffer == nullptr ? nullptr : buffer->held.handle();
}
/// An absent buffer is an empty one.
inline Buffer buffer_of(const ClattnBuffer* buffer) {
  return buffer == nullptr ? Buffer() : buffer->held;
}
inline TensorRef tensor_of(const ClattnTensorRef& tensor) {
  return {memory_of(tensor.buffer), tensor.offset, tensor.token_stride};
}
inline Event* event_of(ClattnEvent* event) {
  return event == nullptr ? nullptr : &event->held;
}
inline DType dtype_of(const char* name, DType otherwise = DType::kF16) {
  return name == nullptr ? otherwise : parse_dtype(name);
}
inline std::optional<KVCacheLayout> layout_of(const char* name) {
  return name == nullptr ? std::nullopt : std::optional(parse_kv_cache_layout(name));
}
/// A T that serves layers like this one.
template <typename T, typename... Options>
T made_for(const ClattnLayer* layer, Options&&... options) {
  const ClattnLayer& of = deref(layer, "layer");
  return T(of.context, *of.held.get_attn_backend(), of.held.config(),
           std::forward<Options>(options)...);
}

/// The metadata of a step becomes what `build` makes of the arguments; none if that fails.
template <typename Build, typename... Args>
void rebuild(ClattnStep& step, const Build& build, Args&&... args) {
  step.metadata = nullptr;
  step.metadata = &std::invoke(build, std::forward<Args>(args)...);
}
/// The same for a step that another handle holds and returns.
template <typename... Args>
void give_step(ClattnStep& step, const ClattnStep** place, Args&&... build) {
  const ClattnStep*& given = deref(place, "step");
  rebuild(step, std::forward<Args>(build)...);
  given = &step;
}
/// The step's metadata. Throws if it has none.
inline const AttentionMetadata& metadata_of(const ClattnStep* step) {
  const AttentionMetadata* const metadata = deref(step, "step").metadata;
  detail::throw_invalid_if(metadata == nullptr,
                           "step: it has no batch, legal: one that clattn_step_build() built");
  return *metadata;
}
/// Of a step that clattn_step_create() made.
AttentionMetadataBuilder& builder_of(const ClattnStep* step);
/// What a struct that was read() says, in the types of the C++ API.
AttentionOptions options_of(const ClattnLayerConfig& config);
/// Null stands for the defaults.
BuilderOptions builder_options_of(const ClattnStepOptions* options);
CommonAttentionMetadata batch_of(const ClattnBatchInfo& given);
/// A batch for calls that take no options of clattn_step_build().
CommonAttentionMetadata plain_batch_of(const ClattnBatchInfo* batch);
GroupPages pages_of(const ClattnGroupPages& given, std::int32_t num_reqs);
KVCacheSpec spec_of(const ClattnKVCacheSpec* spec, const char* name);
/// The cache of a layer, which has to be bound by then.
const KVCache& require_bound(const KVCache& cache);
AttentionTensors tensors_of(const ClattnTensors& given);
ForwardOptions forward_options_of(const ClattnTensors& given);
/// Without a cache.
PrepareQKV prepare_of(const ClattnPrepareQKV& given);
/// Loads a checkpoint's scales and logs what is odd about them.
void load_kv_scales(Attention& layer, const ClattnKVScales* scales);

}  // namespace clattn::c_api
