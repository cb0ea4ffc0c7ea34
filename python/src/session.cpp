#include <clattn/block_pool.hpp>
#include <clattn/explain.hpp>
#include <clattn/session.hpp>
#include <clattn/session_states.hpp>

#include "layer.hpp"
#include "prepare_qkv.hpp"

namespace clattn::python {

namespace {

void bind_step(nb::module_& module) {
  nb::class_<Step>(module, "Step", "The rows of a step, request after request; int32 arrays.")
      .def_prop_ro("token_ids", &view_of<&Step::token_ids>,
                   "[rows]: whose query, key and value to compute.")
      .def_prop_ro("positions", &view_of<&Step::positions>, "[rows], in their request.")
      .def_prop_ro("query_start_loc", &view_of<&Step::query_start_loc>,
                   "[requests + 1]: a request's first row.")
      .def_prop_ro("seq_lens", &view_of<&Step::seq_lens>,
                   "[requests]: tokens computed after the step, with drafts.")
      .def_prop_ro("num_drafts", &view_of<&Step::num_drafts>,
                   "[requests]: how many of its last rows are drafts.")
      .def_prop_ro("num_tokens", &Step::num_tokens)
      .def_prop_ro(
          "metadata", [](const Step& self) { return self.metadata; },
          nb::rv_policy::reference_internal,
          "What attend() uses, for reports; valid until the session's next step().")
      .def("last_row", &Step::last_row, "request"_a,
           "The row of the last token of the step's request of this index; its drafts' follow.");
  Record<StepRequest>(module, "StepRequest", "A request's part of a step.")
      .def_rw("id", &StepRequest::id)
      .def_rw("new_tokens", &StepRequest::new_tokens, "Token ids that join the request's.")
      .def_rw("max_tokens", &StepRequest::max_tokens,
              "Compute this many of its tokens at most; the others are for later steps.")
      .def_rw("compute_every_row", &StepRequest::compute_every_row,
              "Also the rows of tokens that published blocks hold.")
      .def_rw("spans", &StepRequest::spans,
              "[number, 2]: first position and one past the last of tokens that see one another,\n"
              "such as images, in this step. Only with layers of use_spans; where prefixes are\n"
              "shared, token ids and salt have to determine them.")
      .def_rw("drafts", &StepRequest::drafts,
              "Guesses at what follows, computed, too; accept() settles them.")
      .def_rw("draft_parents", &StepRequest::draft_parents,
              "[drafts]: the earlier draft that each follows, -1 = the request's last token.\n"
              "Empty = a chain. A tree needs use_trees in every layer.");
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
                     const std::optional<Queue>& queue, const Progress& progress,
                     bool explicit_commit, const std::optional<RecurrentLayers>& recurrent) {
  SessionConfig config;
  config.layers = std::move(layers);
  config.num_blocks = num_blocks;
  config.cache_bytes = cache_bytes;
  config.prefix_caching = prefix_caching;
  if (layout) config.layout = parse_kv_cache_layout(*layout);
  config.builder = builder;
  config.progress = telling(progress);
  config.explicit_commit = explicit_commit;
  if (recurrent) config.recurrent = std::make_shared<RecurrentLayers>(*recurrent);
  return Session(std::move(context), queue.value_or(Queue()), std::move(config));
}

void warm_up(Session& session, const Progress& progress) {
  without_gil([&] { session.warm_up(telling(progress)); });
}

void bind_requests(nb::class_<Session>& session) {
  session
      .def(
          "add",
          [](Session& self, nb::handle prompt, std::uint64_t cache_salt) {
            const Int32s tokens = numbers<std::int32_t>(prompt, "prompt");
            return without_gil([&] { return self.add(span_of(tokens), cache_salt); });
          },
          "prompt"_a, "cache_salt"_a = 0,
          "A request with the token ids of its prompt; gives its number. Requests share blocks\n"
          "with those of the same cache_salt alone: give one to each image or LoRA adapter.")
      .def("fork", &Session::fork, "id"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Another request with the same tokens and, so far, the same blocks.")
      .def("evict", &Session::evict, "id"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Gives up the request's blocks; a later step computes its tokens again.")
      .def("finish", &Session::finish, "id"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("truncate", &Session::truncate, "id"_a, "length"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Takes the request back to its first `length` tokens and gives up the blocks behind\n"
           "them; what others hold of those stays.")
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
      .def_prop_ro(
          "blocks", [](const Session& self) -> const BlockPool& { return self.blocks(); },
          nb::rv_policy::reference_internal,
          "The BlockPool of layers that keep all tokens. To be read; the session changes it.")
      .def(
          "window_blocks",
          [](const Session& self) {
            std::vector<std::pair<std::int32_t, const BlockPool*>> all;
            for (const auto& [window, blocks] : self.window_blocks())
              all.emplace_back(window, blocks);
            return all;
          },
          nb::rv_policy::reference_internal,
          "(window, BlockPool) of layers that give up what their window has left.")
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
          "requests"_a, nb::keep_alive<0, 1>(),
          "Begins a step: adds the new tokens, finds blocks, uploads the metadata. Raises\n"
          "OutOfBlocks if too few blocks are free.")
      .def(
          "blocks_needed",
          [](Session& self, const std::vector<StepRequest>& requests) {
            return without_gil([&] { return self.blocks_needed(requests); });
          },
          "requests"_a,
          "How many free blocks step(requests) would take: of `blocks`, then of each of\n"
          "window_blocks(). Requests and their blocks stay as they are.")
      .def(
          "attend",
          [](Session& self, std::int32_t layer, nb::handle query, nb::handle key, nb::handle value,
             nb::handle output, nb::handle lse, nb::handle custom_mask, nb::handle output_fp8,
             nb::handle output_scale, nb::handle launches, std::optional<std::int64_t> num_rows) {
            return forward_with(
                *self.context(), self.queue(), self.layer(layer).config(), nullptr,
                {query, key, value, output, lse, custom_mask, output_fp8, output_scale, launches,
                 num_rows},
                [&](const AttentionTensors& tensors, const ForwardOptions& options) {
                  self.attend(layer, tensors, options);
                });
          },
          "layer"_a, "query"_a, "key"_a.none(), "value"_a.none(), "output"_a, nb::kw_only(),
          "lse"_a = nb::none(), "custom_mask"_a = nb::none(), "output_fp8"_a = nb::none(),
          "output_scale"_a = nb::none(), "launches"_a = nb::none(), "num_rows"_a = nb::none(),
          "Stores the rows' keys and values and attends; each layer once a step. Tensors\n"
          "[rows, heads, head_size]; all arguments as Attention.forward() takes them. key and "
          "value\n"
          "are None for layers that share another's cache.")
      .def(
          "recur",
          [](Session& self, std::int32_t layer, const nb::callable& run) {
            without_gil([&] {
              self.recur(layer, [&](const RecurrentStep& step) {
                const nb::gil_scoped_acquire held;
                run(nb::cast(step, nb::rv_policy::copy));
              });
            });
          },
          "layer"_a, "run"_a,
          "Runs a recurrent layer, each once a step: calls run(RecurrentStep), which enqueues its\n"
          "operations on the session's queue and keeps nothing.")
      .def(
          "prepare_qkv",
          [](Session& self, std::int32_t layer, const nb::kwargs& kwargs) {
            CallTensors tensors(*self.context(), self.queue());
            const PrepareQKV call = prepare_of(tensors, kwargs, &self.layer(layer).config());
            return tensors.run([&](Event* event) {
              event->reset();
              self.prepare_qkv(layer, call);
            });
          },
          "layer"_a, "kwargs"_a,
          "prepare_qkv() of a layer's rows, which stores their keys and values: attend() then "
          "takes\n"
          "query_out, and None for key and value. Sizes, cache and slots are the session's, and\n"
          "positions where there are none.")
      .def("commit", &Session::commit, nb::call_guard<nb::gil_scoped_release>(),
           "With explicit_commit: the step, whose layers have all been attended, counts.")
      .def(
          "accept",
          [](Session& self, RequestId id, nb::handle path) {
            const Int32s drafts = numbers<std::int32_t>(path, "path");
            without_gil([&] { self.accept(id, span_of(drafts)); });
          },
          "id"_a, "path"_a,
          "Settles the drafts of the request's last step: those of `path`, each following the one\n"
          "before it, join its tokens, their keys and values move together, the others are\n"
          "dropped. What the model gives after the last of them is the next step's new token.")
      .def(
          "accept",
          [](Session& self, const nb::dict& paths) {
            std::vector<Accepted> requests;
            for (const auto& [id, path] : paths)
              requests.push_back({nb::cast<RequestId>(id), list_of<std::int32_t>(path, "path")});
            without_gil([&] { self.accept(requests); });
          },
          "paths"_a,
          "The same for several requests, {id: path}, whose tokens move together. If one of them\n"
          "is refused, none has changed.");
}

void bind_recurrent_parts(nb::module_& module) {
  using L = RecurrentLayers;
  Record<L>(module, "RecurrentLayers", "The recurrent layers of a session's model.")
      .def_rw(
          "layers", &L::layers,
          "KVCacheSpecs of mamba, one a layer: a convolution's state, [rows, channels], then a\n"
          "state, [heads, v, k]. mamba_cache_mode none, or align: a state is kept where a step\n"
          "ends at a multiple of block_size tokens, and steps end there.")
      .def_rw("num_slots", &L::num_slots, "For states of all layers.");
  using S = RecurrentStep;
  Record<S>(module, "RecurrentStep", "What operations of a recurrent layer are given in a step.")
      .def_rw("conv_states", &S::conv_states)
      .def_rw("conv_metadata", &S::conv_metadata, "Of causal_conv1d_fn(), short_conv().")
      .def_rw("states", &S::states)
      .def_rw("metadata", &S::metadata, "Of the other operations.");
}

}  // namespace

void bind_session(nb::module_& module) {
  bind_step(module);
  bind_recurrent_parts(module);
  nb::class_<Session> session(
      module, "Session",
      "From a model's shape to decoded tokens: owns caches, layers, blocks\n"
      "and each request's tokens. For one thread at a time.");
  session
      .def(nb::new_([](const std::shared_ptr<Context>& context,
                       const std::vector<AttentionOptions>& layers, std::int64_t num_blocks,
                       std::size_t cache_bytes, bool prefix_caching,
                       const std::optional<std::string>& layout, const BuilderOptions& builder,
                       const std::optional<Queue>& queue, const Progress& progress,
                       bool explicit_commit, const std::optional<RecurrentLayers>& recurrent) {
             return without_gil([&] {
               return std::unique_ptr<Session>(new Session(
                   make_session(context, layers, num_blocks, cache_bytes, prefix_caching, layout,
                                builder, queue, progress, explicit_commit, recurrent)));
             });
           }),
           "context"_a, "layers"_a, nb::kw_only(), "num_blocks"_a = 0, "cache_bytes"_a = 0,
           "prefix_caching"_a = true, "layout"_a = nb::none(), "builder"_a = BuilderOptions(),
           "queue"_a = nb::none(), "progress"_a = nb::none(), "explicit_commit"_a = false,
           "recurrent"_a = nb::none(),
           "layers: AttentionOptions, one a layer. Caches have num_blocks, or what cache_bytes\n"
           "hold. Calls progress(done, total) while the layers are made, which compiles. With\n"
           "explicit_commit a step counts when commit() says so. recurrent: RecurrentLayers of a\n"
           "hybrid model.")
      .def_prop_ro("num_layers", &Session::num_layers)
      .def_prop_ro("num_recurrent_layers", &Session::num_recurrent_layers)
      .def_prop_ro(
          "state_slots", [](const Session& self) { return self.state_slots(); },
          nb::rv_policy::reference_internal,
          "The BlockPool of states of recurrent layers, or None. To be read.")
      .def_prop_ro("context", [](const Session& self) { return self.context(); })
      .def(
          "layer",
          [](const Session& self, std::int32_t index) {
            return std::make_unique<Layer>(self.context(), self.layer(index));
          },
          "index"_a, nb::keep_alive<0, 1>(),
          "The Attention of a layer, to load scales, for reports, or to read its cache.")
      .def(
          "load_kv_scales",
          [](const Session& self, std::int32_t layer, std::optional<float> k_scale,
             std::optional<float> v_scale, std::optional<float> q_scale,
             std::optional<float> prob_scale, bool fnuz) {
            return without_gil([&] {
              return self.layer(layer).load_kv_scales(
                  loaded_scales(k_scale, v_scale, q_scale, prob_scale, fnuz));
            });
          },
          "layer"_a, "k_scale"_a = nb::none(), "v_scale"_a = nb::none(), "q_scale"_a = nb::none(),
          "prob_scale"_a = nb::none(), "fnuz"_a = false,
          "Attention.load_kv_scales() of a layer; returns warnings.")
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
