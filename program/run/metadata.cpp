#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <clattn/compat/page.hpp>
#include <clattn/compat/virtual_batches.hpp>
#include <clattn/registry.hpp>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "program/common/error.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {
namespace {

using nlohmann::json;

std::int32_t read_block_size(CaseFile& file) {
  return file.int32("block_size", kBlockSize);
}

std::int32_t read_threshold(CaseFile& file) {
  return file.int32("decode_threshold", {1, INT32_MAX}, 1);
}

}  // namespace

void run_split_decodes_and_prefills(CaseFile& file, const RunOptions& /*options*/,
                                    CaseOutputs& outputs) {
  const std::int32_t threshold = read_threshold(file);
  file.refuse_unknown_keys();
  BatchArrays batch;
  batch.query_start_loc = read_prefix_sums(file, "query_start_loc", -1);
  // Only the query lengths matter here; sequences as long as their queries make a valid batch.
  for (std::size_t r = 0; r + 1 < batch.query_start_loc.size(); ++r) {
    batch.seq_lens.push_back(batch.query_start_loc[r + 1] - batch.query_start_loc[r]);
  }
  const BatchSplit split = split_decodes_and_prefills(batch.metadata(), threshold);
  outputs.add("result", json{{"num_decodes", split.num_decodes},
                             {"num_prefills", split.num_prefills},
                             {"num_decode_tokens", split.num_decode_tokens},
                             {"num_prefill_tokens", split.num_prefill_tokens}});
}

void run_reorder_batch(CaseFile& file, const RunOptions& /*options*/, CaseOutputs& outputs) {
  const std::int32_t threshold = read_threshold(file);
  file.refuse_unknown_keys();
  const std::vector<std::int32_t> scheduled = file.indices32("num_scheduled_tokens", {-1});
  for (std::size_t r = 0; r < scheduled.size(); ++r) {
    throw_invalid_if(scheduled[r] < 0,
                     "num_scheduled_tokens.npy: request {}: {}; expected at least 0", r,
                     scheduled[r]);
  }
  std::vector<std::int32_t> order(scheduled.size());
  const bool modified = reorder_batch_to_split_decodes_and_prefills(scheduled, threshold, order);
  outputs.add_values("order", order);
  outputs.add("result", json{{"modified", modified}});
}

void run_paged_kv_metadata(CaseFile& file, const RunOptions& /*options*/, CaseOutputs& outputs) {
  const std::int32_t block_size = read_block_size(file);
  file.refuse_unknown_keys();
  BatchArrays batch = read_batch(file);
  // The page lists depend on the sequences alone: no request needs a query.
  batch.query_start_loc.assign(batch.seq_lens.size() + 1, 0);
  validate_batch(batch.metadata(), block_size, -1);
  const PagedKVMetadata paged = build_paged_kv_metadata(batch.metadata(), block_size);
  outputs.add_values("paged_kv_indptr", paged.indptr);
  outputs.add_values("paged_kv_indices", paged.indices);
  outputs.add_values("paged_kv_last_page_len", paged.last_page_len);
}

void run_compute_slot_mapping(CaseFile& file, const RunOptions& /*options*/, CaseOutputs& outputs) {
  const std::int32_t block_size = read_block_size(file);
  file.refuse_unknown_keys();
  const BatchArrays batch = read_batch_with_queries(file);
  // A handful of numbers can ask for any size of output.
  constexpr std::int32_t kMostTokens = 1 << 28;
  throw_invalid_if(batch.query_start_loc.back() > kMostTokens,
                   "query_start_loc.npy: the last entry is {}; expected at most {} tokens",
                   batch.query_start_loc.back(), kMostTokens);
  validate_batch(batch.metadata(), block_size, -1);
  std::vector<std::int64_t> slots(to_size(batch.query_start_loc.back()));
  compute_slot_mapping(batch.metadata(), block_size, slots);
  outputs.add_values("slot_mapping", slots);
}

