// Calls of the C API's operations on caches, of lengths on the device and of host arithmetic.
#include <algorithm>
#include <vector>

#include "random_calls/c_help.hpp"

using namespace test::c;
using test::CWorld;
using test::World;

static const ClattnBuffer* any_buffer(World& world) {
  return maybe(world.dice, world.dice.pick(world.c->buffers));
}

static ClattnTensorRef any_tensor(World& world) {
  return tensor_of(world.dice, world.dice.pick(world.c->buffers).get());
}

static std::vector<std::int64_t> any_pairs(World& world) {
  std::vector<std::int64_t> pairs;
  for (const clattn::BlockPair& pair : world.block_pairs()) {
    pairs.insert(pairs.end(), {pair.source, pair.destination});
  }
  return pairs;
}

static void merge(World& world) {
  auto merge = sized<ClattnMerge>(world.dice);
  merge.num_heads = 2;
  merge.head_size = world.dice.one_in(8) ? 7 : 32;
  merge.num_tokens = world.dice.below(20);
  merge.tokens_without_prefix = world.dice.one_in(4) ? world.dice.odd_number() : 0;
  merge.dtype = "f32";
  if (world.dice.one_in(4)) merge.output_dtype = world.dice.one_in(2) ? "int8" : "no type";
  if (world.dice.one_in(4)) merge.output_scale = any_buffer(world);
  for (ClattnAttnState* const state : {&merge.merged, &merge.prefix, &merge.suffix}) {
    state->output = any_tensor(world);
    state->lse = any_buffer(world);
    if (world.dice.one_in(20)) state->lse_token_stride = world.dice.odd_number();
  }
  tell(clattn_merge_attn_states(maybe(world.dice, world.c->context),
                                maybe(world.dice, world.c->queue), &merge));
}

static void append(World& world) {
  auto append = sized<ClattnCacheAppend>(world.dice);
  append.num_reqs = static_cast<std::int32_t>(world.dice.below(6)) - 1;
  append.dtype = world.dice.one_in(2) ? "f32" : nullptr;
  append.key = any_tensor(world);
  append.value = any_tensor(world);
  append.batch_indices = any_buffer(world);
  append.positions = any_buffer(world);
  append.indices = any_buffer(world);
  append.indptr = any_buffer(world);
  append.num_tokens = world.dice.one_in(20) ? world.dice.odd_number() : world.dice.below(20);
  tell(clattn_append_paged_kv_cache(maybe(world.dice, world.c->context),
                                    maybe(world.dice, world.c->queue),
                                    maybe(world.dice, world.c->cache), &append));
}

static void swap(World& world) {
  CWorld& c = *world.c;
  const auto pairs = any_pairs(world);
  auto device = sized<ClattnSwapSpace>(world.dice);
  auto host = sized<ClattnSwapSpace>(world.dice);
  device.cache = maybe(world.dice, c.cache);
  host.host = world.dice.one_in(20) ? nullptr : world.sent.data();
  host.host_bytes = world.sent.size();
  const bool out = world.dice.one_in(2);
  tell(clattn_swap_blocks(maybe(world.dice, c.context), maybe(world.dice, c.queue),
                          out ? &device : &host, out ? &host : &device, pairs.data(),
                          pairs.size() / 2, c.event.get()));
}

static void gather(World& world) {
  const Batch drawn = batch(world);
  auto gather = sized<ClattnGather>(world.dice);
  gather.num_reqs = drawn.info.num_reqs;
  gather.dtype = "f32";
  gather.cu_seq_lens = drawn.info.query_start_loc;
  gather.block_table = drawn.info.block_table;
  gather.block_table_stride = drawn.info.block_table_stride;
  gather.destination = any_tensor(world);
  tell(clattn_gather_and_maybe_dequant_cache(maybe(world.dice, world.c->context),
                                             maybe(world.dice, world.c->queue),
                                             maybe(world.dice, world.c->cache), &gather));
}

