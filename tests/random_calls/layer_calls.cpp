// Calls that make layers, build steps and attend, also recorded or in cascades.
#include <algorithm>
#include <clattn/cascade.hpp>
#include <clattn/explain.hpp>
#include <clattn/log.hpp>

#include "random_calls/world.hpp"

using namespace clattn;
using test::kBlocks;
using test::Paged;
using test::World;

static void make_layer(World& world) {
  Paged made = make_paged(world, test::random_config(world.dice));
  world.queue.finish();
  world.recorded.clear();
  world.dice.pick(world.layers) = std::move(made);
}

static void choose(World& world) {
  AttentionConfig config = test::random_config(world.dice);
  const auto number = static_cast<std::int32_t>(world.dice.odd_number());
  const std::array fields = {&config.num_heads,      &config.num_kv_heads,
                             &config.head_size,      &config.block_size,
                             &config.sliding_window, &config.attention_chunk_size,
                             &config.window_left,    &config.window_right};
  *world.dice.pick(fields) = number;
  const AttentionBackend& backend = *get_attn_backend(config, &world.context->capabilities());
  if (config.block_size <= 64 && config.head_size <= 64) backend.make_impl(world.context, config);
}

static void build(World& world) {
  Paged& layer = world.dice.pick(world.layers);
  const auto made = world.batch(layer.config.block_size);
  BuildOptions options{.fast_build = world.dice.one_in(4)};
  if (world.dice.one_in(8)) {
    options.common_prefix_len = static_cast<std::int32_t>(world.dice.odd_number());
  }
  layer.metadata = &layer.builder->build(world.queue, made.batch, world.maybe_event(), options);
}

static void update_block_table(World& world) {
  Paged& layer = world.dice.pick(world.layers);
  Paged& other = world.dice.one_in(8) ? world.dice.pick(world.layers) : layer;
  if (layer.metadata == nullptr) return;
  const auto made = world.batch(layer.config.block_size);
  other.group_builder->update_block_table(world.queue, *layer.metadata,
                                          {made.batch.block_table, made.batch.block_table_stride});
}

static void write_kv_cache(World& world) {
  Paged& layer = world.dice.pick(world.layers);
  const Paged& planned = world.dice.one_in(8) ? world.dice.pick(world.layers) : layer;
  if (planned.metadata == nullptr) return;
  layer.impl->write_kv_cache(world.queue, world.tensor(), world.tensor(), layer.cache,
                             *planned.metadata, world.maybe_event());
}

static void forward(World& world) {
  Paged& layer = world.dice.pick(world.layers);
  const Paged& planned = world.dice.one_in(8) ? world.dice.pick(world.layers) : layer;
  if (planned.metadata == nullptr) return;
  KVCache cache = layer.cache;
  const auto number = world.dice.odd_number();
  if (world.dice.one_in(8)) {
    const std::array fields = {&cache.num_blocks,   &cache.k_offset,     &cache.v_offset,
                               &cache.block_stride, &cache.token_stride, &cache.head_stride};
    *world.dice.pick(fields) = number;
  }
  AttentionTensors tensors{.query = world.tensor(), .output = world.output()};
  if (world.dice.one_in(3)) tensors.lse = world.buffer().handle();
  std::vector<LaunchRecord> launches;
  ForwardOptions options{.event = world.maybe_event()};
  if (world.dice.one_in(4)) options.launches = &launches;
  if (world.dice.one_in(16)) options.custom_mask = world.buffer().handle();
  layer.impl->forward(world.queue, tensors, cache, *planned.metadata, options);
}

static void warm_up(World& world) {
  world.dice.pick(world.layers).impl->warm_up(world.queue);
}

static void record(World& world) {
  const std::size_t index =
      static_cast<std::size_t>(world.dice.below(static_cast<std::int64_t>(world.layers.size())));
  Paged& layer = world.layers[index];
  test::Recorded made;
  made.layer = index;
  BuilderOptions options;
  options.limits = {.max_num_reqs = 4, .max_num_batched_tokens = 16, .max_model_len = 128};
  options.limits.num_blocks = kBlocks;
  made.state =
      std::make_unique<AttentionState>(world.context, *layer.backend, layer.config, options);
  const auto capturing = made.state->graph_capture(4);
  const auto& metadata = made.state->graph_capture_get_metadata_for_batch(world.queue, 4);
  GraphCapture capture(world.queue);
  layer.impl->forward(world.queue, {.query = world.tensor(), .output = world.output()}, layer.cache,
                      metadata);
  made.graph = capture.end();
  if (world.recorded.size() > 3) world.recorded.clear();
  world.recorded.push_back(std::move(made));
}

