// F12: captured operations on latent rows, on scales and of plugins do the same again.

#include <gtest/gtest.h>

#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <clattn/mla.hpp>
#include <clattn/plugin.hpp>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "robustness/capture.hpp"
#include "support/plugin.hpp"

namespace test_capture_ops {

using clattn::DType;

constexpr std::size_t kBlocks = 4, kTokens = 4, kWidth = 24, kPage = kTokens * kWidth;

class CaptureOfOperations : public CaptureInProcess {
 protected:
  std::shared_ptr<clattn::Context> context_ = clattn::Context::create();
  clattn::Queue queue_ = context_->create_queue();

  template <typename T>
  clattn::Buffer up(const std::vector<T>& values) const {
    return upload(*context_, queue_, values);
  }
  static std::vector<float> counted(std::size_t count) {
    std::vector<float> values(count);
    std::iota(values.begin(), values.end(), 1.0F);
    return values;
  }
  clattn::MLACache latent() const {
    return {.buffer = up(counted(kBlocks * kPage)),
            .dtype = DType::kF32,
            .num_blocks = kBlocks,
            .block_size = kTokens,
            .kv_lora_rank = 16,
            .rope_dim = 8,
            .scale = {}};
  }
  std::string name_of_newest() const { return newest().filename().string().substr(5); }
};

TEST_F(CaptureOfOperations, F12_CopiesOfLatentRows) {
  const clattn::MLACache cache = latent();
  const std::vector<clattn::BlockPair> mapping = {{3, 0}, {1, 2}};
  copy_blocks_mla(*context_, queue_, std::span(&cache, 1), mapping);
  EXPECT_EQ(name_of_newest(), "copy_blocks_mla");
  EXPECT_EQ(RunCase(RunCase::InPlace{}, newest()).array<float>("kv_cache_out"),
            floats_in(queue_, cache.buffer));
}

TEST_F(CaptureOfOperations, F12_MovesOfLatentRows) {
  const clattn::MLACache cache = latent();
  const std::vector<std::int64_t> src = {5, 9, 14}, dst = {4, 5, 9};
  const std::vector<std::int32_t> starts = {0, 3};
  const std::vector<float> before = floats_in(queue_, cache.buffer);
  move_tokens_mla(*context_, queue_, std::span(&cache, 1), clattn::TokenMoves{src, dst, starts});
  EXPECT_EQ(name_of_newest(), "move_tokens_mla");
  const auto moved = RunCase(RunCase::InPlace{}, newest()).array<float>("kv_cache_out");
  const std::vector<float> memory = floats_in(queue_, cache.buffer);
  const auto rows_of = [](const std::vector<float>& all) {  // of the blocks that are named
    return std::vector<float>(all.begin() + kPage, all.end());
  };
  EXPECT_EQ(rows_of(moved), rows_of(memory));
  EXPECT_NE(rows_of(memory), rows_of(before));
}

// F4: the cache of a latent layer as the layer has it, one plane that is K and V at once.
TEST_F(CaptureOfOperations, F4_CopiesOfALatentLayersCache) {
  clattn::AttentionConfig config;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.head_size = 576;  // more than other layers have
  config.rope_dim = 64;
  config.block_size = kTokens;
  config.dtype = DType::kF32;
  config.use_mla = true;
  const auto& backend = *clattn::get_attn_backend(config, nullptr);
  const clattn::KVCache cache = make_kv_cache(*context_, queue_, backend, config, kBlocks);
  const std::vector<float> rows = counted(kBlocks * kTokens * 576);
  queue_.write(cache.buffer, std::as_bytes(std::span(rows)));
  const std::vector<clattn::BlockPair> mapping = {{3, 0}, {1, 2}};
  copy_blocks(*context_, queue_, std::span(&cache, 1), mapping);
  const RunCase again(RunCase::InPlace{}, newest());
  const std::vector<float> stored = floats_in(queue_, cache.buffer);
  EXPECT_EQ(again.array<float>("key_cache_out"), stored);
  EXPECT_EQ(again.array<float>("value_cache_out"), stored);
}

TEST_F(CaptureOfOperations, F12_Gathers) {
  const clattn::MLACache cache = latent();
  const std::vector<std::int32_t> sums = {0, 3, 3, 8}, table = {9, 2, -1, -1, 1, 3},
                                  starts = {4, 0, 0};
  const clattn::Buffer out = context_->allocate(8 * 30 * sizeof(float));
  gather_and_maybe_dequant_cache(
      *context_, queue_, cache, {.buffer = out.handle(), .offset = 2, .token_stride = 28},
      DType::kF32,
      {.cu_seq_lens = sums, .block_table = table, .block_table_stride = 2, .seq_starts = starts});
  EXPECT_EQ(name_of_newest(), "gather_and_maybe_dequant_cache");
  const auto again = RunCase(RunCase::InPlace{}, newest()).array<float>("dst");
  const std::vector<float> gathered = floats_in(queue_, out);
  ASSERT_EQ(again.size(), 8 * kWidth);
  for (std::size_t i = 0; i < again.size(); ++i)
    EXPECT_EQ(again[i], gathered[2 + i / kWidth * 28 + i % kWidth]) << i;
}

TEST_F(CaptureOfOperations, F12_ScalesOfTheFirstBatch) {
  for (const bool use_mla : {false, true}) {
    clattn::AttentionOptions options;
    options.config.num_heads = 4;
    options.config.num_kv_heads = use_mla ? 1 : 2;
    options.config.head_size = kWidth;
    options.config.use_mla = use_mla;
    if (use_mla) options.config.rope_dim = 8;
    options.config.dtype = DType::kF32;
    options.prefix = "layers.0";
    options.config.kv_cache_dtype = DType::kFp8E4M3;
    options.calculate_kv_scales = true;
    clattn::LayerRegistry layers;
    clattn::Attention layer(context_, layers, options);
    const clattn::Buffer rows = context_->allocate(3 * 4 * kWidth * sizeof(float));
    fill(queue_, rows, 5);
    const clattn::TensorRef tensor{.buffer = rows.handle()};
    layer.calc_kv_scales(queue_, tensor, tensor, tensor, 3);
    EXPECT_EQ(name_of_newest(), "calc_kv_scales");
    const std::size_t before = cases().size();
    EXPECT_EQ(RunCase(RunCase::InPlace{}, newest()).array<float>("scales"),
              floats_in(queue_, layer.scales()));
    layer.calc_kv_scales(queue_, tensor, tensor, tensor, 3);  // which finds them there
    EXPECT_EQ(cases().size(), before);
  }
}

TEST_F(CaptureOfOperations, F12_AppendsAreTheWritesThatTheyBecome) {
  const clattn::PagedKVLists lists{.indices = up(std::vector<std::int32_t>{2, 0, 3}),
                                   .indptr = up(std::vector<std::int32_t>{0, 2, 3}),
                                   .num_reqs = 2};
  const clattn::Buffer requests = up(std::vector<std::int32_t>{0, -1, 1});
  const clattn::Buffer positions = up(std::vector<std::int32_t>{5, 0, 2});
  const clattn::MLACache cache = latent();
  const clattn::Buffer rows = up(counted(3 * kWidth));
  append_paged_mla_kv_cache(*context_, queue_, {.buffer = rows.handle()}, {.buffer = rows.handle()},
                            DType::kF32, cache, requests, positions, 3, lists);
  EXPECT_EQ(name_of_newest(), "concat_and_cache_mla");
  EXPECT_EQ(values_of<std::int64_t>(read_bytes(newest() / "slot_mapping.npy")),
            (std::vector<std::int64_t>{1, -1, 14}));
}

TEST_F(CaptureOfOperations, F12_StepsOfPlugins) {
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(test::plugin_path("none"));
  const auto& backend = *plugin.backend();
  clattn::AttentionConfig config;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_size = 8;
  config.block_size = 4;
  config.dtype = DType::kF32;
  const auto impl = backend.make_impl(context_, config);
  const auto builder = backend.make_builder(context_, config);
  const clattn::KVCache cache = make_kv_cache(*context_, queue_, backend, config, 3);
  const clattn::Buffer rows = context_->allocate(4 * 4 * 8 * sizeof(float)),
                       out = context_->allocate(4 * 4 * 8 * sizeof(float));
  fill(queue_, rows, 6);
  const clattn::TensorRef tensor{.buffer = rows.handle()};
  const std::vector<std::int32_t> starts = {0, 1, 4}, lens = {6, 3}, table = {2, 0, 1, -1};
  const auto& metadata =
      builder->build(queue_, clattn::CommonAttentionMetadata::of(starts, lens, table));
  const std::size_t before = cases().size();
  impl->write_kv_cache(queue_, tensor, tensor, cache, metadata);
  impl->forward(queue_, {.query = tensor, .output = {.buffer = out.handle()}}, cache, metadata);
  const auto made = cases();
  ASSERT_EQ(made.size(), before + 2);
  EXPECT_EQ(made[before].filename().string().substr(5), "reshape_and_cache");
  EXPECT_EQ(made[before + 1].filename().string().substr(5), "attention");
  static_cast<void>(RunCase(RunCase::InPlace{}, made[before]));
  const std::string place = made[before + 1].string();
  EXPECT_NE(read_bytes(made[before + 1] / "case.json").find("\"backend\": \"REFERENCE\""),
            std::string::npos);
  const ProgramResult run = run_program("run " + place + " --out " + place + "/again", {},
                                        "CLATTN_PLUGINS=" + test::plugin_path("none"));
  ASSERT_EQ(run.code, 0) << run.standard_error;
  EXPECT_EQ(values_of<float>(read_bytes(made[before + 1] / "again" / "out.npy")),
            floats_in(queue_, out));
}

}  // namespace test_capture_ops
