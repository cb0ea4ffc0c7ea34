#include <algorithm>
#include <clattn/attn_utils.hpp>
#include <clattn/cascade.hpp>
#include <clattn/compat/v0_slot_mapping.hpp>
#include <clattn/custom_mask.hpp>
#include <clattn/log.hpp>
#include <clattn/reorder.hpp>

#include "random_calls/world.hpp"

using namespace clattn;
using test::Dice;
using test::kBlocks;
using test::Paged;
using test::World;

static std::size_t bytes_of(Dice& dice) {
  return static_cast<std::size_t>(dice.one_in(10) ? dice.odd_number() : dice.below(5000));
}

static std::span<std::byte> part_of(Dice& dice, std::vector<std::byte>& host) {
  return std::span(host).first(static_cast<std::size_t>(dice.below(5000)));
}

static Event* maybe_event(World& world) {
  return world.dice.one_in(3) ? &world.event : nullptr;
}

static void allocate(World& world) {
  // Small ones, and some that no device has.
  const std::size_t bytes = world.dice.one_in(8)
                                ? static_cast<std::size_t>(world.dice.odd_number())
                                : static_cast<std::size_t>(1 + world.dice.below(70000));
  if (bytes > (std::size_t{1} << 20) && bytes < (std::size_t{1} << 40)) return;
  // The last one stays: tensors fit it.
  if (Buffer& old = world.buffer(); &old != &world.buffers.back()) {
    old = world.context->allocate(bytes);
  }
}

static void write(World& world) {
  const auto source = part_of(world.dice, world.sent);
  world.queue.write(world.buffer(), source, bytes_of(world.dice));
}
static void write_async(World& world) {
  const auto source = part_of(world.dice, world.sent);
  world.queue.write_async(world.buffer(), source, bytes_of(world.dice), maybe_event(world));
}
static void read(World& world) {
  const auto target = part_of(world.dice, world.received);
  world.queue.read(world.buffer(), target, bytes_of(world.dice));
}
static void read_async(World& world) {
  const auto target = part_of(world.dice, world.received);
  world.queue.read_async(world.buffer(), target, bytes_of(world.dice), maybe_event(world));
}
static void fill(World& world) {
  world.queue.fill(world.buffer(), static_cast<std::uint32_t>(world.dice.below(20)),
                   bytes_of(world.dice) & ~std::size_t{3}, bytes_of(world.dice) & ~std::size_t{3});
}
static void map(World& world) {
  HostView view = world.queue.map(world.buffer(), HostAccess::kReadWrite);
  if (!view.bytes().empty()) view.bytes().back() = std::byte{1};
}
static void share(World& world) {
  const Buffer shared = world.context->share(part_of(world.dice, world.received));
  world.queue.fill(shared, 7, 0, shared.size_bytes() & ~std::size_t{3});
  world.queue.finish();
}
static void wait(World& world) {
  if (world.event) world.event.wait();
  if (world.dice.one_in(3)) world.event.reset();
}
static void flush(World& world) {
  world.queue.flush();
}
static void finish(World& world) {
  world.queue.finish();
}
static void queues(World& world) {
  Queue made = world.context->create_queue(world.dice.one_in(2) ? QueueProfiling::kOn
                                                                : QueueProfiling::kOff);
  made.fill(world.buffer(), 0, 0, 4);
  made.finish();
  if (world.dice.one_in(2)) {
    world.queue.finish();
    world.queue = Queue::adopt(made);
  }
}
static void adopt(World& world) {
  const auto context = Context::adopt(world.context->handle(), world.context->device());
  const Buffer retained = Buffer::adopt(world.buffer().handle());
  context->create_queue().fill(retained, 0, 0, 4);
}

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
                             &config.sliding_window, &config.attention_chunk_size};
  *world.dice.pick(fields) = number;
  const AttentionBackend& backend = get_attn_backend(config, &world.context->capabilities());
  if (config.block_size <= 64 && config.head_size <= 64) backend.make_impl(world.context, config);
}

static void build(World& world) {
  Paged& layer = world.dice.pick(world.layers);
  const auto made = world.batch(layer.config.block_size);
  BuildOptions options{.fast_build = world.dice.one_in(4)};
  if (world.dice.one_in(8)) {
    options.common_prefix_len = static_cast<std::int32_t>(world.dice.odd_number());
  }
  layer.metadata = &layer.builder->build(world.queue, made.batch, maybe_event(world), options);
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
                             *planned.metadata, maybe_event(world));
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
  AttentionTensors tensors{.query = world.tensor(), .output = world.tensor()};
  if (world.dice.one_in(3)) tensors.lse = world.buffer().handle();
  std::vector<LaunchRecord> launches;
  ForwardOptions options{.event = maybe_event(world)};
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
  layer.impl->forward(world.queue, {.query = world.tensor(), .output = world.tensor()}, layer.cache,
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
  if (step.graph_batch_size > 0) recorded.graph.replay(world.queue, maybe_event(world));
}

