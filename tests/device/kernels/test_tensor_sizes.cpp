// Kernels check no buffer's end: what is smaller than its shape is refused when it is bound.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <clattn/compat/packed_cache.hpp>
#include <clattn/device.hpp>
#include <clattn/graph.hpp>
#include <clattn/mla.hpp>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "support/error_text.hpp"

namespace test_tensor_sizes {

using attention_test::all_contexts;
using attention_test::small_config;
using clattn::Buffer;
using clattn::TensorRef;

constexpr std::int64_t kTokens = 3, kRow = 4 * 64, kStride = 300;

clattn::BuilderOptions builder_options() {
  clattn::BuilderOptions options;
  options.limits = {.max_num_reqs = kTokens,
                    .max_num_batched_tokens = kTokens,
                    .max_model_len = 16,
                    .num_blocks = 1};
  return options;
}

/// One prompt of three tokens over a cache of one page, and buffers that are just large enough.
/// `recorded`: three decodes that replays will bring.
struct Prompt {
  explicit Prompt(const clattn::AttentionBackend& backend, const clattn::AttentionConfig& config,
                  bool recorded = false)
      : impl(backend.make_impl(context, config)),
        builder(backend.make_builder(context, config)),
        state(context, backend, config, builder_options()),
        is_recorded(recorded) {
    const std::vector<std::int32_t> starts = {0, kTokens}, lens = {kTokens}, table = {0};
    clattn::CommonAttentionMetadata batch;
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    batch.num_reqs = 1;
    batch.num_actual_tokens = kTokens;
    batch.block_table = table;
    batch.block_table_stride = 1;
    metadata = &builder->build(queue, batch);
    if (recorded) {
      const auto capturing = state.graph_capture(kTokens);
      metadata = &state.graph_capture_get_metadata_for_batch(queue, kTokens);
    }
    cache = clattn::make_kv_cache(*context, queue, backend, config, 1);
    queue.finish();
  }
  ~Prompt() { queue.finish(); }
  Prompt(const Prompt&) = delete;
  Prompt& operator=(const Prompt&) = delete;

  /// What forward() says when `field` holds `missing` bytes less than it must.
  std::string forward(std::string_view field = {}, std::size_t missing = 0) const {
    const auto buffer = [&](std::string_view name, std::int64_t bytes) {
      const auto size = static_cast<std::size_t>(bytes);
      return context->allocate(name == field ? size - missing : size);
    };
    const std::int64_t elements = 8 + (kTokens - 1) * kStride + kRow;
    const Buffer query = buffer("query", 2 * elements), output = buffer("output", 2 * elements);
    const Buffer lse = buffer("lse", 4 * kTokens * 4);
    const Buffer mask = buffer("custom_mask", kTokens * 16);
    const Buffer fp8 = buffer("output_fp8", kTokens * kRow), scale = buffer("output_scale", 4);
    clattn::ForwardOptions options;
    if (impl->config().custom_mask) {
      options.custom_mask = mask.handle();
      options.custom_mask_stride = 16;
    }
    if (impl->config().output_fp8) {
      options.output_fp8 = fp8.handle();
      options.output_scale = scale.handle();
    }
    return test::error_text([&] {
      std::optional<clattn::GraphCapture> capture;
      if (is_recorded) capture.emplace(queue);
      impl->forward(queue,
                    {.query = {query.handle(), 8, kStride},
                     .output = {output.handle(), 8, kStride},
                     .lse = lse.handle()},
                    cache, *metadata, options);
      queue.finish();
    });
  }

