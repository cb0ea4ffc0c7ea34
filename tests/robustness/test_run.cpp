#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "oracle/oracle.hpp"
#include "robustness/run_case.hpp"

namespace test_run {

using Ints = std::vector<std::int32_t>;
using Slots = std::vector<std::int64_t>;

TEST(RunHost, ReorderIsTheFewestSwaps) {
  const RunCase run({R"({"op": "reorder_batch_to_split_decodes_and_prefills"})",
                     {{"num_scheduled_tokens.npy", npy_i32({5, 1, 1, 7, 1})}}});
  EXPECT_EQ(run.array<std::int32_t>("order"), (Ints{4, 1, 2, 3, 0}));
  EXPECT_EQ(run.text("result"), "{\"modified\":true}");
}

TEST(RunHost, SplitCountsRequestsAndTokens) {
  const RunCase run({R"({"op": "split_decodes_and_prefills", "decode_threshold": 2})",
                     {{"query_start_loc.npy", npy_i64({0, 1, 3, 8})}}});
  EXPECT_EQ(
      run.text("result"),
      "{\"num_decode_tokens\":3,\"num_decodes\":2,\"num_prefill_tokens\":5,\"num_prefills\":1}");
}

TEST(RunHost, PagesAreListedBehindOneAnother) {
  const RunCase run(
      {R"({"op": "paged_kv_metadata", "block_size": 4})",
       {{"seq_lens.npy", npy_i32({9, 0, 12, 5})},
        {"block_table.npy", npy_i32({0, 5, 8, 99, 99, 99, 1, 6, 7, 3, 4, 99}, "(4, 3)")}}});
  EXPECT_EQ(run.array<std::int32_t>("paged_kv_indptr"), (Ints{0, 3, 3, 6, 8}));
  EXPECT_EQ(run.array<std::int32_t>("paged_kv_indices"), (Ints{0, 5, 8, 1, 6, 7, 3, 4}));
  EXPECT_EQ(run.array<std::int32_t>("paged_kv_last_page_len"), (Ints{1, 0, 4, 1}));
}

TEST(RunHost, SlotsFollowTheBlockTable) {
  const RunCase run({R"({"op": "compute_slot_mapping", "block_size": 4})",
                     {{"seq_lens.npy", npy_i64({5, 3})},
                      {"query_start_loc.npy", npy_i32({0, 2, 5})},
                      {"block_table.npy", npy_i32({7, 2, 9, -5}, "(2, 2)")}}});
  EXPECT_EQ(run.array<std::int64_t>("slot_mapping"), (Slots{31, 8, 36, 37, 38}));
}

TEST(RunHost, A1_7_ChunksBecomeVirtualRequests) {
  std::vector<std::int32_t> table(30);
  std::iota(table.begin(), table.end(), 0);
  const RunCase run({R"({"op": "make_local_attention_virtual_batches", "attn_chunk_size": 4,
                     "block_size": 2})",
                     {{"seq_lens.npy", npy_i32({6, 17, 9})},
                      {"query_start_loc.npy", npy_i32({0, 4, 14, 19})},
                      {"block_table.npy", npy_i32(table, "(3, 10)")}}});
  EXPECT_EQ(run.array<std::int32_t>("query_start_loc"), (Ints{0, 2, 4, 5, 9, 13, 14, 18, 19}));
  EXPECT_EQ(run.array<std::int32_t>("seq_lens"), (Ints{4, 2, 4, 4, 4, 1, 4, 1}));
  EXPECT_EQ(run.array<std::int32_t>("virtual_batch_to_request"), (Ints{0, 0, 1, 1, 1, 1, 2, 2}));
  EXPECT_EQ(run.array<std::int32_t>("block_table"),
            (Ints{0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19, 22, 23, 24, 25}));
}

