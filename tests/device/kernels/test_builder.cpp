#define CL_USE_DEPRECATED_OPENCL_1_2_APIS  // clCreateCommandQueue: every platform has it
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <clattn/compat/flashinfer.hpp>
#include <clattn/compat/paged_attention.hpp>
#include <clattn/compat/xformers.hpp>
#include <clattn/device.hpp>
#include <clattn/registry.hpp>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "support/counting_new.hpp"
#include "support/error_text.hpp"

namespace test_builder {

using attention_test::all_contexts;
using attention_test::small_config;
using clattn::CommonAttentionMetadata;
using test::error_text;

/// A batch of decodes with `context` tokens each, over a table of consecutive pages.
struct Decodes {
  std::vector<std::int32_t> starts, lens, table;
  CommonAttentionMetadata batch;

  Decodes(std::int32_t count, std::int32_t context, std::int32_t block_size = 16) {
    const std::int32_t pages = (context + block_size - 1) / block_size;
    starts.resize(static_cast<std::size_t>(count) + 1);
    std::iota(starts.begin(), starts.end(), 0);
    lens.assign(static_cast<std::size_t>(count), context);
    table.resize(static_cast<std::size_t>(count) * static_cast<std::size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    batch.num_reqs = count;
    batch.num_actual_tokens = count;
    batch.block_table = table;
    batch.block_table_stride = pages;
  }
};

TEST(Builder, AWarmStepAllocatesNothing) {
  for (const auto& context : all_contexts()) {
    for (const auto& backend : clattn::list_attn_backends()) {
      if (backend->is_mla()) continue;  // MLALayer has its own
      const clattn::Queue queue = context->create_queue();
      const auto builder = backend->make_builder(context, small_config());
      const auto impl = backend->make_impl(context, small_config());
      Decodes decodes(8, 700);
      const clattn::KVCacheSpec spec{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
      const clattn::KVCache cache = clattn::reshape_kv_cache(
          context->allocate(decodes.table.size() * spec.page_size_bytes()), spec, *backend,
          backend->preferred_layout(context->capabilities()));
      const clattn::Buffer rows = context->allocate(8 * 4 * 64 * 2);
      const clattn::Buffer out = context->allocate(8 * 4 * 64 * 2);
      const auto step = [&] {
        const auto& metadata = builder->build(queue, decodes.batch);
        impl->write_kv_cache(queue, {rows.handle()}, {rows.handle()}, cache, metadata);
        impl->forward(queue, {.query = {rows.handle()}, .output = {out.handle()}}, cache, metadata);
      };
      for (int warm = 0; warm < 4; ++warm) step();
      queue.finish();
      EXPECT_EQ(test::allocations_of([&] {
                  for (int i = 0; i < 10; ++i) step();
                }),
                0U)
          << backend->name();
      queue.finish();
    }
  }
}

// Whichever field is wrong, no step of the batch before can run by mistake.
TEST(Builder, ARefusedBatchLeavesNoMetadata) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), &context->capabilities());
  const auto builder = backend.make_builder(context, small_config());
  const auto impl = backend.make_impl(context, small_config());
  const clattn::KVCache cache = make_kv_cache(*context, queue, backend, small_config(), 4);
  const clattn::Buffer rows = context->allocate(4 * 64 * 2), out = context->allocate(4 * 64 * 2);
  Decodes decodes(1, 20);
  const auto& metadata = builder->build(queue, decodes.batch);
  const auto forward = [&] {
    impl->forward(queue, {.query = {rows.handle()}, .output = {out.handle()}}, cache, metadata);
  };
  forward();
  decodes.starts[0] = 1;
  EXPECT_NE(error_text([&] { builder->build(queue, decodes.batch); }), "no error");
  EXPECT_NE(error_text(forward), "no error");
}

// F9: that the host has no memory left is an exception wherever it shows, and passes.
TEST(Builder, F9_NoFailedAllocationEndsTheProcess) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  for (const auto& backend : clattn::list_attn_backends()) {
    if (backend->is_mla()) continue;
    const auto config = small_config();
    const Decodes decodes(3, 40);
    const clattn::KVCache cache = make_kv_cache(*context, queue, *backend, config, 9);
    const clattn::Buffer rows = context->allocate(4096), out = context->allocate(4096);
    const std::vector<clattn::BlockPair> pairs = {{0, 1}};
    const auto use = [&] {
      const auto impl = backend->make_impl(context, config);
      const auto builder = backend->make_builder(context, config);
      const auto& metadata = builder->build(queue, decodes.batch);
      impl->write_kv_cache(queue, {rows.handle()}, {rows.handle()}, cache, metadata);
      impl->forward(queue, {.query = {rows.handle()}, .output = {out.handle()}}, cache, metadata);
      copy_blocks(*context, queue, std::span(&cache, 1), pairs);
      queue.finish();
    };
    use();
    EXPECT_GT(test::fail_each_allocation(use), 20U);
    use();
  }
}

