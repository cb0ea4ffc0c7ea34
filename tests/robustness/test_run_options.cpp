// `clattn run` for every option of the attention operation, judged by the oracle.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "robustness/attention_model.hpp"

namespace test_run_options {

/// Two decodes and a prefill; and the same where the program has to bring the decodes to the front.
AttentionModel mixed() {
  return AttentionModel::paged({{1, 21}, {1, 6}, {5, 9}});
}
AttentionModel unordered() {
  return AttentionModel::paged({{5, 9}, {1, 21}, {3, 3}, {1, 6}});
}

void expect_right(const AttentionModel& model) {
  expect_truth(model, RunCase(model.image));
}

TEST(RunOptions, WindowsCountTheOwnToken) {
  AttentionModel model = mixed();
  model.add("\"sliding_window\": 3");
  model.truth.window_left = 2;
  expect_right(model);
}

TEST(RunOptions, WindowsReachAsFarAheadAsBackWithoutCausality) {
  AttentionModel model = mixed();
  model.add("\"sliding_window\": 3, \"causal\": false");
  model.truth.causal = false;
  model.truth.window_left = model.truth.window_right = 2;
  expect_right(model);
}

TEST(RunOptions, WindowsHaveSidesOfTheirOwn) {
  AttentionModel model = mixed();
  model.add("\"window_left\": 0, \"window_right\": 2, \"causal\": false");
  model.truth.causal = false;
  model.truth.window_left = 0;
  model.truth.window_right = 2;
  expect_right(model);
  AttentionModel ahead = mixed();
  ahead.add("\"window_left\": -1, \"window_right\": 1, \"causal\": false");
  ahead.truth.causal = false;
  ahead.truth.window_right = 1;
  expect_right(ahead);
}

TEST(RunOptions, ChunksAreAligned) {
  AttentionModel model = unordered();
  model.add("\"attention_chunk_size\": 6");
  model.truth.chunk = 6;
  expect_right(model);
}

TEST(RunOptions, LookbackShowsEarlierChunks) {
  AttentionModel model = unordered();
  model.add("\"attention_chunk_size\": 3, \"chunk_lookback\": 2");
  model.truth.chunk = 3;
  model.truth.chunk_lookback = 2;
  expect_right(model);
}

TEST(RunOptions, LogitOptionsCombineInOrder) {
  AttentionModel model = unordered();
  model.add("\"logits_soft_cap\": 1.5, \"scale\": 0.75, \"sliding_window\": 7");
  model.truth.soft_cap = 1.5;
  model.truth.scale = 0.75;
  model.truth.window_left = 6;
  model.set_per_head("alibi_slopes", {0.5, 0.25, 0.125, 0.0625});
  model.set_per_head("sinks", {0.5, -1, 2, -INFINITY});
  expect_right(model);
}

TEST(RunOptions, MaskRowsMoveWithTheirTokens) {
  AttentionModel model = unordered();
  model.set_mask();
  expect_right(model);
}

TEST(RunOptions, BidirectionalDecodersSeeEveryKey) {
  AttentionModel model = mixed();
  model.add("\"causal\": false");
  model.truth.causal = false;
  expect_right(model);
}

/// The first and the last key that each row of the only request sees, {-1, -1}: none.
using Rows = std::vector<std::pair<std::int32_t, std::int32_t>>;

/// Compares with a truth that is told which keys each row sees, and by the program's own.
void expect_rows(AttentionModel model, const Rows& rows) {
  oracle::AttentionCase plain = model.truth;
  plain.causal = false;
  plain.looks.clear();
  plain.spans.clear();
  plain.first_keys.clear();
  plain.window_left = plain.window_right = -1;
  plain.custom_mask_stride = model.max_seq_len();
  for (const auto& [first, last] : rows) {
    for (std::int32_t key = 0; key < model.max_seq_len(); ++key)
      plain.custom_mask.push_back(first <= key && key <= last ? 1 : 0);
  }
  model.truth = plain;
  expect_truth(model, RunCase(model.image, "--verify"));
}

TEST(RunOptions, M8_ACanvasLooksBackFromItsFirstQuery) {
  AttentionModel model = AttentionModel::paged({{4, 12}});
  model.add("\"window_left\": 3");
  model.set_directions({oracle::Looks::kCanvas});
  expect_rows(model, {{5, 11}, {5, 11}, {5, 11}, {5, 11}});
}

TEST(RunOptions, M14_TheWholeSpanUnderAWindow) {
  AttentionModel model = AttentionModel::paged({{8, 8}});
  model.add("\"sliding_window\": 2");
  model.set_spans({{0, 2, 6}});
  const Rows rows = {{0, 0}, {0, 1}, {1, 5}, {2, 5}, {2, 5}, {2, 5}, {5, 6}, {6, 7}};
  expect_rows(model, rows);
  AttentionModel own_keys = AttentionModel::encoder("encoder_only", {{8, 8}});
  own_keys.add("\"sliding_window\": 2");
  own_keys.set_spans({{0, 2, 6}});
  own_keys.set_directions({oracle::Looks::kBack});
  expect_rows(own_keys, rows);
}

TEST(RunOptions, M16_ASpanThatIsCutOnBothSides) {
  AttentionModel model = AttentionModel::paged({{8, 8}});
  model.add("\"sliding_window\": 2, \"span_rule\": \"clip_both\"");
  model.set_spans({{0, 2, 6}});
  expect_rows(model, {{0, 0}, {0, 1}, {1, 3}, {2, 4}, {3, 5}, {4, 5}, {5, 6}, {6, 7}});
}

TEST(RunOptions, M25_SpansThatTheLayerDoesNotLookAt) {
  AttentionModel model = AttentionModel::paged({{5, 9}});
  model.set_spans({{0, 2, 9}});
  model.add("\"use_spans\": false");
  expect_rows(model, {{0, 4}, {0, 5}, {0, 6}, {0, 7}, {0, 8}});
}

TEST(RunOptions, M37_KeysBeforeTheFirstAreNone) {
  AttentionModel model = AttentionModel::paged({{2, 10}});
  model.set_first_keys({3});
  model.poison_keys(0, 0, 3);
  expect_rows(model, {{3, 8}, {3, 9}});
  model.set_first_keys({10});
  model.poison_keys(0, 0, 10);
  expect_rows(model, {{-1, -1}, {-1, -1}});
}

TEST(RunOptions, M34_KeysThatEscapeTheWindow) {
  AttentionModel model = AttentionModel::paged({{3, 10}});
  model.add("\"window_left\": 2");
  model.truth.window_left = 2;
  model.set_keep_keys({3});
  model.poison_keys(0, 3, 5);
  expect_right(model);
}

TEST(RunOptions, ListsAreThoseOfTheirRequests) {
  AttentionModel model = unordered();
  model.add("\"window_left\": 3, \"window_right\": 1, \"span_rule\": \"clip_left\"");
  model.truth.window_left = 3;
  model.truth.window_right = 1;
  model.truth.span_cut = oracle::SpanCut::kLeft;
  model.set_directions({oracle::Looks::kBothWays, oracle::Looks::kBack, oracle::Looks::kCanvas,
                        oracle::Looks::kBothWays});
  model.set_spans({{0, 4, 7}, {0, 7, 20}, {1, 0, 21}, {2, 0, 2}});
  model.set_first_keys({2, 19, 1, 6});
  model.set_keep_keys({3, 0, 2, 6});
  expect_right(model);
}

TEST(RunOptions, QuantizedCachesCountTimesTheirScales) {
  const struct {
    oracle::Element element;
    const char* dtype;
    std::vector<double> k_scale, v_scale;
  } rows[] = {
      {oracle::Element::kFp8E4M3,
       "fp8_e4m3",
       {0.5},
       {0.25, 2}},  // one form is widened to the other
      {oracle::Element::kFp8E5M2, "fp8_e5m2", {0.5, 1}, {0.75}},
      {oracle::Element::kInt8, "int8", {0.03125}, {0.0625}},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.dtype);
    AttentionModel model = unordered();
    model.quantize(row.element, row.dtype, row.k_scale, row.v_scale);
    model.store_newest();
    const RunCase run(model.image);
    expect_truth(model, run);
    EXPECT_EQ(npy_data(run.bytes("key_cache_out.npy")), model.expected_key_cache);
    EXPECT_EQ(npy_data(run.bytes("value_cache_out.npy")), model.expected_value_cache);
  }
}

