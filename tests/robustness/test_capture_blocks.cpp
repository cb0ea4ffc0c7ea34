// Captured operations on whole blocks and on metadata of the device: their cases do the same again.

#include <gtest/gtest.h>

#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <clattn/compat/packed_cache.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "robustness/capture.hpp"

namespace test_capture_blocks {

using clattn::BlockPair;
using clattn::KVCacheLayout;

/// Caches of four blocks of f32: 16 tokens, two heads of 8.
class CaptureOfBlocks : public CaptureInProcess {
 protected:
  static constexpr std::size_t kBlock = std::size_t{16} * 2 * 8;
  std::shared_ptr<clattn::Context> context_ = clattn::Context::create();
  clattn::Queue queue_ = context_->create_queue();
  const clattn::AttentionBackend& backend_ = *clattn::list_attn_backends()[0];
  const clattn::KVCacheSpec spec_{
      .block_size = 16, .num_kv_heads = 2, .head_size = 8, .dtype = clattn::DType::kF32};

  clattn::Buffer counted(float start) const {
    std::vector<float> values(4 * 2 * kBlock);
    std::iota(values.begin(), values.end(), start);
    return upload(*context_, queue_, values);
  }
  /// The element of a block in logical order.
  static std::vector<float> block_of(const std::vector<float>& array, std::size_t block) {
    const auto begin = array.begin() + static_cast<std::ptrdiff_t>(block * kBlock);
    return {begin, begin + kBlock};
  }
  static std::vector<float> logical_block(const std::vector<float>& memory,
                                          const clattn::KVCache& cache, std::int64_t block,
                                          bool values) {
    std::vector<float> elements;
    for (std::int64_t token = 0; token < 16; ++token) {
      for (std::int64_t head = 0; head < 2; ++head) {
        for (std::int64_t dim = 0; dim < 8; ++dim) {
          const std::int64_t at = values ? cache.value_at(block, token, head, dim)
                                         : cache.key_at(block, token, head, dim);
          elements.push_back(memory[static_cast<std::size_t>(at)]);
        }
      }
    }
    return elements;
  }
};

TEST_F(CaptureOfBlocks, CopiesAreACaseALayer) {
  for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
    std::vector<clattn::KVCache> layers;
    for (const float start : {0.0F, 5000.0F})
      layers.push_back(reshape_kv_cache(counted(start), spec_, backend_, layout));
    const std::vector<BlockPair> mapping = {{3, 0}, {1, 2}};
    const std::size_t before = cases().size();
    copy_blocks(*context_, queue_, std::span<const clattn::KVCache>(layers), mapping);
    const auto made = cases();
    ASSERT_EQ(made.size(), before + 2);
    for (std::size_t layer = 0; layer < 2; ++layer) {
      const std::filesystem::path& place = made[before + layer];
      EXPECT_EQ(place.filename().string().substr(4), "-copy_blocks");
      const RunCase again(RunCase::InPlace{}, place);
      const std::vector<float> memory = floats_in(queue_, layers[layer].buffer);
      for (const bool values : {false, true}) {
        const auto got = again.array<float>(values ? "value_cache_out" : "key_cache_out");
        for (std::size_t block = 0; block < 4; ++block) {
          EXPECT_EQ(block_of(got, block),
                    logical_block(memory, layers[layer], static_cast<std::int64_t>(block), values));
        }
      }
    }
  }
}