TEST(RunHost, CacheShapesOfTheBackends) {
  const auto shape = [](const std::string& backend, const std::string& layout) {
    return RunCase(CaseImage{R"({"op": "kv_cache_shape", "num_blocks": 10, "block_size": 16,
                    "num_kv_heads": 8, "head_size": 64, "backend": ")" +
                                 backend + "\", \"layout\": \"" + layout + "\"}",
                             {}})
        .text("result");
  };
  EXPECT_EQ(shape("FLASHINFER", "HND"),
            "{\"page_size_bytes\":32768,\"shape\":[10,2,16,8,64],\"stride_order\":[0,1,3,2,4],"
            "\"strides\":[16384,8192,64,1024,1]}");
  EXPECT_EQ(shape("XFORMERS", "NHD"),
            "{\"page_size_bytes\":32768,\"shape\":[2,10,16,8,64],\"stride_order\":[0,1,2,3,4],"
            "\"strides\":[81920,8192,512,64,1]}");
  const RunCase latent(CaseImage{R"({"op": "kv_cache_shape", "num_blocks": 10, "block_size": 64,
                       "num_kv_heads": 1, "head_size": 576, "backend": "CLATTN_MLA"})",
                                 {}});
  EXPECT_EQ(latent.text("result"),
            "{\"page_size_bytes\":73728,\"shape\":[1,10,64,1,576],\"stride_order\":[0,1,2,3,4],"
            "\"strides\":[368640,36864,576,576,1]}");
}

TEST(RunHost, TheSelectorNamesItsChoice) {
  const RunCase run(CaseImage{R"({"op": "select_backend", "head_size": 128, "dtype": "f16",
                     "kv_cache_dtype": "auto", "block_size": 16, "is_attention_free": false,
                     "use_mla": false, "has_sink": false})",
                              {}});
  EXPECT_NE(run.text("result").find("\"backend\":\"FLASHINFER\""), std::string::npos);
  const RunCase sink({R"({"op": "select_backend", "head_size": 128, "dtype": "f16",
                      "has_sink": true})",
                      {}});
  EXPECT_NE(sink.text("result").find("\"backend\":\"FLASHINFER\""), std::string::npos);
  const RunCase latent({R"({"op": "select_backend", "head_size": 576, "dtype": "bf16",
                        "block_size": 64, "use_mla": true})",
                        {}});
  EXPECT_NE(latent.text("result").find("\"backend\":\"CLATTN_MLA\""), std::string::npos);
  const RunCase nothing({R"({"op": "select_backend", "head_size": 128, "dtype": "f16",
                         "is_attention_free": true})",
                         {}});
  EXPECT_EQ(nothing.text("result"), "{\"backend\":\"NO_ATTENTION\",\"rejected\":{}}");
}

/// The small case as the oracle sees it, after its new tokens have been stored.
oracle::AttentionCase oracle_view(const CaseImage& image) {
  oracle::AttentionCase call;
  call.num_heads = 2;
  call.num_kv_heads = 1;
  call.head_size = 8;
  call.block_size = 4;
  call.scale = 1 / std::sqrt(8.0);
  call.query_start_loc = values_of<std::int32_t>(image.files.at("query_start_loc.npy"));
  call.seq_lens = values_of<std::int32_t>(image.files.at("seq_lens.npy"));
  call.block_table = values_of<std::int32_t>(image.files.at("block_table.npy"));
  call.max_blocks = 2;
  const auto doubles = [&](const char* name) {
    const std::vector<float> values = values_of<float>(image.files.at(name));
    return std::vector<double>(values.begin(), values.end());
  };
  call.query = doubles("query.npy");
  call.key_cache = doubles("key_cache.npy");
  call.value_cache = doubles("value_cache.npy");
  const std::vector<double> key = doubles("key.npy"), value = doubles("value.npy");
  const auto slots = values_of<std::int64_t>(image.files.at("slot_mapping.npy"));
  for (std::size_t i = 0; i < key.size(); ++i) {
    const std::size_t at = static_cast<std::size_t>(slots[i / 8]) * 8 + i % 8;
    call.key_cache[at] = key[i];
    call.value_cache[at] = value[i];
  }
  return call;
}

