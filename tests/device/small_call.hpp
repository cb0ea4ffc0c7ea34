#pragma once

#include <clattn/clattn.hpp>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"

/// One impl in f32 with a cache and tensors of known values, for tests of what calls take, refuse
/// and leave behind.
namespace small_test {

using attention_test::all_contexts;
using layer_test::random_values;

inline constexpr std::int32_t kHeads = 2, kDims = 16, kPage = 4, kBlocks = 16, kRows = 4;
inline constexpr std::size_t kRow = std::size_t{kHeads} * kDims;

inline clattn::AttentionConfig config() {
  return {.num_heads = kHeads,
          .num_kv_heads = kHeads,
          .head_size = kDims,
          .block_size = kPage,
          .dtype = clattn::DType::kF32};
}

/// A batch that owns its arrays.
struct Batch {
  std::vector<std::int32_t> starts, lens, table;
  clattn::CommonAttentionMetadata metadata;
  Batch(std::vector<std::int32_t> query_start_loc, std::vector<std::int32_t> seq_lens,
        std::vector<std::int32_t> pages)
      : starts(std::move(query_start_loc)), lens(std::move(seq_lens)), table(std::move(pages)) {
    metadata = clattn::CommonAttentionMetadata::of(starts, lens, table);
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
};

struct Call : layer_test::Device {
  std::shared_ptr<const clattn::AttentionBackend> backend;
  std::shared_ptr<const clattn::AttentionImpl> impl;
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
  clattn::KVCache cache;
  clattn::Buffer query, key, value, out;

  explicit Call(const std::shared_ptr<clattn::Context>& opened,
                const clattn::AttentionConfig& layer = config(),
                const clattn::BuilderOptions& options = builder_options(),
                const std::string& name = {})
      : Device(opened), backend(get_attn_backend(layer, &opened->capabilities(), name)) {
    impl = backend->make_impl(context, layer);
    builder = backend->make_builder(context, layer, options);
    cache = make_kv_cache(*context, queue, *backend, layer, kBlocks);
    fill_cache(1);
    query = upload(random_values(kRows * kRow, 2));
    key = upload(random_values(kRows * kRow, 3));
    value = upload(random_values(kRows * kRow, 4));
    out = upload(std::vector<float>(kRows * kRow, -7));
  }

  static clattn::BuilderOptions builder_options() {
    clattn::BuilderOptions options;
    options.limits = {.max_num_reqs = kRows,
                      .max_num_batched_tokens = kRows,
                      .max_model_len = kBlocks * kPage,
                      .num_blocks = kBlocks};
    return options;
  }
  void fill_cache(std::uint32_t seed) const {
    const std::vector<float> values =
        random_values(cache.buffer.size_bytes() / sizeof(float), seed);
    queue.write(cache.buffer, std::as_bytes(std::span(values)));
  }
  /// Keys and values of a block.
  void poison(std::int64_t block) const {
    const std::vector<float> nan(std::size_t{kPage} * kRow,
                                 std::numeric_limits<float>::quiet_NaN());
    for (const std::int64_t offset : {cache.k_offset, cache.v_offset}) {
      const auto at = static_cast<std::size_t>(offset + block * cache.block_stride);
      queue.write(cache.buffer, std::as_bytes(std::span(nan)), at * sizeof(float));
    }
  }
  clattn::AttentionTensors tensors() const {
    return {.query = {query.handle()}, .output = {out.handle()}};
  }
  void forward(const clattn::AttentionMetadata& metadata) const {
    impl->forward(queue, tensors(), cache, metadata);
  }
  /// The output's first rows.
  std::vector<float> rows(std::size_t count) const {
    std::vector<float> values = download(out);
    values.resize(count * kRow);
    return values;
  }
};

}  // namespace small_test