static void build_latent(World& world) {
  test::Latent& latent = world.latents.front();
  const auto made = world.batch(latent.config.block_size);
  latent.metadata = &latent.builder->build(world.queue, made.batch);
}
static void forward_latent(World& world) {
  const test::Latent& latent = world.latents.front();
  if (latent.metadata == nullptr) return;
  latent.impl->forward(world.queue, {.query = world.tensor(), .output = world.tensor()},
                       latent.cache, *latent.metadata, maybe_event(world));
}
static void write_latent(World& world) {
  concat_and_cache_mla(*world.context, world.queue, world.tensor(), world.tensor(), DType::kF32,
                       world.latents.front().cache, world.buffer().handle(),
                       world.slot_offset_bytes(), world.dice.below(20), maybe_event(world));
}
static void gather_latent(World& world) {
  auto made = world.batch(16);
  if (!world.dice.one_in(4)) std::ranges::fill(made.seq_lens, 0);
  gather_and_maybe_dequant_cache(*world.context, world.queue, world.latents.front().cache,
                                 world.tensor(), DType::kF32,
                                 {.cu_seq_lens = made.query_start_loc,
                                  .block_table = made.block_table,
                                  .block_table_stride = made.batch.block_table_stride,
                                  .seq_starts = made.seq_lens});
}

static void write_slots(World& world) {
  const Paged& layer = world.dice.pick(world.layers);
  reshape_and_cache_flash(*world.context, world.queue, world.tensor(), world.tensor(),
                          layer.config.dtype, layer.cache, world.buffer().handle(),
                          world.slot_offset_bytes(), world.dice.below(20), maybe_event(world));
}
static PackedKVCache packed(World& world) {
  return {.key = world.buffer().handle(),
          .value = world.buffer().handle(),
          .dtype = DType::kF32,
          .num_blocks = world.dice.one_in(4) ? world.dice.odd_number() : 2,
          .block_size = 16,
          .num_kv_heads = 2,
          .head_size = 32};
}
static void write_packed(World& world) {
  reshape_and_cache(*world.context, world.queue, world.tensor(), world.tensor(), DType::kF32,
                    packed(world), world.buffer().handle(), 0, world.dice.below(20));
}
static void copy(World& world) {
  const std::array caches = {world.dice.pick(world.layers).cache};
  copy_blocks(*world.context, world.queue, caches, world.block_pairs(), maybe_event(world));
}
static void swap(World& world) {
  const KVCache& cache = world.dice.pick(world.layers).cache;
  const auto pairs = world.block_pairs();
  const SwapSpace device = cache;
  const SwapSpace other = world.dice.one_in(2) ? SwapSpace(std::span(world.sent))
                                               : SwapSpace(world.dice.pick(world.layers).cache);
  if (world.dice.one_in(2)) {
    swap_blocks(*world.context, world.queue, device, other, pairs, maybe_event(world));
  } else {
    swap_blocks(*world.context, world.queue, other, device, pairs, maybe_event(world));
  }
}
static OutputWithLse with_lse(World& world) {
  return {world.tensor(), {.buffer = world.buffer().handle()}};
}
static void merge(World& world) {
  const MergeAttnStates config{.num_tokens = world.dice.below(20),
                               .num_heads = 2,
                               .head_size = world.dice.one_in(8) ? 7 : 32,
                               .dtype = DType::kF32};
  merge_attn_states(*world.context, world.queue, config, with_lse(world), with_lse(world),
                    with_lse(world), maybe_event(world));
}
static void append(World& world) {
  const Paged& layer = world.dice.pick(world.layers);
  append_paged_kv_cache(
      *world.context, world.queue, world.tensor(), world.tensor(), layer.config.dtype, layer.cache,
      world.buffer(), world.buffer(), world.dice.below(20),
      {world.buffer(), world.buffer(), static_cast<std::int32_t>(world.dice.below(5))},
      maybe_event(world));
}
static void advance(World& world) {
  AdvanceStep step;
  step.num_seqs = static_cast<std::int32_t>(world.dice.below(9));
  step.num_blocks = kBlocks;
  step.block_table_stride = world.dice.one_in(6) ? world.dice.odd_number() : 4;
  step.num_queries = static_cast<std::int32_t>(world.dice.below(9));
  AdvanceStepPages pages;
  std::size_t row = 0;
  for (Buffer* const buffer :
       {&step.input_tokens, &step.sampled_token_ids, &step.input_positions, &step.seq_lens,
        &step.slot_mapping, &step.block_tables, &pages.paged_kv_indices, &pages.paged_kv_indptr,
        &pages.paged_kv_last_page_len, &pages.block_table_bound}) {
    *buffer = world.dice.one_in(40) ? world.buffer() : world.rows[row];
    if (world.dice.one_in(8)) world.queue.write(*buffer, std::span(world.sent).first(512));
    ++row;
  }
  if (world.dice.one_in(2)) {
    advance_step_flashattn(*world.context, world.queue, step, *world.errors, maybe_event(world));
  } else {
    advance_step_flashinfer(*world.context, world.queue, step, pages, *world.errors,
                            maybe_event(world));
  }
}
static void check_errors(World& world) {
  world.errors->check(world.queue);
}

