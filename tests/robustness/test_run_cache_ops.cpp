#include <gtest/gtest.h>
#include <clattn/cache_ops.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "oracle/oracle.hpp"
#include "robustness/program.hpp"

// The cache operations of the case format, through the program.
namespace test_run_cache_ops {

/// Runs a case and gives its outputs and what it said.
class CacheCase {
 public:
  explicit CacheCase(const CaseImage& image) {
    image.write(scratch_.path() / "case");
    result_ = run_program("run " + (scratch_.path() / "case").string());
  }
  const ProgramResult& result() const { return result_; }
  template <typename T>
  std::vector<T> array(const std::string& name) const {
    EXPECT_EQ(result_.code, 0) << result_.standard_error;
    const std::string data =
        npy_data(read_bytes(scratch_.path() / "case" / "out" / (name + ".npy")));
    std::vector<T> values(data.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), data.data(), values.size() * sizeof(T));
    return values;
  }

 private:
  ScratchDirectory scratch_;
  ProgramResult result_;
};

std::vector<float> counted(std::size_t count, float start) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = start + static_cast<float>(i);
  return values;
}

void copy_rows(std::vector<float>& to, const std::vector<float>& from, std::size_t row,
               std::size_t source, std::size_t destination) {
  std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(source * row), row,
              to.begin() + static_cast<std::ptrdiff_t>(destination * row));
}

CaseImage copy_case() {
  return {R"({"op": "copy_blocks"})",
          {{"key_cache.npy", npy_f32(counted(4 * 32, 0), "(4, 2, 2, 8)")},
           {"value_cache.npy", npy_f32(counted(4 * 32, 500), "(4, 2, 2, 8)")},
           {"block_mapping.npy", npy_i64({3, 0, 1, 2}, "(2, 2)")}}};
}

TEST(RunCacheOps, CopyBlocks) {
  const CacheCase run(copy_case());
  for (const float start : {0.0F, 500.0F}) {
    std::vector<float> want = counted(4 * 32, start);
    copy_rows(want, counted(4 * 32, start), 32, 3, 0);
    copy_rows(want, counted(4 * 32, start), 32, 1, 2);
    EXPECT_EQ(run.array<float>(start == 0 ? "key_cache_out" : "value_cache_out"), want);
  }
}

CaseImage move_case(const std::string& starts) {
  return {R"({"op": "move_tokens"})",
          {{"key_cache.npy", npy_f32(counted(4 * 32, 0), "(4, 2, 2, 8)")},
           {"value_cache.npy", npy_f32(counted(4 * 32, 500), "(4, 2, 2, 8)")},
           {"src_slots.npy", npy_i64({3, 5, 6})},
           {"dst_slots.npy", npy_i64({2, 3, 7})},
           {"starts.npy", starts}}};
}

TEST(RunCacheOps, MoveTokens) {
  const CacheCase run(move_case(npy_i64({0, 2, 3})));
  for (const float start : {0.0F, 500.0F}) {
    std::vector<float> want = counted(4 * 32, start);
    copy_rows(want, counted(4 * 32, start), 16, 3, 2);
    copy_rows(want, counted(4 * 32, start), 16, 5, 3);
    copy_rows(want, counted(4 * 32, start), 16, 6, 7);
    EXPECT_EQ(run.array<float>(start == 0 ? "key_cache_out" : "value_cache_out"), want);
  }
  expect_refusal(CacheCase(move_case(npy_i64({0, 2, 2}))).result(), 2,
                 "starts ends with 2, legal: 3 (pairs)");
}

TEST(RunCacheOps, SwapBlocksInEveryDirection) {
  for (const std::string direction : {"device_to_host", "host_to_device", "device_to_device"}) {
    const CacheCase run({R"({"op": "swap_blocks", "direction": ")" + direction + "\"}",
                         {{"src_cache.npy", npy_f32(counted(4 * 32, 0), "(4, 2, 2, 8)")},
                          {"dst_cache.npy", npy_f32(counted(3 * 32, 500), "(3, 2, 2, 8)")},
                          {"block_mapping.npy", npy_i64({3, 0, 0, 2}, "(2, 2)")}}});
    std::vector<float> want = counted(3 * 32, 500);
    copy_rows(want, counted(4 * 32, 0), 32, 3, 0);
    copy_rows(want, counted(4 * 32, 0), 32, 0, 2);
    EXPECT_EQ(run.array<float>("dst_cache_out"), want) << direction;
  }
}

