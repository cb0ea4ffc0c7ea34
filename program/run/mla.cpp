#include <algorithm>
#include <clattn/mla.hpp>
#include <cstdint>
#include <limits>
#include <vector>

#include "program/common/elements.hpp"
#include "program/common/error.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {
namespace {

/// Rows of the query whose requests are planned with keys, which alone are run, and the batch made
/// of them.
void compact(AttentionCall& call, const std::vector<std::byte>& query) {
  const std::size_t requests = call.seq_lens.size();
  const std::size_t row_bytes = requests == 0 ? 0 : query.size() / requests;
  const std::vector<std::int32_t>& planned =
      call.seq_len_bounds.empty() ? call.seq_lens : call.seq_len_bounds;
  call.query_start_loc = {0};
  for (std::size_t r = 0; r < requests; ++r) {
    call.query_start_loc.push_back(call.query_start_loc.back());
    if (planned[r] > 0) {
      ++call.query_start_loc.back();
      const auto from = query.begin() + static_cast<std::ptrdiff_t>(r * row_bytes);
      call.query.insert(call.query.end(), from, from + static_cast<std::ptrdiff_t>(row_bytes));
    }
  }
}

/// An mla_decode case: one query token a request, or none where it is planned without keys.
AttentionCall read_mla_case(CaseFile& file) {
  AttentionCall call;
  AttentionConfig& config = call.config;
  const NpyArray any_query = file.array("query", "", {-1, -1, -1});
  config.dtype = read_dtype(file, any_query, "query");
  config.use_mla = true;
  config.num_kv_heads = 1;
  config.kv_cache_dtype = read_kv_cache_dtype(file);
  const std::int64_t width = any_query.shape[2];
  config.head_size = static_cast<std::int32_t>(width);
  config.rope_dim = config.head_size - file.int32("kv_lora_rank", {1, width});
  config.num_heads = static_cast<std::int32_t>(any_query.shape[1]);
  if (file.has("scale")) config.scale = static_cast<float>(file.number("scale"));
  call.num_splits = file.int32("num_splits", {0, 65536}, 0);
  call.plan = read_plan(file);
  config.kernel_family = read_kernel_family(file);
  const std::int32_t num_rows = file.int32("num_actual_tokens", kCount, 0);
  const float scale = read_scale(file, config.cache_dtype());
  if (is_quantized(config.cache_dtype())) call.scales = {scale, scale};
  file.refuse_unknown_keys();

  static_cast<BatchArrays&>(call) = read_batch(file);
  const auto requests = static_cast<std::int64_t>(call.seq_lens.size());
  const NpyArray query =
      file.array("query", descr_of(config.dtype), {requests, config.num_heads, width});
  NpyArray cache = file.array("kv_cache", descr_of(config.cache_dtype()), {-1, -1, width});
  call.num_blocks = cache.shape[0];
  config.block_size = static_cast<std::int32_t>(std::min<std::int64_t>(cache.shape[1], INT32_MAX));
  call.backend = kMLABackendName;
  call.layout = KVCacheLayout::kNHD;
  call.cache = {cache.data, std::move(cache.data)};
  if (file.has_array("seq_len_bounds")) {
    call.seq_len_bounds = file.indices32("seq_len_bounds", {requests});
    validate_bounds(call.seq_lens, call.seq_len_bounds, call.max_blocks * config.block_size);
  }
  compact(call, query.data);
  pad_to(num_rows, call);
  config.use_first_keys = file.has_array("first_keys");
  config.use_trees = file.has_array("tree_parents");
  read_seen_keys(file, call);
  return call;
}

}  // namespace

void run_mla_decode(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  if (!options.backend.empty() && !backend_named(options.backend).is_mla())
    throw_unsupported("--backend {} for mla_decode: not supported yet", options.backend);
  const AttentionCall call = read_mla_case(file);
  const auto context = Context::create(options.device);
  const AttentionOutcome outcome = execute(context, call);

  const auto heads = to_size(call.config.num_heads);
  const std::int32_t rank = call.config.output_head_size();
  const std::size_t row = heads * to_size(rank);
  const std::size_t requests = call.seq_lens.size();
  const std::vector<double> got = decode_elements(call.config.dtype, outcome.out);
  std::vector<float> out(requests * row, 0.0F);
  std::vector<float> lse(requests * heads, -std::numeric_limits<float>::infinity());
  for (std::size_t r = 0; r < requests; ++r) {
    const auto token = to_size(call.query_start_loc[r]);
    if (call.query_start_loc[r + 1] == call.query_start_loc[r]) continue;
    for (std::size_t i = 0; i < row; ++i)
      out[r * row + i] = static_cast<float>(got[token * row + i]);
    std::copy_n(&outcome.lse[token * heads], heads, &lse[r * heads]);
  }
  const auto count = static_cast<std::int64_t>(requests);
  outputs.add_values("out", out, {count, call.config.num_heads, rank});
  outputs.add_values("lse", lse, {count, call.config.num_heads});
  outputs.add("info", attention_info("mla_decode", *context, outcome));
  if (options.verify) verify_outcome(call, outcome, outputs);
}

}  // namespace clattn::cli