TEST(Builder, FlashInferMetadataHasThePagingArrays) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr, "FLASHINFER");
  const auto builder = backend.make_builder(context, small_config());
  // The worked example of the paging arrays: pages {[0,5,8],[1,6,7],[3,4]}; one prefill at the end.
  const std::vector<std::int32_t> starts = {0, 1, 2, 22};
  const std::vector<std::int32_t> lens = {40, 48, 20};
  const std::vector<std::int32_t> table = {0, 5, 8, 1, 6, 7, 3, 4, 99};
  CommonAttentionMetadata batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  batch.num_reqs = 3;
  batch.num_actual_tokens = 22;
  batch.block_table = table;
  batch.block_table_stride = 3;
  const auto& metadata =
      clattn::metadata_as<clattn::FlashInferMetadata>(builder->build(queue, batch));
  const auto list = [](auto span) { return std::vector(span.begin(), span.end()); };
  using Ints = std::vector<std::int32_t>;
  EXPECT_EQ(list(metadata.paged_kv_indptr), (Ints{0, 3, 6, 8}));
  EXPECT_EQ(list(metadata.paged_kv_indices), (Ints{0, 5, 8, 1, 6, 7, 3, 4}));
  EXPECT_EQ(list(metadata.paged_kv_last_page_len), (Ints{8, 16, 4}));
  EXPECT_EQ(metadata.split(), (clattn::BatchSplit{2, 1, 2, 20}));
  EXPECT_EQ(metadata.max_query_len(), 20);
  EXPECT_EQ(metadata.max_seq_len(), 48);
  EXPECT_EQ(metadata.slot_mapping()[0], 8 * 16 + 7);
  EXPECT_EQ(metadata.slot_mapping()[21], 4 * 16 + 3);
  EXPECT_EQ(list(metadata.seq_start_loc), (std::vector<std::int64_t>{0, 40, 88, 108}));
  EXPECT_EQ(metadata.decode_query_len, 1);
  EXPECT_EQ(metadata.num_qo_heads, small_config().num_heads);
  EXPECT_EQ(metadata.num_kv_heads, small_config().num_kv_heads);
  EXPECT_EQ(metadata.head_dim, small_config().head_size);
  EXPECT_EQ(metadata.page_size, small_config().block_size);
  EXPECT_EQ(metadata.data_type, small_config().cache_dtype());
  EXPECT_EQ(metadata.q_data_type, small_config().dtype);
  EXPECT_EQ(list(metadata.query_start_loc), starts);
  EXPECT_NE(metadata.slot_mapping_buffer(), nullptr);
  EXPECT_FALSE(metadata.is_profile_run);
  const std::vector<std::int64_t> nowhere(22, clattn::kPadSlotId);
  batch.slot_mapping = nowhere;
  builder->build(queue, batch);
  EXPECT_TRUE(metadata.is_profile_run);
  queue.finish();
}

// M4: counts are right in any order; views want each side's requests together.
TEST(Builder, M4_CountsAndViewsOfOtherOrders) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr, "FLASHINFER");
  const auto builder = backend.make_builder(context, small_config());
  const std::vector<std::int32_t> lens = {20, 30, 5, 6}, table = {0, 1, 2, 3, 4, 9, 5, 9};
  const std::vector<std::int32_t> prefills_first = {0, 20, 30, 31, 32}, mixed = {0, 20, 21, 26, 27};
  const auto build = [&](const std::vector<std::int32_t>& starts) -> const auto& {
    return clattn::metadata_as<clattn::FlashInferMetadata>(
        builder->build(queue, CommonAttentionMetadata::of(starts, lens, table)));
  };
  // The order of FlashInfer's first backend in vLLM.
  const auto& metadata = build(prefills_first);
  EXPECT_EQ(metadata.split(), (clattn::BatchSplit{2, 2, 2, 30}));
  EXPECT_EQ(metadata.decode_query_len, 1);
  EXPECT_EQ(metadata.prefill_metadata().max_seq_len, 30);
  EXPECT_EQ(metadata.decode_metadata().seq_lens[1], 6);
  EXPECT_EQ(metadata.decode_metadata().query_start_loc[0], 30);
  EXPECT_EQ(metadata.decode_metadata().paged_kv_last_page_len[0], 5);
  build(mixed);
  EXPECT_EQ(metadata.split(), (clattn::BatchSplit{2, 2, 2, 25}));
  for (const bool decodes : {false, true}) {
    EXPECT_EQ(error_text(
                  [&] {
                    static_cast<void>(decodes ? metadata.decode_metadata().num_reqs
                                              : metadata.prefill_metadata().num_reqs);
                  },
                  clattn::ErrorCode::kUnsupported),
              "attn_metadata: its decodes and prefills are interleaved, so neither is a range of "
              "rows of the batch's arrays; legal: a batch in the order of reorder_batch()");
  }
  queue.finish();
}

