// Calls of the C API's recorded steps and cascades (clattn_graph.h).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <clattn/error.hpp>
#include <cmath>
#include <string_view>

#include "random_calls/c_help.hpp"

using namespace test::c;
using test::CGraphs;
using test::CWorld;
using test::Dice;
using test::World;

static constexpr std::size_t kMemoryBytes = std::size_t{test::kBlocks} * 2 * 16 * 2 * 32 * 4;
static constexpr std::size_t kRowBytes = std::size_t{64} * 4 * 32 * 4;  // of the largest step

static ClattnStepOptions limits() {
  ClattnStepOptions options{};
  options.struct_size = sizeof options;
  options.max_num_reqs = 8;
  options.max_num_batched_tokens = 64;
  options.max_model_len = 128;
  return options;
}

/// Numbers that are finite as f16 and as f32.
static void write_rows(const CWorld& c, const ClattnBuffer* buffer, std::size_t bytes) {
  Dice dice(5);
  std::vector<std::uint16_t> numbers(bytes / 2);
  for (std::size_t i = 0; i < numbers.size(); i += 2)
    numbers[i] = numbers[i + 1] = static_cast<std::uint16_t>(0x3800 + dice.below(0x500));
  tell(clattn_buffer_write(buffer, c.queue.get(), 0, numbers.data(), bytes));
}

void test::make_graphs(CWorld& c) {
  CGraphs& of = c.graphs;
  const auto make_buffer = [&](CBuffer& buffer, std::size_t bytes) {
    remake(buffer, [&](auto* made) { return clattn_buffer_create(c.context.get(), bytes, made); });
    write_rows(c, buffer.get(), bytes);
  };
  make_buffer(of.memory, kMemoryBytes);
  make_buffer(of.rows, kRowBytes);
  make_buffer(of.output, kRowBytes);
  make_buffer(of.session_output, kRowBytes);
  make_buffer(of.known_output, kRowBytes);
  ClattnLayerConfig config{};
  config.struct_size = sizeof config;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_size = 32;
  config.dtype = "f32";
  const ClattnStepOptions options = limits();
  remake(of.layer,
         [&](auto* made) { return clattn_layer_create(c.context.get(), nullptr, &config, made); });
  remake(of.cache, [&](auto* made) {
    return clattn_cache_adopt(of.layer.get(), of.memory.get(), nullptr, made);
  });
  tell(clattn_layer_bind_cache(of.layer.get(), of.cache.get()));
  remake(of.step, [&](auto* made) { return clattn_step_create(of.layer.get(), &options, made); });
}

/// That of the recordings, or, seldom, another one or null.
static ClattnLayer* any_layer(World& world) {
  CWorld& c = *world.c;
  return world.dice.one_in(20) ? c.layer.get() : maybe(world.dice, c.graphs.layer);
}

static ClattnTensors any_tensors(World& world) {
  const CGraphs& of = world.c->graphs;
  auto made = sized<ClattnTensors>(world.dice);
  for (ClattnTensorRef* const tensor : {&made.query, &made.key, &made.value})
    *tensor = tensor_of(world.dice, of.rows.get());
  made.output = tensor_of(world.dice, of.output.get());
  return made;
}

static bool is_plain(const ClattnTensors& tensors) {
  const std::array refs = {&tensors.query, &tensors.key, &tensors.value, &tensors.output};
  return std::ranges::all_of(
      refs, [](const auto* ref) { return ref->offset == 0 && ref->token_stride == 0; });
}

static void make_state(World& world) {
  CGraphs& of = world.c->graphs;
  const bool odd = world.dice.one_in(4);
  const ClattnStepOptions options = odd ? step_options(world.dice) : limits();
  ClattnLayer* const layer = any_layer(world);
  remake(of.state, [&](auto* made) {
    const ClattnResult status = clattn_graph_state_create(layer, &options, made);
    if (status != CLATTN_SUCCESS) return status;
    of.state_step = nullptr;
    of.graph_size = 0;  // its graph reads the old one's memory
    of.state_is_known = !odd && layer == of.layer.get();
    return status;
  });
}

static void end_recording(World& world) {
  CGraphs& of = world.c->graphs;
  of.graph_size = 0;  // until it is known what it is of
  remake(of.graph,
         [&](auto* made) { return clattn_graph_capture_end(maybe(world.dice, of.capture), made); });
}

static std::int32_t any_size(Dice& dice) {
  return static_cast<std::int32_t>(dice.one_in(10) ? dice.odd_number() : 1 + dice.below(4));
}

