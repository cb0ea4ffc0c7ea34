// What layers keep in their caches (kv_cache_spec.hpp).

#include <clattn/attention_backend.hpp>
#include <clattn/kv_cache_spec.hpp>

#include <algorithm>
#include <array>

#include "bindings.hpp"

namespace clattn::python {

namespace {

template <typename E>
struct Name {
  E value;
  std::string_view name;
};
constexpr std::array kModes = {
    Name<KVQuantMode>{KVQuantMode::kNone, "none"},
    Name<KVQuantMode>{KVQuantMode::kPerTokenHead, "per_token_head"},
};

template <const auto& rows, typename E>
void add_named(Record<KVCacheSpec>& record, const char* name, E KVCacheSpec::*field,
               const char* doc) {
  record.def_prop_rw(
      name,
      [field](const KVCacheSpec& self) {
        const auto row = std::ranges::find(rows, self.*field, &Name<E>::value);
        return std::string(row->name);
      },
      [field, name](KVCacheSpec& self, std::string_view value) {
        const auto row = std::ranges::find(rows, value, &Name<E>::name);
        if (row != rows.end()) {
          self.*field = row->value;
          return;
        }
        std::string legal;
        for (const auto& each : rows) legal += (legal.empty() ? "" : ", ") + std::string(each.name);
        throw_invalid(std::string(name) + " is '" + std::string(value) + "', legal: " + legal);
      },
      doc);
}

void bind_spec(nb::module_& module) {
  using T = StateTensor;
  Record<T> tensor(module, "StateTensor", "One tensor of a constant state.");
  tensor.named("dtype", &T::dtype, parse_dtype, "Of its elements.")
      .def_rw("shape", &T::shape, "Of one request.");
  using S = KVCacheSpec;
  Record<S> spec(module, "KVCacheSpec", "What a page of a layer's cache holds.");
  add_named<kModes>(spec, "kv_quant_mode", &S::kv_quant_mode, "none or per_token_head.");
  spec.named("kind", &S::kind, parse_kv_cache_kind,
             "full, sliding_window, chunked_local, encoder_only, cross or mamba.")
      .named("mamba_cache_mode", &S::mamba_cache_mode, parse_mamba_cache_mode,
             "Of mamba: none, align or all.")
      .named("dtype", &S::dtype, parse_dtype, "As stored.")
      .def_rw("block_size", &S::block_size, "Tokens per page.")
      .def_rw("num_kv_heads", &S::num_kv_heads)
      .def_rw("head_size", &S::head_size)
      .def_rw("head_size_v", &S::head_size_v, "0 is head_size.")
      .def_rw("sliding_window", &S::sliding_window)
      .def_rw("attention_chunk_size", &S::attention_chunk_size)
      .def_rw("use_mla", &S::use_mla)
      .def_rw("page_size_padded", &S::page_size_padded, "Bytes; 0 is the page's own.")
      .def_rw("states", &S::states, "StateTensors, of mamba.")
      .def_rw("num_speculative_blocks", &S::num_speculative_blocks,
              "Of mamba: pages for states after drafts.")
      .def_prop_ro("page_size_bytes", &S::page_size_bytes)
      .def("max_admission_blocks_per_request", &S::max_admission_blocks_per_request,
           "max_model_len"_a, "max_num_batched_tokens"_a, "encoder_len"_a = 0,
           "Most pages that one request of up to max_model_len tokens holds.")
      .def("max_memory_usage_bytes", &S::max_memory_usage_bytes, "max_model_len"_a,
           "max_num_batched_tokens"_a, "encoder_len"_a = 0,
           "Most bytes that one request of up to max_model_len tokens holds.")
      .def_static(
          "merge", [](const std::vector<S>& specs) { return S::merge(specs); }, "specs"_a,
          "The spec of layers that share a block table.")
      .def("__eq__", [](const S& self, const S& other) { return self == other; });
  module.def(
      "unify_kv_cache_spec_page_size",
      [](std::map<std::string, S> specs) {
        unify_kv_cache_spec_page_size(specs);
        return specs;
      },
      "specs"_a, "The specs by layer name with pages of one size.");
}

void bind_config_of_caches(nb::module_& module) {
  using T = KVCacheTensor;
  Record<T>(module, "KVCacheTensor", "One buffer, aliased by every layer of shared_by.")
      .def_rw("size_bytes", &T::size_bytes)
      .def_rw("shared_by", &T::shared_by, "Names of layers.");
  using G = KVCacheGroupSpec;
  Record<G>(module, "KVCacheGroupSpec", "Layers that share one block table.")
      .def_rw("layer_names", &G::layer_names)
      .def_rw("spec", &G::spec, "Of each that has none in layer_specs.")
      .def_rw("layer_specs", &G::layer_specs,
              "dict of KVCacheSpec: layers whose pages hold the same tokens in other bytes.")
      .def("spec_of", &G::spec_of, "layer"_a)
      .def_prop_ro("page_size_bytes", &G::page_size_bytes, "The sum of all layers' pages.")
      .def("max_memory_usage_bytes", &G::max_memory_usage_bytes, "max_model_len"_a,
           "max_num_batched_tokens"_a, "encoder_len"_a = 0,
           "Most bytes of all layers' caches that one request holds.");
  using C = KVCacheConfig;
  Record<C>(module, "KVCacheConfig", "The caches of a model, as an engine lays them out.")
      .def_rw("num_blocks", &C::num_blocks, "Pages of every tensor; 0: what its bytes hold.")
      .def_rw("tensors", &C::tensors, "KVCacheTensors.")
      .def_rw("groups", &C::groups, "KVCacheGroupSpecs.");
  nb::class_<StateView>(module, "StateView", "A state tensor in a buffer's pages.")
      .def_ro("buffer", &StateView::buffer)
      .def_ro("tensor", &StateView::tensor)
      .def_ro("num_blocks", &StateView::num_blocks)
      .def_ro("offset", &StateView::offset, "Elements before page 0's.")
      .def_ro("block_stride", &StateView::block_stride, "Elements from page to page.");
}

}  // namespace

void bind_specs(nb::module_& module) {
  bind_spec(module);
  bind_config_of_caches(module);
  module.def(
      "allocate_kv_cache",
      [](const Context& context, const Queue& queue, const KVCacheConfig& config) {
        return without_gil([&] { return allocate_kv_cache(context, queue, config); });
      },
      "context"_a, "queue"_a, "config"_a, "Zeroed Buffers by layer name.");
  module.def(
      "reshape_kv_cache",
      [](const Buffer& raw, const KVCacheSpec& spec, const AttentionBackend& backend,
         std::string_view layout) {
        return reshape_kv_cache(raw, spec, backend, parse_kv_cache_layout(layout));
      },
      "raw"_a, "spec"_a, "backend"_a, "layout"_a, "Views a buffer's pages as the backend does.");
  module.def("view_state_pages", &view_state_pages, "raw"_a, "spec"_a,
             "Views a buffer of mamba pages: a StateView for each of spec.states.");
  module.def(
      "get_kv_cache_layout",
      []() -> std::optional<std::string> {
        const auto layout = get_kv_cache_layout();
        if (!layout) return std::nullopt;
        return std::string(to_string(*layout));
      },
      "The layout for caches that are made without naming one, or None.");
  module.def(
      "set_kv_cache_layout",
      [](std::optional<std::string_view> layout) {
        set_kv_cache_layout(layout ? std::optional(parse_kv_cache_layout(*layout)) : std::nullopt);
      },
      "layout"_a.none(), "Overrides the environment; None removes the override.");
  module.def(
      "element_size_bytes",
      [](nb::handle dtype) { return element_size_bytes(parse_dtype(name_of(dtype))); }, "dtype"_a);
  module.def(
      "parse_dtype", [](nb::handle name) { return name_of(parse_dtype(name_of(name))); }, "name"_a,
      "The library's name of an element type: of \"float16\", torch.float16 or np.float16 "
      "\"f16\".");
  module.def(
      "find_dtype", [](nb::handle name) { return name_of(find_dtype(name_of(name))); }, "name"_a,
      "As parse_dtype(), None for what names no type.");
  module.def(
      "parse_kv_cache_dtype",
      [](nb::handle name) -> std::optional<std::string> {
        const auto format = parse_kv_cache_dtype(name_of(name));
        if (!format) return std::nullopt;
        return std::string(to_string(*format));
      },
      "name"_a,
      "As parse_dtype(), and the names of formats with a scale for each token and head;\n"
      "None for \"auto\".");
  module.def(
      "is_quantized", [](nb::handle dtype) { return is_quantized(parse_dtype(name_of(dtype))); },
      "dtype"_a, "Whether it is a type of caches alone, of 8 or 4 bits.");
}

}  // namespace clattn::python