// By lists of the host and of the device, where a pair that names no slot moves nothing.
TEST_F(CaptureOfBlocks, MovesOfTokens) {
  const std::vector<std::int64_t> src = {18, 20, -1, 40}, dst = {17, 18, 0, 33};
  const std::vector<std::int32_t> starts = {0, 2, 4}, host_starts = {0, 2, 2};
  const clattn::DeviceTokenMoves moves{upload(*context_, queue_, src),
                                       upload(*context_, queue_, dst),
                                       upload(*context_, queue_, starts), 2};
  for (const bool on_device : {false, true}) {
    for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
      const clattn::KVCache cache = reshape_kv_cache(counted(0), spec_, backend_, layout);
      const std::span<const clattn::KVCache> caches(&cache, 1);
      if (on_device) {
        move_tokens(*context_, queue_, caches, moves);
      } else {
        move_tokens(
            *context_, queue_, caches,
            clattn::TokenMoves{std::span(src).first(2), std::span(dst).first(2), host_starts});
      }
      const std::filesystem::path place = newest();
      EXPECT_EQ(place.filename().string().substr(4), "-move_tokens");
      const RunCase again(RunCase::InPlace{}, place);
      const std::vector<float> memory = floats_in(queue_, cache.buffer);
      for (const bool values : {false, true}) {
        const auto got = again.array<float>(values ? "value_cache_out" : "key_cache_out");
        for (std::size_t block = 1; block < (on_device ? 3U : 2U); ++block) {
          EXPECT_EQ(block_of(got, block),
                    logical_block(memory, cache, static_cast<std::int64_t>(block), values));
        }
      }
    }
  }
}

TEST_F(CaptureOfBlocks, WarmingUpIsNoCallOfTheApplication) {
  clattn::AttentionConfig config;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_size = 64;
  config.block_size = 16;
  config.dtype = clattn::DType::kF16;
  const std::size_t before = cases().size();
  clattn::get_attn_backend(config, &context_->capabilities())
      ->make_impl(context_, config)
      ->warm_up(queue_);
  EXPECT_EQ(cases().size(), before);
}

TEST_F(CaptureOfBlocks, CopiesOfPackedCaches) {
  const clattn::Buffer raw = counted(0);
  const clattn::PackedKVCache cache = split_kv_cache(raw, spec_);
  const std::vector<BlockPair> mapping = {{3, 0}};
  copy_blocks(*context_, queue_, std::span<const clattn::PackedKVCache>(&cache, 1), mapping);
  const std::filesystem::path place = newest();
  const RunCase again(RunCase::InPlace{}, place);
  // Value (block 3, token 5, head 1, dim 2) lies at [3, 1, 2, 5] behind all keys.
  const auto source = values_of<float>(read_bytes(place / "value_cache.npy"));
  const std::size_t in_block = 5 * 16 + 8 + 2;
  EXPECT_EQ(source[3 * kBlock + in_block],
            static_cast<float>(4 * kBlock + 3 * kBlock + 10 * 16 + 5));
  for (const std::string name : {"key_cache", "value_cache"}) {
    const auto from = values_of<float>(read_bytes(place / (name + ".npy")));
    EXPECT_EQ(block_of(again.array<float>(name + "_out"), 0), block_of(from, 3)) << name;
  }
}

TEST_F(CaptureOfBlocks, SwapsAreACaseAPlane) {
  const clattn::KVCache cache = reshape_kv_cache(counted(0), spec_, backend_, KVCacheLayout::kHND);
  const clattn::KVCache other =
      reshape_kv_cache(counted(5000), spec_, backend_, KVCacheLayout::kHND);
  std::vector<float> image(4 * 2 * kBlock);
  std::iota(image.begin(), image.end(), 9000.0F);
  const clattn::SwapSpace host = std::as_writable_bytes(std::span(image));
  const std::vector<BlockPair> mapping = {{3, 0}, {0, 2}};
  const struct {
    std::string direction;
    clattn::SwapSpace from, to;
  } rows[] = {{"device_to_device", cache, other},
              {"host_to_device", host, other},
              {"device_to_host", cache, host}};
  for (const auto& row : rows) {
    const std::size_t before = cases().size();
    swap_blocks(*context_, queue_, row.from, row.to, mapping);
    queue_.finish();
    const auto made = cases();
    ASSERT_EQ(made.size(), before + 2) << row.direction;
    const std::vector<float> after =
        row.direction == "device_to_host" ? image : floats_in(queue_, other.buffer);
    for (std::size_t plane = 0; plane < 2; ++plane) {
      const RunCase again(RunCase::InPlace{}, made[before + plane]);
      const auto got = again.array<float>("dst_cache_out");
      EXPECT_NE(read_bytes(made[before + plane] / "case.json").find(row.direction),
                std::string::npos);
      for (const std::size_t block : {0U, 2U}) {
        // Blocks as they lie: of this backend one plane behind the other, or side by side.
        const auto first = static_cast<std::size_t>(
            plane == 0 ? cache.key_at(static_cast<std::int64_t>(block), 0, 0, 0)
                       : cache.value_at(static_cast<std::int64_t>(block), 0, 0, 0));
        const auto begin = after.begin() + static_cast<std::ptrdiff_t>(first);
        EXPECT_EQ(block_of(got, block), std::vector<float>(begin, begin + kBlock))
            << row.direction << " plane " << plane;
      }
    }
  }
}

