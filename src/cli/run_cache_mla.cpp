#include <array>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/run.hpp"

namespace clattn::cli {

void run_concat_and_cache_mla(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const std::array<std::int64_t, 2> any_rows = {-1, -1};
  NpyArray latent = file.array("kv_c", "", any_rows);
  NpyArray rope = file.array("k_pe", "", std::array<std::int64_t, 2>{latent.shape[0], -1});
  const std::int64_t width = latent.shape[1] + rope.shape[1];
  const std::array<std::int64_t, 3> any_cache = {-1, -1, width};
  const std::vector<std::int64_t> shape = file.array("kv_cache", "", any_cache).shape;
  const DType dtype = read_dtype(file, std::string(to_string(dtype_of(latent, "kv_c"))));
  const DType cache_dtype = read_kv_cache_dtype(file).value_or(dtype);
  require_extent(file, "block_size", kBlockSize, shape[1]);
  require_extent(file, "kv_lora_rank", kHeadSize, latent.shape[1]);
  require_extent(file, "rope_dim", kHeadSize, rope.shape[1]);
  const float scale = read_scale(file, cache_dtype);
  file.refuse_unknown_keys();
  latent = file.array("kv_c", descr_of(dtype), latent.shape);
  rope = file.array("k_pe", descr_of(dtype), rope.shape);
  NpyArray entries = file.array("kv_cache", descr_of(cache_dtype), shape);
  const std::vector<std::int64_t> slots = read_slots(file, latent.shape[0], shape[0] * shape[1]);

  const auto context = Context::create(options.device);
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  MLACache cache;
  cache.buffer = upload(*context, queue, std::span<const std::byte>(entries.data));
  cache.dtype = cache_dtype;
  cache.num_blocks = shape[0];
  cache.block_size = static_cast<std::int32_t>(shape[1]);
  cache.kv_lora_rank = static_cast<std::int32_t>(latent.shape[1]);
  cache.rope_dim = static_cast<std::int32_t>(rope.shape[1]);
  if (is_quantized(cache_dtype)) {
    cache.scale = upload(*context, queue, std::span<const float>(&scale, 1));
  }
  const Buffer kv_c = upload(*context, queue, std::span<const std::byte>(latent.data));
  const Buffer k_pe = upload(*context, queue, std::span<const std::byte>(rope.data));
  const Buffer mapping = upload(*context, queue, std::span<const std::int64_t>(slots));
  Event event;
  concat_and_cache_mla(*context, queue, {.buffer = kv_c.handle()}, {.buffer = k_pe.handle()}, dtype,
                       cache, mapping.handle(), 0, static_cast<std::int64_t>(slots.size()), &event);
  queue.finish();
  if (!entries.data.empty()) queue.read(cache.buffer, entries.data);
  outputs.add("kv_cache_out", std::move(entries));
  outputs.add("info", device_info("concat_and_cache_mla", *context, event));
}

}  // namespace clattn::cli
