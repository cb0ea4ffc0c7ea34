// Calls of the cache operations.
#include <algorithm>
#include <clattn/compat/packed_cache.hpp>

#include "random_calls/world.hpp"

using namespace clattn;
using test::kBlocks;
using test::Paged;
using test::World;

static void write_latent(World& world) {
  concat_and_cache_mla(*world.context, world.queue, world.tensor(), world.tensor(), DType::kF32,
                       world.latents.front().cache, world.buffer().handle(),
                       world.slot_offset_bytes(), world.dice.below(20), world.maybe_event());
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
                          world.slot_offset_bytes(), world.dice.below(20), world.maybe_event());
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
  copy_blocks(*world.context, world.queue, caches, world.block_pairs(), world.maybe_event());
}

static void swap(World& world) {
  const KVCache& cache = world.dice.pick(world.layers).cache;
  const auto pairs = world.block_pairs();
  const SwapSpace device = cache;
  const SwapSpace other = world.dice.one_in(2) ? SwapSpace(std::span(world.sent))
                                               : SwapSpace(world.dice.pick(world.layers).cache);
  if (world.dice.one_in(2)) {
    swap_blocks(*world.context, world.queue, device, other, pairs, world.maybe_event());
  } else {
    swap_blocks(*world.context, world.queue, other, device, pairs, world.maybe_event());
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
                    with_lse(world), world.maybe_event());
}

static void append(World& world) {
  const Paged& layer = world.dice.pick(world.layers);
  append_paged_kv_cache(
      *world.context, world.queue, world.tensor(), world.tensor(), layer.config.dtype, layer.cache,
      world.buffer(), world.buffer(), world.dice.below(20),
      {world.buffer(), world.buffer(), static_cast<std::int32_t>(world.dice.below(5))},
      world.maybe_event());
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
    advance_step_flashattn(*world.context, world.queue, step, *world.errors, world.maybe_event());
  } else {
    advance_step_flashinfer(*world.context, world.queue, step, pages, *world.errors,
                            world.maybe_event());
  }
}

static void check_errors(World& world) {
  world.errors->check(world.queue);
}

std::span<const test::RandomCall> test::cache_calls() {
  static constexpr auto kCalls = std::to_array<RandomCall>({
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
  });
  return kCalls;
}