// A4.2, A5: the fields of vLLM's impls.
TEST(Impl, A5_TellsItsConfiguration) {
  clattn::AttentionConfig config = small_config();
  config.scale = 0.25F;
  config.alibi_slopes.assign(static_cast<std::size_t>(config.num_heads), 0.5F);
  config.kv_cache_dtype = clattn::DType::kFp8E4M3;
  config.sliding_window = 20;
  config.logits_soft_cap = 30;
  for (const char* const name : {"FLASHINFER", "XFORMERS"}) {
    const auto impl =
        clattn::get_attn_backend(config, nullptr, name)->make_impl(all_contexts().front(), config);
    const clattn::AttentionConfig& told = impl->config();
    EXPECT_EQ(told.num_heads, config.num_heads);
    EXPECT_EQ(told.num_kv_heads, config.num_kv_heads);
    EXPECT_EQ(told.num_queries_per_kv(), config.num_heads / config.num_kv_heads);
    EXPECT_EQ(told.head_size, config.head_size);
    EXPECT_EQ(told.scale, 0.25F);
    EXPECT_EQ(told.alibi_slopes, config.alibi_slopes);
    EXPECT_EQ(told.kv_cache_dtype, config.kv_cache_dtype);
    EXPECT_EQ(told.sliding_window, 20);
    EXPECT_EQ(told.logits_soft_cap, 30);
  }
}

// M10: in vLLM's words.
TEST(Impl, M10_AMissingOutputIsRefused) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  const auto builder = backend.make_builder(context, small_config());
  const auto impl = backend.make_impl(context, small_config());
  const auto cache = make_kv_cache(*context, queue, backend, small_config(), 1);
  const clattn::Buffer rows = context->allocate(4 * 64 * 2);
  const Decodes step(1, 16);
  EXPECT_EQ(error_text([&] {
              impl->forward(queue, {.query = {rows.handle()}, .output = {}}, cache,
                            builder->build(queue, step.batch));
            }),
            "Output tensor must be provided.");
  queue.finish();
}

// M6: what a layer cannot do is refused, not done otherwise.
TEST(Builder, M6_CausalOfLayersThatSeeAllKeysIsRefused) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  for (const auto type :
       {clattn::AttentionType::kEncoderDecoder, clattn::AttentionType::kEncoder}) {
    clattn::AttentionConfig config = small_config();
    config.attn_type = type;
    const auto builder = clattn::get_attn_backend(config, nullptr)->make_builder(context, config);
    Decodes step(2, 1);
    builder->build(queue, step.batch);
    step.batch.causal = true;
    EXPECT_EQ(error_text([&] { builder->build(queue, step.batch); }),
              "causal is true, legal with attn_type " + std::string(to_string(type)) +
                  ": false, or not given");
  }
  queue.finish();
}

