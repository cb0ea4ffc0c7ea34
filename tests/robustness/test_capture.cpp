// CLATTN_CAPTURE_DIR: calls become cases, and the cases give the calls' bits again.

#include <gmock/gmock.h>

#include <algorithm>
#include <clattn/attention_functions.hpp>
#include <clattn/attn_utils.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/cascade.hpp>
#include <clattn/clattn.hpp>
#include <cmath>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "robustness/attention_model.hpp"
#include "robustness/capture.hpp"
#include "support/error_text.hpp"

namespace test_capture {

namespace fs = std::filesystem;

AttentionModel mixed() {
  return AttentionModel::paged({{1, 21}, {1, 6}, {5, 9}});
}

TEST(Capture, PlainDecode) {
  AttentionModel model = AttentionModel::paged({{1, 21}, {1, 6}});
  model.add("\"scale\": 0.3, \"layout\": \"NHD\", \"num_splits\": 3, \"causal\": false");
  const RoundTrip trip(model.image);
  EXPECT_EQ(names_in(trip.calls()), Names{"0000-attention"});
}

// A case that is not its call is found: `clattn run` compares with what the call gave.
TEST(Capture, AWrongResultIsCounted) {
  AttentionModel model = AttentionModel::paged({{1, 21}, {1, 6}});
  const RoundTrip trip(model.image);
  const fs::path place = trip.calls() / "0000-attention";
  ASSERT_EQ(names_in(place / "captured"), (Names{"lse.npy", "out.npy"}));

  std::string query = read_bytes(place / "query.npy");
  query.back() = static_cast<char>(query.back() ^ 0x40);  // of the last head of the last token
  write_bytes(place / "query.npy", query);
  const ProgramResult changed = run_program("run " + place.string());
  EXPECT_EQ(changed.code, 0) << changed.standard_error;
  EXPECT_THAT(changed.standard_output, testing::HasSubstr("lse: 1 of 8 elements differ"));
  EXPECT_THAT(changed.standard_output, testing::HasSubstr("out: 16 of 128 elements differ"));

  write_bytes(place / "captured" / "sum.npy", npy_f32({1}, "(1,)"));
  expect_refusal(run_program("run " + place.string()), 2, "captured/sum.npy: the operation gives");
  fs::remove(place / "captured" / "sum.npy");
  write_bytes(place / "captured" / "lse.npy", npy_f32({1}, "(1,)"));
  expect_refusal(run_program("run " + place.string()), 2, "captured/lse.npy: <f4 [1]; expected");
}

TEST(Capture, EveryLogitOption) {
  AttentionModel model = mixed();
  model.add(
      "\"logits_soft_cap\": 1.5, \"sliding_window\": 7, \"attention_chunk_size\": 8, "
      "\"chunk_lookback\": 1");
  model.set_per_head("alibi_slopes", {0.5, 0.25, 0.125, 0.0625});
  model.set_per_head("sinks", {0.5, -1, 2, -INFINITY});
  const RoundTrip trip(model.image);
}

TEST(Capture, SidesOfAWindow) {
  AttentionModel model = mixed();
  model.add("\"window_left\": 4, \"window_right\": 0, \"causal\": false");
  const RoundTrip trip(model.image);
}

TEST(Capture, CustomMaskAndFp8Output) {
  AttentionModel model = mixed();
  model.set_mask();
  model.image.files["output_scale.npy"] = npy_f32({0.125F}, "(1,)");
  const RoundTrip trip(model.image);
  trip.expect_equal("out_fp8");
}

TEST(Capture, EncoderAndCrossAttention) {
  RoundTrip(AttentionModel::encoder("encoder_only", {{7, 7}, {1, 1}, {12, 12}}).image);
  RoundTrip(AttentionModel::encoder("encoder_decoder", {{1, 7}, {4, 2}}).image);
  AttentionModel small = AttentionModel::encoder("encoder_only", {{7, 7}, {12, 12}});
  small.halve_values();
  RoundTrip{small.image};
  AttentionModel paged = AttentionModel::paged({{1, 7}, {4, 2}});
  paged.add("\"attn_type\": \"encoder_decoder\"");
  const RoundTrip trip(paged.image);
}

TEST(Capture, QuantizedCacheAndItsWrite) {
  AttentionModel model = mixed();
  model.quantize(oracle::Element::kFp8E4M3, "fp8_e4m3", {0.5, 2}, {0.25});
  model.store_newest();
  const RoundTrip trip(model.image);
  ASSERT_EQ(names_in(trip.calls()), (Names{"0000-reshape_and_cache", "0001-attention"}));
  // The write's case has the pages that it touched.
  const RunCase write(RunCase::InPlace{}, trip.calls() / "0000-reshape_and_cache");
  const std::string key = npy_data(write.bytes("key_cache_out.npy"));
  const std::string value = npy_data(write.bytes("value_cache_out.npy"));
  ASSERT_EQ(key.size(), model.expected_key_cache.size());
  constexpr std::size_t kPageBytes = 4 * 2 * 16;
  for (const std::int64_t slot : values_of<std::int64_t>(model.image.files["slot_mapping.npy"])) {
    if (slot < 0) continue;
    const std::size_t at = static_cast<std::size_t>(slot) / 4 * kPageBytes;
    EXPECT_EQ(key.substr(at, kPageBytes), model.expected_key_cache.substr(at, kPageBytes));
    EXPECT_EQ(value.substr(at, kPageBytes), model.expected_value_cache.substr(at, kPageBytes));
  }
}

TEST(Capture, ProductsInFp8AndTheScaleOfQueries) {
  for (const std::vector<double>& k_scale : {std::vector{0.5}, std::vector{0.5, 2.0}}) {
    AttentionModel model = mixed();
    model.quantize(oracle::Element::kFp8E4M3, "fp8_e4m3", k_scale, {0.25});
    model.add("\"fp8_products\": true, \"q_scale\": 0.125");
    const RoundTrip trip(model.image);
    const std::string text = read_bytes(trip.calls() / "0000-attention" / "case.json");
    EXPECT_NE(text.find("\"fp8_products\": true"), std::string::npos) << text;
    EXPECT_NE(text.find("\"q_scale\": 0.125"), std::string::npos) << text;
  }
}

/// `count` random numbers as f16.
std::string random_f16(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::string bytes;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = oracle::encode(oracle::Element::kF16, normal(random));
    bytes += {static_cast<char>(bits & 0xFF), static_cast<char>(bits >> 8)};
  }
  return bytes;
}