  const std::shared_ptr<clattn::Context> context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  std::shared_ptr<const clattn::AttentionImpl> impl;
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
  clattn::AttentionState state;
  bool is_recorded;
  const clattn::AttentionMetadata* metadata = nullptr;
  clattn::KVCache cache;
};

TEST(TensorSizes, TensorsThatAreTooSmallAreRefusedByName) {
  for (const char* name : {"FLASHINFER", "XFORMERS"}) {
    SCOPED_TRACE(name);
    const Prompt prompt(*clattn::get_attn_backend(small_config(), nullptr, name), small_config());
    EXPECT_EQ(prompt.forward(), "no error");
    EXPECT_EQ(prompt.forward("query", 4),
              "query: its 3 rows end at element 864, legal: the buffer's 862");
    EXPECT_EQ(prompt.forward("output", 4),
              "output: its 3 rows end at element 864, legal: the buffer's 862");
    EXPECT_EQ(prompt.forward("lse", 4),
              "lse: its 3 rows end at element 12, legal: the buffer's 11");
  }
}

TEST(TensorSizes, ExtraTensorsThatAreTooSmallAreRefusedByName) {
  clattn::AttentionConfig config = small_config();
  config.custom_mask = config.output_fp8 = true;
  const Prompt prompt(*clattn::get_attn_backend(config, nullptr), config);
  EXPECT_EQ(prompt.forward(), "no error");
  EXPECT_EQ(prompt.forward("custom_mask", 16),
            "custom_mask: its 3 rows end at element 35, legal: the buffer's 32");
  EXPECT_EQ(prompt.forward("output_fp8", 4),
            "output_fp8: its 3 rows end at element 768, legal: the buffer's 764");
}

// Steps are recorded before their batches are known, and replays check no tensor again.
TEST(TensorSizes, RecordedTensorsHoldTheLargestBatchOfTheirReplays) {
  clattn::AttentionConfig config = small_config();
  config.custom_mask = config.output_fp8 = true;
  const Prompt prompt(*clattn::get_attn_backend(config, nullptr), config, true);
  EXPECT_EQ(prompt.forward(), "no error");
  EXPECT_EQ(prompt.forward("query", 4),
            "query: its 3 rows end at element 864, legal: the buffer's 862");
  EXPECT_EQ(prompt.forward("output", 4),
            "output: its 3 rows end at element 864, legal: the buffer's 862");
  EXPECT_EQ(prompt.forward("lse", 4), "lse: its 3 rows end at element 12, legal: the buffer's 11");
  EXPECT_EQ(prompt.forward("custom_mask", 16),
            "custom_mask: its 3 rows end at element 48, legal: the buffer's 32");
  EXPECT_EQ(prompt.forward("output_fp8", 4),
            "output_fp8: its 3 rows end at element 768, legal: the buffer's 764");
}

TEST(TensorSizes, KeysAndValuesOfEncodersThatAreTooShortAreRefusedByName) {
  clattn::AttentionConfig config = small_config();
  config.attn_type = clattn::AttentionType::kEncoderOnly;
  config.block_size = 0;
  const std::vector<std::int32_t> starts = {0, kTokens}, lens = {kTokens};
  clattn::CommonAttentionMetadata batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  batch.num_reqs = 1;
  batch.num_actual_tokens = kTokens;
  batch.causal = false;
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(config, nullptr);
  const auto builder = backend.make_builder(context, config);
  const auto& metadata = builder->build(queue, batch);
  const auto impl = backend.make_impl(context, config);
  const Buffer rows = context->allocate(kTokens * kRow * 2),
               out = context->allocate(kTokens * kRow * 2);
  const Buffer keys = context->allocate(kTokens * kRow), few = context->allocate(kRow);
  const auto forward = [&](const Buffer& key, const Buffer& value) {
    return test::error_text([&] {
      impl->forward_encoder(queue,
                            {.query = {rows.handle()},
                             .key = {key.handle()},
                             .value = {value.handle()},
                             .output = {out.handle()}},
                            metadata);
      queue.finish();
    });
  };
  EXPECT_EQ(forward(few, keys), "key: its 3 rows end at element 384, legal: the buffer's 128");
  EXPECT_EQ(forward(keys, few), "value: its 3 rows end at element 384, legal: the buffer's 128");
  EXPECT_EQ(forward(keys, keys), "no error");
}

/// Cross attention of two requests, of `first` and `second` query tokens, over no keys; the key and
/// value tensors are null.
void attend_to_no_keys(const std::shared_ptr<clattn::Context>& context,
                       const clattn::AttentionConfig& config, std::int32_t first,
                       std::int32_t second) {
  const std::vector<std::int32_t> starts = {0, first, first + second}, lens = {0, 0},
                                  key_starts = {0, 0, 0};
  clattn::CommonAttentionMetadata batch = clattn::CommonAttentionMetadata::of(starts, lens, {});
  batch.key_start_loc = key_starts;
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(config, &context->capabilities());
  const auto builder = backend.make_builder(context, config);
  const auto impl = backend.make_impl(context, config);
  const auto rows = static_cast<std::size_t>(starts.back() * config.num_heads);
  const Buffer query = context->allocate(rows * 64 * 2), output = context->allocate(rows * 64 * 2);
  const Buffer lse = context->allocate(rows * 4);
  queue.fill(query, 0x3c003c00, 0, query.size_bytes());
  queue.fill(output, 0x7e007e00, 0, output.size_bytes());
  queue.fill(lse, 0x3f000000, 0, lse.size_bytes());
  impl->forward_encoder(
      queue, {.query = {query.handle()}, .output = {output.handle()}, .lse = lse.handle()},
      builder->build(queue, batch));
  std::vector<std::uint16_t> got(rows * 64);
  std::vector<float> got_lse(rows);
  queue.read(output, std::as_writable_bytes(std::span(got)));
  queue.read(lse, std::as_writable_bytes(std::span(got_lse)));
  EXPECT_EQ(got, std::vector<std::uint16_t>(rows * 64, 0));
  EXPECT_EQ(got_lse, std::vector<float>(rows, -std::numeric_limits<float>::infinity()));
}

// A kernel that begins to load keys before it knows that there are any would read memory that is
// not there.
TEST(TensorSizes, NoKeysNeedNoMemory) {
  clattn::AttentionConfig config = small_config();
  config.attn_type = clattn::AttentionType::kEncoderDecoder;
  config.block_size = 0;
  for (const auto& context : all_contexts()) {
    for (const clattn::KernelFamily family : clattn::kKernelFamilies) {
      config.kernel_family = family;
      const auto& backend = *clattn::get_attn_backend(config, nullptr, "FLASHINFER");
      if (!backend.validate_configuration(config, &context->capabilities()).empty()) continue;
      SCOPED_TRACE(fmt::format("{} {}", context->capabilities().name, clattn::to_string(family)));
      attend_to_no_keys(context, config, 1, 3);
      attend_to_no_keys(context, config, 3, 150);
    }
  }
}

/// What a write of three tokens says when its keys, then its values hold `missing` bytes less than
/// they must.
template <typename Write>
std::vector<std::string> writes_of(const clattn::Context& context, const Write& write,
                                   std::size_t missing) {
  const std::size_t bytes = kTokens * kRow / 2 * 2;  // two KV heads of f16
  const Buffer enough = context.allocate(bytes), few = context.allocate(bytes - missing);
  return {test::error_text([&] { write({few.handle()}, {enough.handle()}); }),
          test::error_text([&] { write({enough.handle()}, {few.handle()}); })};
}

const std::vector<std::string> kWritten = {"no error", "no error"};
const std::vector<std::string> kTooShort = {
    "key: its 3 rows end at element 384, legal: the buffer's 382",
    "value: its 3 rows end at element 384, legal: the buffer's 382"};

TEST(TensorSizes, F1_KeysAndValuesOfACacheWriteThatAreTooShortAreRefused) {
  for (const char* name : {"FLASHINFER", "XFORMERS"}) {
    for (const bool recorded : {false, true}) {
      SCOPED_TRACE(fmt::format("{} {}", name, recorded));
      const Prompt prompt(*clattn::get_attn_backend(small_config(), nullptr, name), small_config(),
                          recorded);
      const auto write = [&](TensorRef key, TensorRef value) {
        std::optional<clattn::GraphCapture> capture;
        if (recorded) capture.emplace(prompt.queue);
        prompt.impl->write_kv_cache(prompt.queue, key, value, prompt.cache, *prompt.metadata);
      };
      EXPECT_EQ(writes_of(*prompt.context, write, 0), kWritten);
      EXPECT_EQ(writes_of(*prompt.context, write, 4), kTooShort);
    }
  }
}

TEST(TensorSizes, F1_ReshapeAndCacheRefusesKeysAndValuesThatAreTooShort) {
  const Prompt prompt(*clattn::get_attn_backend(small_config(), nullptr), small_config());
  const clattn::AttentionConfig config = small_config();
  const std::vector<std::int64_t> slots = {0, 1, 2};
  const Buffer device_slots = prompt.context->allocate(slots.size() * 8);
  prompt.queue.write(device_slots, std::as_bytes(std::span(slots)));
  const auto flash = [&](TensorRef key, TensorRef value) {
    clattn::reshape_and_cache_flash(*prompt.context, prompt.queue, key, value, config.dtype,
                                    prompt.cache, device_slots.handle(), 0, kTokens);
  };
  EXPECT_EQ(writes_of(*prompt.context, flash, 0), kWritten);
  EXPECT_EQ(writes_of(*prompt.context, flash, 4), kTooShort);

  const Buffer pages = prompt.context->allocate(static_cast<std::size_t>(config.block_size) * kRow);
  const clattn::PackedKVCache packed{.key = pages.handle(),
                                     .value = pages.handle(),
                                     .dtype = config.dtype,
                                     .num_blocks = 1,
                                     .block_size = config.block_size,
                                     .num_kv_heads = 2,
                                     .head_size = 64};
  const auto write_packed = [&](TensorRef key, TensorRef value) {
    clattn::reshape_and_cache(*prompt.context, prompt.queue, key, value, config.dtype, packed,
                              device_slots.handle(), 0, kTokens);
  };
  EXPECT_EQ(writes_of(*prompt.context, write_packed, 0), kWritten);
  EXPECT_EQ(writes_of(*prompt.context, write_packed, 4), kTooShort);
}

TEST(TensorSizes, F1_LatentRowsThatAreTooShortAreRefused) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const std::vector<std::int64_t> slots = {0, 1, 2};
  const Buffer device_slots = context->allocate(slots.size() * 8);
  queue.write(device_slots, std::as_bytes(std::span(slots)));
  const clattn::MLACache cache{.buffer = context->allocate(4 * 24 * 2),
                               .num_blocks = 1,
                               .block_size = 4,
                               .kv_lora_rank = 16,
                               .rope_dim = 8,
                               .scale = {}};
  const Buffer enough = context->allocate(kTokens * 16 * 2), few = context->allocate(44);
  const auto write = [&](const Buffer& kv_c, const Buffer& k_pe) {
    return test::error_text([&] {
      clattn::concat_and_cache_mla(*context, queue, {kv_c.handle()}, {k_pe.handle()},
                                   clattn::DType::kF16, cache, device_slots.handle(), 0, kTokens);
      queue.finish();
    });
  };
  EXPECT_EQ(write(enough, enough), "no error");
  EXPECT_EQ(write(few, enough), "kv_c: its 3 rows end at element 48, legal: the buffer's 22");
  EXPECT_EQ(write(enough, few), "k_pe: its 3 rows end at element 24, legal: the buffer's 22");
}

