// Cascades (A6.8, A6.11) against the oracle over the levels' keys one behind the other.
#include <gmock/gmock.h>
#include <clattn/cascade.hpp>

#include <array>

#include "device/cascade_model.hpp"
#include "device/runtime_fixture.hpp"
#include "support/counting_new.hpp"
#include "support/error_text.hpp"

namespace test_cascade {

using attention_test::all_contexts;
using cascade_test::Cascade;
using cascade_test::Outcome;
using clattn::DType;
using clattn::KernelFamily;
using test::error_text;

/// A system prompt, then requests of their own: decodes, one without work, and prefills.
Cascade shared_prompt(std::int32_t prefix = 96) {
  Cascade c;
  c.config.num_heads = 8;
  c.config.num_kv_heads = 2;
  c.config.head_size = 64;
  c.config.block_size = 16;
  c.as_batch = true;
  c.levels = {{{30, prefix}}, {{0, 0}, {1, 1}, {1, 70}, {1, 16}, {0, 40}, {4, 4}, {23, 61}}};
  return c;
}

/// Three levels whose lengths need no whole pages: everyone's, two groups', each one's own.
Cascade three_levels() {
  Cascade c = shared_prompt();
  c.as_batch = false;
  c.levels = {{{14, 37}}, {{5, 20}, {0, 3}, {9, 0}}, {{1, 1}, {4, 50}, {0, 0}, {3, 9}, {6, 6}}};
  return c;
}

class CascadeAttention : public testing::TestWithParam<KernelFamily> {
 protected:
  std::vector<Outcome> check(Cascade c) {
    c.config.kernel_family = GetParam();
    for (auto& layer : c.layers) layer.kernel_family = GetParam();
    std::vector<Outcome> outcomes;
    for (const auto& context : all_contexts()) outcomes.push_back(cascade_test::run(context, c));
    return outcomes;
  }
};

TEST_P(CascadeAttention, A6_8_APrefixAndWhatFollows) {
  check(shared_prompt());
  check(shared_prompt(16));
  Cascade c = shared_prompt();
  c.levels = {{{12, 512}}, std::vector<cascade_test::Sequence>(12, {1, 5})};
  c.query_padding = 24;
  check(c);
  c.num_splits = 3;
  check(c);
}

// What a batch says of its requests holds in the last level, which has other positions.
TEST_P(CascadeAttention, TakesDirectionsSpansAndTrees) {
  Cascade c = shared_prompt();
  c.config.use_directions = c.config.use_spans = c.config.use_trees = true;
  c.config.use_first_keys = c.config.use_keep_keys = true;
  c.said.resize(7);
  c.said[2].direction = clattn::Direction::kBothWays;
  c.said[3].parents = {-1, -1, 0};  // two of its drafts are stored already
  c.said[4].parents = {-1};         // of a request without query tokens
  c.said[5].parents = {-1, 0, 0, 1};
  c.said[6].spans = {{3, 20}, {90, 140}, {140, 150}};
  check(c);
  c.num_splits = 3;
  c.said[5].parents.clear();
  c.said[5].direction = clattn::Direction::kCanvas;
  c.said[6].spans = {{0, 400}};
  check(c);
}

TEST_P(CascadeAttention, A6_8_EveryTypeOfQueryAndCache) {
  constexpr std::array kPairs = {
      std::pair{DType::kF32, DType::kF32}, std::pair{DType::kBF16, DType::kBF16},
      std::pair{DType::kF16, DType::kFp8E4M3}, std::pair{DType::kBF16, DType::kInt8}};
  for (const auto& [dtype, cache_dtype] : kPairs) {
    Cascade c = shared_prompt();
    c.config.dtype = dtype;
    c.config.kv_cache_dtype = cache_dtype;
    c.cache_scale = cache_dtype == DType::kInt8 ? 0x1p-5 : cache_dtype == dtype ? 1.0 : 0.5;
    check(c);
  }
}

// One plan for layers that differ in scale, cap and sinks; a sink counts once.
TEST_P(CascadeAttention, A6_8_LayersShareAPlanAndSinksCountOnce) {
  for (Cascade c : {shared_prompt(), three_levels()}) {
    c.config.dtype = DType::kF32;
    c.layers.assign(2, c.config);
    c.layers[0].sinks = {1, -2, 0, 4, 7, 2, 0.5F, -1};
    c.layers[1].logits_soft_cap = 3;
    c.layers[1].scale = 0.3F;
    check(c);
    c.causal = c.as_batch;  // with a group that sees no key in the last levels but has sinks
    if (!c.as_batch) c.levels[2] = {{1, 0}, {4, 50}, {0, 0}, {3, 2}, {6, 6}};
    check(c);
  }
}

TEST_P(CascadeAttention, A6_8_OnTheCachesOfBothBackends) {
  Cascade c = shared_prompt();
  c.layout = clattn::KVCacheLayout::kNHD;
  check(c);
  c.backend = "XFORMERS";
  check(c);
}

TEST_P(CascadeAttention, A6_11_AnyNumberOfLevels) {
  Cascade c = three_levels();
  check(c);
  c.num_splits = 2;
  check(c);
  c.num_splits = 0;
  c.causal = false;  // then a level may have fewer keys than queries, or none
  c.levels[2][4].keys = 2;
  c.levels[2][3].keys = 0;
  check(c);
  c.levels[0][0].keys = 0;  // some tokens see no key at all
  check(c);
  c.levels.push_back({{7, 33}, {7, 1}});  // levels need not nest
  c.levels.push_back({{14, 18}});
  check(c);
  c.levels.resize(1);
  check(c);
  c.levels[0][0].keys = 40;
  c.causal = true;
  check(c);
}

TEST_P(CascadeAttention, A6_11_StepsWithoutTokens) {
  Cascade c = three_levels();
  c.levels = {{{0, 30}}, {}, {{0, 0}, {0, 9}}};
  check(c);
  c = shared_prompt();
  c.levels = {{{0, 32}}, {{0, 20}, {0, 0}}};
  check(c);
}

// The point of it: a tile of the prefix serves the query rows of all requests.
TEST_P(CascadeAttention, A6_8_ThePrefixIsReadOncePerTileOfAllRequestsRows) {
  Cascade c = shared_prompt(512);
  constexpr std::int32_t kRequests = 4;
  c.levels = {{{kRequests, 512}}, std::vector<cascade_test::Sequence>(kRequests, {1, 5})};
  c.num_splits = 1;
  for (const Outcome& outcome : check(c)) {
    ASSERT_EQ(outcome.kernels.size(), 3U);
    // On CPUs one task decodes with both KV heads.
    const bool takes_both = outcome.kernels[0].starts_with("decode_cpu");
    const std::int32_t groups = takes_both ? 1 : c.config.num_kv_heads;
    EXPECT_EQ(outcome.tasks[0], groups) << "16 rows are one tile";
    EXPECT_EQ(outcome.tasks[1], kRequests * groups);
    EXPECT_EQ(outcome.kernels[2], "merge_attn_states");
    EXPECT_EQ(outcome.tasks[2], kRequests);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, CascadeAttention,
                         testing::Values(KernelFamily::kAuto, KernelFamily::kGpu),
                         [](const auto& tested) {
                           return std::string(clattn::to_string(tested.param));
                         });

struct Made {
  Cascade c = three_levels();
  cascade_test::Model model{c};
  std::shared_ptr<clattn::Context> context = all_contexts().front();
  clattn::Queue queue = context->create_queue();
  const clattn::AttentionBackend& backend = *clattn::get_attn_backend(c.config, nullptr);
};

TEST(Cascade, AWarmStepAllocatesNothing) {
  Made made;
  made.c = shared_prompt();
  made.model = cascade_test::Model(made.c);
  const cascade_test::SharedBatch shared(made.c, made.model);
  clattn::CascadeAttention cascade(made.context, made.backend, made.c.config);
  const clattn::CascadeImpl impl(made.context, made.backend, made.c.config);
  const clattn::KVCache cache = clattn::make_kv_cache(*made.context, made.queue, made.backend,
                                                      made.c.config, made.model.num_blocks);
  const clattn::Buffer rows = made.context->allocate(std::size_t{30} * 8 * 64 * 2);
  const clattn::Buffer out = made.context->allocate(rows.size_bytes());
  const auto step = [&] {
    cascade.build(made.queue, shared.batch(), shared.prefix_len);
    cascade.forward(made.queue, impl, {.query = {rows.handle()}, .output = {out.handle()}}, cache);
  };
  for (int warm = 0; warm < 4; ++warm) step();
  made.queue.finish();
  EXPECT_EQ(test::allocations_of([&] {
              for (int i = 0; i < 10; ++i) step();
            }),
            0U);
  made.queue.finish();
}

// vLLM asserts these; its words are kept.
TEST(Cascade, A6_8_LayersThatCannotCascadeAreRefused) {
  Made made;
  const auto reasons = [&](auto change) {
    clattn::AttentionConfig config = made.c.config;
    change(config);
    const auto text = [&](const auto& make) {
      return error_text(make, clattn::ErrorCode::kUnsupported);
    };
    const std::string one = text([&] { clattn::CascadeImpl(made.context, made.backend, config); });
    EXPECT_EQ(one, text([&] { clattn::CascadeAttention(made.context, made.backend, config); }));
    const std::string lead = "backend FLASHINFER does not support this configuration: ";
    EXPECT_EQ(one.substr(0, lead.size()), lead);
    return one.substr(lead.size());
  };
  using Config = clattn::AttentionConfig;
  EXPECT_EQ(reasons([](Config& c) { c.alibi_slopes.assign(8, 0.5F); }),
            "Cascade attention does not support alibi_slopes.");
  EXPECT_EQ(reasons([](Config& c) { c.sliding_window = 64; }),
            "Cascade attention does not support sliding_window.");
  EXPECT_EQ(reasons([](Config& c) { c.window_left = c.window_right = 0; }),
            "Cascade attention does not support window_left.; Cascade attention does not support "
            "window_right.");
  EXPECT_EQ(reasons([](Config& c) { c.attention_chunk_size = 64; }),
            "Cascade attention does not support attention_chunk_size.");
  EXPECT_EQ(reasons([](Config& c) { c.custom_mask = c.output_fp8 = true; }),
            "Cascade attention does not support custom_mask.; Cascade attention does not support "
            "output_fp8.");
  EXPECT_EQ(reasons([](Config& c) { c.attn_type = clattn::AttentionType::kEncoderDecoder; }),
            "Cascade attention does not support attn_type encoder_decoder.");
}

TEST(Cascade, A6_8_BatchesWithoutACommonPrefixAreRefused) {
  Made made;
  made.c = shared_prompt();
  made.model = cascade_test::Model(made.c);
  cascade_test::SharedBatch shared(made.c, made.model);
  clattn::BuilderOptions options;
  options.limits.num_blocks = made.model.num_blocks;
  options.limits.max_model_len = 200;
  clattn::CascadeAttention cascade(made.context, made.backend, made.c.config, options);
  const auto build = [&](std::int32_t prefix_len) {
    return error_text([&] { cascade.build(made.queue, shared.batch(), prefix_len); });
  };
  EXPECT_EQ(build(0), "common_prefix_len is 0, legal: multiples of block_size 16, >= 16");
  EXPECT_EQ(build(17), "common_prefix_len is 17, legal: multiples of block_size 16, >= 0");
  EXPECT_EQ(build(112), "request 1: common_prefix_len is 112, legal: 0 … 96 (its computed tokens)");
  const clattn::CascadeImpl impl(made.context, made.backend, made.c.config);
  EXPECT_EQ(error_text([&] { cascade.forward(made.queue, impl, {}, {}); }),
            "run: 0 of 2 levels are planned, legal: run() after plan()");
  auto batch = shared.batch();
  batch.causal = false;
  EXPECT_EQ(error_text([&] { cascade.build(made.queue, batch, 96); }),
            "causal is false, legal: true in cascade attention");
  shared.lens[6] = 201;
  EXPECT_NE(build(96).find("request 6: seq_lens is 201, legal: 23 … "), std::string::npos);
  shared.lens[6] = 96 + 61;
  const auto stride = static_cast<std::size_t>(shared.batch().block_table_stride);
  shared.table[6 * stride + 7] = 1000;
  EXPECT_EQ(build(96).substr(0, 36), "request 6: block_table[7] is 1000, l");
  shared.table[6 * stride + 2] = 1;
  shared.table[6 * stride + 7] = 1;
  EXPECT_EQ(build(96).substr(0, 31), "request 6: block_table[2] is 1,");
}

TEST(Cascade, A6_11_BadLevelsAreRefusedByName) {
  Made made;
  const auto make = [&](std::int32_t num_levels, std::int32_t graph) {
    clattn::BuilderOptions options;
    options.limits.num_blocks = made.model.num_blocks;
    options.graph_batch_size = graph;
    return clattn::MultiLevelCascadeAttentionWrapper(made.context, made.backend, made.c.config,
                                                     num_levels, options);
  };
  EXPECT_EQ(error_text([&] { make(0, 0); }), "num_levels is 0, legal: >= 1");
  EXPECT_EQ(error_text([&] { make(2, 4); }),
            "graph_batch_size is 4, legal: 0: cascades are not recorded");
  auto wrapper = make(3, 0);
  EXPECT_EQ(error_text([&] { wrapper.plan(made.queue, {}); }),
            "levels: 0 given, legal: 3 (num_levels)");
  const auto plan = [&](auto change) {
    cascade_test::Model model = made.model;
    auto levels = model.spans(true);
    change(model, levels);
    return error_text([&] { wrapper.plan(made.queue, levels); });
  };
  using Levels = std::vector<clattn::CascadeLevel>;
  using Model = cascade_test::Model;
  EXPECT_EQ(plan([](Model&, Levels& l) { l[1].causal = true; }),
            "level 1: causal is true, legal: false; the last level may be causal");
  EXPECT_EQ(plan([](Model& m, Levels&) { m.levels[1].qo_indptr.back() = 13; }),
            "level 1: qo_indptr ends at 13, legal: 14 as in level 0");
  EXPECT_EQ(plan([](Model& m, Levels&) { m.levels[2].qo_indptr[1] = 9; }),
            "level 2: request 1: qo_indptr[2] is 5, legal: at least 9");
  EXPECT_EQ(plan([](Model&, Levels& l) { l[0].qo_indptr = {}; }),
            "level 0: qo_indptr is empty, legal: num_seqs + 1 elements");
  EXPECT_EQ(plan([](Model& m, Levels&) { m.levels[0].indptr[0] = 1; }),
            "level 0: paged_kv_indptr[0] is 1, legal: 0");
  EXPECT_EQ(plan([](Model&, Levels& l) { l[1].paged_kv_indices = {}; }),
            "level 1: paged_kv_indices holds 0 elements, legal: at least 3 (paged_kv_indptr[3])");
  EXPECT_EQ(plan([](Model&, Levels& l) { l[1].paged_kv_last_page_len = {}; }),
            "level 1: paged_kv_last_page_len holds 0 elements, legal: 3 (num_seqs)");
  EXPECT_EQ(plan([](Model& m, Levels&) { m.levels[0].last_page_len[0] = 17; }),
            "level 0: request 0: last_page_len is 17, legal: 1 … 16 (3 pages of 16)");
  EXPECT_EQ(plan([](Model& m, Levels&) { m.levels[1].indices[1] = -4; }).substr(0, 41),
            "level 1: request 0: block_table[1] is -4,");
  EXPECT_EQ(plan([](Model& m, Levels&) { m.levels[2].last_page_len[4] = 5; }).substr(0, 34),
            "level 2: request 4: seq_lens is 5,");
}

}  // namespace test_cascade
