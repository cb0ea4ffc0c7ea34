// Recorded steps (graph.hpp).

#include <clattn/graph.hpp>
#include <clattn/mla.hpp>

#include "steps.hpp"

namespace clattn::python {

namespace {

ReplayMode parse_mode(std::string_view name) {
  if (name == "auto") return ReplayMode::kAuto;
  if (name == "launch_list") return ReplayMode::kLaunchList;
  if (name == "command_buffer") return ReplayMode::kCommandBuffer;
  throw_invalid("mode is '" + std::string(name) + "', legal: auto, launch_list, command_buffer");
}

/// A recording that ends with its `with` block: this thread's calls refuse arrays meanwhile.
struct Capture {
  Queue queue;
  ReplayMode mode;
  std::unique_ptr<GraphCapture> capture = nullptr;
  std::optional<Graph> graph = std::nullopt;

  void begin() {
    capture = std::make_unique<GraphCapture>(queue, mode);
    recording_queue() = queue;
  }
  void end(bool failed) {
    recording_queue() = nullptr;
    const std::unique_ptr<GraphCapture> ended = std::move(capture);
    if (!failed && ended != nullptr) graph = ended->end();
  }
};

/// AttentionState::CaptureScope as a context manager.
struct Sizes {
  AttentionState* state;
  std::int32_t max_batch_size;
  std::unique_ptr<AttentionState::CaptureScope> scope = nullptr;
};

void bind_capture(nb::module_& module) {
  nb::class_<Graph>(module, "Graph", "A recorded step: the launches of every layer.")
      .def(
          "replay",
          [](const Graph& self, const Queue& queue) {
            Event event;
            without_gil([&] { self.replay(queue, &event); });
            return event;
          },
          "queue"_a, "Asynchronous; reads what the buffers and the metadata hold now.")
      .def_prop_ro("num_launches", &Graph::num_launches)
      .def_prop_ro("uses_command_buffer", &Graph::uses_command_buffer);
  nb::class_<Capture>(
      module, "GraphCapture",
      "`with GraphCapture(queue) as capture:` records this thread's launches on the\n"
      "queue instead of running them; then capture.graph is the Graph. Tensors are\n"
      "Buffers: arrays of the host are refused.")
      .def(nb::new_([](const Queue& queue, std::string_view mode) {
             return std::unique_ptr<Capture>(new Capture{queue, parse_mode(mode)});
           }),
           "queue"_a, "mode"_a = "auto", "mode: auto, launch_list or command_buffer.")
      .def(
          "__enter__",
          [](Capture& self) -> Capture& {
            self.begin();
            return self;
          },
          nb::rv_policy::reference)
      .def(
          "__exit__",
          [](Capture& self, nb::handle type, nb::handle, nb::handle) { self.end(!type.is_none()); },
          nb::arg().none(), nb::arg().none(), nb::arg().none())
      .def_prop_ro(
          "graph",
          [](Capture& self) -> Graph& {
            if (!self.graph)
              throw_invalid("graph: nothing was recorded yet, legal: behind the block");
            return *self.graph;
          },
          nb::rv_policy::reference_internal);
}

void bind_state(nb::class_<AttentionState>& state) {
  using S = AttentionState;
  state
      .def(
          "graph_capture",
          [](S& self, std::int32_t max_batch_size) {
            return std::unique_ptr<Sizes>(new Sizes{&self, max_batch_size});
          },
          "max_batch_size"_a, nb::keep_alive<0, 1>(),
          "`with state.graph_capture(n):` sizes of up to n requests can be captured inside.")
      .def(
          "graph_capture_get_metadata_for_batch",
          [](S& self, const Queue& queue, std::int32_t batch_size) -> const AttentionMetadata& {
            return without_gil([&]() -> const AttentionMetadata& {
              return self.graph_capture_get_metadata_for_batch(queue, batch_size);
            });
          },
          "queue"_a, "batch_size"_a, nb::rv_policy::reference_internal,
          "The metadata to record a step of up to batch_size requests with.")
      .def("graph_clone", &S::graph_clone, "batch_size"_a, nb::keep_alive<0, 1>(),
           "A state of this size alone, on the same buffers.")
      .def_static("get_graph_input_buffers", &S::get_graph_input_buffers, "metadata"_a,
                  nb::keep_alive<0, 1>())
      .def(
          "begin_forward",
          [](S& self, const Queue& queue, const Batch& batch) {
            return without_gil([&] { return self.begin_forward(queue, batch.view()); });
          },
          "queue"_a, "batch"_a, nb::keep_alive<0, 1>(),
          "Plans a step for the smallest captured size that can replay it, else to be launched.")
      .def(
          "prepare_graph_input_buffers",
          [](S& self, const Queue& queue, std::int32_t batch_size,
             const Batch& batch) -> const AttentionMetadata& {
            return without_gil([&]() -> const AttentionMetadata& {
              return self.prepare_graph_input_buffers(queue, batch_size, batch.view());
            });
          },
          "queue"_a, "batch_size"_a, "batch"_a, nb::rv_policy::reference_internal,
          "Puts a step's metadata where the graphs of batch_size read it.")
      .def(
          "batch_size_for",
          [](const S& self, const Batch& batch) { return self.batch_size_for(batch.view()); },
          "batch"_a, "The smallest captured size for this step; 0: none.");
}

}  // namespace

void bind_graph(nb::module_& module) {
  bind_capture(module);
  nb::class_<GraphInputBuffers>(module, "GraphInputBuffers",
                                "What kernels of the engine may write before a replay.")
      .def_ro("slot_mapping", &GraphInputBuffers::slot_mapping, "int64 [num_slots]")
      .def_ro("num_slots", &GraphInputBuffers::num_slots);
  nb::class_<ForwardStep>(module, "ForwardStep", "How to run a step.")
      .def_prop_ro(
          "metadata",
          [](const ForwardStep& self) -> const AttentionMetadata& { return *self.metadata; },
          nb::rv_policy::reference_internal, "Valid until the state's next call.")
      .def_ro("graph_batch_size", &ForwardStep::graph_batch_size,
              "Replay this size's graph; 0: launch the layers.");
  nb::class_<Sizes>(module, "CaptureScope", "What AttentionState.graph_capture() gives.")
      .def("__enter__",
           [](Sizes& self) {
             self.scope.reset(
                 new AttentionState::CaptureScope(self.state->graph_capture(self.max_batch_size)));
           })
      .def("__exit__", [](Sizes& self, const nb::args&) { self.scope.reset(); });
  nb::class_<AttentionState> state(module, "AttentionState",
                                   "The metadata that recorded decode steps read. For one thread.");
  state
      .def(nb::init<std::shared_ptr<Context>, const AttentionBackend&, AttentionConfig,
                    BuilderOptions>(),
           "context"_a, "backend"_a, "config"_a, "options"_a = BuilderOptions(),
           nb::keep_alive<1, 3>())
      .def(
          "__init__",
          [](AttentionState* self, const std::shared_ptr<Context>& context, const MLAConfig& config,
             const BuilderOptions& options) {
            new (self) AttentionState(
                [context, config](const BuilderOptions& given) {
                  return make_mla_builder(context, config, given);
                },
                options);
          },
          "context"_a, "config"_a, "options"_a = BuilderOptions(), "Of latent attention.");
  bind_state(state);
}

}  // namespace clattn::python