TEST(RunCacheOps, QuantizedReshapeDividesByTheScales) {
  CaseImage image;
  image.json = R"({"op": "reshape_and_cache", "kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5,
                   "v_scale": [4, 0.25]})";
  const std::vector<float> rows = counted(32, -13);
  image.files = {{"key.npy", npy_f32(rows, "(2, 2, 8)")},
                 {"value.npy", npy_f32(rows, "(2, 2, 8)")},
                 {"key_cache.npy", npy_image("|u1", "(1, 16, 2, 8)", std::string(256, '\7'))},
                 {"value_cache.npy", npy_image("|u1", "(1, 16, 2, 8)", std::string(256, '\7'))},
                 {"slot_mapping.npy", npy_i64({5, 0})}};
  const CacheCase run(image);
  const double scales[2][2] = {{0.5, 0.5}, {4, 0.25}};
  for (std::size_t kv = 0; kv < 2; ++kv) {
    std::vector<std::uint8_t> want(256, 7);
    for (std::size_t i = 0; i < 32; ++i) {
      const std::size_t slot = i < 16 ? 5 : 0;
      want[slot * 16 + i % 16] = static_cast<std::uint8_t>(oracle::encode(
          oracle::Element::kFp8E4M3, static_cast<double>(rows[i]) / scales[kv][i % 16 / 8]));
    }
    EXPECT_EQ(run.array<std::uint8_t>(kv == 0 ? "key_cache_out" : "value_cache_out"), want);
  }
}

TEST(RunCacheOps, PackedCachesTakeHeadsOfWholeVectors) {
  for (const std::size_t head_size : {8U, 24U}) {
    const std::string size = std::to_string(head_size);
    const std::string cache(512 * head_size, '\7');
    const std::vector<float> rows = counted(head_size, 0);
    CaseImage image;
    image.json = R"({"op": "reshape_and_cache", "layout": "packed", "kv_cache_dtype": "fp8_e4m3"})";
    for (const std::string name : {"key", "value"}) {
      image.files[name + ".npy"] = npy_f32(rows, "(1, 1, " + size + ")");
      image.files[name + "_cache.npy"] = npy_image("|u1", "(1, 512, 1, " + size + ")", cache);
    }
    image.files["slot_mapping.npy"] = npy_i64({5});
    expect_refusal(CacheCase(image).result(), 2,
                   "head_size is " + size + ", legal in an x-packed cache of fp8_e4m3");
  }
}

TEST(RunCacheOps, MergeAttnStates) {
  const float inf = HUGE_VALF;
  const CacheCase run({R"({"op": "merge_attn_states"})",
                       {{"prefix_output.npy", npy_f32(counted(24, 0), "(3, 1, 8)")},
                        {"suffix_output.npy", npy_f32(counted(24, 100), "(3, 1, 8)")},
                        {"prefix_lse.npy", npy_f32({0, -inf, inf}, "(3, 1)")},
                        {"suffix_lse.npy", npy_f32({std::log(3.0F), 2, -inf}, "(3, 1)")}}});
  const std::vector<float> out = run.array<float>("out");
  const std::vector<float> lse = run.array<float>("lse");
  ASSERT_EQ(out.size(), 24U);
  for (std::size_t d = 0; d < 8; ++d) {
    EXPECT_NEAR(out[d], static_cast<float>(d) + 75.0F, 1e-4F);
    EXPECT_EQ(out[8 + d], 108.0F + static_cast<float>(d));
    EXPECT_EQ(out[16 + d], 0.0F);
  }
  ASSERT_EQ(lse.size(), 3U);
  EXPECT_NEAR(lse[0], std::log(4.0F), 1e-6F);
  EXPECT_EQ(lse[1], 2.0F);
  EXPECT_EQ(lse[2], -inf);
}

