#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/elements.hpp"
#include "cli/run.hpp"

namespace clattn::cli {
namespace {

template <typename T>
std::vector<T> download(const Queue& queue, const Buffer& buffer, std::size_t count) {
  std::vector<T> values(count);
  queue.read(buffer, std::as_writable_bytes(std::span(values)));
  return values;
}

template <typename T>
void add_vector(CaseOutputs& outputs, const std::string& name, const std::vector<T>& values) {
  outputs.add(name,
              make_array(sizeof(T) == 4 ? "<i4" : "<i8", {static_cast<std::int64_t>(values.size())},
                         std::span<const T>(values)));
}

/// Everything of a merge but its tensors; `seen` is its prefix_output.
MergeAttnStates read_merge(CaseFile& file, const NpyArray& seen) {
  constexpr std::array<std::string_view, 2> kBases = {"e", "2"};
  constexpr std::array<std::string_view, 3> kOutputTypes = {"fp8_e4m3", "fp8_e5m2", "int8"};
  MergeAttnStates config;
  config.dtype = read_dtype(file, std::string(to_string(dtype_of(seen, "prefix_output"))));
  config.num_tokens = seen.shape[0];
  require_extent(file, "num_heads", kHeads, seen.shape[1]);
  require_extent(file, "head_size", kHeadSize, seen.shape[2]);
  config.num_heads = static_cast<std::int32_t>(seen.shape[1]);
  config.head_size = static_cast<std::int32_t>(seen.shape[2]);
  config.prefill_tokens_with_context =
      file.integer("prefill_tokens_with_context", {0, config.num_tokens}, config.num_tokens);
  if (file.choice("lse_base", kBases, "e") == "2") config.lse_base = LseBase::k2;
  if (file.has("output_dtype") || file.has_array("output_scale"))
    config.output_dtype = parse_dtype(file.choice("output_dtype", kOutputTypes, "fp8_e4m3"));
  file.refuse_unknown_keys();
  return config;
}

}  // namespace

void run_merge_attn_states(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const NpyArray seen = file.array("prefix_output", "", std::array<std::int64_t, 3>{-1, -1, -1});
  MergeAttnStates config = read_merge(file, seen);
  const std::array<std::int64_t, 2> lse_shape = {seen.shape[0], seen.shape[1]};
  const NpyArray prefix = file.array("prefix_output", descr_of(config.dtype), seen.shape);
  const NpyArray suffix = file.array("suffix_output", descr_of(config.dtype), seen.shape);
  const NpyArray prefix_lse = file.array("prefix_lse", "<f4", lse_shape);
  const NpyArray suffix_lse = file.array("suffix_lse", "<f4", lse_shape);
  std::optional<NpyArray> scale;
  if (file.has_array("output_scale"))
    scale = file.array("output_scale", "<f4", std::array<std::int64_t, 1>{1});
  const auto context = Context::create(options.device);
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  const auto send = [&](const NpyArray& array) {
    return upload(*context, queue, std::span<const std::byte>(array.data));
  };
  const Buffer p = send(prefix);
  const Buffer s = send(suffix);
  const Buffer p_lse = send(prefix_lse);
  const Buffer s_lse = send(suffix_lse);
  const Buffer out = context->allocate(prefix.data.size());
  const Buffer lse = context->allocate(prefix_lse.data.size());
  Event event;
  const auto merge = [&](const MergeAttnStates& how) {
    merge_attn_states(*context, queue, how, {{.buffer = out.handle()}, {.buffer = lse.handle()}},
                      {{.buffer = p.handle()}, {.buffer = p_lse.handle()}},
                      {{.buffer = s.handle()}, {.buffer = s_lse.handle()}}, &event);
  };
  if (config.output_dtype) {  // in the same memory, before the output itself
    if (scale) config.output_scale = send(*scale);
    merge(config);
    const std::size_t count = prefix.data.size() / element_size_bytes(config.dtype);
    outputs.add(config.output_dtype == DType::kInt8 ? "out_int8" : "out_fp8",
                NpyArray{std::string(descr_of(*config.output_dtype)), seen.shape,
                         download<std::byte>(queue, out, count)});
    config.output_dtype = std::nullopt;
    config.output_scale = {};
  }
  merge(config);
  const std::vector<double> merged =
      decode_elements(config.dtype, download<std::byte>(queue, out, prefix.data.size()));
  const std::vector<float> narrow(merged.begin(), merged.end());
  outputs.add("out", make_array("<f4", seen.shape, std::span<const float>(narrow)));
  outputs.add("lse", NpyArray{"<f4",
                              {lse_shape.begin(), lse_shape.end()},
                              download<std::byte>(queue, lse, prefix_lse.data.size())});
  outputs.add("info", device_info("merge_attn_states", *context, event));
}

void run_advance_step(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const BatchArrays batch = read_batch(file);
  const auto rows = static_cast<std::int64_t>(batch.seq_lens.size());
  AdvanceStep step;
  step.num_seqs = static_cast<std::int32_t>(rows);
  step.block_size = static_cast<std::int32_t>(file.integer("block_size", kBlockSize));
  step.num_queries = static_cast<std::int32_t>(file.integer("num_queries", {0, rows}, rows));
  file.refuse_unknown_keys();
  std::vector<std::int64_t> sampled =
      file.indices64("sampled_token_ids", std::array<std::int64_t, 1>{-1});
  if (std::cmp_less(sampled.size(), step.num_queries)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("sampled_token_ids.npy: holds {}; expected at least {} (num_queries)",
                            sampled.size(), step.num_queries));
  }
  // The last pages as they are before the step: padding rows keep theirs.
  std::vector<std::int32_t> last_page;
  for (const std::int32_t length : batch.seq_lens) {
    last_page.push_back(length > 0 ? (length - 1) % step.block_size + 1 : 0);
  }
  const auto context = Context::create(options.device);
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  const auto n = static_cast<std::size_t>(rows);
  step.num_blocks = INT32_MAX;  // the case does not say
  step.block_table_stride = batch.max_blocks;
  step.seq_lens = upload(*context, queue, std::span<const std::int32_t>(batch.seq_lens));
  step.block_tables = upload(*context, queue, std::span<const std::int32_t>(batch.block_table));
  step.sampled_token_ids = upload(*context, queue, std::span<const std::int64_t>(sampled));
  step.input_tokens = context->allocate(n * 8);
  step.input_positions = context->allocate(n * 8);
  step.slot_mapping = context->allocate(n * 8);
  AdvanceStepPages pages;
  pages.paged_kv_indices = context->allocate(batch.block_table.size() * 4);
  pages.paged_kv_indptr = context->allocate((n + 1) * 4);
  pages.paged_kv_last_page_len = upload(*context, queue, std::span<const std::int32_t>(last_page));
  pages.block_table_bound = context->allocate(n * 4);
  DeviceErrors errors(*context, queue);
  Event event;
  advance_step_flashinfer(*context, queue, step, pages, errors, &event);
  errors.check(queue);
  const auto indptr = download<std::int32_t>(queue, pages.paged_kv_indptr, n + 1);
  add_vector(outputs, "input_tokens", download<std::int64_t>(queue, step.input_tokens, n));
  add_vector(outputs, "input_positions", download<std::int64_t>(queue, step.input_positions, n));
  add_vector(outputs, "seq_lens", download<std::int32_t>(queue, step.seq_lens, n));
  add_vector(outputs, "slot_mapping", download<std::int64_t>(queue, step.slot_mapping, n));
  add_vector(outputs, "paged_kv_indptr", indptr);
  add_vector(outputs, "paged_kv_indices",
             download<std::int32_t>(queue, pages.paged_kv_indices,
                                    static_cast<std::size_t>(indptr.back())));
  add_vector(outputs, "paged_kv_last_page_len",
             download<std::int32_t>(queue, pages.paged_kv_last_page_len, n));
  outputs.add("info", device_info("advance_step", *context, event));
}

}  // namespace clattn::cli
