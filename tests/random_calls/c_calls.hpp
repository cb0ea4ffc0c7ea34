#pragma once

#include <clattn/clattn.h>

#include <array>
#include <clattn/context.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace test {

struct World;
struct RandomCall;

template <auto Destroy>
struct Destroyer {
  template <typename Handle>
  void operator()(Handle* handle) const {
    Destroy(handle);
  }
};
template <typename Handle, auto Destroy>
using CHandle = std::unique_ptr<Handle, Destroyer<Destroy>>;
using CBuffer = CHandle<ClattnBuffer, clattn_buffer_destroy>;
using CLayer = CHandle<ClattnLayer, clattn_layer_destroy>;
using CCache = CHandle<ClattnCache, clattn_cache_destroy>;
using CStep = CHandle<ClattnStep, clattn_step_destroy>;

/// A session of two layers and the requests that it has reported.
struct CSession {
  CHandle<ClattnSession, clattn_session_destroy> handle;
  std::vector<std::int64_t> requests;
  std::vector<float> known;  ///< what its known step gave, once it has run
  std::uint64_t checks = 0;  ///< how often that step ran
  bool explicit_commit = false;
};

/// A layer that is made once, with its own cache, recorded steps and cascade.
struct CGraphs {
  CBuffer memory, rows, output;  ///< of the cache; of every input; of every output
  /// Outputs of sessions, whose queues run beside `CWorld::queue`, and of their known steps.
  CBuffer session_output, known_output;
  CLayer layer;
  CCache cache;
  CStep step;
  CHandle<ClattnGraphState, clattn_graph_state_destroy> state;
  bool state_is_known = false;             ///< made from `layer`, with plain options
  const ClattnStep* state_step = nullptr;  ///< the state's, once it gave one
  CHandle<ClattnGraphCapture, clattn_graph_capture_destroy> capture;
  CHandle<ClattnGraph, clattn_graph_destroy> graph;
  std::int32_t graph_size = 0;  ///< of the recorded step; 0 = of a step that nobody compares
  CHandle<ClattnCascade, clattn_cascade_destroy> cascade;
  bool cascade_is_known = false;
  const ClattnStep* cascade_step = nullptr;  ///< the cascade's, once it gave one
  CHandle<ClattnCascadeLayer, clattn_cascade_layer_destroy> cascade_layer;
};

/// What calls of the C API act on: a layer and what it needs, each a handle or null where making it
/// failed. In the order in which C programs would make them; any order of ends is legal.
struct CWorld {
  explicit CWorld(const clattn::Context& like);

  CHandle<ClattnContext, clattn_context_destroy> context;
  CHandle<ClattnQueue, clattn_queue_destroy> queue;
  std::array<CBuffer, 3> buffers;
  CHandle<ClattnEvent, clattn_event_destroy> event;
  CHandle<ClattnModel, clattn_model_destroy> model;
  CLayer layer;
  CCache cache;
  CStep step;
  CHandle<ClattnDeviceErrors, clattn_device_errors_destroy> errors;
  CHandle<ClattnBlockPool, clattn_block_pool_destroy> pool;
  CSession session;
  CGraphs graphs;
};

/// All calls of the C API, those of the three functions below included.
std::vector<RandomCall> random_c_calls();
std::span<const RandomCall> c_session_calls();
std::span<const RandomCall> c_graph_calls();
std::span<const RandomCall> c_op_calls();

void make_graphs(CWorld& c);
/// Without failures of the driver: whether every block is free once all requests have finished, and
/// a step gives what it gave at first.
bool session_computes_as_before(World& world);
/// Likewise: whether a step that is replayed gives what it gives without a recording, and a cascade
/// too.
bool graphs_compute_as_before(World& world);

}  // namespace test
