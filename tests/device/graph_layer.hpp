#pragma once

#include <clattn/attn_utils.hpp>
#include <clattn/clattn.hpp>
#include <clattn/graph.hpp>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"

/// For tests of recorded steps: one layer of one KV head whose caches are page by page, so that a
/// token's place is easily said.
namespace graph_test {

using clattn::AttentionState;
using clattn::CommonAttentionMetadata;
using layer_test::Device;
using layer_test::random_values;

inline constexpr std::int32_t kDims = 16, kPage = 4, kBlocks = 12, kWidth = 3, kSize = 4;

inline clattn::AttentionOptions layer_options() {
  clattn::AttentionOptions options;
  options.config.num_heads = 1;
  options.config.head_size = kDims;
  options.prefix = "layers.0";
  options.config.dtype = clattn::DType::kF32;
  options.config.block_size = kPage;
  return options;
}

inline clattn::BuilderOptions builder_options() {
  clattn::BuilderOptions options;
  options.limits = {.max_num_reqs = 8,
                    .max_num_batched_tokens = 64,
                    .max_model_len = kWidth * kPage,
                    .num_blocks = kBlocks};
  return options;
}

/// One decode for each length; request r has the pages r * kWidth and those behind.
struct Step {
  std::vector<std::int32_t> starts{0}, lens, table;
  CommonAttentionMetadata batch;
  explicit Step(std::vector<std::int32_t> lengths) : lens(std::move(lengths)) {
    for (std::size_t r = 0; r < lens.size(); ++r) {
      starts.push_back(starts.back() + 1);
      for (std::int32_t p = 0; p < kWidth; ++p) {
        table.push_back((static_cast<std::int32_t>(r) * kWidth + p) % kBlocks);
      }
    }
    batch = CommonAttentionMetadata::of(starts, lens, table);
  }
  Step(const Step&) = delete;
};

/// A device with a layer, its cache of twos, and tensors for kSize tokens.
struct Layer : Device {
  clattn::LayerRegistry registry;
  clattn::Attention attention;
  clattn::Buffer query, key, out;

  explicit Layer(const std::shared_ptr<clattn::Context>& opened,
                 const clattn::AttentionOptions& options = layer_options())
      : Device(opened), attention(context, registry, options) {
    query = upload(random_values(kSize * kDims, 1));
    key = upload(random_values(kSize * kDims, 2));
    out = upload(std::vector<float>(kSize * kDims, -7));
    attention.bind_kv_cache(new_cache());
  }
  clattn::KVCache new_cache() const {
    const clattn::KVCacheSpec spec{
        .block_size = kPage, .num_kv_heads = 1, .head_size = kDims, .dtype = clattn::DType::kF32};
    const auto bytes = kBlocks * spec.page_size_bytes();
    return reshape_kv_cache(upload(std::vector<float>(bytes / sizeof(float), 2)), spec,
                            *attention.get_attn_backend(), clattn::KVCacheLayout::kNHD);
  }
  AttentionState state(const clattn::BuilderOptions& options = builder_options()) const {
    return {context, *attention.get_attn_backend(), attention.config(), options};
  }
  void forward(const clattn::AttentionMetadata& metadata, std::int64_t num_rows = 0) {
    attention.forward(queue,
                      {.query = {query.handle()},
                       .key = {key.handle()},
                       .value = {key.handle()},
                       .output = {out.handle()}},
                      &metadata, {.num_rows = num_rows});
  }
  clattn::Graph record(const clattn::AttentionMetadata& metadata, std::int64_t num_rows = 0) {
    clattn::GraphCapture capture(queue);
    forward(metadata, num_rows);
    return capture.end();
  }
  /// The key that the cache holds at a slot.
  std::vector<float> key_at(const clattn::KVCache& cache, std::int64_t slot) const {
    const std::vector<float> memory = download(cache.buffer);
    const auto at = memory.begin() + cache.k_offset + slot / kPage * cache.block_stride +
                    slot % kPage * cache.token_stride;
    return {at, at + kDims};
  }
  std::vector<float> row(const clattn::Buffer& buffer, std::ptrdiff_t token) const {
    const std::vector<float> memory = download(buffer);
    return {memory.begin() + token * kDims, memory.begin() + (token + 1) * kDims};
  }
};

inline std::string error_text(const std::function<void()>& call) {
  try {
    call();
  } catch (const clattn::Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace graph_test