static void replay(World& world) {
  if (world.recorded.empty()) return;
  test::Recorded& recorded = world.dice.pick(world.recorded);
  const auto made = world.batch(16);
  const ForwardStep step = recorded.state->begin_forward(world.queue, made.batch);
  if (step.graph_batch_size > 0) recorded.graph.replay(world.queue, world.maybe_event());
}

static void build_latent(World& world) {
  test::Latent& latent = world.latents.front();
  const auto made = world.batch(latent.config.block_size);
  latent.metadata = &latent.builder->build(world.queue, made.batch);
}

static void forward_latent(World& world) {
  const test::Latent& latent = world.latents.front();
  if (latent.metadata == nullptr) return;
  latent.impl->forward(world.queue, {.query = world.tensor(), .output = world.output()},
                       latent.cache, *latent.metadata, world.maybe_event());
}

static void make_registered(World& world) {
  world.layer.reset();
  AttentionOptions options{.config = {.num_heads = 4, .head_size = 32},
                           .prefix = "model.layers.0.attn"};
  options.config.num_kv_heads = world.dice.one_in(8) ? 3 : 2;
  options.config.dtype = DType::kF32;
  options.calculate_kv_scales = true;
  if (world.dice.one_in(2)) options.config.kv_cache_dtype = DType::kFp8E4M3;
  world.layer = std::make_unique<Attention>(world.context, world.registry, options);
}

static void use_registered(World& world) {
  if (world.layer == nullptr) return;
  Paged& planned = world.dice.pick(world.layers);
  if (world.dice.one_in(3)) world.layer->bind_kv_cache(planned.cache);
  if (world.dice.one_in(8)) {
    const std::array<float, 1> scale = {world.dice.one_in(3) ? 0.0F : 0.5F};
    world.layer->load_kv_scales({.k_scale = scale});
  }
  world.layer->forward(world.queue,
                       {.query = world.tensor(),
                        .key = world.tensor(),
                        .value = world.tensor(),
                        .output = world.output()},
                       world.dice.one_in(8) ? nullptr : planned.metadata,
                       {.event = world.maybe_event(), .num_rows = world.dice.below(20)});
}

static void cascade(World& world) {
  Paged& layer = world.dice.pick(world.layers);
  const CascadeImpl impl(world.context, *layer.backend, layer.config);
  CascadeAttention attention(
      world.context, *layer.backend, layer.config,
      {.limits = {.max_num_reqs = 8, .max_num_batched_tokens = 64, .max_model_len = 128}});
  auto made = world.batch(16);
  for (std::size_t at = 0; at < made.block_table.size(); at += 5) made.block_table[at] = 3;
  for (std::int32_t& length : made.seq_lens) length = std::min(length, 48) + 16;
  attention.build(world.queue, made.batch, world.dice.one_in(4) ? 15 : 16);
  attention.forward(world.queue, impl, {.query = world.tensor(), .output = world.output()},
                    layer.cache);
  world.queue.finish();
}

static void explain(World& world) {
  const Paged& layer = world.dice.pick(world.layers);
  to_string(layer.impl->candidates());
  layer.backend->validate_configuration(layer.config, &world.context->capabilities());
}

std::span<const test::RandomCall> test::layer_calls() {
  static constexpr auto kCalls = std::to_array<RandomCall>({
      {"AttentionBackend::make_impl", 1, make_layer},
      {"get_attn_backend", 10, choose},
      {"AttentionMetadataBuilder::build", 200, build},
      {"AttentionMetadataBuilder::update_block_table", 20, update_block_table},
      {"AttentionImpl::write_kv_cache", 100, write_kv_cache},
      {"AttentionImpl::forward", 150, forward},
      {"AttentionImpl::warm_up", 1, warm_up},
      {"GraphCapture", 4, record},
      {"Graph::replay", 30, replay},
      {"MLA build", 30, build_latent},
      {"MLAImpl::forward", 30, forward_latent},
      {"Attention", 2, make_registered},
      {"Attention::forward", 60, use_registered},
      {"CascadeAttention", 2, cascade},
      {"candidates", 5, explain},
  });
  return kCalls;
}