// A4.3: the two sides are rows of the whole batch's arrays.
TEST(Builder, A4_3_FlashInferMetadataViewsItsTwoSides) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr, "FLASHINFER");
  clattn::BuilderOptions options;
  options.decode_threshold = 3;
  const auto builder = backend.make_builder(context, small_config(), options);
  const std::vector<std::int32_t> starts = {0, 1, 4, 24};
  const std::vector<std::int32_t> lens = {40, 48, 20};
  const std::vector<std::int32_t> table = {0, 5, 8, 1, 6, 7, 3, 4, 99};
  const auto& metadata = clattn::metadata_as<clattn::FlashInferMetadata>(
      builder->build(queue, CommonAttentionMetadata::of(starts, lens, table)));
  EXPECT_EQ(metadata.decode_query_len, 3);
  using Ints = std::vector<std::int32_t>;
  const auto list = [](auto span) { return std::vector(span.begin(), span.end()); };
  const auto decode = metadata.decode_metadata();
  EXPECT_EQ(decode.num_reqs, 2);
  EXPECT_EQ(decode.num_tokens, 4);
  EXPECT_EQ(decode.max_query_len, 3);
  EXPECT_EQ(decode.max_seq_len, 48);
  EXPECT_EQ(list(decode.query_start_loc), (Ints{0, 1, 4}));
  EXPECT_EQ(list(decode.paged_kv_indptr), (Ints{0, 3, 6}));
  EXPECT_EQ(list(decode.paged_kv_last_page_len), (Ints{8, 16}));
  const auto prefill = metadata.prefill_metadata();
  EXPECT_EQ(prefill.num_reqs, 1);
  EXPECT_EQ(prefill.num_tokens, 20);
  EXPECT_EQ(prefill.max_query_len, 20);
  EXPECT_EQ(prefill.max_seq_len, 20);
  EXPECT_EQ(list(prefill.query_start_loc), (Ints{4, 24}));
  EXPECT_EQ(list(prefill.seq_lens), (Ints{20}));
  EXPECT_EQ(list(prefill.paged_kv_indptr), (Ints{6, 8}));
  EXPECT_EQ(prefill.paged_kv_indices.data(), metadata.paged_kv_indices.data());
  EXPECT_EQ(list(prefill.paged_kv_last_page_len), (Ints{4}));
  EXPECT_EQ(prefill.slot_mapping.data(), metadata.slot_mapping().data() + 4);
  EXPECT_EQ(prefill.slot_mapping[19], 4 * 16 + 3);
  const auto& decodes_only =
      clattn::metadata_as<clattn::FlashInferMetadata>(builder->build(queue, Decodes(2, 40).batch));
  EXPECT_EQ(decodes_only.prefill_metadata().num_reqs, 0);
  EXPECT_TRUE(decodes_only.prefill_metadata().paged_kv_indptr.empty());
  queue.finish();
}

// A4.3: `.device`
TEST(Builder, A4_3_MetadataIsInItsBuildersContext) {
  const auto& context = all_contexts().at(0);
  const auto other = clattn::Context::create();
  const auto backend = clattn::get_attn_backend(small_config(), nullptr);
  for (const auto& made : {context, other}) {
    const clattn::Queue queue = made->create_queue();
    const auto builder = backend->make_builder(made, small_config());
    const auto& metadata = builder->build(queue, Decodes(2, 40).batch);
    cl_context owner = nullptr;
    ASSERT_EQ(clGetMemObjectInfo(metadata.slot_mapping_buffer(), CL_MEM_CONTEXT, sizeof owner,
                                 &owner, nullptr),
              CL_SUCCESS);
    EXPECT_EQ(owner, made->handle());
    std::vector<std::int64_t> slots(2);
    queue.read(clattn::Buffer::adopt(metadata.slot_mapping_buffer()),
               std::as_writable_bytes(std::span(slots)), metadata.slot_mapping_offset_bytes());
    EXPECT_TRUE(std::ranges::equal(slots, metadata.slot_mapping()));
  }
  EXPECT_NE(context->handle(), other->handle());
}

// A4.4: lists of a recorded step are as long as its batch size, as vLLM pads them for a graph.
TEST(Builder, A4_4_PageListsOfRecordedStepsAreFilledUp) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto backend = clattn::get_attn_backend(small_config(), nullptr, "FLASHINFER");
  clattn::BuilderOptions options{.limits = {.max_model_len = 64, .num_blocks = 8}};
  options.graph_batch_size = 6;
  const auto builder = backend->make_builder(context, small_config(), options);
  const std::vector<std::int32_t> starts = {0, 1, 2, 3}, lens = {16, 20, 32},
                                  table = {5, 0, 6, 7, 2, 3};
  using Ints = std::vector<std::int32_t>;
  const auto list = [](auto span) { return std::vector(span.begin(), span.end()); };
  for (const std::int32_t size : {4, 6, 3}) {
    auto batch = CommonAttentionMetadata::of(starts, lens, table);
    batch.graph_pad_size = size;
    const auto& metadata =
        clattn::metadata_as<clattn::FlashInferMetadata>(builder->build(queue, batch));
    Ints indptr = {0, 1, 3, 5}, last = {16, 4, 16};
    indptr.resize(static_cast<std::size_t>(size) + 1, 5);
    last.resize(static_cast<std::size_t>(size), 0);
    EXPECT_EQ(list(metadata.paged_kv_indptr), indptr);
    EXPECT_EQ(list(metadata.paged_kv_last_page_len), last);
    EXPECT_EQ(list(metadata.paged_kv_indices), (Ints{5, 6, 7, 2, 3}));
    EXPECT_EQ(list(metadata.decode_metadata().paged_kv_indptr), (Ints{0, 1, 3, 5}));
  }
  queue.finish();
}

