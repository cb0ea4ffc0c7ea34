#include <clattn/cascade.hpp>

#include "attention.hpp"
#include "steps.hpp"

namespace clattn::python {

namespace {

/// A CascadeLevel with its arrays.
struct Level {
  CascadeLevel level;
  std::vector<HostArray> arrays;
};

template <auto field>
auto field_of(const Level& self) {
  return view_of_span(self.level.*field, nb::find(self));
}

/// A cascade of either kind, and the context in which arrays become buffers.
template <typename Cascade>
struct InContext {
  std::shared_ptr<Context> context;
  Cascade cascade;
  AttentionMetadata const* planned = nullptr;
};
using Levels = InContext<MultiLevelCascadeAttentionWrapper>;
using Prefix = InContext<CascadeAttention>;

/// Binds run() or forward(), which differ in their names alone.
template <typename Cascade, typename Run>
void bind_run(nb::class_<InContext<Cascade>>& cascade, const char* name, Run run) {
  cascade.def(
      name,
      [run](const InContext<Cascade>& self, const Queue& queue, const CascadeImpl& impl,
            nb::handle query, nb::handle output, const KVCache& cache, nb::handle lse,
            nb::handle launches) {
        return forward_with(*self.context, queue, impl.config(), self.planned,
                            {.query = query, .output = output, .lse = lse, .launches = launches},
                            [&](const AttentionTensors& tensors, const ForwardOptions& options) {
                              run(self.cascade, queue, impl, tensors, cache, options.event,
                                  options.launches);
                            });
      },
      "queue"_a, "impl"_a, "query"_a, "output"_a, "cache"_a, nb::kw_only(), "lse"_a = nb::none(),
      "launches"_a = nb::none(),
      "query and output [num_tokens, num_heads, head_size]; lse f32 [num_tokens, num_heads] over\n"
      "all levels.");
}

void bind_choice(nb::module_& module) {
  module.def(
      "use_cascade_attention",
      [](std::int32_t common_prefix_len, nb::handle query_lens, std::int32_t num_query_heads,
         std::int32_t num_kv_heads, bool use_alibi, bool use_sliding_window,
         bool use_local_attention, std::int32_t num_sms) {
        const Int32s lengths = numbers<std::int32_t>(query_lens, "query_lens");
        return use_cascade_attention({common_prefix_len, span_of(lengths), num_query_heads,
                                      num_kv_heads, use_alibi, use_sliding_window,
                                      use_local_attention, num_sms});
      },
      nb::kw_only(), "common_prefix_len"_a, "query_lens"_a, "num_query_heads"_a, "num_kv_heads"_a,
      "use_alibi"_a = false, "use_sliding_window"_a = false, "use_local_attention"_a = false,
      "num_sms"_a, "vLLM's heuristic: whether a cascade is worth it for a batch.");
  module.def("validate_cascade_configuration", &validate_cascade_configuration, "config"_a,
             "Why layers of this configuration cannot cascade, one sentence each.");
  using B = AttentionMetadataBuilder;
  bound<B>().def(
      "use_cascade_attention",
      [](const B& self, std::int32_t common_prefix_len, nb::handle query_lens,
         std::int32_t num_query_heads, std::int32_t num_kv_heads, std::int32_t num_sms) {
        const Int32s lengths = numbers<std::int32_t>(query_lens, "query_lens");
        return self.use_cascade_attention({.common_prefix_len = common_prefix_len,
                                           .query_lens = span_of(lengths),
                                           .num_query_heads = num_query_heads,
                                           .num_kv_heads = num_kv_heads,
                                           .num_sms = num_sms});
      },
      nb::kw_only(), "common_prefix_len"_a, "query_lens"_a, "num_query_heads"_a, "num_kv_heads"_a,
      "num_sms"_a, "The heuristic; False for layers that do not cascade.");
}

void bind_level(nb::module_& module) {
  nb::class_<CascadeImpl>(module, "CascadeImpl", "A layer for cascades, compiled. Thread-safe.")
      .def(nb::init<const std::shared_ptr<Context>&, const AttentionBackend&,
                    const AttentionConfig&>(),
           "context"_a, "backend"_a, "config"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("config", &CascadeImpl::config, nb::rv_policy::reference_internal);
  nb::class_<Level>(module, "CascadeLevel", "One level of the keys in FlashInfer's form.")
      .def(
          "__init__",
          [](Level* self, nb::handle qo_indptr, nb::handle indptr, nb::handle indices,
             nb::handle last_page_len, bool causal) {
            Batch batch;
            const auto take = [&](nb::handle given, const char* name) {
              return batch.keep(numbers<std::int32_t>(given, name));
            };
            const CascadeLevel level{take(qo_indptr, "qo_indptr"), take(indptr, "paged_kv_indptr"),
                                     take(indices, "paged_kv_indices"),
                                     take(last_page_len, "paged_kv_last_page_len"), causal};
            new (self) Level{level, std::move(batch.arrays)};
          },
          "qo_indptr"_a, "paged_kv_indptr"_a, "paged_kv_indices"_a, "paged_kv_last_page_len"_a,
          nb::kw_only(), "causal"_a = false,
          "Sequence s holds query tokens qo_indptr[s] ... qo_indptr[s + 1] - 1 and the pages\n"
          "paged_kv_indices[paged_kv_indptr[s] : paged_kv_indptr[s + 1]]. causal: last level only.")
      .def_prop_ro("qo_indptr", &field_of<&CascadeLevel::qo_indptr>)
      .def_prop_ro("paged_kv_indptr", &field_of<&CascadeLevel::paged_kv_indptr>)
      .def_prop_ro("paged_kv_indices", &field_of<&CascadeLevel::paged_kv_indices>)
      .def_prop_ro("paged_kv_last_page_len", &field_of<&CascadeLevel::paged_kv_last_page_len>)
      .def_prop_ro("causal", [](const Level& self) { return self.level.causal; });
}

void bind_levels(nb::module_& module) {
  nb::class_<Levels> levels(module, "MultiLevelCascadeAttentionWrapper",
                            "Attention over keys that requests share in levels. For one thread.");
  levels
      .def(nb::new_([](const std::shared_ptr<Context>& context, const AttentionBackend& backend,
                       const AttentionConfig& config, std::int32_t num_levels,
                       const BuilderOptions& options) {
             return without_gil([&] {
               return std::unique_ptr<Levels>(
                   new Levels{context, MultiLevelCascadeAttentionWrapper(context, backend, config,
                                                                         num_levels, options)});
             });
           }),
           "context"_a, "backend"_a, "config"_a, "num_levels"_a, "options"_a = BuilderOptions())
      .def(
          "plan",
          [](Levels& self, const Queue& queue, const std::vector<const Level*>& given) {
            std::vector<CascadeLevel> views;
            for (const Level* level : given) views.push_back(level->level);
            without_gil([&] { self.cascade.plan(queue, views); });
          },
          "queue"_a, "levels"_a, "One upload per CascadeLevel.");
  bind_run(levels, "run",
           [](const auto& cascade, auto&&... arguments) { cascade.run(arguments...); });
}

void bind_prefix(nb::module_& module) {
  nb::class_<Prefix> prefix(module, "CascadeAttention",
                            "A batch whose requests begin with the same pages, as two levels.");
  prefix
      .def(nb::new_([](const std::shared_ptr<Context>& context, const AttentionBackend& backend,
                       const AttentionConfig& config, const BuilderOptions& options) {
             return without_gil([&] {
               return std::unique_ptr<Prefix>(
                   new Prefix{context, CascadeAttention(context, backend, config, options)});
             });
           }),
           "context"_a, "backend"_a, "config"_a, "options"_a = BuilderOptions())
      .def(
          "build",
          [](Prefix& self, const Queue& queue, const Batch& batch,
             std::int32_t common_prefix_len) -> const AttentionMetadata& {
            self.planned = nullptr;
            self.planned = without_gil(
                [&] { return &self.cascade.build(queue, batch.view(), common_prefix_len); });
            return *self.planned;
          },
          "queue"_a, "batch"_a, "common_prefix_len"_a, nb::rv_policy::reference_internal,
          "Plans both levels; the metadata has the step's slots, for write_kv_cache().");
  bind_run(prefix, "forward",
           [](const auto& cascade, auto&&... arguments) { cascade.forward(arguments...); });
}

}  // namespace

void bind_cascade(nb::module_& module) {
  bind_choice(module);
  bind_level(module);
  bind_levels(module);
  bind_prefix(module);
}

}  // namespace clattn::python
