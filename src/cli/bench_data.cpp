#include "cli/bench_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <span>
#include <utility>

#include "cli/attention_call.hpp"
#include "cli/check_batches.hpp"
#include "cli/elements.hpp"

namespace clattn::cli {
namespace {

std::int64_t pages_of(const BenchShape& shape, std::int32_t block_size) {
  return (shape.seq_len + std::int64_t{block_size} - 1) / block_size;
}

}  // namespace

TiledRandom::TiledRandom(DType dtype, std::uint32_t seed)
    : bytes_(random_elements(dtype, kPeriod, seed)), values_(decode_elements(dtype, bytes_)) {}

void TiledRandom::fill(const Queue& queue, const Buffer& buffer, std::size_t num_elements) const {
  const std::size_t size_bytes = num_elements * (bytes_.size() / kPeriod);
  for (std::size_t at = 0; at < size_bytes; at += bytes_.size()) {
    queue.write(buffer, std::span(bytes_).first(std::min(bytes_.size(), size_bytes - at)), at);
  }
}

std::vector<std::int32_t> RotatingCache::block_table(std::int32_t set) const {
  const auto begin = pages.begin() + set * pages_per_set;
  return {begin, begin + pages_per_set};
}

RotatingCache make_rotating_cache(const std::shared_ptr<Context>& context,
                                  const BenchOptions& options, const BenchShape& shape) {
  constexpr std::size_t kMaxSets = 256;  // each has a metadata builder of its own
  const DeviceCapabilities& device = context->capabilities();
  const AttentionConfig& config = options.config;
  RotatingCache result;
  result.backend = &get_attn_backend(config, &device, options.backend);
  const KVCacheSpec spec{.kind = KVCacheKind::kFull,
                         .block_size = config.block_size,
                         .num_kv_heads = config.num_kv_heads,
                         .head_size = config.head_size,
                         .dtype = config.cache_dtype()};
  result.pages_per_set = shape.batch * pages_of(shape, config.block_size);
  const std::size_t set_bytes =
      static_cast<std::size_t>(result.pages_per_set) * spec.page_size_bytes();
  const std::size_t room =
      static_cast<std::size_t>(std::min(device.max_alloc_bytes, device.global_mem_bytes / 2));
  if (set_bytes > room) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("needs {} bytes of KV cache, the device has room for {}", set_bytes, room));
  }
  const std::size_t wanted = (options.rotate_bytes + set_bytes - 1) / set_bytes;
  result.num_sets = static_cast<std::int32_t>(
      std::clamp<std::size_t>(wanted, 1, std::min(kMaxSets, room / set_bytes)));
  const std::int64_t num_pages = result.pages_per_set * result.num_sets;
  result.cache = make_cache(*context, *result.backend, result.backend->preferred_layout(device),
                            spec, num_pages);
  result.pages.resize(static_cast<std::size_t>(num_pages));
  std::iota(result.pages.begin(), result.pages.end(), 0);
  std::shuffle(result.pages.begin(), result.pages.end(), std::mt19937(7));
  return result;
}

EqualBatch::EqualBatch(const BenchShape& shape, std::int32_t block_size,
                       std::vector<std::int32_t> table)
    : seq_lens(static_cast<std::size_t>(shape.batch), shape.seq_len),
      block_table(std::move(table)),
      max_blocks(pages_of(shape, block_size)),
      max_query_len(shape.query_len) {
  for (std::int32_t r = 0; r <= shape.batch; ++r) query_start_loc.push_back(r * shape.query_len);
}

CommonAttentionMetadata EqualBatch::metadata() const {
  CommonAttentionMetadata batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.num_reqs = static_cast<std::int32_t>(seq_lens.size());
  batch.num_actual_tokens = query_start_loc.back();
  batch.max_query_len = max_query_len;
  batch.block_table = block_table;
  batch.block_table_stride = max_blocks;
  return batch;
}

BuilderOptions builder_options(const BenchShape& shape, std::int64_t num_blocks) {
  BuilderOptions options;
  options.limits = {.max_num_reqs = shape.batch,
                    .max_num_batched_tokens = shape.num_tokens(),
                    .max_model_len = shape.seq_len,
                    .num_blocks = num_blocks};
  return options;
}

}  // namespace clattn::cli