static void change_lengths(World& world) {
  CWorld& c = *world.c;
  if (c.errors == nullptr || world.dice.one_in(20)) {
    return remake(c.errors, [&](auto* made) {
      return clattn_device_errors_create(maybe(world.dice, c.context), maybe(world.dice, c.queue),
                                         made);
    });
  }
  if (world.dice.one_in(4)) {
    return tell(clattn_device_errors_check(c.errors.get(), maybe(world.dice, c.queue)));
  }
  if (c.step != nullptr && world.dice.one_in(2)) {
    const ClattnBuffer* const slots = world.dice.one_in(3) ? any_buffer(world) : nullptr;
    return tell(clattn_update_seq_lens(maybe(world.dice, c.queue), c.step.get(), any_buffer(world),
                                       slots, c.errors.get(), c.event.get()));
  }
  if (c.step != nullptr && world.dice.one_in(2)) {
    return tell(clattn_update_query_lens(maybe(world.dice, c.queue), c.step.get(),
                                         any_buffer(world), any_buffer(world), nullptr,
                                         c.errors.get(), c.event.get()));
  }
  if (c.step != nullptr && world.dice.one_in(3)) {
    auto lists = sized<ClattnDeviceLists>(world.dice);
    lists.tree_bits_stride = static_cast<std::int32_t>(world.dice.below(4));
    for (const ClattnBuffer** const field : {&lists.direction, &lists.tree_sizes, &lists.tree_bits})
      if (world.dice.one_in(2)) *field = any_buffer(world);
    return tell(clattn_update_lists(maybe(world.dice, c.queue), c.step.get(), &lists,
                                    c.errors.get(), c.event.get()));
  }
  auto advance = sized<ClattnAdvanceStep>(world.dice);
  advance.num_seqs = static_cast<std::int32_t>(world.dice.below(9));
  advance.num_queries = static_cast<std::int32_t>(world.dice.below(9));
  advance.num_blocks = test::kBlocks;
  advance.block_table_stride = world.dice.one_in(6) ? world.dice.odd_number() : 4;
  for (const ClattnBuffer** const field :
       {&advance.input_tokens, &advance.sampled_token_ids, &advance.input_positions,
        &advance.seq_lens, &advance.slot_mapping, &advance.block_tables}) {
    *field = any_buffer(world);
  }
  if (world.dice.one_in(4)) advance.paged_kv_indptr = any_buffer(world);
  tell(clattn_advance_step(maybe(world.dice, c.context), maybe(world.dice, c.queue), &advance,
                           c.errors.get(), nullptr));
}

static void plan_on_host(World& world) {
  const Batch drawn = batch(world);
  auto split = sized<ClattnBatchSplit>(world.dice);
  auto options = sized<ClattnSplitOptions>(world.dice);
  auto reorder = sized<ClattnReorder>(world.dice);
  std::array<std::int64_t, 64> slots{};
  std::array<std::int32_t, 64> order{}, last{}, pages{};
  std::size_t count = 0;
  std::int32_t moved = 0;
  std::uint64_t bytes = 0;
  options.require_uniform = world.dice.one_in(2);
  options.short_extends_are_prefills = world.dice.one_in(8);
  switch (world.dice.below(7)) {
    case 0:
      return tell(clattn_split_decodes_and_prefills(
          &drawn.info, world.dice.one_in(2) ? nullptr : &options, &split));
    case 1:
      return tell(clattn_split_decodes_prefills_and_extends(
          &drawn.info, static_cast<std::int32_t>(world.dice.below(4)), &split));
    case 2:
      return tell(clattn_compute_slot_mapping(&drawn.info, 16, slots.data(),
                                              static_cast<std::size_t>(world.dice.below(65))));
    case 3:
      return tell(
          clattn_build_paged_kv_metadata(&drawn.info, 16, order.data(), last.data(), pages.data(),
                                         static_cast<std::size_t>(world.dice.below(65)), &count));
    case 4:
      return tell(clattn_validate_batch(&drawn.info, 16, world.dice.below(20)));
    case 5:
      reorder.num_reqs = drawn.drawn.seq_lens.size();
      reorder.num_scheduled_tokens = drawn.drawn.seq_lens.data();
      reorder.order = order.data();
      return tell(clattn_reorder_batch(&reorder, &moved));
    default:
      return tell(
          clattn_step_workspace_bytes(maybe(world.dice, world.c->step), &drawn.info, &bytes));
  }
}