static void make_registered(World& world) {
  world.layer.reset();
  AttentionOptions options{.num_heads = 4, .head_size = 32, .prefix = "model.layers.0.attn"};
  options.num_kv_heads = world.dice.one_in(8) ? 3 : 2;
  options.dtype = DType::kF32;
  options.cache_config = CacheConfig{.calculate_kv_scales = true};
  if (world.dice.one_in(2)) options.cache_config->cache_dtype = DType::kFp8E4M3;
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
                        .output = world.tensor()},
                       world.dice.one_in(8) ? nullptr : planned.metadata,
                       {.event = maybe_event(world), .num_rows = world.dice.below(20)});
}

static void cascade(World& world) {
  Paged& layer = world.dice.pick(world.layers);
  const CascadeImpl impl(world.context, *layer.backend, layer.config);
  CascadeAttention attention(
      world.context, *layer.backend, layer.config,
      {.limits = {.max_num_reqs = 8, .max_num_batched_tokens = 64, .max_model_len = 128}});
  auto made = world.batch(16);
  for (std::size_t at = 0; at < made.block_table.size(); at += 5) made.block_table[at] = 3;
  for (std::int32_t& length : made.seq_lens) length = std::min(length + 16, 64);
  attention.build(world.queue, made.batch, world.dice.one_in(4) ? 15 : 16);
  attention.forward(world.queue, impl, {.query = world.tensor(), .output = world.tensor()},
                    layer.cache);
  world.queue.finish();
}

static void plan_on_host(World& world) {
  const auto made = world.batch(16);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(world.dice.below(70)));
  std::vector<std::int32_t> order(static_cast<std::size_t>(made.batch.seq_lens.size()));
  switch (world.dice.below(6)) {
    case 0:
      compute_slot_mapping(made.batch, 16, slots);
      break;
    case 1:
      split_decodes_and_prefills(made.batch, 1);
      break;
    case 2:
      build_paged_kv_metadata(made.batch, 16);
      break;
    case 3:
      validate_batch(made.batch, 16, kBlocks);
      break;
    case 4:
      reorder_batch_to_split_decodes_and_prefills(made.seq_lens, 1, order);
      break;
    default:
      map_to_kernel_blocks(made.block_table, 16, world.dice.one_in(2) ? 8 : 5, order);
  }
}
static void read_names(World& world) {
  static constexpr std::array kNames = {"f16", "auto", "torch.float", "NHD", "", "fp8", "x", "gpu"};
  const std::string_view name = world.dice.pick(kNames);
  switch (world.dice.below(4)) {
    case 0:
      parse_kv_cache_dtype(name);
      break;
    case 1:
      parse_kv_cache_layout(name);
      break;
    case 2:
      parse_kernel_family(name);
      break;
    default:
      extract_layer_index(name);
  }
}
static void explain(World& world) {
  const Paged& layer = world.dice.pick(world.layers);
  to_string(layer.impl->candidates());
  layer.backend->validate_configuration(layer.config, &world.context->capabilities());
}

static constexpr auto kCppCalls = std::to_array<test::RandomCall>({
    {"Context::allocate", 40, allocate},
    {"Queue::write", 60, write},
    {"Queue::write_async", 60, write_async},
    {"Queue::read", 60, read},
    {"Queue::read_async", 60, read_async},
    {"Queue::fill", 40, fill},
    {"Queue::map", 30, map},
    {"Context::share", 20, share},
    {"Event::wait", 30, wait},
    {"Queue::flush", 10, flush},
    {"Queue::finish", 20, finish},
    {"Context::create_queue", 2, queues},
    {"Context::adopt", 1, adopt},
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
    {"concat_and_cache_mla", 30, write_latent},
    {"gather_and_maybe_dequant_cache", 20, gather_latent},
    {"reshape_and_cache_flash", 40, write_slots},
    {"reshape_and_cache", 30, write_packed},
    {"copy_blocks", 30, copy},
    {"swap_blocks", 30, swap},
    {"merge_attn_states", 40, merge},
    {"append_paged_kv_cache", 30, append},
    {"advance_step", 30, advance},
    {"DeviceErrors::check", 10, check_errors},
    {"Attention", 2, make_registered},
    {"Attention::forward", 60, use_registered},
    {"CascadeAttention", 2, cascade},
    {"metadata on the host", 100, plan_on_host},
    {"names", 30, read_names},
    {"candidates", 5, explain},
    {"three threads", 2, test::call_from_threads},
});

const std::vector<test::RandomCall>& test::random_calls() {
  static const std::vector<RandomCall> kCalls = [] {
    std::vector<RandomCall> calls(kCppCalls.begin(), kCppCalls.end());
    const auto of_c = random_c_calls();
    calls.insert(calls.end(), of_c.begin(), of_c.end());
    return calls;
  }();
  return kCalls;
}