TEST(Capture, OtherBackendAndType) {
  const RoundTrip trip(
      {R"({"op": "attention", "num_heads": 2, "num_kv_heads": 2, "head_size": 32,
                            "block_size": 16, "dtype": "f16", "return_lse": true,
                            "backend": "XFORMERS"})",
       {{"query.npy", npy_image("<f2", "(4, 2, 32)", random_f16(256, 1))},
        {"key_cache.npy", npy_image("<f2", "(4, 16, 2, 32)", random_f16(4096, 2))},
        {"value_cache.npy", npy_image("<f2", "(4, 16, 2, 32)", random_f16(4096, 3))},
        {"block_table.npy", npy_i32({3, 1, 2, 0}, "(2, 2)")},
        {"seq_lens.npy", npy_i32({20, 3})},
        {"query_start_loc.npy", npy_i32({0, 1, 4})}}});
}

TEST_F(CaptureInProcess, StridedTensorsArePackedAndStraySlotsDropped) {
  const auto context = clattn::Context::create();
  const clattn::Queue queue = context->create_queue();
  constexpr std::int64_t kTokens = 3, kRow = 8, kOffset = 5, kStride = 11;
  const auto upload = [&](const auto& values) {
    const clattn::Buffer buffer = context->allocate(values.size() * sizeof(values[0]));
    queue.write(buffer, std::as_bytes(std::span(values)));
    return buffer;
  };
  std::vector<float> elements(kOffset + 2 * kStride + kRow, NAN), packed(kTokens * kRow, 0);
  for (std::int64_t i = 0; i < kTokens * kRow; ++i) {
    packed[static_cast<std::size_t>(i)] = static_cast<float>(i + 1);
    elements[static_cast<std::size_t>(kOffset + i / kRow * kStride + i % kRow)] =
        static_cast<float>(i + 1);
  }
  const clattn::Buffer tensor = upload(elements);
  const clattn::Buffer slots = upload(std::vector<std::int64_t>{77, -3, 6, 1000});
  const clattn::AttentionConfig config = {.num_heads = 1,
                                          .num_kv_heads = 1,
                                          .head_size = 8,
                                          .block_size = 4,
                                          .dtype = clattn::DType::kF32};
  const clattn::KVCache cache =
      make_kv_cache(*context, queue, *clattn::list_attn_backends()[0], config, 3);
  const clattn::TensorRef rows = {
      .buffer = tensor.handle(), .offset = kOffset, .token_stride = kStride};
  reshape_and_cache_flash(*context, queue, rows, rows, config.dtype, cache, slots.handle(),
                          sizeof(std::int64_t), kTokens);
  queue.finish();
  ASSERT_EQ(cases().size(), 1U);
  const fs::path place = cases()[0];
  EXPECT_EQ(place.filename().string().substr(4), "-reshape_and_cache");
  EXPECT_EQ(values_of<float>(read_bytes(place / "key.npy")), packed);
  EXPECT_EQ(values_of<float>(read_bytes(place / "value.npy")), packed);
  EXPECT_EQ(values_of<std::int64_t>(read_bytes(place / "slot_mapping.npy")),
            (std::vector<std::int64_t>{-1, 6, -1}));
  const RunCase again(RunCase::InPlace{}, place);
  std::vector<float> expected(3 * 4 * 8, 0);
  std::copy_n(packed.begin() + kRow, kRow, expected.begin() + 6 * kRow);
  EXPECT_EQ(again.array<float>("key_cache_out"), expected);

  clattn::TensorRef nowhere = rows;
  nowhere.offset = -1;
  EXPECT_EQ(test::error_text([&] {
              reshape_and_cache_flash(*context, queue, nowhere, rows, config.dtype, cache,
                                      slots.handle(), sizeof(std::int64_t), kTokens);
            }),
            "key: offset is -1, legal: >= 0");
  EXPECT_EQ(cases().size(), 1U) << "a refused call left a case";
}