/// Blocks that are seldom held, of a pool that is sometimes full.
static void use_pool(World& world) {
  CWorld& c = *world.c;
  std::array<std::int32_t, 8> blocks{};
  for (auto& block : blocks) block = static_cast<std::int32_t>(world.dice.below(9));
  std::array<std::int32_t, 20> tokens{};
  for (auto& token : tokens) token = static_cast<std::int32_t>(world.dice.below(2));
  std::size_t count = 0;
  const auto few = static_cast<std::size_t>(world.dice.below(4));
  const std::uint64_t salt = world.dice.one_in(2);
  ClattnBlockPool* const pool = maybe(world.dice, c.pool);
  auto info = sized<ClattnBlockPoolInfo>(world.dice);
  switch (world.dice.one_in(30) ? 6 : world.dice.below(6)) {
    case 0:
      return tell(clattn_block_pool_allocate(pool, static_cast<std::int32_t>(few), blocks.data()));
    case 1:
      return tell(clattn_block_pool_find_prefix(pool, tokens.data(), tokens.size(), salt,
                                                blocks.data(), &count));
    case 2:
      return tell(clattn_block_pool_share(pool, blocks.data(), few));
    case 3:
      return tell(
          clattn_block_pool_publish(pool, tokens.data(), 4 * few, blocks.data(), few, salt));
    case 4:
      return tell(clattn_block_pool_release(pool, blocks.data(), few));
    case 5:
      return tell(clattn_block_pool_info(pool, &info));
    default:
      return remake(c.pool, [&](auto* made) {
        return clattn_block_pool_create(static_cast<std::int32_t>(world.dice.below(9)), 4, made);
      });
  }
}

static void use_memory(World& world) {
  CWorld& c = *world.c;
  const ClattnBuffer* const buffer = any_buffer(world);
  const ClattnQueue* const queue = maybe(world.dice, c.queue);
  if (world.dice.one_in(2)) {
    return tell(clattn_buffer_fill(buffer, queue, 1,
                                   4 * static_cast<std::size_t>(world.dice.below(20)),
                                   static_cast<std::size_t>(world.dice.below(5000))));
  }
  test::CHandle<ClattnHostMemory, clattn_host_memory_destroy> memory;
  void* bytes = nullptr;
  remake(memory, [&](auto* made) {
    if (world.dice.one_in(4)) {
      return clattn_pinned_memory_create(maybe(world.dice, c.context), 4096, made, &bytes);
    }
    return clattn_buffer_map(buffer, queue, world.dice.one_in(8) ? "no access" : "read", made,
                             &bytes);
  });
}

std::span<const test::RandomCall> test::c_op_calls() {
  static constexpr auto kCalls = std::to_array<RandomCall>({
      {"clattn_merge_attn_states", 20, merge},
      {"clattn_append_paged_kv_cache", 20, append},
      {"clattn_swap_blocks", 20, swap},
      {"clattn_gather_and_maybe_dequant_cache", 10, gather},
      {"clattn_update_seq_lens, _advance_step", 20, change_lengths},
      {"C metadata on the host", 40, plan_on_host},
      {"clattn_block_pool_...", 30, use_pool},
      {"clattn_buffer_map, _fill", 20, use_memory},
  });
  return kCalls;
}
