#include <clattn/cache_ops.hpp>
#include <clattn/mla.hpp>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "program/common/device_memory.hpp"
#include "program/common/error.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {
namespace {

/// kv_cache.npy, [num_blocks, block_size, kv_lora_rank + rope_dim], on the host, and its upload to
/// the device.
struct LatentRows {
  DType dtype = DType::kF16;
  std::int32_t kv_lora_rank = 0;
  float scale = 1;
  NpyArray array;

  MLACache upload_to(const OnDevice& on) const {
    MLACache cache;
    cache.buffer = on.up(array.data);
    cache.dtype = dtype;
    cache.num_blocks = array.shape[0];
    cache.block_size = static_cast<std::int32_t>(array.shape[1]);
    cache.kv_lora_rank = kv_lora_rank;
    cache.rope_dim = static_cast<std::int32_t>(array.shape[2]) - kv_lora_rank;
    if (is_quantized(dtype)) cache.scale = on.up(std::span<const float>(&scale, 1));
    return cache;
  }
  void add_to(CaseOutputs& outputs, const Queue& queue, const MLACache& cache) {
    queue.finish();
    if (!array.data.empty()) queue.read(cache.buffer, array.data);
    outputs.add("kv_cache_out", std::move(array));
  }
};

}  // namespace

void run_concat_and_cache_mla(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const Extents any_rows = {-1, -1};
  NpyArray latent = file.array("kv_c", "", any_rows);
  NpyArray rope = file.array("k_pe", "", {latent.shape[0], -1});
  const Extents any_cache = {-1, -1, latent.shape[1] + rope.shape[1]};
  const std::vector<std::int64_t> shape = file.array("kv_cache", "", any_cache).shape;
  const DType dtype = read_dtype(file, latent, "kv_c");
  LatentRows rows{.dtype = read_kv_cache_dtype(file).value_or(dtype), .array = {}};
  require_extent(file, "block_size", kBlockSize, shape[1]);
  require_extent(file, "kv_lora_rank", kHeadSize, latent.shape[1]);
  require_extent(file, "rope_dim", kHeadSize, rope.shape[1]);
  rows.kv_lora_rank = static_cast<std::int32_t>(latent.shape[1]);
  rows.scale = read_scale(file, rows.dtype);
  file.refuse_unknown_keys();
  latent = file.array("kv_c", descr_of(dtype), latent.shape);
  rope = file.array("k_pe", descr_of(dtype), rope.shape);
  rows.array = file.array("kv_cache", descr_of(rows.dtype), shape);
  const std::vector<std::int64_t> slots = read_slots(file, latent.shape[0], shape[0] * shape[1]);

  const OnDevice on{Context::create(options.device)};
  const MLACache cache = rows.upload_to(on);
  const Buffer kv_c = on.up(latent.data);
  const Buffer k_pe = on.up(rope.data);
  const Buffer mapping = on.up(slots);
  Event event;
  concat_and_cache_mla(*on.context, on.queue, {.buffer = kv_c.handle()}, {.buffer = k_pe.handle()},
                       dtype, cache, mapping.handle(), 0, std::ssize(slots), &event);
  rows.add_to(outputs, on.queue, cache);
  outputs.add("info", device_info("concat_and_cache_mla", *on.context, event));
}

void run_copy_blocks_mla(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const NpyArray any = file.array("kv_cache", "", {-1, -1, -1});
  LatentRows rows{.dtype = read_cache_dtype(file, any, "kv_cache"), .array = {}};
  file.refuse_unknown_keys();
  rows.array = file.array("kv_cache", descr_of(rows.dtype), any.shape);
  rows.kv_lora_rank = static_cast<std::int32_t>(any.shape[2]);  // copies ignore the two parts
  const std::vector<BlockPair> mapping = read_mapping(file);

  const OnDevice on{Context::create(options.device)};
  const MLACache cache = rows.upload_to(on);
  Event event;
  copy_blocks_mla(*on.context, on.queue, std::span(&cache, 1), mapping, &event);
  rows.add_to(outputs, on.queue, cache);
  outputs.add("info", device_info("copy_blocks_mla", *on.context, event));
}

void run_move_tokens_mla(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const NpyArray any = file.array("kv_cache", "", {-1, -1, -1});
  LatentRows rows{.dtype = read_cache_dtype(file, any, "kv_cache"), .array = {}};
  file.refuse_unknown_keys();
  rows.array = file.array("kv_cache", descr_of(rows.dtype), any.shape);
  rows.kv_lora_rank = static_cast<std::int32_t>(any.shape[2]);  // moves ignore the two parts
  const MovedSlots moves = read_moves(file);

  const OnDevice on{Context::create(options.device)};
  const MLACache cache = rows.upload_to(on);
  Event event;
  move_tokens_mla(*on.context, on.queue, std::span(&cache, 1), moves.view(), &event);
  rows.add_to(outputs, on.queue, cache);
  outputs.add("info", device_info("move_tokens_mla", *on.context, event));
}