/// A layer's latent attention: every query token becomes a request that decodes.
TEST_F(CaptureInProcess, AStepOfALatentLayerBecomesItsTwoCases) {
  const auto context = clattn::Context::create();
  const clattn::Queue queue = context->create_queue();
  clattn::LayerRegistry layers;
  clattn::AttentionOptions options;
  options.config.num_heads = 2;
  options.config.head_size = 24;
  options.config.rope_dim = 8;
  options.config.use_mla = true;
  options.config.dtype = clattn::DType::kF32;
  options.config.block_size = 2;
  options.config.kv_cache_dtype = clattn::DType::kFp8E4M3;
  clattn::Attention layer(context, layers, options);
  const auto& backend = *layer.get_attn_backend();
  layer.bind_kv_cache(make_kv_cache(*context, queue, backend, layer.config(), 4));
  const float scale = 0.5;
  static_cast<void>(layer.load_kv_scales({.k_scale = std::span(&scale, 1)}));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto upload = [&](std::size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = normal(random);
    const clattn::Buffer buffer = context->allocate(count * sizeof(float));
    queue.write(buffer, std::as_bytes(std::span(values)));
    return buffer;
  };
  constexpr std::size_t kTokens = 4, kOut = kTokens * 2 * 16;
  const clattn::Buffer query = upload(kTokens * 2 * 24), kv_c = upload(kTokens * 16),
                       k_pe = upload(kTokens * 8), out = upload(kOut);
  const std::vector<std::int32_t> starts = {0, 3, 4}, lens = {3, 1}, table = {3, 0, 2, 9};
  const auto builder = backend.make_builder(context, layer.config());
  const auto& metadata =
      builder->build(queue, clattn::CommonAttentionMetadata::of(starts, lens, table));
  layer.forward(queue,
                {.query = {query.handle()},
                 .key = {kv_c.handle()},
                 .value = {k_pe.handle()},
                 .output = {out.handle()}},
                &metadata);
  std::vector<float> want(kOut);
  queue.read(out, std::as_writable_bytes(std::span(want)));
  std::string stored(layer.kv_cache()->buffer.size_bytes(), '\0');
  queue.read(layer.kv_cache()->buffer, std::as_writable_bytes(std::span(stored)));

  ASSERT_EQ(cases().size(), 2U);
  EXPECT_EQ(cases()[0].filename().string().substr(4), "-concat_and_cache_mla");
  EXPECT_EQ(cases()[1].filename().string().substr(4), "-mla_decode");
  const RunCase write(RunCase::InPlace{}, cases()[0]);
  EXPECT_EQ(npy_data(write.bytes("kv_cache_out.npy")), stored);
  EXPECT_EQ(values_of<std::int32_t>(read_bytes(cases()[1] / "seq_lens.npy")),
            (std::vector<std::int32_t>{1, 2, 3, 1}));
  const RunCase decode(RunCase::InPlace{}, cases()[1]);
  const std::vector<float> got = decode.array<float>("out");
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-5) << i;
}

