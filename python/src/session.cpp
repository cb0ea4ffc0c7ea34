#include <clattn/session.hpp>

#include "attention.hpp"

namespace clattn::python {

namespace {

/// Views one of a Step's lists, which keeps it.
using StepList = nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<1>>;
template <std::vector<std::int32_t> Step::*list>
StepList list_of(const Step& step) {
  const std::vector<std::int32_t>& values = step.*list;
  return StepList(values.data(), {values.size()}, nb::find(step));
}

void bind_step(nb::module_& module) {
  nb::class_<Step>(module, "Step", "The rows of a step, request after request; int32 arrays.")
      .def_prop_ro("token_ids", &list_of<&Step::token_ids>,
                   "[rows]: whose query, key and value to compute.")
      .def_prop_ro("positions", &list_of<&Step::positions>, "[rows], in their request.")
      .def_prop_ro("query_start_loc", &list_of<&Step::query_start_loc>,
                   "[requests + 1]: a request's first row.")
      .def_prop_ro("seq_lens", &list_of<&Step::seq_lens>,
                   "[requests]: tokens computed after the step.")
      .def_prop_ro("num_tokens", &Step::num_tokens)
      .def("last_row", &Step::last_row, "request"_a,
           "The row of the last token of the step's request of this index.");
  Record<StepRequest>(module, "StepRequest", "A request's part of a step.")
      .def_rw("id", &StepRequest::id)
      .def_rw("new_tokens", &StepRequest::new_tokens, "Token ids that join the request's.")
      .def_rw("max_tokens", &StepRequest::max_tokens,
              "Compute this many of its tokens at most; the others are for later steps.");
}

using Progress = std::optional<nb::callable>;

/// `progress` runs with the interpreter; what it raises ends the call.
std::function<void(std::int32_t, std::int32_t)> telling(const Progress& progress) {
  if (!progress) return {};
  return [&progress](std::int32_t done, std::int32_t total) {
    const nb::gil_scoped_acquire held;
    (*progress)(done, total);
  };
}

Session make_session(std::shared_ptr<Context> context, std::vector<AttentionOptions> layers,
                     std::int64_t num_blocks, std::size_t cache_bytes, bool prefix_caching,
                     const std::optional<std::string>& layout, const BuilderOptions& builder,
                     const std::optional<Queue>& queue, const Progress& progress) {
  SessionConfig config;
  config.layers = std::move(layers);
  config.num_blocks = num_blocks;
  config.cache_bytes = cache_bytes;
  config.prefix_caching = prefix_caching;
  if (layout) config.layout = parse_kv_cache_layout(*layout);
  config.builder = builder;
  config.progress = telling(progress);
  return Session(std::move(context), queue.value_or(Queue()), std::move(config));
}

void warm_up(Session& session, const Progress& progress) {
  without_gil([&] { session.warm_up(telling(progress)); });
}

void bind_requests(nb::class_<Session>& session) {
  session
      .def(
          "add",
          [](Session& self, const std::vector<std::int32_t>& prompt) { return self.add(prompt); },
          "prompt"_a, nb::call_guard<nb::gil_scoped_release>(),
          "A request with the token ids of its prompt; gives its number.")
      .def("fork", &Session::fork, "id"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Another request with the same tokens and, so far, the same blocks.")
      .def("evict", &Session::evict, "id"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Gives up the request's blocks; a later step computes its tokens again.")
      .def("finish", &Session::finish, "id"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "tokens",
          [](const Session& self, RequestId id) {
            const auto tokens = self.tokens(id);
            return std::vector<std::int32_t>(tokens.begin(), tokens.end());
          },
          "id"_a)
      .def(
          "block_table",
          [](const Session& self, RequestId id) {
            const auto blocks = self.block_table(id);
            return std::vector<std::int32_t>(blocks.begin(), blocks.end());
          },
          "id"_a)
      .def("num_computed_tokens", &Session::num_computed_tokens, "id"_a)
      .def_prop_ro("num_blocks", [](const Session& self) { return self.blocks().num_blocks(); })
      .def_prop_ro("num_free_blocks", [](const Session& self) { return self.blocks().num_free(); });
}

void bind_steps_of(nb::class_<Session>& session) {
  session
      .def(
          "step",
          [](Session& self, const std::vector<StepRequest>& requests) {
            return without_gil([&]() -> Step { return self.step(requests); });
          },
          "requests"_a,
          "Begins a step: adds the new tokens, finds blocks, uploads the metadata. Raises\n"
          "OutOfBlocks if too few blocks are free.")
      .def(
          "attend",
          [](Session& self, std::int32_t layer, nb::handle query, nb::handle key, nb::handle value,
             nb::handle output, nb::handle lse) {
            return forward_with(
                *self.context(), self.queue(), self.layer(layer).config(),
                {query, key, value, output, lse, nb::none()},
                [&](const AttentionTensors& tensors, const ForwardOptions& options) {
                  self.attend(layer, tensors, options);
                });
          },
          "layer"_a, "query"_a, "key"_a, "value"_a, "output"_a, nb::kw_only(), "lse"_a = nb::none(),
          "Stores the rows' keys and values and attends; each layer once a step. Tensors\n"
          "[rows, heads, head_size], as AttentionImpl takes them.");
}

}  // namespace

void bind_session(nb::module_& module) {
  bind_step(module);
  nb::class_<Session> session(
      module, "Session",
      "From a model's shape to decoded tokens: owns caches, layers, blocks\n"
      "and each request's tokens. For one thread at a time.");
  session
      .def(nb::new_([](const std::shared_ptr<Context>& context,
                       const std::vector<AttentionOptions>& layers, std::int64_t num_blocks,
                       std::size_t cache_bytes, bool prefix_caching,
                       const std::optional<std::string>& layout, const BuilderOptions& builder,
                       const std::optional<Queue>& queue, const Progress& progress) {
             return without_gil([&] {
               return std::unique_ptr<Session>(
                   new Session(make_session(context, layers, num_blocks, cache_bytes,
                                            prefix_caching, layout, builder, queue, progress)));
             });
           }),
           "context"_a, "layers"_a, nb::kw_only(), "num_blocks"_a = 0, "cache_bytes"_a = 0,
           "prefix_caching"_a = true, "layout"_a = nb::none(), "builder"_a = BuilderOptions(),
           "queue"_a = nb::none(), "progress"_a = nb::none(),
           "layers: AttentionOptions, one a layer. Caches have num_blocks, or what cache_bytes\n"
           "hold. Calls progress(done, total) while the layers are made, which compiles.")
      .def_prop_ro("num_layers", &Session::num_layers)
      .def_prop_ro("queue", &Session::queue, nb::rv_policy::reference_internal)
      .def("warm_up", &warm_up, "progress"_a = nb::none(),
           "Compiles what a first request would wait for; calls progress(done, total).")
      .def(
          "explain",
          [](const Session& self, std::int32_t layer) {
            return without_gil([&] { return self.layer(layer).explain(); });
          },
          "layer"_a = 0);
  bind_requests(session);
  bind_steps_of(session);
}

}  // namespace clattn::python