/// A recording from its beginning to its end, some of which are left out, or ended by another call.
static void record(World& world) {
  CWorld& c = *world.c;
  CGraphs& of = c.graphs;
  Dice& dice = world.dice;
  const std::array<const char*, 4> modes = {nullptr, "launch_list", "command_buffer", "no mode"};
  if (of.state == nullptr) make_state(world);
  if (!dice.one_in(10)) of.capture.reset();
  if (!dice.one_in(10)) clattn_graph_state_end_capture(of.state.get());
  if (!dice.one_in(10))
    tell(clattn_graph_state_begin_capture(maybe(dice, of.state),
                                          dice.one_in(10) ? any_size(dice) : 4));
  const std::int32_t size = any_size(dice);
  tell(clattn_graph_state_capture_step(maybe(dice, of.state), maybe(dice, c.queue), size,
                                       dice.one_in(60) ? nullptr : &of.state_step));
  remake(of.capture, [&](auto* made) {
    return clattn_graph_capture_create(maybe(dice, c.queue), dice.pick(modes), made);
  });
  const ClattnTensors tensors = any_tensors(world);
  ClattnLayer* const layer = any_layer(world);
  tell(clattn_layer_forward(layer, c.queue.get(), &tensors, of.state_step));
  if (dice.one_in(10)) return;
  end_recording(world);
  of.capture.reset();
  if (layer == of.layer.get() && is_plain(tensors)) of.graph_size = size;
  if (!dice.one_in(10)) tell(clattn_graph_state_end_capture(of.state.get()));
}

static void begin_step(World& world) {
  CWorld& c = *world.c;
  CGraphs& of = c.graphs;
  Dice& dice = world.dice;
  if (of.state == nullptr) return record(world);
  const Batch batch = test::c::batch(world);
  std::int32_t size = 0;
  tell(clattn_graph_state_begin_step(
      maybe(dice, of.state), maybe(dice, c.queue), dice.one_in(60) ? nullptr : &batch.info,
      dice.one_in(60) ? nullptr : &of.state_step, dice.one_in(60) ? nullptr : &size));
  if (size > 0 && dice.one_in(2)) return;  // to be replayed
  const ClattnTensors tensors = any_tensors(world);
  tell(clattn_layer_forward(any_layer(world), maybe(dice, c.queue), &tensors, of.state_step));
}

static void replay(World& world) {
  CWorld& c = *world.c;
  ClattnEvent* const event = world.dice.one_in(3) ? c.event.get() : nullptr;
  tell(clattn_graph_replay(maybe(world.dice, c.graphs.graph), maybe(world.dice, c.queue), event));
}

static void ask_graph(World& world) {
  auto info = sized<ClattnGraphInfo>(world.dice);
  tell(clattn_graph_info(maybe(world.dice, world.c->graphs.graph), &info));
}

static void make_cascade(World& world) {
  CGraphs& of = world.c->graphs;
  const bool odd = world.dice.one_in(4);
  const ClattnStepOptions options = odd ? step_options(world.dice) : limits();
  ClattnLayer* const layer = any_layer(world);
  of.cascade_is_known = false;  // of whichever of the two is made
  remake(of.cascade, [&](auto* made) {
    const ClattnResult status = clattn_cascade_create(layer, &options, made);
    if (status == CLATTN_SUCCESS) of.cascade_step = nullptr;
    return status;
  });
  remake(of.cascade_layer, [&](auto* made) { return clattn_cascade_layer_create(layer, made); });
  of.cascade_is_known = !odd && layer == of.layer.get();
}

static void cascade(World& world) {
  CWorld& c = *world.c;
  CGraphs& of = c.graphs;
  Dice& dice = world.dice;
  if (of.cascade == nullptr || of.cascade_layer == nullptr) return make_cascade(world);
  Batch batch = test::c::batch(world);
  test::RandomBatch& drawn = batch.drawn;
  for (std::size_t at = 0; at < drawn.block_table.size(); at += 5) drawn.block_table[at] = 3;
  for (std::int32_t& length : drawn.seq_lens) length = std::min(length, 48) + 16;
  batch.info.common_prefix_len = dice.one_in(10) ? any_size(dice) : 16;
  if (!dice.one_in(8))
    tell(clattn_cascade_build(maybe(dice, of.cascade), maybe(dice, c.queue),
                              dice.one_in(60) ? nullptr : &batch.info,
                              dice.one_in(60) ? nullptr : &of.cascade_step));
  ClattnTensors tensors = any_tensors(world);
  if (dice.one_in(3)) tensors.event = c.event.get();
  if (!dice.one_in(8))
    tell(clattn_layer_store(any_layer(world), maybe(dice, c.queue), &tensors, of.cascade_step));
  tell(clattn_cascade_forward(maybe(dice, of.cascade), maybe(dice, c.queue),
                              maybe(dice, of.cascade_layer), &tensors));
}

/// Ends one of them; the others go on.
static void destroy(World& world) {
  CGraphs& of = world.c->graphs;
  switch (world.dice.below(5)) {
    case 0:
      of.state_step = nullptr;
      of.graph_size = 0;
      return of.state.reset();
    case 1:
      return of.capture.reset();
    case 2:
      of.graph_size = 0;
      return of.graph.reset();
    case 3:
      of.cascade_step = nullptr;
      return of.cascade.reset();
    default:
      return of.cascade_layer.reset();
  }
}

