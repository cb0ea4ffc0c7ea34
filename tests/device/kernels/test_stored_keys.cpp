#include <gtest/gtest.h>

#include <clattn/cache_ops.hpp>
#include <clattn/compat/paged_attention.hpp>
#include <clattn/mla.hpp>
#include <clattn/plugin.hpp>
#include <functional>
#include <vector>

#include "device/small_call.hpp"
#include "support/error_text.hpp"
#include "support/plugin.hpp"

// AttentionImpl::forward() stores the keys and values that it is given, as layers' forward() does.
namespace test_stored_keys {

using clattn::AttentionTensors;
using small_test::Batch;
using small_test::Call;
using test::error_text;

/// A request's only token sees itself, so the output is its value.
void expect_stored(const Call& call) {
  const Batch batch({0, 1}, {1}, {5});
  const auto& metadata = call.builder->build(call.queue, batch.metadata);
  AttentionTensors tensors = call.tensors();
  tensors.key = {call.key.handle()};
  tensors.value = {call.value.handle()};
  const auto forward = [&] { call.impl->forward(call.queue, tensors, call.cache, metadata); };

  const std::vector<float> before = call.download(call.cache.buffer);
  const clattn::Buffer small = call.upload({0});
  const AttentionTensors legal = tensors;
  const std::vector<std::function<void()>> faults = {
      [&] { tensors.output.buffer = small.handle(); }, [&] { tensors.lse = small.handle(); },
      [&] { tensors.value.buffer = small.handle(); },  [&] { tensors.value.buffer = nullptr; },
      [&] { tensors.key.buffer = nullptr; },
  };
  for (std::size_t i = 0; i < faults.size(); ++i) {
    tensors = legal;
    faults[i]();
    const std::string text = error_text(forward);
    EXPECT_NE(text, "no error") << i;
    const std::string one = i == 3 ? "key" : "value";
    if (i >= 3) {
      EXPECT_EQ(text, "key, value: only " + one + " is given, legal: both or none");
    }
    EXPECT_EQ(call.download(call.cache.buffer), before) << i;
  }

  tensors = legal;
  forward();
  std::vector<float> value = call.download(call.value);
  value.resize(small_test::kRow);
  EXPECT_EQ(call.rows(1), value);
  const std::vector<float> stored = call.download(call.cache.buffer);
  call.fill_cache(1);
  call.impl->write_kv_cache(call.queue, legal.key, legal.value, call.cache, metadata);
  EXPECT_EQ(stored, call.download(call.cache.buffer));
}

TEST(StoredKeys, OfACallAreInTheCacheBeforeItAttends) {
  for (const auto& context : small_test::all_contexts()) {
    expect_stored(Call(context));
  }
}

TEST(StoredKeys, OfAPluginsCallAre) {
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(test::plugin_path("none"));
  clattn::AttentionConfig config = small_test::config();
  for (const auto& context : small_test::all_contexts()) {
    const std::string name(plugin.backend()->name());
    expect_stored(Call(context, config, Call::builder_options(), name));
  }
}

TEST(StoredKeys, OfALatentCallAre) {
  clattn::AttentionConfig config = small_test::config();
  config.num_kv_heads = 1;
  config.head_size = 16 + 8;
  config.use_mla = true;
  config.rope_dim = 8;
  for (const auto& context : small_test::all_contexts()) {
    const Call call(context, config);
    const Batch batch({0, 1}, {1}, {5});
    const auto& metadata = call.builder->build(call.queue, batch.metadata);
    AttentionTensors tensors = call.tensors();
    tensors.key = {call.key.handle()};
    const auto forward = [&] { call.impl->forward(call.queue, tensors, call.cache, metadata); };
    const std::vector<float> before = call.download(call.cache.buffer);
    EXPECT_EQ(error_text(forward), "key, value: only key is given, legal: both or none");
    EXPECT_EQ(call.download(call.cache.buffer), before);
    tensors.value = {call.value.handle()};
    forward();
    const std::vector<float> kv_c = call.download(call.key), out = call.download(call.out);
    for (std::size_t head = 0; head < 2; ++head) {
      for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(out[head * 16 + i], kv_c[i]) << head << i;
    }
  }
}

TEST(StoredKeys, AreRefusedWhereTheyWouldBeIgnored) {
  const auto& context = small_test::all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const clattn::Buffer rows = context->allocate(4096), out = context->allocate(4096);
  const AttentionTensors tensors{.query = {rows.handle()},
                                 .key = {rows.handle()},
                                 .value = {rows.handle()},
                                 .output = {out.handle()}};
  const Batch batch({0, 1}, {1}, {0});
  const clattn::MLAConfig latent{.num_heads = 2,
                                 .kv_lora_rank = 16,
                                 .rope_dim = 8,
                                 .block_size = 4,
                                 .dtype = clattn::DType::kF32};
  const clattn::MLACache latent_cache{.buffer = context->allocate(4 * 24 * sizeof(float)),
                                      .dtype = clattn::DType::kF32,
                                      .num_blocks = 1,
                                      .block_size = 4,
                                      .kv_lora_rank = 16,
                                      .rope_dim = 8,
                                      .scale = {}};
  const auto latent_builder = make_mla_builder(context, latent);
  EXPECT_EQ(error_text([&] {
              make_mla_impl(*context, latent)
                  ->forward(queue, tensors, latent_cache,
                            latent_builder->build(queue, batch.metadata));
            }),
            "key, value: given, legal: none, as concat_and_cache_mla() stores them");
  const clattn::AttentionConfig config = small_test::config();
  const clattn::KVCacheSpec spec{.block_size = config.block_size,
                                 .num_kv_heads = config.num_kv_heads,
                                 .head_size = config.head_size,
                                 .dtype = config.dtype};
  const clattn::Buffer page = context->allocate(spec.page_size_bytes());
  const clattn::PackedKVCache packed = split_kv_cache(page, spec);
  const auto packed_builder = make_paged_attention_builder(context, config);
  EXPECT_EQ(error_text([&] {
              make_paged_attention(*context, config)
                  ->forward(queue, tensors, packed, packed_builder->build(queue, batch.metadata));
            }),
            "key, value: given, legal: none, as reshape_and_cache() stores them");
}

}  // namespace test_stored_keys
