#pragma once

#include <clattn/clattn.h>

#include <array>
#include <clattn/context.hpp>
#include <cstddef>
#include <memory>
#include <span>

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

/// What calls of the C API act on: a layer and what it needs, each a handle or null where making it
/// failed. In the order in which C programs would make them; any order of ends is legal.
struct CWorld {
  explicit CWorld(const clattn::Context& like);

  CHandle<ClattnContext, clattn_context_destroy> context;
  CHandle<ClattnQueue, clattn_queue_destroy> queue;
  std::array<CHandle<ClattnBuffer, clattn_buffer_destroy>, 3> buffers;
  CHandle<ClattnEvent, clattn_event_destroy> event;
  CHandle<ClattnModel, clattn_model_destroy> model;
  CHandle<ClattnLayer, clattn_layer_destroy> layer;
  CHandle<ClattnCache, clattn_cache_destroy> cache;
  CHandle<ClattnStep, clattn_step_destroy> step;
};

std::span<const RandomCall> random_c_calls();

}  // namespace test