void run_gather(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const NpyArray any = file.array("kv_cache", "", {-1, -1, -1});
  const DType dtype = read_dtype(file);
  LatentRows rows{.dtype = read_kv_cache_dtype(file).value_or(dtype), .array = {}};
  rows.kv_lora_rank = file.int32("kv_lora_rank", {1, any.shape[2]});
  rows.scale = read_scale(file, rows.dtype);
  file.refuse_unknown_keys();
  rows.array = file.array("kv_cache", descr_of(rows.dtype), any.shape);
  const std::vector<std::int32_t> starts = read_prefix_sums(file, "cu_seq_lens", -1);
  const std::int64_t num_reqs = std::ssize(starts) - 1;
  Extents table_shape;
  const std::vector<std::int32_t> table =
      file.indices32("block_table", {num_reqs, -1}, &table_shape);
  std::vector<std::int32_t> first;
  if (file.has_array("seq_starts")) first = file.indices32("seq_starts", {num_reqs});
  for (std::size_t r = 0; r + 1 < starts.size(); ++r) {  // before memory is taken for them
    throw_invalid_if(starts[r + 1] - starts[r] > table_shape[1] * any.shape[1],
                     "cu_seq_lens.npy: request {} has {} tokens; expected at most {} ({} pages of "
                     "{} in block_table.npy)",
                     r, starts[r + 1] - starts[r], table_shape[1] * any.shape[1], table_shape[1],
                     any.shape[1]);
  }

  const OnDevice on{Context::create(options.device)};
  const MLACache cache = rows.upload_to(on);
  const std::int64_t width = any.shape[2];
  NpyArray out{std::string(descr_of(dtype)),
               {starts.back(), width},
               std::vector<std::byte>(to_size(starts.back() * width) * element_size_bytes(dtype))};
  const Buffer destination = on.up(out.data);
  Event event;
  gather_and_maybe_dequant_cache(*on.context, on.queue, cache, {.buffer = destination.handle()},
                                 dtype,
                                 {.cu_seq_lens = starts,
                                  .block_table = table,
                                  .block_table_stride = table_shape[1],
                                  .seq_starts = first},
                                 &event);
  on.queue.finish();
  if (!out.data.empty()) on.queue.read(destination, out.data);
  outputs.add("dst", std::move(out));
  outputs.add("info", device_info("gather_and_maybe_dequant_cache", *on.context, event));
}

void run_calc_kv_scales(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const Extents any_rows = {-1, -1, -1};
  const NpyArray query = file.array("query", "", any_rows);
  const NpyArray key = file.array("key", query.descr, any_rows);
  const NpyArray value = file.array("value", query.descr, {key.shape[0], key.shape[1], -1});
  AttentionOptions layer_options{.prefix = "layer.0", .calculate_kv_scales = true};
  AttentionConfig& config = layer_options.config;
  config.dtype = read_dtype(file, query, "query");
  config.kv_cache_dtype = read_kv_cache_dtype(file);
  config.use_mla = file.boolean("use_mla", false);
  file.refuse_unknown_keys();
  if (!is_quantized(config.cache_dtype()))
    throw_invalid("case.json: kv_cache_dtype: expected fp8_e4m3, fp8_e5m2 or int8");
  config.num_heads = static_cast<std::int32_t>(query.shape[1]);
  config.num_kv_heads = static_cast<std::int32_t>(key.shape[1]);
  config.head_size = static_cast<std::int32_t>(query.shape[2]);
  if (config.use_mla) config.rope_dim = static_cast<std::int32_t>(value.shape[2]);
  const std::int64_t latent = config.use_mla ? value.shape[2] : 0;
  throw_invalid_if(
      key.shape[2] + latent != query.shape[2] ||
          (!config.use_mla && value.shape[2] != query.shape[2]),
      "key.npy, value.npy: rows of {} and {} elements, query.npy of {}; expected equal widths, or "
      "with use_mla two that add up to the query's",
      key.shape[2], value.shape[2], query.shape[2]);

  const OnDevice on{Context::create(options.device)};
  LayerRegistry registry;
  Attention layer(on.context, registry, layer_options);
  const Buffer q = on.up(query.data), k = on.up(key.data), v = on.up(value.data);
  layer.calc_kv_scales(on.queue, {.buffer = q.handle()}, {.buffer = k.handle()},
                       {.buffer = v.handle()}, query.shape[0], key.shape[0]);
  outputs.add_values("scales", on.down<float>(layer.scales(), 3));  // of K, V and Q
  outputs.add("info", device_info("calc_kv_scales", *on.context, {}));
}

}  // namespace clattn::cli