// What one swap brings to the host the next one takes from there, though nobody waits between them.
// Blocks of 4 MiB, so that the copy lasts.
TEST_F(CaptureOfBlocks, ASwapInHoldsWhatTheSwapOutBroughtOut) {
  const clattn::KVCacheSpec spec{
      .block_size = 64, .num_kv_heads = 64, .head_size = 256, .dtype = clattn::DType::kF32};
  const std::size_t elements = 2UL * 64 * 64 * 256;
  const clattn::KVCache cache =
      reshape_kv_cache(upload(*context_, queue_, std::vector<float>(elements, 3.0F)), spec,
                       backend_, KVCacheLayout::kHND);
  std::vector<float> image(elements, -1.0F);
  const clattn::SwapSpace host = std::as_writable_bytes(std::span(image));
  const std::vector<BlockPair> mapping = {{0, 0}};
  swap_blocks(*context_, queue_, cache, host, mapping);
  const std::size_t before = cases().size();
  swap_blocks(*context_, queue_, host, cache, mapping);
  queue_.finish();
  const auto made = cases();
  ASSERT_EQ(made.size(), before + 2);
  for (std::size_t plane = 0; plane < 2; ++plane) {
    EXPECT_EQ(values_of<float>(read_bytes(made[before + plane] / "src_cache.npy")),
              std::vector<float>(elements / 2, 3.0F))
        << "plane " << plane;
  }
}

TEST_F(CaptureOfBlocks, AStepThatAdvances) {
  clattn::AdvanceStep step;
  step.num_seqs = 3;
  step.num_queries = 2;
  step.block_size = 4;
  step.num_blocks = 10;
  step.block_table_stride = 2;
  step.seq_lens = upload(*context_, queue_, std::vector<std::int32_t>{4, 2, 7});
  step.block_tables = upload(*context_, queue_, std::vector<std::int32_t>{9, 3, 5, -1, 8, 8});
  step.sampled_token_ids = upload(*context_, queue_, std::vector<std::int64_t>{70, 71});
  step.input_tokens = context_->allocate(24);
  step.input_positions = context_->allocate(24);
  step.slot_mapping = context_->allocate(24);
  clattn::DeviceErrors errors(*context_, queue_);
  advance_step_flashattn(*context_, queue_, step, errors);
  errors.check(queue_);
  const std::filesystem::path place = newest();
  EXPECT_EQ(place.filename().string().substr(4), "-advance_step");
  const RunCase again(RunCase::InPlace{}, place);
  EXPECT_EQ(again.array<std::int64_t>("slot_mapping"), (std::vector<std::int64_t>{12, 22, -1}));
  EXPECT_EQ(again.array<std::int32_t>("seq_lens"), (std::vector<std::int32_t>{5, 3, 7}));
  // A table that names what the cache does not have is refused again.
  std::string json = read_bytes(place / "case.json");
  json.replace(json.find("\"num_blocks\": 10"), 16, "\"num_blocks\": 9");
  write_bytes(place / "case.json", json);
  expect_refusal(run_program("run " + place.string() + " --out " + (place / "again").string()), 2,
                 "row 0 was left out: its block table names a block outside the cache");
}

}  // namespace test_capture_blocks