/// A cascade of any levels is their attention and their merges: each is a case.
TEST_F(CaptureInProcess, LevelsOfACascadeAndTheirMerge) {
  const auto context = clattn::Context::create();
  const clattn::Queue queue = context->create_queue();
  const clattn::AttentionConfig config = {.num_heads = 2,
                                          .num_kv_heads = 1,
                                          .head_size = 16,
                                          .block_size = 4,
                                          .dtype = clattn::DType::kF32};
  const clattn::AttentionBackend& backend = *clattn::list_attn_backends()[0];
  const clattn::KVCache cache = make_kv_cache(*context, queue, backend, config, 4);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](const clattn::Buffer& buffer) {
    std::vector<float> values(buffer.size_bytes() / sizeof(float));
    for (float& value : values) value = normal(random);
    queue.write(buffer, std::as_bytes(std::span(values)));
  };
  fill(cache.buffer);
  constexpr std::size_t kOut = std::size_t{2} * 2 * 16;
  const clattn::Buffer query = context->allocate(kOut * sizeof(float));
  const clattn::Buffer out = context->allocate(kOut * sizeof(float));
  fill(query);
  const std::vector<std::int32_t> both = {0, 2}, each = {0, 1, 2}, one = {0, 1}, prefix = {3},
                                  own = {0, 2}, full = {4}, last = {3, 2};
  clattn::MultiLevelCascadeAttentionWrapper cascade(context, backend, config, 2);
  const clattn::CascadeImpl layer(context, backend, config);
  const clattn::CascadeLevel levels[] = {{both, one, prefix, full}, {each, each, own, last, true}};
  cascade.plan(queue, levels);
  cascade.run(queue, layer, {.query = {query.handle()}, .output = {out.handle()}}, cache);
  std::vector<float> want(kOut);
  queue.read(out, std::as_writable_bytes(std::span(want)));

  ASSERT_EQ(cases().size(), 3U);
  const fs::path merge_case = cases()[2];
  EXPECT_EQ(merge_case.filename().string().substr(4), "-merge_attn_states");
  const RunCase merge(RunCase::InPlace{}, merge_case);
  EXPECT_EQ(merge.array<float>("out"), want);
  for (const std::size_t level : {0U, 1U}) {
    EXPECT_EQ(cases()[level].filename().string().substr(4), "-attention");
    const RunCase again(RunCase::InPlace{}, cases()[level]);
    const std::string side = level == 0 ? "prefix" : "suffix";
    EXPECT_EQ(again.array<float>("out"),
              values_of<float>(read_bytes(merge_case / (side + "_output.npy"))));
    EXPECT_EQ(again.array<float>("lse"),
              values_of<float>(read_bytes(merge_case / (side + "_lse.npy"))));
  }
}