void expect_right(const CaseImage& image, const std::string& options) {
  const RunCase run(image, options);
  const oracle::AttentionCase call = oracle_view(image);
  const oracle::AttentionResult truth = oracle::attention(call, oracle::Element::kF32);
  const auto out = run.array<float>("out");
  const auto lse = run.array<float>("lse");
  ASSERT_EQ(out.size(), truth.out.size());
  ASSERT_EQ(lse.size(), truth.lse.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(out[i]), truth.out[i], 2 * truth.bound[i] + 1e-7);
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(lse[i]), truth.lse[i], 2e-5);
  }
  const auto keys = run.array<float>("key_cache_out");
  ASSERT_EQ(keys.size(), call.key_cache.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(static_cast<double>(keys[i]), call.key_cache[i]);
  }
  EXPECT_EQ(run.num_outputs(), 5U);  // out, lse, both caches, info
  EXPECT_NE(run.text("info").find("\"kernels\":[{"), std::string::npos);
}

TEST(RunDevice, AttentionMatchesTheOracleInEveryLayout) {
  CaseImage image = small_attention_case();
  expect_right(image, "");
  image.json.insert(1, "\"layout\": \"NHD\", ");
  expect_right(image, "--backend FLASHINFER");
  image.json.replace(image.json.find("NHD"), 3, "HND");
  expect_right(image, "--backend FLASHINFER");
}

TEST(RunDevice, RequestsMayStandInAnyOrder) {
  CaseImage image = small_attention_case();  // the prompt first, the decode behind it
  image.files["block_table.npy"] = npy_i32({2, 77, 1, 0}, "(2, 2)");
  image.files["seq_lens.npy"] = npy_i32({2, 5});
  image.files["query_start_loc.npy"] = npy_i32({0, 2, 3});
  image.files["slot_mapping.npy"] = npy_i64({8, 9, 0, -1, -1});
  expect_right(image, "");
}

TEST(RunDevice, NeutralOptionsChangeNothing) {
  CaseImage image = small_attention_case();
  image.json.insert(1,
                    "\"sliding_window\": null, \"logits_soft_cap\": 0, \"k_scale\": [1.0], "
                    "\"v_scale\": 1, \"common_prefix_len\": 0, \"attn_type\": \"decoder\", "
                    "\"kv_cache_dtype\": \"auto\", \"backend\": \"auto\", \"num_splits\": 0, ");
  expect_right(image, "");
}

/// The info's "splits" of the small case with one sequence of eight keys.
std::string splits_of(const std::string& num_splits) {
  CaseImage image = small_attention_case();
  for (const char* name : {"key.npy", "value.npy", "slot_mapping.npy"}) image.files.erase(name);
  image.json.insert(1, "\"num_splits\": " + num_splits + ", ");
  image.files["query.npy"] = npy_f32(std::vector<float>(16, 1), "(1, 2, 8)");
  image.files["block_table.npy"] = npy_i32({1, 0}, "(1, 2)");
  image.files["seq_lens.npy"] = npy_i32({8});
  image.files["query_start_loc.npy"] = npy_i32({0, 1});
  const std::string info = RunCase(image).text("info");
  const std::size_t at = info.find("\"splits\"");
  return at == std::string::npos ? info : info.substr(at, info.find('}', at) - at + 1);
}

TEST(RunDevice, InfoTellsWhatTheSplitsBecame) {
  EXPECT_EQ(splits_of("1"), "\"splits\":{\"attention_tasks\":1,\"merge_tasks\":0,\"requested\":1}");
  // A CPU's decode joins its splits itself: no launch merges.
  EXPECT_EQ(splits_of("2"), "\"splits\":{\"attention_tasks\":2,\"merge_tasks\":0,\"requested\":2}");
}