// Rows without query tokens are on neither side where a side has nothing else.
TEST(Builder, A2_5_ASideWithoutTokensIsEmpty) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const std::vector<std::int32_t> lens = {5, 20}, table = {1, 0, 2, 3};
  const std::vector<std::int32_t> idle = {0, 0, 0}, prompt_second = {0, 0, 20};
  for (const char* const name : {"FLASHINFER", "XFORMERS"}) {
    const auto backend = clattn::get_attn_backend(small_config(), nullptr, name);
    const auto builder = backend->make_builder(context, small_config());
    const auto sides = [&](const std::vector<std::int32_t>& starts) {
      const auto& made = builder->build(queue, CommonAttentionMetadata::of(starts, lens, table));
      const auto both = [](const auto& metadata) {
        const clattn::BatchView decodes = metadata.decode_metadata();
        const clattn::BatchView prefills = metadata.prefill_metadata();
        EXPECT_EQ(decodes.query_start_loc.size(), decodes.num_reqs == 0 ? 0U : 2U);
        return std::array{decodes.num_reqs, prefills.num_reqs, prefills.num_tokens};
      };
      return name == std::string_view("XFORMERS")
                 ? both(clattn::metadata_as<clattn::XFormersMetadata>(made))
                 : both(clattn::metadata_as<clattn::FlashInferMetadata>(made));
    };
    EXPECT_EQ(sides(idle), (std::array{0, 0, 0})) << name;
    EXPECT_EQ(sides(prompt_second), (std::array{0, 1, 20})) << name;
  }
  queue.finish();
}

// A2.4, get_metadata_cls: the wrong backend's class is refused by names.
TEST(Builder, A2_4_MetadataIsOfItsBackendsClass) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr, "XFORMERS");
  const auto builder = backend.make_builder(context, small_config());
  const auto& metadata = builder->build(queue, Decodes(1, 16).batch);
  EXPECT_EQ(metadata.backend(), "XFORMERS");
  EXPECT_EQ(&clattn::metadata_as<clattn::XFormersMetadata>(metadata), &metadata);
  EXPECT_EQ(error_text([&] { clattn::metadata_as<clattn::FlashInferMetadata>(metadata); }),
            "attn_metadata: made by XFORMERS, legal: metadata of FLASHINFER");
  queue.finish();
}

TEST(Builder, XFormersMetadataViewsItsTwoSides) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr, "XFORMERS");
  const auto builder = backend.make_builder(context, small_config());
  const std::vector<std::int32_t> starts = {0, 1, 4};
  const std::vector<std::int32_t> lens = {33, 3};
  const std::vector<std::int32_t> table = {7, 8, 9, 77, 2, 77, 77, 77};
  CommonAttentionMetadata batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  batch.num_reqs = 2;
  batch.num_actual_tokens = 4;
  batch.block_table = table;
  batch.block_table_stride = 4;
  const auto& metadata =
      clattn::metadata_as<clattn::XFormersMetadata>(builder->build(queue, batch));
  using Ints = std::vector<std::int32_t>;
  const auto list = [](auto span) { return std::vector(span.begin(), span.end()); };
  EXPECT_EQ(metadata.num_actual_tokens(), 4);
  EXPECT_EQ(list(metadata.query_start_loc), starts);
  EXPECT_EQ(list(metadata.seq_lens), lens);
  EXPECT_EQ(metadata.max_query_len(), 3);
  EXPECT_EQ(metadata.max_seq_len(), 33);
  EXPECT_EQ(list(metadata.slot_mapping()), (std::vector<std::int64_t>{144, 32, 33, 34}));
  EXPECT_EQ(metadata.split(), (clattn::BatchSplit{1, 1, 1, 3}));
  EXPECT_EQ(metadata.block_table_stride, 3);
  EXPECT_EQ(list(metadata.block_table), (Ints{7, 8, 9, 2, 0, 0}));
  const auto decode = metadata.decode_metadata();
  EXPECT_EQ(list(decode.block_table), (Ints{7, 8, 9}));
  EXPECT_EQ(decode.num_tokens, 1);
  EXPECT_EQ(decode.max_seq_len, 33);
  const auto prefill = metadata.prefill_metadata();
  EXPECT_EQ(list(prefill.query_start_loc), (Ints{1, 4}));
  EXPECT_EQ(list(prefill.seq_lens), (Ints{3}));
  EXPECT_EQ(list(prefill.block_table), (Ints{2, 0, 0}));
  EXPECT_EQ(prefill.num_tokens, 3);
  queue.finish();
}