/// Rows without a prefix are not read, strides are taken out, and the codes come out again.
TEST_F(CaptureInProcess, AMergeAsEightBits) {
  const auto context = clattn::Context::create();
  const clattn::Queue queue = context->create_queue();
  const auto upload = [&](const std::vector<float>& values) {
    const clattn::Buffer buffer = context->allocate(values.size() * sizeof(float));
    queue.write(buffer, std::as_bytes(std::span(values)));
    return buffer;
  };
  std::vector<float> rows(48);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i) * 0.25F;
  const clattn::Buffer suffix = upload(rows), prefix = upload({rows.begin(), rows.begin() + 24});
  const clattn::Buffer lse = upload({1, 2, 3, 4, 5, 6, 7, 8});
  clattn::MergeAttnStates how{.num_tokens = 2, .num_heads = 2, .head_size = 8};
  how.dtype = clattn::DType::kF32;
  how.prefill_tokens_with_context = 1;
  how.output_dtype = clattn::DType::kFp8E4M3;
  how.output_scale = upload({0.125F});
  const clattn::Buffer codes = context->allocate(32);
  const clattn::LseRef by_head{lse.handle(), 1, 1, 4};  // [head, token]
  merge_attn_states(*context, queue, how, {{codes.handle()}, {}},
                    {{prefix.handle()}, {lse.handle()}}, {{suffix.handle(), 8, 24}, by_head});
  std::string want(32, '\0');
  queue.read(codes, std::as_writable_bytes(std::span(want)));
  ASSERT_EQ(cases().size(), 1U);
  const RunCase again(RunCase::InPlace{}, cases()[0]);
  EXPECT_EQ(npy_data(again.bytes("out_fp8.npy")), want);
  EXPECT_EQ(values_of<float>(read_bytes(cases()[0] / "suffix_lse.npy")),
            (std::vector<float>{2, 6, 3, 7}));
}

TEST_F(CaptureInProcess, OneCallIsOneCase) {
  const auto context = clattn::Context::create();
  const clattn::Queue queue = context->create_queue();
  const clattn::Buffer rows = context->allocate(6 * 16 * sizeof(float));
  const clattn::Buffer out = context->allocate(6 * 16 * sizeof(float));
  const clattn::Buffer lse = context->allocate(6 * 2 * sizeof(float));
  std::vector<float> values(96);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 7) * 0.25F;
  queue.write(rows, std::as_bytes(std::span(values)));
  const clattn::TensorRef in{rows.handle()};
  const std::vector<std::int32_t> starts = {0, 2, 6};
  clattn::attention(
      queue,
      {.query = in,
       .key = in,
       .value = in,
       .output = {out.handle()},
       .query_start_loc = starts,
       .lse = {lse.handle(), 0, 1, 6},
       .lse_base = clattn::LseBase::k2},
      {.num_heads = 2, .num_kv_heads = 2, .head_size = 8, .dtype = clattn::DType::kF32});
  std::vector<float> want(96);
  queue.read(out, std::as_writable_bytes(std::span(want)));
  ASSERT_EQ(cases().size(), 1U);  // the other form of the LSE is no part of it
  const RunCase again(RunCase::InPlace{}, cases()[0]);
  EXPECT_EQ(again.array<float>("out"), want);
  clattn::clear_attention_functions();
}

TEST(Capture, NumbersContinueBehindThoseThatAreThere) {
  const ScratchDirectory scratch;
  const CapturingInto capture(scratch.path());
  RunCase(small_attention_case(), "");
  RunCase(small_attention_case(), "");
  EXPECT_EQ(names_in(scratch.path()), (Names{"0000-reshape_and_cache", "0001-attention",
                                             "0002-reshape_and_cache", "0003-attention"}));
}

TEST(Capture, FoldersThatCannotBeMadeAreNamed) {
  const ScratchDirectory scratch;
  write_bytes(scratch.path() / "file", "in the way");
  small_attention_case().write(scratch.path() / "case");
  const CapturingInto capture(scratch.path() / "file" / "calls");
  const ProgramResult result = run_program("run " + (scratch.path() / "case").string());
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.error_lines(), 1U) << result.standard_error;
  EXPECT_NE(result.standard_error.find("file/calls: cannot be created: Not a directory"),
            std::string::npos)
      << result.standard_error;
  EXPECT_FALSE(fs::exists(scratch.path() / "case" / "out"));
}

}  // namespace test_capture