/// Heads of this size are never multiplied in 8 bits: neither the option nor the scale changes a
/// bit.
TEST(RunOptions, ProductsInFp8LeaveOthersAlone) {
  AttentionModel model = unordered();
  model.quantize(oracle::Element::kFp8E4M3, "fp8_e4m3", {0.5, 2}, {0.25});
  const RunCase without(model.image);
  model.add("\"fp8_products\": true, \"q_scale\": 0.03125");
  const RunCase with(model.image, "--verify");
  expect_truth(model, with);
  EXPECT_EQ(with.bytes("out.npy"), without.bytes("out.npy"));
  EXPECT_EQ(with.bytes("lse.npy"), without.bytes("lse.npy"));
  EXPECT_NE(with.text("info").find("\"multiplies_fp8\":false"), std::string::npos);
}

TEST(RunOptions, ReshapeAndCacheDividesByTheScales) {
  AttentionModel model = mixed();
  model.quantize(oracle::Element::kFp8E4M3, "fp8_e4m3", {0.5, 2}, {0.25});
  model.store_newest();
  const std::size_t begin = model.image.json.find("\"kv_cache_dtype\"");
  const std::size_t end = model.image.json.find("\"op\"");
  model.image.json =
      "{" + model.image.json.substr(begin, end - begin) + "\"op\": \"reshape_and_cache\"}";
  for (const char* other : {"query", "seq_lens", "query_start_loc", "block_table"})
    model.image.files.erase(std::string(other) + ".npy");
  const RunCase run(model.image);
  EXPECT_EQ(npy_data(run.bytes("key_cache_out.npy")), model.expected_key_cache);
  EXPECT_EQ(npy_data(run.bytes("value_cache_out.npy")), model.expected_value_cache);
}

