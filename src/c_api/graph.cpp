#include <clattn/clattn_graph.h>

#include <clattn/graph.hpp>
#include <memory>
#include <string>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

struct ClattnGraphCapture {
  Queue queue;  // outlives the recording
  GraphCapture capture;
};
struct ClattnGraph {
  Graph graph;
};
struct ClattnGraphState {
  AttentionState state;
  ClattnStep step = {};  // without a builder: its metadata is the state's
  std::unique_ptr<AttentionState::CaptureScope> capturing = nullptr;
};

namespace {

/// Recorded launches check block ids, so they have to know the cache's size.
BuilderOptions options_for(const Attention& layer, const ClattnStepOptions* given) {
  BuilderOptions options = builder_options_of(given);
  if (options.limits.num_blocks < 0 && layer.kv_cache() != nullptr)
    options.limits.num_blocks = layer.kv_cache()->num_blocks;
  return options;
}

ReplayMode replay_mode_of(const char* name) {
  const std::string mode = text_or(name, "auto");
  if (mode == "auto") return ReplayMode::kAuto;
  if (mode == "launch_list") return ReplayMode::kLaunchList;
  if (mode == "command_buffer") return ReplayMode::kCommandBuffer;
  detail::throw_invalid("mode is {}, legal: auto, launch_list, command_buffer", mode);
}

}  // namespace

ClattnResult clattn_graph_capture_create(const ClattnQueue* queue, const char* mode,
                                         ClattnGraphCapture** capture) {
  return make_handle(capture, "capture", [&] {
    const Queue& on = deref(queue, "queue").queue;
    return ClattnGraphCapture{on, GraphCapture(on, replay_mode_of(mode))};
  });
}

ClattnResult clattn_graph_capture_end(ClattnGraphCapture* capture, ClattnGraph** graph) {
  return make_handle(graph, "graph",
                     [&] { return ClattnGraph{deref(capture, "capture").capture.end()}; });
}

void clattn_graph_capture_destroy(ClattnGraphCapture* capture) {
  delete capture;
}

void clattn_graph_destroy(ClattnGraph* graph) {
  delete graph;
}

ClattnResult clattn_graph_replay(const ClattnGraph* graph, const ClattnQueue* queue,
                                 ClattnEvent* event) {
  return guarded(
      [&] { deref(graph, "graph").graph.replay(deref(queue, "queue").queue, event_of(event)); });
}

ClattnResult clattn_graph_info(const ClattnGraph* graph, ClattnGraphInfo* info) {
  return guarded([&] {
    const Graph& of = deref(graph, "graph").graph;
    fill(info,
         {.struct_size = 0,
          .uses_command_buffer = of.uses_command_buffer() ? 1 : 0,
          .num_launches = of.num_launches()},
         "info");
  });
}

ClattnResult clattn_graph_state_create(const ClattnLayer* layer, const ClattnStepOptions* options,
                                       ClattnGraphState** state) {
  return make_handle(state, "state", [&] {
    const ClattnLayer& of = deref(layer, "layer");
    return ClattnGraphState{AttentionState(of.context, *of.layer.get_attn_backend(),
                                           of.layer.config(), options_for(of.layer, options))};
  });
}

void clattn_graph_state_destroy(ClattnGraphState* state) {
  delete state;
}

ClattnResult clattn_graph_state_begin_capture(ClattnGraphState* state, int32_t max_batch_size) {
  return guarded([&] {
    ClattnGraphState& of = deref(state, "state");
    // NOLINTNEXTLINE(modernize-make-unique): it cannot be moved
    of.capturing.reset(new AttentionState::CaptureScope(of.state.graph_capture(max_batch_size)));
  });
}

ClattnResult clattn_graph_state_end_capture(ClattnGraphState* state) {
  return guarded([&] {
    ClattnGraphState& of = deref(state, "state");
    detail::throw_invalid_if(
        of.capturing == nullptr,
        "state: it is not capturing, legal: after clattn_graph_state_begin_capture()");
    of.capturing.reset();
  });
}

ClattnResult clattn_graph_state_capture_step(ClattnGraphState* state, const ClattnQueue* queue,
                                             int32_t batch_size, const ClattnStep** step) {
  return guarded([&] {
    ClattnGraphState& of = deref(state, "state");
    const Queue& on = deref(queue, "queue").queue;
    const ClattnStep*& given = deref(step, "step");
    of.step.metadata = nullptr;
    of.step.metadata = &of.state.graph_capture_get_metadata_for_batch(on, batch_size);
    given = &of.step;
  });
}

ClattnResult clattn_graph_state_begin_step(ClattnGraphState* state, const ClattnQueue* queue,
                                           const ClattnBatchInfo* batch, const ClattnStep** step,
                                           int32_t* graph_batch_size) {
  return guarded([&] {
    ClattnGraphState& of = deref(state, "state");
    const Queue& on = deref(queue, "queue").queue;
    const auto next = batch_of(read(batch, "batch"));
    const ClattnStep*& given = deref(step, "step");
    int32_t& size = deref(graph_batch_size, "graph_batch_size");
    of.step.metadata = nullptr;
    const ForwardStep begun = of.state.begin_forward(on, next);
    of.step.metadata = begun.metadata;
    given = &of.step;
    size = begun.graph_batch_size;
  });
}