TEST(RunDevice, ReshapeAndCacheStoresAtItsSlots) {
  CaseImage image = small_attention_case();
  image.json = R"({"op": "reshape_and_cache", "dtype": "f32"})";
  for (const char* other : {"query", "seq_lens", "query_start_loc", "block_table"})
    image.files.erase(std::string(other) + ".npy");
  image.files["slot_mapping.npy"] = npy_i64({11, -1, 2});
  const RunCase run(image);
  for (const std::string name : {"key", "value"}) {
    auto expected = values_of<float>(image.files.at(name + "_cache.npy"));
    const auto rows = values_of<float>(image.files.at(name + ".npy"));
    for (std::size_t d = 0; d < 8; ++d) {
      expected[11 * 8 + d] = rows[d];
      expected[2 * 8 + d] = rows[16 + d];
    }
    EXPECT_EQ(run.array<float>(name + "_cache_out"), expected);
  }
}

TEST(RunDevice, AnEmptyBatchGivesEmptyOutputs) {
  CaseImage image = small_attention_case();
  for (const char* name : {"key.npy", "value.npy", "slot_mapping.npy"}) image.files.erase(name);
  image.files["query.npy"] = npy_f32({}, "(0, 2, 8)");
  image.files["block_table.npy"] = npy_i32({}, "(0, 2)");
  image.files["seq_lens.npy"] = npy_i32({});
  image.files["query_start_loc.npy"] = npy_i32({0});
  const RunCase run(image);
  EXPECT_TRUE(run.array<float>("out").empty());
  EXPECT_EQ(run.num_outputs(), 3U);  // out, lse, info
}

/// Two heads over rows of 16 + 8 elements; request 1 is empty. The second key of request 0 is twice
/// the first, and its query picks element 0, which the first row sets to ln 3.
TEST(RunDevice, A6_6_LatentDecodeWeighsItsRows) {
  constexpr std::size_t kWidth = 24, kRank = 16;
  std::vector<float> query(3 * 2 * kWidth, 0.0F), cache(2 * 2 * kWidth, NAN);
  std::fill_n(cache.begin() + 2 * kWidth, 2 * kWidth, 0.0F);  // block 1: the two keys
  cache[2 * kWidth] = cache[2 * kWidth + kRank] = std::log(3.0F);
  cache[3 * kWidth] = cache[3 * kWidth + kRank] = 2 * std::log(3.0F);
  for (std::size_t h = 0; h < 2;
       ++h) {  // head 0 looks at the latent part, head 1 at the rotary one
    query[h * kWidth + (h == 0 ? 0 : kRank)] = 1.0F;
    query[(4 + h) * kWidth + (h == 0 ? 0 : kRank)] = 1.0F;
  }
  CaseImage image;
  image.json = R"({"op": "mla_decode", "kv_lora_rank": 16, "scale": 1})";
  image.files = {{"query.npy", npy_f32(query, "(3, 2, 24)")},
                 {"kv_cache.npy", npy_f32(cache, "(2, 2, 24)")},
                 {"block_table.npy", npy_i32({1, 99, 1}, "(3, 1)")},
                 {"seq_lens.npy", npy_i32({2, 0, 1})}};
  const RunCase run(image);
  const auto out = run.array<float>("out");
  const auto lse = run.array<float>("lse");
  ASSERT_EQ(out.size(), 3 * 2 * kRank);
  ASSERT_EQ(lse.size(), 6U);
  for (std::size_t h = 0; h < 2; ++h) {
    // Weights 3 and 9 of 12: (ln 3 + 3 * 2 ln 3) / 4.
    EXPECT_NEAR(out[h * kRank], 1.75F * std::log(3.0F), 1e-5);
    EXPECT_NEAR(lse[h], std::log(12.0F), 1e-5);
    EXPECT_EQ(out[(2 + h) * kRank], 0.0F);
    EXPECT_EQ(lse[2 + h], -INFINITY);
    EXPECT_NEAR(out[(4 + h) * kRank], std::log(3.0F), 1e-5);
    EXPECT_NEAR(lse[4 + h], std::log(3.0F), 1e-5);
  }
}

}  // namespace test_run