void run_local_virtual_batches(CaseFile& file, const RunOptions& /*options*/,
                               CaseOutputs& outputs) {
  const auto chunk = file.int32("attn_chunk_size", {1, INT32_MAX});
  const std::int32_t block_size = read_block_size(file);
  file.refuse_unknown_keys();
  const BatchArrays batch = read_batch_with_queries(file);
  // A handful of numbers can ask for any size of output: a row for each chunk that tokens touch.
  constexpr std::int64_t kMostEntries = 1 << 28;
  validate_batch(batch.metadata(), block_size, -1);
  std::int64_t rows = 0;
  for (std::size_t r = 0; r < batch.seq_lens.size(); ++r) {
    const std::int32_t query_len = batch.query_start_loc[r + 1] - batch.query_start_loc[r];
    if (query_len == 0) continue;
    rows += (batch.seq_lens[r] - 1) / chunk - (batch.seq_lens[r] - query_len) / chunk + 1;
  }
  throw_invalid_if(rows > kMostEntries / std::max(chunk / block_size, 1),
                   "{} virtual requests of {} blocks; expected at most {} entries of "
                   "block_table",
                   rows, chunk / block_size, kMostEntries);
  const LocalAttentionVirtualBatches local =
      make_local_attention_virtual_batches(chunk, batch.metadata(), block_size);
  outputs.add_values("query_start_loc", local.query_start_loc);
  outputs.add_values("seq_lens", local.seq_lens);
  outputs.add_values("virtual_batch_to_request", local.virtual_batch_to_request);
  outputs.add_values("block_table", local.block_table,
                     {local.num_virtual(), local.blocks_per_chunk});
}

void run_kv_cache_shape(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  if (options.backend.empty()) static_cast<void>(file.text("backend"));  // required
  const std::string name = read_backend(file, options);
  const AttentionBackend& backend = backend_named(name);
  KVCacheSpec spec;
  const std::int64_t num_blocks = file.integer("num_blocks", {0, INT32_MAX});
  spec.block_size = read_block_size(file);
  spec.num_kv_heads = file.int32("num_kv_heads", kHeads);
  spec.head_size = file.int32("head_size", kHeadSize);
  const std::optional<KVCacheLayout> wanted = read_layout(file);
  const DType dtype = read_dtype(file, "f16");
  spec.dtype = read_kv_cache_dtype(file).value_or(dtype);
  spec.use_mla = backend.is_mla();
  file.refuse_unknown_keys();

  const KVCacheLayout layout = choose_layout(backend, wanted, nullptr);
  const std::array<std::int64_t, 5> shape =
      backend.get_kv_cache_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size);
  const std::array<std::int32_t, 5> order = backend.get_kv_cache_stride_order(layout);
  std::array<std::int64_t, 5> strides{};
  std::int64_t stride = 1;
  for (std::size_t place = order.size(); place-- > 0;) {
    const auto dimension = to_size(order[place]);
    strides[dimension] = stride;
    throw_invalid_if(__builtin_mul_overflow(stride, shape[dimension], &stride),
                     "a cache of shape {} overflows", shape_text(shape));
  }
  outputs.add("result", json{{"shape", shape},
                             {"stride_order", order},
                             {"strides", strides},
                             {"page_size_bytes", spec.page_size_bytes()}});
}

void run_select_backend(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  AttentionConfig config;
  config.head_size = file.int32("head_size", kHeadSize);
  config.num_heads = config.num_kv_heads = 1;
  config.block_size = file.int32("block_size", kBlockSize, 16);
  config.dtype = read_dtype(file);
  config.kv_cache_dtype = read_kv_cache_dtype(file);
  config.is_attention_free = file.boolean("is_attention_free", false);
  config.use_mla = file.boolean("use_mla", false);
  if (file.boolean("has_sink", false)) config.sinks = {0.0F};
  file.refuse_unknown_keys();
  const AttentionBackend& chosen = *get_attn_backend(config, nullptr, options.backend);
  json rejected = json::object();
  for (const BackendChoice::Rejection& row : choose_attn_backend(config, nullptr).rejected) {
    rejected[row.name] = fmt::format("{}", fmt::join(row.reasons, "; "));
  }
  outputs.add("result", json{{"backend", chosen.name()}, {"rejected", rejected}});
}

}  // namespace clattn::cli