TEST(Builder, RefusesWhatItsLimitsAndTheCacheDoNotHold) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  clattn::BuilderOptions options;
  options.limits = {
      .max_num_reqs = 2, .max_num_batched_tokens = 8, .max_model_len = 64, .num_blocks = 10};
  const auto builder = backend.make_builder(context, small_config(), options);
  const auto refuse = [&](const CommonAttentionMetadata& batch) {
    return error_text([&] { builder->build(queue, batch); });
  };
  EXPECT_NE(refuse(Decodes(3, 10).batch).find("max_num_reqs"), std::string::npos);
  EXPECT_NE(refuse(Decodes(2, 65).batch).find("max_model_len"), std::string::npos);
  Decodes outside(2, 60);
  outside.table[5] = 10;
  const std::string text = refuse(outside.batch);
  EXPECT_NE(text.find("request 1"), std::string::npos) << text;
  EXPECT_NE(text.find("10"), std::string::npos) << text;
  EXPECT_EQ(refuse(Decodes(2, 60).batch), "no error");
}

TEST(Builder, RefusesLimitsWhoseStepsNoDeviceHolds) {
  const auto& context = all_contexts().at(0);
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  clattn::BuilderOptions options;
  options.limits = {
      .max_num_reqs = 8, .max_num_batched_tokens = INT32_MAX, .max_model_len = INT32_MAX};
  const auto refusal = [&] {
    return error_text([&] { backend.make_builder(context, small_config(), options); });
  };
  EXPECT_EQ(refusal().rfind("limits: max_num_reqs 8, max_num_batched_tokens 2147483647: ", 0), 0U);
  // The page lists of recorded steps are allocated at once, so their length counts too.
  options.limits.max_num_reqs = options.limits.max_num_batched_tokens = 32;
  options.limits.num_blocks = 9;
  options.graph_batch_size = 32;
  EXPECT_NE(refusal().find("max_num_batched_tokens 32, max_model_len 2147483647 in pages of "
                           "block_size 16: the largest step: "),
            std::string::npos);
}

TEST(Builder, WorkspaceQueryIsExactAndGrowsWithTheBatch) {
  for (const auto& context : all_contexts()) {
    const auto& backend = *clattn::get_attn_backend(small_config(), &context->capabilities());
    clattn::BuilderOptions options;
    options.num_splits = 4;
    const auto builder = backend.make_builder(context, small_config(), options);
    // 4 splits x 1 token x 4 heads x (64 dims + lse) floats
    EXPECT_EQ(builder->workspace_bytes(Decodes(1, 700).batch), 4U * 4 * 65 * 4);
    EXPECT_EQ(builder->workspace_bytes(Decodes(3, 700).batch), 3U * 4 * 4 * 65 * 4);
    EXPECT_EQ(builder->workspace_bytes(Decodes(3, 16).batch), 0U);  // one page: nothing to split
  }
}

TEST(Builder, QueuesMayChangeBetweenStepsButMustBeInOrder) {
  for (const auto& context : all_contexts()) {
    const auto& backend = *clattn::get_attn_backend(small_config(), &context->capabilities());
    clattn::BuilderOptions options;
    options.limits = {.max_num_reqs = 4, .max_num_batched_tokens = 4, .max_model_len = 1 << 20};
    const auto builder = backend.make_builder(context, small_config(), options);
    const clattn::Queue one = context->create_queue();
    const clattn::Queue two = context->create_queue();
    bool first = false;
    for (std::int32_t length = 16; length < 1 << 20; length *= 4) {
      const Decodes decodes(4, length);
      clattn::Event uploaded;
      first = !first;
      const auto& metadata = builder->build(first ? one : two, decodes.batch, &uploaded);
      uploaded.wait();
      EXPECT_EQ(metadata.max_seq_len(), length);
    }
    cl_int status = CL_SUCCESS;
    const cl_command_queue unordered = clCreateCommandQueue(
        context->handle(), context->device(), CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, &status);
    if (status != CL_SUCCESS) continue;  // a device without such queues cannot be given one
    EXPECT_EQ(error_text([&] { builder->build(unordered, Decodes(1, 16).batch); }),
              "queue: an out-of-order queue was given, legal: in-order queues");
    clReleaseCommandQueue(unordered);
  }
}

TEST(Builder, QueuesOfOtherContextsAreRefused) {
  for (const auto& context : all_contexts()) {
    const auto& backend = *clattn::get_attn_backend(small_config(), &context->capabilities());
    const auto builder = backend.make_builder(context, small_config());
    const auto build_on = [&](cl_command_queue queue) {
      return error_text([&] { builder->build(queue, Decodes(1, 16).batch); });
    };
    const std::vector<clattn::Device> devices = clattn::list_devices();
    const auto device = std::ranges::find(devices, context->device(), &clattn::Device::id);
    ASSERT_NE(device, devices.end());
    const auto other = clattn::Context::create(*device);
    EXPECT_EQ(build_on(other->create_queue()),
              "queue: of another context, legal: a queue of the builder's context");
    EXPECT_EQ(build_on(nullptr), "queue: null, legal: a queue of the builder's context");
    EXPECT_EQ(build_on(context->create_queue()), "no error");
  }
}

