#include "random_calls/world.hpp"

#include <algorithm>
#include <limits>

using namespace clattn;

namespace test {

std::int64_t Dice::odd_number() {
  static constexpr std::array<std::int64_t, 16> kNumbers = {
      0,
      1,
      -1,
      2,
      7,
      8,
      15,
      16,
      17,
      255,
      4096,
      65537,
      -4096,
      std::numeric_limits<std::int32_t>::max(),
      std::numeric_limits<std::int32_t>::min(),
      std::numeric_limits<std::int64_t>::max()};
  return pick(kNumbers);
}

// Few: each is some kernels to compile.
AttentionConfig random_config(Dice& dice) {
  AttentionConfig config{.num_heads = 4, .num_kv_heads = 2, .head_size = 32, .block_size = 16};
  switch (dice.below(5)) {
    case 0:
      config.dtype = DType::kF32;
      break;
    case 1:
      config.kv_cache_dtype = DType::kFp8E4M3;
      break;
    case 2:
      config.kv_cache_dtype = DType::kInt8;
      break;
    case 3:
      config.dtype = DType::kBF16;
      config.sliding_window = 5;
      break;
    default:
      config.logits_soft_cap = 30;
      config.sinks = {0, 1, 2, 3};
  }
  return config;
}

Paged make_paged(World& world, const AttentionConfig& config) {
  Paged made;
  made.config = config;
  made.backend = get_attn_backend(config, &world.context->capabilities()).get();
  made.impl = made.backend->make_impl(world.context, config);
  BuilderOptions options;
  options.limits = {.max_num_reqs = 8, .max_num_batched_tokens = 64, .max_model_len = 128};
  options.limits.num_blocks = world.dice.one_in(2) ? kBlocks : -1;
  if (world.dice.one_in(3)) options.split_policy = SplitPolicy::kDeterministic;
  made.builder = made.backend->make_builder(world.context, config, options);
  made.group_builder = made.backend->make_builder(world.context, config, options);
  made.cache = make_kv_cache(*world.context, world.queue, *made.backend, config, kBlocks);
  if (is_quantized(made.cache.dtype)) made.cache.scales = world.context->allocate(8);
  return made;
}

static Latent make_latent(World& world) {
  Latent made;
  made.config = {.num_heads = 2, .kv_lora_rank = 32, .rope_dim = 8, .block_size = 16};
  made.config.dtype = DType::kF32;
  made.impl = make_mla_impl(*world.context, made.config);
  made.builder = make_mla_builder(
      world.context, made.config,
      {.limits = {.max_num_reqs = 8, .max_num_batched_tokens = 64, .max_model_len = 128}});
  made.cache = {.buffer = world.context->allocate(std::size_t{kBlocks} * 16 * 40 * 4),
                .dtype = DType::kF32,
                .num_blocks = kBlocks,
                .block_size = 16,
                .kv_lora_rank = 32,
                .rope_dim = 8,
                .scale = {}};
  return made;
}

World::World(std::uint64_t seed)
    : dice(seed), context(Context::create()), queue(context->create_queue()) {
  for (const std::size_t bytes : {4U, 64U, 1024U, 4096U, 16384U, 65536U}) {
    buffers.push_back(context->allocate(bytes));
    queue.fill(buffers.back(), 0, 0, bytes);
  }
  results = context->allocate(buffers.back().size_bytes());
  for (int i = 0; i < 10; ++i) rows.push_back(context->allocate(512));
  for (int i = 0; i < 4; ++i) layers.push_back(make_paged(*this, random_config(dice)));
  latents.push_back(make_latent(*this));
  errors = std::make_unique<DeviceErrors>(*context, queue);
  c = std::make_unique<CWorld>(*context);
  // Small numbers: slots, block ids and lengths, some of 4 and some of 8 bytes.
  for (std::size_t at = 0; at < sent.size(); at += dice.one_in(2) ? 4U : 8U) {
    sent[at] = static_cast<std::byte>(dice.below(40));
  }
}

TensorRef World::tensor() {
  TensorRef made{.buffer = (dice.one_in(8) ? buffer() : buffers.back()).handle()};
  if (dice.one_in(20)) made.offset = dice.odd_number();
  if (dice.one_in(20)) made.token_stride = dice.odd_number();
  if (dice.one_in(60)) made.buffer = nullptr;
  return made;
}

TensorRef World::output() {
  TensorRef made = tensor();
  if (made.buffer == buffers.back().handle() && !dice.one_in(30)) made.buffer = results.handle();
  return made;
}

std::size_t World::slot_offset_bytes() {
  return static_cast<std::size_t>(dice.one_in(6) ? dice.odd_number() : 8 * dice.below(20));
}

// One field of a batch, replaced.
static void spoil(Dice& dice, RandomBatch& made) {
  const auto number = dice.odd_number();
  const auto small = static_cast<std::int32_t>(number);
  CommonAttentionMetadata& batch = made.batch;
  switch (dice.below(12)) {
    case 0:
      batch.num_reqs = small;
      break;
    case 1:
      batch.num_actual_tokens = small;
      break;
    case 2:
      batch.max_query_len = small;
      break;
    case 3:
      batch.max_seq_len = small;
      break;
    case 4:
      batch.block_table_stride = number;
      break;
    case 5:
      batch.query_start_loc = batch.query_start_loc.first(0);
      break;
    case 6:
      batch.seq_lens = batch.seq_lens.first(batch.seq_lens.size() / 2);
      break;
    case 7:
      batch.block_table = batch.block_table.first(batch.block_table.size() / 2);
      break;
    case 8:
      dice.pick(made.query_start_loc) = small;
      break;
    case 9:
      dice.pick(made.seq_lens) = small;
      break;
    case 10:
      dice.pick(made.block_table) = small;
      break;
    default:
      batch.graph_pad_size = small;
  }
}

RandomBatch World::batch(Dice& dice, std::int32_t block_size) {
  RandomBatch made;
  const std::int64_t requests = 1 + dice.below(4);
  const std::int64_t columns = 64 / block_size + 1;
  made.query_start_loc = {0};
  const bool decodes = dice.one_in(2);
  for (std::int64_t r = 0; r < requests; ++r) {
    const std::int64_t query = decodes ? 1 : dice.below(12);
    made.seq_lens.push_back(static_cast<std::int32_t>(query + dice.below(50)));
    made.query_start_loc.push_back(made.query_start_loc.back() + static_cast<std::int32_t>(query));
    for (std::int64_t i = 0; i < columns; ++i) {
      made.block_table.push_back(static_cast<std::int32_t>(dice.below(kBlocks)));
    }
  }
  made.batch = CommonAttentionMetadata::of(made.query_start_loc, made.seq_lens, made.block_table);
  if (dice.one_in(4)) {
    made.slots.resize(static_cast<std::size_t>(made.batch.num_actual_tokens));
    for (std::int64_t& slot : made.slots) slot = dice.below(std::int64_t{kBlocks} * block_size);
    if (dice.one_in(3) && !made.slots.empty()) dice.pick(made.slots) = dice.odd_number();
    made.batch.slot_mapping = made.slots;
  }
  if (dice.one_in(3)) spoil(dice, made);
  return made;
}

std::vector<BlockPair> World::block_pairs() {
  std::vector<BlockPair> pairs(static_cast<std::size_t>(dice.below(4)));
  for (BlockPair& pair : pairs) pair = {dice.below(kBlocks), dice.below(kBlocks)};
  if (!pairs.empty() && dice.one_in(5)) dice.pick(pairs).source = dice.odd_number();
  return pairs;
}

}  // namespace test