// vLLM's merge_attn_states with output_scale: the codes of the merged output, which is given too.
TEST(RunCacheOps, MergeAttnStatesAsEightBits) {
  CaseImage image = {R"({"op": "merge_attn_states", "lse_base": "2"})",
                     {{"prefix_output.npy", npy_f32(counted(16, 0), "(2, 1, 8)")},
                      {"suffix_output.npy", npy_f32(counted(16, 100), "(2, 1, 8)")},
                      {"prefix_lse.npy", npy_f32({1, -HUGE_VALF}, "(2, 1)")},
                      {"suffix_lse.npy", npy_f32({3, 2}, "(2, 1)")},
                      {"output_scale.npy", npy_f32({0.3F}, "(1,)")}}};
  const CacheCase run(image);
  const std::vector<float> out = run.array<float>("out"), lse = run.array<float>("lse");
  const auto codes = run.array<std::uint8_t>("out_fp8");
  ASSERT_EQ(out.size(), 16U);
  ASSERT_EQ(codes.size(), 16U);
  for (std::size_t i = 0; i < 16; ++i) {
    const double want = static_cast<double>(i) + (i < 8 ? 80 : 100);  // weights 1 and 4, or 0 and 1
    EXPECT_NEAR(out[i], want, 1e-4) << i;
    EXPECT_EQ(codes[i], oracle::encode(oracle::Element::kFp8E4M3, want / 0.3)) << i;
  }
  EXPECT_NEAR(lse.at(0), std::log2(10.0F), 1e-6F);
  EXPECT_EQ(lse.at(1), 2.0F);
  image.json = R"({"op": "merge_attn_states", "lse_base": "2", "output_dtype": "int8"})";
  const CacheCase bytes(image);
  EXPECT_EQ(bytes.array<std::int8_t>("out_int8").at(0), 127);  // 80 / 0.3 saturates
  image.files["output_scale.npy"] = npy_f32({0.5F, 1}, "(2,)");
  const CacheCase wrong(image);
  EXPECT_EQ(wrong.result().code, 2);
  EXPECT_NE(wrong.result().standard_error.find("output_scale.npy"), std::string::npos);
}

TEST(RunCacheOps, ConcatAndCacheMla) {
  const CacheCase run({R"({"op": "concat_and_cache_mla"})",
                       {{"kv_c.npy", npy_f32(counted(32, 0), "(2, 16)")},
                        {"k_pe.npy", npy_f32(counted(16, 100), "(2, 8)")},
                        {"kv_cache.npy", npy_f32(counted(96, 500), "(2, 2, 24)")},
                        {"slot_mapping.npy", npy_i64({3, -1})}}});
  std::vector<float> want = counted(96, 500);
  for (std::size_t d = 0; d < 24; ++d) {
    want[72 + d] = d < 16 ? static_cast<float>(d) : 84.0F + static_cast<float>(d);
  }
  EXPECT_EQ(run.array<float>("kv_cache_out"), want);
}

// The rows that a request's table names, softmax in double, the latent part of the rows.
TEST(RunCacheOps, MlaDecode) {
  constexpr std::size_t kHeads = 3, kRank = 16, kWidth = 24, kBlock = 2;
  std::vector<float> query = counted(2 * kHeads * kWidth, 0),
                     cache = counted(4 * kBlock * kWidth, 0);
  for (std::size_t i = 0; i < query.size(); ++i) query[i] = std::sin(query[i]);
  for (std::size_t i = 0; i < cache.size(); ++i) cache[i] = std::cos(cache[i] * 0.7F);
  const std::vector<std::int32_t> lens = {3, 0}, table = {2, 0, 9, 9};
  const CacheCase run({R"({"op": "mla_decode", "kv_lora_rank": 16, "scale": 0.5})",
                       {{"query.npy", npy_f32(query, "(2, 3, 24)")},
                        {"kv_cache.npy", npy_f32(cache, "(4, 2, 24)")},
                        {"block_table.npy", npy_i32(table, "(2, 2)")},
                        {"seq_lens.npy", npy_i32(lens)}}});
  const std::vector<float> out = run.array<float>("out"), lse = run.array<float>("lse");
  ASSERT_EQ(out.size(), 2 * kHeads * kRank);
  for (std::size_t h = 0; h < kHeads; ++h) {
    double denominator = 0;
    std::vector<double> want(kRank);
    for (std::size_t p = 0; p < 3; ++p) {
      const std::size_t block = static_cast<std::size_t>(table[p / kBlock]);
      const float* row = &cache[(block * kBlock + p % kBlock) * kWidth];
      double logit = 0;
      for (std::size_t d = 0; d < kWidth; ++d) logit += double{query[h * kWidth + d]} * row[d];
      const double weight = std::exp(0.5 * logit);
      denominator += weight;
      for (std::size_t d = 0; d < kRank; ++d) want[d] += weight * row[d];
    }
    EXPECT_NEAR(lse[h], std::log(denominator), 1e-5);
    EXPECT_EQ(lse[kHeads + h], -std::numeric_limits<float>::infinity());
    for (std::size_t d = 0; d < kRank; ++d) {
      EXPECT_NEAR(out[h * kRank + d], want[d] / denominator, 1e-5) << h << " " << d;
      EXPECT_EQ(out[(kHeads + h) * kRank + d], 0);
    }
  }
}