std::span<const test::RandomCall> test::c_graph_calls() {
  static constexpr auto kCalls = std::to_array<RandomCall>({
      {"clattn_graph_state_create", 2, make_state},
      {"clattn_graph_capture_create", 20, record},
      {"clattn_graph_capture_end", 3, end_recording},
      {"clattn_graph_state_begin_step", 40, begin_step},
      {"clattn_graph_replay", 40, replay},
      {"clattn_graph_info", 5, ask_graph},
      {"clattn_cascade_create", 2, make_cascade},
      {"clattn_cascade_build, _forward", 40, cascade},
      {"clattn_graph_..._destroy", 2, destroy},
  });
  return kCalls;
}

/// Two decodes whose sequences begin with the same page.
static ClattnBatchInfo known_batch() {
  static constexpr std::array<std::int32_t, 3> kStarts = {0, 1, 2};
  static constexpr std::array<std::int32_t, 2> kLengths = {20, 33};
  static constexpr std::array<std::int32_t, 6> kPages = {3, 1, 0, 3, 5, 2};
  ClattnBatchInfo batch{};
  batch.struct_size = sizeof batch;
  batch.num_reqs = 2;
  batch.query_start_loc = kStarts.data();
  batch.seq_lens = kLengths.data();
  batch.block_table = kPages.data();
  batch.block_table_stride = 3;
  return batch;
}

/// What `attend` gives over known tensors and a known cache.
template <typename Attend>
static std::vector<float> rows_of(CWorld& c, const Attend& attend) {
  CGraphs& of = c.graphs;
  write_rows(c, of.memory.get(), kMemoryBytes);
  write_rows(c, of.output.get(), kRowBytes);
  ClattnTensors tensors{};
  tensors.struct_size = sizeof tensors;
  tensors.query.buffer = tensors.key.buffer = tensors.value.buffer = of.rows.get();
  tensors.output.buffer = of.output.get();
  attend(tensors);
  std::vector<float> rows(2UL * 4 * 32);
  tell(clattn_buffer_read(of.output.get(), c.queue.get(), 0, rows.data(), rows.size() * 4));
  return rows;
}

/// The same of something that was made while the driver failed now and then. If it lacked resources
/// for the best kernels then, those that were built may not fit the layer's, which refuses them:
/// from then on it is not `known`.
template <typename Attend>
static std::vector<float> rows_or_refusal(CWorld& c, bool& known, const Attend& attend) {
  try {
    return rows_of(c, attend);
  } catch (const clattn::Error& error) {
    if (std::string_view(error.what()).find("split work otherwise") == std::string_view::npos)
      throw;
    known = false;
    return {};
  }
}

/// Sums are of positive numbers below 0.04, in any order.
static bool alike(const std::vector<float>& rows, const std::vector<float>& expected) {
  return std::ranges::equal(rows, expected, [](float row, float wanted) {
    return std::abs(row - wanted) < 1e-7F;  // false for NaN
  });
}

bool test::graphs_compute_as_before(World& world) {
  CWorld& c = *world.c;
  CGraphs& of = c.graphs;
  const ClattnQueue* const queue = c.queue.get();
  ClattnBatchInfo batch = known_batch();
  of.capture.reset();  // or what follows would be recorded
  clattn_graph_state_end_capture(of.state.get());
  const auto plain = rows_of(c, [&](const ClattnTensors& tensors) {
    tell(clattn_step_build(of.step.get(), queue, &batch));
    tell(clattn_layer_forward(of.layer.get(), queue, &tensors, of.step.get()));
  });
  if (of.state != nullptr && of.state_is_known) {
    std::int32_t size = 0;
    const auto rows = rows_or_refusal(c, of.state_is_known, [&](const ClattnTensors& tensors) {
      tell(clattn_graph_state_begin_step(of.state.get(), queue, &batch, &of.state_step, &size));
      if (size > 0 && size == of.graph_size)
        return tell(clattn_graph_replay(of.graph.get(), queue, nullptr));
      tell(clattn_layer_forward(of.layer.get(), queue, &tensors, of.state_step));
    });
    if (of.state_is_known && !alike(rows, plain)) {
      fmt::print(stderr, "a step of a graph state, replayed {}, computes other rows\n", size);
      return false;
    }
  }
  if (of.cascade == nullptr || of.cascade_layer == nullptr || !of.cascade_is_known) return true;
  batch.common_prefix_len = 16;
  const auto rows = rows_or_refusal(c, of.cascade_is_known, [&](const ClattnTensors& tensors) {
    tell(clattn_cascade_build(of.cascade.get(), queue, &batch, &of.cascade_step));
    tell(clattn_layer_store(of.layer.get(), queue, &tensors, of.cascade_step));
    tell(clattn_cascade_forward(of.cascade.get(), queue, of.cascade_layer.get(), &tensors));
  });
  if (!of.cascade_is_known || alike(rows, plain)) return true;
  fmt::print(stderr, "a cascade computes other rows\n");
  return false;
}
