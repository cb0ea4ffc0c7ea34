#include <clattn/graph.hpp>

#include "base/names.hpp"
#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

struct ClattnGraphCapture {
  static constexpr const char* kName = "capture";
  Queue queue;  // outlives the recording
  GraphCapture held;
};
CLATTN_DESTROYS(clattn_graph_capture_destroy, ClattnGraphCapture)

struct ClattnGraph : Holds<Graph, "graph"> {};
CLATTN_DESTROYS(clattn_graph_destroy, ClattnGraph)

struct ClattnGraphState : Holds<AttentionState, "state"> {
  ClattnStep step = {};  // its metadata is the state's
  std::unique_ptr<AttentionState::CaptureScope> capturing = nullptr;
};
CLATTN_DESTROYS(clattn_graph_state_destroy, ClattnGraphState)

namespace {

/// Recorded launches check block ids, so they have to know the cache's size.
BuilderOptions options_for(const Attention& layer, const ClattnStepOptions* given) {
  BuilderOptions options = builder_options_of(given);
  if (options.limits.num_blocks < 0 && layer.kv_cache() != nullptr)
    options.limits.num_blocks = layer.kv_cache()->num_blocks;
  return options;
}

ReplayMode replay_mode_of(const char* name) {
  constexpr detail::Named<ReplayMode> kNames[] = {{ReplayMode::kAuto, "auto"},
                                                  {ReplayMode::kLaunchList, "launch_list"},
                                                  {ReplayMode::kCommandBuffer, "command_buffer"}};
  return detail::parse_named(kNames, text_or(name, "auto"), "mode");
}

}  // namespace

ClattnResult clattn_graph_capture_create(const ClattnQueue* queue, const char* mode,
                                         ClattnGraphCapture** capture) {
  return make_handle(capture, [&] {
    const Queue& on = held(queue);
    return ClattnGraphCapture{on, GraphCapture(on, replay_mode_of(mode))};
  });
}

ClattnResult clattn_graph_capture_end(ClattnGraphCapture* capture, ClattnGraph** graph) {
  return make_handle(graph, [&] { return held(capture).end(); });
}

ClattnResult clattn_graph_replay(const ClattnGraph* graph, const ClattnQueue* queue,
                                 ClattnEvent* event) {
  return guarded([&] { held(graph).replay(held(queue), event_of(event)); });
}

ClattnResult clattn_graph_info(const ClattnGraph* graph, ClattnGraphInfo* info) {
  return guarded([&] {
    const Graph& of = held(graph);
    fill(info, "info", {0, of.uses_command_buffer() ? 1 : 0, of.num_launches()});
  });
}

ClattnResult clattn_graph_state_create(const ClattnLayer* layer, const ClattnStepOptions* options,
                                       ClattnGraphState** state) {
  return make_handle(
      state, [&] { return made_for<AttentionState>(layer, options_for(held(layer), options)); });
}

ClattnResult clattn_graph_state_begin_capture(ClattnGraphState* state, int32_t max_batch_size) {
  return guarded([&] {
    AttentionState& of = held(state);
    // NOLINTNEXTLINE(modernize-make-unique): it cannot be moved
    state->capturing.reset(new AttentionState::CaptureScope(of.graph_capture(max_batch_size)));
  });
}

ClattnResult clattn_graph_state_end_capture(ClattnGraphState* state) {
  return guarded([&] {
    auto& capturing = deref(state, "state").capturing;
    detail::throw_invalid_if(
        capturing == nullptr,
        "state: it is not capturing, legal: after clattn_graph_state_begin_capture()");
    capturing.reset();
  });
}

ClattnResult clattn_graph_state_capture_step(ClattnGraphState* state, const ClattnQueue* queue,
                                             int32_t batch_size, const ClattnStep** step) {
  return guarded([&] {
    AttentionState& of = held(state);
    give_step(state->step, step, &AttentionState::graph_capture_get_metadata_for_batch, of,
              held(queue), batch_size);
  });
}

ClattnResult clattn_graph_state_begin_step(ClattnGraphState* state, const ClattnQueue* queue,
                                           const ClattnBatchInfo* batch, const ClattnStep** step,
                                           int32_t* graph_batch_size) {
  return guarded([&] {
    AttentionState& of = held(state);
    const Queue& on = held(queue);
    const auto next = plain_batch_of(batch);
    int32_t& size = deref(graph_batch_size, "graph_batch_size");
    give_step(
        state->step, step, [&]() -> auto& {
          const ForwardStep begun = of.begin_forward(on, next);
          size = begun.graph_batch_size;
          return *begun.metadata;
        });
  });
}

ClattnResult clattn_graph_state_batch_size_for(const ClattnGraphState* state,
                                               const ClattnBatchInfo* batch,
                                               int32_t* graph_batch_size) {
  return give(graph_batch_size, "graph_batch_size",
              [&] { return held(state).batch_size_for(plain_batch_of(batch)); });
}

ClattnResult clattn_graph_state_prepare(ClattnGraphState* state, const ClattnQueue* queue,
                                        int32_t batch_size, const ClattnBatchInfo* batch,
                                        const ClattnStep** step) {
  return guarded([&] {
    AttentionState& of = held(state);
    give_step(state->step, step, &AttentionState::prepare_graph_input_buffers, of, held(queue),
              batch_size, plain_batch_of(batch));
  });
}

ClattnResult clattn_graph_state_clone(const ClattnGraphState* state, int32_t batch_size,
                                      ClattnGraphState** clone) {
  return make_handle(
      clone, [&] { return held(state).graph_clone(batch_size); }, "clone");
}

ClattnResult clattn_graph_input_buffers(const ClattnStep* step, ClattnBuffer** slot_mapping,
                                        int64_t* num_slots) {
  const auto make = [&] {
    const GraphInputBuffers found = AttentionState::get_graph_input_buffers(metadata_of(step));
    deref(num_slots, "num_slots") = found.num_slots;
    return found.slot_mapping;
  };
  return make_handle(slot_mapping, make, "slot_mapping");
}