TEST(RunOptions, Fp8OutputIsTheUnroundedOneOverItsScale) {
  constexpr double kScale = 0.125;
  AttentionModel model = unordered();
  model.image.files["output_scale.npy"] = npy_f32({static_cast<float>(kScale)}, "(1,)");
  const RunCase run(model.image);
  expect_truth(model, run);
  const oracle::AttentionResult truth = oracle::attention(model.truth, oracle::Element::kF32);
  const std::string codes = npy_data(run.bytes("out_fp8.npy"));
  ASSERT_EQ(codes.size(), truth.out.size());
  const auto fp8 = [](double x) { return oracle::round_to(oracle::Element::kFp8E4M3, x); };
  for (std::size_t i = 0; i < codes.size(); ++i) {
    // Rounding never falls: the right code lies between those of the ends of what is allowed.
    const double slack = 2 * truth.bound[i] + 1e-6;
    const double got =
        oracle::decode(oracle::Element::kFp8E4M3, static_cast<unsigned char>(codes[i]));
    ASSERT_GE(got, fp8((truth.out[i] - slack) / kScale)) << i;
    ASSERT_LE(got, fp8((truth.out[i] + slack) / kScale)) << i;
  }
  EXPECT_EQ(run.num_outputs(), 4U);  // out, lse, out_fp8, info
}

TEST(RunOptions, EncodersAttendTheirKeysInBothDirections) {
  for (const char* type : {"encoder", "encoder_only"}) {
    SCOPED_TRACE(type);
    AttentionModel model = AttentionModel::encoder(type, {{7, 7}, {1, 1}, {12, 12}});
    const RunCase run(model.image);
    expect_truth(model, run);
    EXPECT_EQ(run.num_outputs(), 3U);  // out, lse, info: no cache
  }
}

// M6
TEST(RunOptions, M6_EncoderOnlyMayBeCausal) {
  AttentionModel model = AttentionModel::encoder("encoder_only", {{7, 7}, {1, 1}, {40, 40}});
  model.add("\"causal\": true");
  model.truth.causal = true;
  expect_right(model);
}

TEST(RunOptions, ValuesMayHaveFewerElementsThanKeys) {
  AttentionModel model = AttentionModel::encoder("encoder_only", {{7, 7}, {1, 1}, {40, 40}});
  model.halve_values();
  const RunCase run(model.image, "--verify");
  const oracle::AttentionResult want = oracle::attention(model.truth, oracle::Element::kF32);
  const std::vector<float> out = run.array<float>("out");
  ASSERT_EQ(out.size() * 2, want.out.size());
  for (std::size_t i = 0; i < out.size(); ++i)
    EXPECT_NEAR(out[i], want.out[i / 8 * 16 + i % 8], 1e-5) << i;
}