TEST(RunCacheOps, AdvanceStep) {
  using Ints = std::vector<std::int32_t>;
  using Longs = std::vector<std::int64_t>;
  const CacheCase run({R"({"op": "advance_step", "block_size": 4, "num_queries": 2})",
                       {{"seq_lens.npy", npy_i32({4, 2, 7})},
                        {"block_table.npy", npy_i32({9, 3, 5, -1, 8, 8}, "(3, 2)")},
                        {"sampled_token_ids.npy", npy_i64({70, 71})}}});
  EXPECT_EQ(run.array<std::int64_t>("input_tokens"), (Longs{70, 71, 0}));
  EXPECT_EQ(run.array<std::int64_t>("input_positions"), (Longs{4, 2, 0}));
  EXPECT_EQ(run.array<std::int32_t>("seq_lens"), (Ints{5, 3, 7}));
  EXPECT_EQ(run.array<std::int64_t>("slot_mapping"), (Longs{12, 22, -1}));
  EXPECT_EQ(run.array<std::int32_t>("paged_kv_indptr"), (Ints{0, 2, 3, 3}));
  EXPECT_EQ(run.array<std::int32_t>("paged_kv_indices"), (Ints{9, 3, 5}));
  EXPECT_EQ(run.array<std::int32_t>("paged_kv_last_page_len"), (Ints{1, 3, 3}));
}

TEST(RunCacheOps, NonsenseExitsWithOneLine) {
  CaseImage image = copy_case();
  image.files["block_mapping.npy"] = npy_i64({3, 4}, "(1, 2)");
  const CacheCase range(image);
  EXPECT_EQ(range.result().code, 2);
  EXPECT_NE(range.result().standard_error.find("destination block 4, legal: 0 … 3"),
            std::string::npos);
  EXPECT_EQ(range.result().error_lines(), 1U);
  const CacheCase full({R"({"op": "advance_step", "block_size": 4})",
                        {{"seq_lens.npy", npy_i32({8})},
                         {"block_table.npy", npy_i32({9, 3}, "(1, 2)")},
                         {"sampled_token_ids.npy", npy_i64({70})}}});
  EXPECT_EQ(full.result().code, 2);
  EXPECT_NE(full.result().standard_error.find("row 0 was left out"), std::string::npos);
}

// What cu_seq_lens asks for is checked before memory is taken for it: here 100 GB.
TEST(RunGather, TokensThatTheTableDoesNotHoldAreRefusedFirst) {
  CaseImage image = {R"({"op": "gather_and_maybe_dequant_cache", "dtype": "f32",
                         "kv_lora_rank": 16})",
                     {{"kv_cache.npy", npy_f32(std::vector<float>(2 * 4 * 24), "(2, 4, 24)")},
                      {"cu_seq_lens.npy", npy_i32({0, 8})},
                      {"block_table.npy", npy_i32({0, 1}, "(1, 2)")}}};
  EXPECT_EQ(CacheCase(image).result().code, 0);
  image.files["cu_seq_lens.npy"] = npy_i32({0, 1'000'000'000});
  expect_refusal(CacheCase(image).result(), 2,
                 "cu_seq_lens.npy: request 0 has 1000000000 tokens; expected at most 8 (2 pages of "
                 "4 in block_table.npy)");
}

}  // namespace test_run_cache_ops