TEST(Builder, AnEmptyBatchLeavesEventsEmpty) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  const auto builder = backend.make_builder(context, small_config());
  const auto impl = backend.make_impl(context, small_config());
  const clattn::KVCacheSpec spec{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
  const clattn::Buffer memory = context->allocate(spec.page_size_bytes());
  const auto cache = clattn::reshape_kv_cache(memory, spec, backend, clattn::KVCacheLayout::kNHD);
  clattn::Event event;
  builder->build(queue, Decodes(1, 16).batch, &event);
  ASSERT_TRUE(event);
  const auto& empty = builder->build(queue, Decodes(0, 16).batch, &event);
  EXPECT_FALSE(event);
  builder->build(queue, Decodes(1, 16).batch, &event);
  const auto& nothing = builder->build(queue, Decodes(0, 16).batch);
  impl->forward(queue, {.query = {memory.handle()}, .output = {memory.handle()}}, cache, nothing,
                {.event = &event});
  EXPECT_FALSE(event);
  EXPECT_EQ(empty.num_actual_tokens(), 0);
  queue.finish();
}

// F5: the field that differs, and whose number it is.
TEST(Impl, F5_SaysWhatMetadataWasBuiltFor) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  const auto impl = backend.make_impl(context, small_config());
  const auto cache = make_kv_cache(*context, queue, backend, small_config(), 3);
  const clattn::Buffer memory = context->allocate(4096), output = context->allocate(4096);
  const auto forward_with = [&](clattn::AttentionConfig config, std::int64_t num_blocks) {
    clattn::BuilderOptions options;
    options.limits.num_blocks = num_blocks;
    const auto builder = backend.make_builder(context, config, options);
    const auto& metadata = builder->build(queue, Decodes(1, 1).batch);
    return error_text([&] {
      impl->forward(queue, {.query = {memory.handle()}, .output = {output.handle()}}, cache,
                    metadata);
    });
  };
  const std::string other = "attn_metadata: built for another configuration: ";
  clattn::AttentionConfig config = small_config();
  config.num_heads = 8;
  EXPECT_EQ(forward_with(config, -1), other + "num_heads is 8, legal: 4");
  config = small_config();
  config.block_size = 32;
  EXPECT_EQ(forward_with(config, -1), other + "block_size is 32, legal: 16");
  config = small_config();
  config.dtype = clattn::DType::kBF16;
  EXPECT_EQ(forward_with(config, -1), other + "dtype is bf16, legal: f16");
  EXPECT_EQ(forward_with(small_config(), 8),
            "attn_metadata: limits.num_blocks of its builder is 8, legal: up to the cache's 3");
  EXPECT_EQ(forward_with(small_config(), 3), "no error");
  queue.finish();
}

TEST(Impl, F5_AnEmptyStepNeedsNoTensors) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  const auto impl = backend.make_impl(context, small_config());
  const auto cache = make_kv_cache(*context, queue, backend, small_config(), 1);
  const auto builder = backend.make_builder(context, small_config());
  const auto& empty = builder->build(queue, Decodes(0, 0).batch);
  EXPECT_EQ(error_text([&] {
              impl->write_kv_cache(queue, {}, {}, cache, empty);
              impl->forward(queue, {.query = {}, .output = {}}, cache, empty);
              clattn::reshape_and_cache_flash(*context, queue, {}, {}, clattn::DType::kF16, cache,
                                              nullptr, 0, 0);
            }),
            "no error");
  queue.finish();
}

