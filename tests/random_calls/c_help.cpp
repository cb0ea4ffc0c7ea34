#include "random_calls/c_help.hpp"

#include <algorithm>
#include <clattn/error.hpp>
#include <string>

using clattn::Error;
using clattn::ErrorCode;

namespace test::c {

void tell(ClattnResult status) {
  if (status == CLATTN_SUCCESS) return;
  const std::string text = clattn_last_error();
  if (text.empty()) throw std::runtime_error("no text for " + std::to_string(status));
  if (status == CLATTN_ERROR_INTERNAL || status == CLATTN_ERROR_OUT_OF_MEMORY)
    throw std::runtime_error(text);
  if ((status == CLATTN_ERROR_OPENCL) != (clattn_last_cl_error() != CL_SUCCESS))
    throw std::runtime_error("a status of OpenCL that does not fit: " + text);
  throw Error(status == CLATTN_ERROR_OPENCL ? ErrorCode::kOpenCL : ErrorCode::kInvalidArgument,
              text);
}

ClattnTensorRef tensor_of(Dice& dice, const ClattnBuffer* buffer) {
  ClattnTensorRef made{};
  made.buffer = dice.one_in(40) ? nullptr : buffer;
  if (dice.one_in(20)) made.offset = dice.odd_number();
  if (dice.one_in(20)) made.token_stride = dice.odd_number();
  return made;
}

ClattnLayerConfig layer_config(Dice& dice) {
  auto config = sized<ClattnLayerConfig>(dice);
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_size = 32;
  return config;
}

ClattnStepOptions step_options(Dice& dice) {
  auto options = sized<ClattnStepOptions>(dice);
  options.max_num_reqs = 8;
  options.max_num_batched_tokens = 64;
  options.max_model_len = 128;
  if (dice.one_in(4)) {
    const std::array fields = {&options.max_num_reqs, &options.decode_threshold,
                               &options.num_splits, &options.deterministic, &options.side_by_side};
    *dice.pick(fields) = static_cast<std::int32_t>(dice.odd_number() % 1000);
  }
  options.device_seq_lens = dice.one_in(8);
  options.device_query_lens = dice.one_in(16);
  options.graph_mixed = dice.one_in(16);
  options.device_directions = dice.one_in(16);
  options.device_trees = dice.one_in(16);
  return options;
}

Batch batch(World& world) {
  Dice& dice = world.dice;
  Batch made{world.batch(16), sized<ClattnBatchInfo>(dice)};
  const RandomBatch& drawn = made.drawn;
  ClattnBatchInfo& info = made.info;
  // Only what a count tells may be wrong.
  info.num_reqs =
      static_cast<std::int32_t>(std::min(drawn.query_start_loc.size() - 1, drawn.seq_lens.size()));
  if (dice.one_in(20)) info.num_reqs = -info.num_reqs;
  info.query_start_loc = drawn.query_start_loc.data();
  info.seq_lens = dice.one_in(40) ? nullptr : drawn.seq_lens.data();
  info.block_table = drawn.block_table.data();
  info.block_table_stride =
      static_cast<std::int64_t>(drawn.block_table.size() / drawn.seq_lens.size());
  info.slot_mapping = drawn.slots.empty() ? nullptr : drawn.slots.data();
  info.num_slots = static_cast<std::int64_t>(drawn.slots.size());
  if (dice.one_in(10)) info.causal = static_cast<std::int32_t>(dice.below(5)) - 2;
  info.fast_build = dice.one_in(8);
  if (dice.one_in(10)) info.common_prefix_len = static_cast<std::int32_t>(dice.odd_number());
  return made;
}

}  // namespace test::c