TEST(RunOptions, EncoderWindowsReachToBothSides) {
  AttentionModel model = AttentionModel::encoder("encoder_only", {{9, 9}, {4, 4}});
  model.add("\"sliding_window\": 3, \"causal\": false");
  model.truth.window_left = model.truth.window_right = 2;
  model.set_mask();
  expect_right(model);
}

TEST(RunOptions, CrossAttentionSeesAllKeysOfTheEncoder) {
  expect_right(AttentionModel::encoder("encoder_decoder", {{1, 7}, {4, 2}, {3, 11}}));
}

TEST(RunOptions, CrossAttentionMayReadTheKeysFromPages) {
  AttentionModel model = AttentionModel::paged({{4, 2}, {1, 7}, {3, 11}});
  model.add("\"attn_type\": \"encoder_decoder\"");
  model.truth.causal = false;
  expect_right(model);
}

/// What the info says of a run that must be right.
std::string info_of_right(const AttentionModel& model, const std::string& options = {}) {
  const RunCase run(model.image, options);
  expect_truth(model, run);
  return run.text("info");
}

TEST(RunOptions, CommonPrefixesRunAsCascades) {
  AttentionModel model = AttentionModel::paged({{5, 13}, {1, 21}, {3, 11}, {1, 9}});
  model.share_prefix(8);
  model.add("\"logits_soft_cap\": 1.5, \"scale\": 0.75");
  model.truth.soft_cap = 1.5;
  model.truth.scale = 0.75;
  model.set_per_head("sinks", {0.5, -1, 2, -INFINITY});
  EXPECT_NE(info_of_right(model).find("\"role\":\"cascade\""), std::string::npos);
}

/// Of a prefix that reaches into new tokens the part before them is shared.
TEST(RunOptions, PrefixesThatAreNotComputedYet) {
  AttentionModel some = AttentionModel::paged({{1, 21}, {5, 11}});
  some.share_prefix(8);
  EXPECT_NE(info_of_right(some).find("\"role\":\"cascade\""), std::string::npos);
  AttentionModel none = AttentionModel::paged({{1, 21}, {8, 11}});
  none.share_prefix(8);
  EXPECT_EQ(info_of_right(none).find("\"role\":\"cascade\""), std::string::npos);
}

TEST(RunOptions, LayersThatDoNotCascadeTakePrefixesInOnePass) {
  AttentionModel window = AttentionModel::paged({{1, 21}, {2, 13}});
  window.share_prefix(8);
  window.add("\"sliding_window\": 7");
  window.truth.window_left = 6;
  EXPECT_EQ(info_of_right(window).find("\"role\":\"cascade\""), std::string::npos);
  AttentionModel both_ways = AttentionModel::paged({{1, 21}, {2, 13}});
  both_ways.share_prefix(8);
  both_ways.add("\"causal\": false");
  both_ways.truth.causal = false;
  EXPECT_EQ(info_of_right(both_ways).find("\"role\":\"cascade\""), std::string::npos);
}

TEST(RunOptions, PrefixesInOtherPagesAreRefused) {
  AttentionModel model = AttentionModel::paged({{1, 21}, {1, 13}});
  model.add("\"common_prefix_len\": 4");
  const ScratchDirectory scratch;
  model.image.write(scratch.path() / "case");
  expect_refusal(run_program("run " + (scratch.path() / "case").string()), 2,
                 "request 1: block_table[0] is 7, legal: 13 (request 0's: common_prefix_len 4)");
}

/// Decodes over x-packed caches, whose newest token the program stores first.
TEST(RunOptions, PackedCachesHoldTheSame) {
  AttentionModel model = AttentionModel::paged({{1, 6}, {1, 21}, {1, 1}});
  model.add("\"layout\": \"packed\"");
  EXPECT_NE(info_of_right(model).find("\"layout\":\"packed\""), std::string::npos);
  AttentionModel bytes = AttentionModel::paged({{1, 6}, {1, 21}});
  bytes.quantize(oracle::Element::kFp8E4M3, "fp8_e4m3", {0.5, 2}, {0.25});
  bytes.store_newest();
  bytes.add("\"layout\": \"packed\"");
  const RunCase run(bytes.image);
  expect_truth(bytes, run);
  EXPECT_EQ(npy_data(run.bytes("key_cache_out.npy")), bytes.expected_key_cache);
  EXPECT_EQ(npy_data(run.bytes("value_cache_out.npy")), bytes.expected_value_cache);
}

}  // namespace test_run_options