TEST(Impl, RefusesBlocksThatTheCacheDoesNotHold) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  const auto builder = backend.make_builder(context, small_config());
  const auto impl = backend.make_impl(context, small_config());
  const clattn::KVCacheSpec spec{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
  const clattn::Buffer memory = context->allocate(2 * spec.page_size_bytes());
  const auto cache = clattn::reshape_kv_cache(memory, spec, backend, clattn::KVCacheLayout::kNHD);
  const auto& metadata = builder->build(queue, Decodes(1, 33).batch);  // blocks 0, 1, 2
  const auto forward = [&](const clattn::KVCache& where) {
    return error_text([&] {
      impl->forward(queue, {.query = {memory.handle()}, .output = {memory.handle()}}, where,
                    metadata);
    });
  };
  EXPECT_EQ(forward(cache),
            "attn_metadata: its block ids reach up to 2, legal: below the cache's 2 blocks");
  clattn::KVCache wrong = cache;
  wrong.num_blocks = 3;
  EXPECT_NE(forward(wrong).find("kv_cache: its last element is number"), std::string::npos);
  wrong = cache;
  wrong.head_stride = 65;
  EXPECT_EQ(forward(wrong),
            "kv_cache: an offset or stride is 65, legal: multiples of 8 elements, >= 0");
  wrong = cache;
  wrong.block_stride = 0;
  EXPECT_EQ(forward(wrong),
            "kv_cache: block_stride is 0, legal where there are several blocks: > 0");
  wrong.block_stride = std::int64_t{1} << 40;
  wrong.head_stride = std::int64_t{1} << 32;
  const std::string most =
      std::to_string(std::numeric_limits<std::int32_t>::max() / 2 / cache.num_kv_heads);
  EXPECT_EQ(forward(wrong),
            "kv_cache: head_stride is 4294967296 and block_stride 1099511627776, legal: " + most +
                " blocks and " + most + " elements between heads at most");
  queue.finish();
}

TEST(Impl, EqualConfigurationsShareOneAndStrangersAreRefused) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  const auto impl = backend.make_impl(context, small_config());
  EXPECT_EQ(impl, backend.make_impl(context, small_config()));
  clattn::AttentionConfig other = small_config();
  other.num_heads = 8;
  const auto builder = backend.make_builder(context, other);
  const auto& metadata = builder->build(queue, Decodes(1, 16).batch);
  const clattn::KVCacheSpec spec{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
  const clattn::Buffer memory = context->allocate(spec.page_size_bytes());
  const auto cache = clattn::reshape_kv_cache(memory, spec, backend, clattn::KVCacheLayout::kNHD);
  EXPECT_NE(error_text([&] {
              impl->forward(queue, {.query = {memory.handle()}, .output = {memory.handle()}}, cache,
                            metadata);
            }).find("attn_metadata"),
            std::string::npos);
  clattn::AttentionConfig longer = small_config();
  longer.block_size = 32;
  const auto stranger = backend.make_builder(context, longer);
  const auto& slots = stranger->build(queue, Decodes(1, 16, 32).batch);
  EXPECT_NE(error_text([&] {
              impl->write_kv_cache(queue, {memory.handle()}, {memory.handle()}, cache, slots);
            }).find("another block_size"),
            std::string::npos);
  clattn::KVCache wrong = cache;
  wrong.block_size = 32;
  EXPECT_NE(error_text([&] {
              impl->forward(queue, {.query = {memory.handle()}, .output = {memory.handle()}}, wrong,
                            metadata);
            }).find("kv_cache: 32 tokens"),
            std::string::npos);
  queue.finish();
}

// Cross attention's queries are no tokens of the cache: what it stores goes to slots that the
// encoder's tokens have. Nothing may be stored silently nowhere.
TEST(Impl, AWriteWithoutSlotsIsRefused) {
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  clattn::AttentionConfig cross = small_config();
  cross.attn_type = clattn::AttentionType::kEncoderDecoder;
  const auto& backend = *clattn::get_attn_backend(cross, nullptr);
  const auto impl = backend.make_impl(context, cross);
  const auto builder = backend.make_builder(context, cross);
  const clattn::KVCacheSpec spec{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
  const clattn::Buffer memory = context->allocate(spec.page_size_bytes());
  const auto cache = clattn::reshape_kv_cache(memory, spec, backend, clattn::KVCacheLayout::kNHD);
  const Decodes step(1, 16);
  const auto write = [&](const clattn::AttentionImpl& to, const clattn::AttentionMetadata& by) {
    return error_text(
        [&] { to.write_kv_cache(queue, {memory.handle()}, {memory.handle()}, cache, by); });
  };
  const std::string refusal =
      "attn_metadata: without slots, since its queries are not in the cache; legal: a batch with a "
      "slot_mapping, or reshape_and_cache_flash()";
  EXPECT_EQ(write(*impl, builder->build(queue, step.batch)), refusal);
  EXPECT_EQ(write(*backend.make_impl(context, small_config()), builder->build(queue, step.batch)),
            refusal);
  CommonAttentionMetadata given = step.batch;
  const std::vector<std::int64_t> slots = {3};
  given.slot_mapping = slots;
  EXPECT_EQ(write(*impl, builder->build(queue, given)), "no error");
  const auto packed = clattn::make_paged_attention_builder(context, small_config());
  EXPECT_EQ(write(*impl, packed->build(queue, step.batch)),
            "attn_metadata: its slots were built for another block_size or form of cache, legal: "
            "pages of 16 tokens");
  queue.finish();
}

}  // namespace test_builder
