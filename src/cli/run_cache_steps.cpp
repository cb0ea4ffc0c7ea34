#include <fmt/format.h>

#include <array>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/device_memory.hpp"
#include "cli/elements.hpp"
#include "cli/run.hpp"

namespace clattn::cli {
namespace {

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

}  // namespace clattn::cli