// By no scale at all int8 would hold whole numbers: zeros, of most models' keys.
TEST(TensorSizes, F2_Int8CachesWithoutScalesAreRefused) {
  clattn::AttentionConfig config = small_config();
  config.kv_cache_dtype = clattn::DType::kInt8;
  Prompt prompt(*clattn::get_attn_backend(config, nullptr), config);
  const std::string refused =
      "kv_cache: no scales, legal for int8: f32 [2][1] or [2][num_kv_heads]";
  EXPECT_EQ(prompt.forward(), refused);
  const auto write = [&](TensorRef key, TensorRef value) {
    prompt.impl->write_kv_cache(prompt.queue, key, value, prompt.cache, *prompt.metadata);
  };
  EXPECT_EQ(writes_of(*prompt.context, write, 0), (std::vector<std::string>{refused, refused}));
  prompt.cache.scales = prompt.context->allocate(2 * sizeof(float));
  EXPECT_EQ(writes_of(*prompt.context, write, 0), kWritten);

  const Buffer pages = prompt.context->allocate(1024), slot = prompt.context->allocate(8);
  const clattn::PackedKVCache packed{.key = pages.handle(),
                                     .value = pages.handle(),
                                     .dtype = clattn::DType::kInt8,
                                     .num_blocks = 1,
                                     .block_size = 16,
                                     .num_kv_heads = 1,
                                     .head_size = 64};
  EXPECT_EQ(test::error_text([&] {
              clattn::reshape_and_cache(*prompt.context, prompt.queue, {pages.handle()},
                                        {pages.handle()}, config.dtype, packed, slot.handle(), 0,
                                        1);
            }),
            refused);
  const clattn::MLACache latent{.buffer = pages,
                                .dtype = clattn::DType::kInt8,
                                .num_blocks = 1,
                                .block_size = 16,
                                .kv_lora_rank = 16,
                                .rope_dim = 8,
                                .scale = {}};
  EXPECT_EQ(test::error_text([&] {
              clattn::concat_and_cache_mla(*prompt.context, prompt.queue, {pages.handle()},
                                           {pages.handle()}, config.dtype, latent, slot.handle(), 0,
                                           1);
            }),
            "kv_cache: no scale, legal for int8: f32 [1]");
  prompt.queue.finish();
}

// The first batch of a layer that calculates its scales reads all three tensors before any kernel
// of attention does.
TEST(TensorSizes, F1_TensorsThatScalesAreCalculatedFromAreBounded) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  clattn::LayerRegistry registry;
  clattn::AttentionOptions options;
  options.config.num_heads = 4;
  options.config.num_kv_heads = 2;
  options.config.head_size = 64;
  options.prefix = "layers.0.attn";
  options.config.kv_cache_dtype = clattn::DType::kFp8E4M3;
  options.calculate_kv_scales = true;
  clattn::Attention layer(context, registry, options);
  const Buffer query = context->allocate(kTokens * kRow * 2);
  const auto calculate = [&](TensorRef key, TensorRef value) {
    layer.calc_kv_scales(queue, {query.handle()}, key, value, kTokens);
  };
  EXPECT_EQ(writes_of(*context, calculate, 4), kTooShort);
  EXPECT_EQ(writes_of(*context, calculate, 0), kWritten);
  queue.finish();
}

}  // namespace test_tensor_sizes
