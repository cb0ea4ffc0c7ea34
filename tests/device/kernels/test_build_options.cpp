// The rest of vLLM's builder (A1.1, A1.10): build() with its options, metadata that is taken over
// by another KV cache group, and what a builder says before a step is built.
#include <gtest/gtest.h>

#include <clattn/cascade.hpp>
#include <clattn/clattn.hpp>
#include <clattn/registry.hpp>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/costs_of_all.hpp"
#include "device/runtime_fixture.hpp"
#include "support/counting_new.hpp"
#include "support/error_text.hpp"

namespace test_build_options {

using attention_test::all_contexts;
using attention_test::small_config;
using clattn::CommonAttentionMetadata;
using clattn::KernelFamily;
using test::error_text;

constexpr std::int32_t kBlock = 16;
constexpr std::int64_t kBlocks = 96;

/// Requests of which all that have query tokens start on the same pages.
struct SharedPrefix {
  std::vector<std::int32_t> starts = {0, 1, 1, 3, 8};
  std::vector<std::int32_t> lens = {70, 40, 64 + 2, 90};
  std::vector<std::int32_t> table = {
      8, 7, 6, 5,  1, -5,  //
      9, 9, 9, -9, 9, 9,   // has no query tokens: need not share
      8, 7, 6, 5,  2, -5,  //
      8, 7, 6, 5,  3, 4,
  };
  CommonAttentionMetadata batch() const { return CommonAttentionMetadata::of(starts, lens, table); }
};

// A1.1: the order that brings decodes first, and whether anything moves.
TEST(BuildOptions, A1_1_ReorderBatchBringsDecodesFirst) {
  const auto& context = all_contexts().front();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  const auto order_of = [&](std::vector<std::int32_t> lengths, std::int32_t threshold) {
    clattn::BuilderOptions options;
    options.decode_threshold = threshold;
    std::vector<std::int32_t> order(lengths.size());
    const bool moved =
        backend.make_builder(context, small_config(), options)->reorder_batch(lengths, order);
    return std::pair(moved, order);
  };
  using Order = std::vector<std::int32_t>;
  EXPECT_EQ(order_of({5, 1, 1, 7, 1}, 1), std::pair(true, Order{4, 1, 2, 3, 0}));
  EXPECT_EQ(order_of({5, 1, 1, 7, 1}, 7), std::pair(false, Order{0, 1, 2, 3, 4}));
}

// common_prefix_len: a multiple of bs, computed and in the cache, shared by all requests; 0 = none.
TEST(BuildOptions, A1_1_TheCommonPrefixIsCheckedAndKept) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  for (const auto& backend : clattn::list_attn_backends()) {
    if (!backend->validate_configuration(small_config(), nullptr).empty()) continue;
    const auto builder = backend->make_builder(context, small_config());
    const auto build = [&](const SharedPrefix& step, std::int32_t tokens) -> const auto& {
      return builder->build(queue, step.batch(), nullptr, {.common_prefix_len = tokens});
    };
    SharedPrefix step;
    EXPECT_EQ(build(step, 64).common_prefix_len(), 64) << backend->name();
    EXPECT_EQ(build(step, 16).common_prefix_len(), 16);
    EXPECT_EQ(build(step, 0).common_prefix_len(), 0);
    EXPECT_EQ(builder->build(queue, step.batch()).common_prefix_len(), 0);
    EXPECT_EQ(error_text([&] { build(step, 20); }),
              "common_prefix_len is 20, legal: multiples of block_size 16, >= 0");
    EXPECT_EQ(error_text([&] { build(step, -16); }),
              "common_prefix_len is -16, legal: multiples of block_size 16, >= 0");
    EXPECT_EQ(error_text([&] { build(step, 80); }),
              "request 0: common_prefix_len is 80, legal: 0 … 69 (its computed tokens)");
    step.lens[2] = 65;
    EXPECT_EQ(error_text([&] { build(step, 64); }),
              "request 2: common_prefix_len is 64, legal: 0 … 63 (its computed tokens)");
    step.lens[2] = 66;
    step.table[20] = 60;
    EXPECT_EQ(error_text([&] { build(step, 48); }),
              "request 3: block_table[2] is 60, legal: 6 (request 0's: common_prefix_len 48)");
    EXPECT_EQ(build(step, 32).common_prefix_len(), 32);
  }
  clattn::AttentionConfig encoder = small_config();
  encoder.attn_type = clattn::AttentionType::kEncoder;
  const auto builder = clattn::get_attn_backend(encoder, nullptr)->make_builder(context, encoder);
  const std::vector<std::int32_t> starts = {0, 20}, lens = {20};
  EXPECT_EQ(error_text([&] {
              builder->build(queue, CommonAttentionMetadata::of(starts, lens, {}), nullptr,
                             {.common_prefix_len = 16});
            }),
            "common_prefix_len is 16, legal: 0 (there are no pages)");
  queue.finish();
}

attention_test::CaseSpec fast_case(KernelFamily family) {
  attention_test::CaseSpec spec;
  spec.config = small_config();
  spec.config.kernel_family = family;
  spec.requests = {{1, 2100}, {1, 0}, {0, 5}, {1, 70}, {20, 300}, {5, 33}, {0, 0}};
  spec.build_options.fast_build = true;
  return spec;
}

std::int64_t total(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

TEST(BuildOptions, A1_1_AFastBuildIsOnePassAndRight) {
  for (const auto& context : all_contexts()) {
    const test::CostsOfAll costs(*context, test::kCutsCostNothing);
    for (const KernelFamily family : {KernelFamily::kAuto, KernelFamily::kGpu}) {
      attention_test::CaseSpec spec = fast_case(family);
      const auto fast = attention_test::run_case(context, spec);
      EXPECT_EQ(fast.fault, "");
      EXPECT_LE(fast.worst_share, 1.0) << fast.worst_place;
      EXPECT_FALSE(fast.kernels.back().starts_with("merge"));
      spec.build_options.fast_build = false;
      const auto planned = attention_test::run_case(context, spec);
      EXPECT_GT(total(planned.tasks), total(fast.tasks)) << "the batch is worth splits";
      // What is not searched for stays as it is, bit for bit.
      spec.num_splits = 3;
      const auto forced = attention_test::run_case(context, spec);
      spec.build_options.fast_build = true;
      const auto fast_forced = attention_test::run_case(context, spec);
      EXPECT_EQ(forced.out, fast_forced.out);
      EXPECT_EQ(forced.tasks, fast_forced.tasks);
    }
  }
}

/// Two groups of layers: the same requests on other pages.
struct Groups {
  std::vector<std::int32_t> starts{0}, lens, tables[2];

  explicit Groups(const std::vector<attention_test::Request>& requests) {
    constexpr std::int32_t kColumns = 12;
    std::int32_t next = 0;
    for (const auto& request : requests) {
      starts.push_back(starts.back() + request.query_len);
      lens.push_back(request.query_len + request.context_len);
      for (std::int32_t page = 0; page < kColumns; ++page, ++next) {
        tables[0].push_back(static_cast<std::int32_t>(next % kBlocks));
        tables[1].push_back(static_cast<std::int32_t>((next * 7 + 3) % kBlocks));
      }
    }
  }
  CommonAttentionMetadata batch(std::size_t group) const {
    return CommonAttentionMetadata::of(starts, lens, tables[group]);
  }
  clattn::GroupPages pages(std::size_t group) const {
    return {tables[group], batch(group).block_table_stride};
  }
};

/// A cache of random bits and the tensors of a forward().
struct Forward {
  const clattn::Queue& queue;
  std::shared_ptr<const clattn::AttentionImpl> impl;
  clattn::KVCache cache;
  clattn::Buffer rows, out, lse;

  Forward(const std::shared_ptr<clattn::Context>& context, const clattn::Queue& on,
          const clattn::AttentionBackend& backend, std::size_t tokens)
      : queue(on), impl(backend.make_impl(context, small_config())) {
    cache = clattn::make_kv_cache(*context, queue, backend, small_config(), kBlocks);
    rows = context->allocate(tokens * 4 * 64 * 2);
    out = context->allocate(rows.size_bytes());
    lse = context->allocate(tokens * 4 * 4);
    std::mt19937 random(3);
    for (const clattn::Buffer& buffer : {cache.buffer, rows}) {
      std::vector<std::uint16_t> bits(buffer.size_bytes() / 2);
      for (auto& b : bits)
        b = static_cast<std::uint16_t>(random() % 0x4000U + (random() % 2 << 15U));
      queue.write(buffer, std::as_bytes(std::span(bits)));
    }
  }
  /// Bits of output, LSE and the written cache.
  std::vector<std::byte> operator()(const clattn::AttentionMetadata& metadata) const {
    for (const clattn::Buffer& b : {out, lse}) queue.fill(b, 0x12345678, 0, b.size_bytes());
    impl->forward(queue, {.query = {rows.handle()}, .output = {out.handle()}, .lse = lse.handle()},
                  cache, metadata);
    impl->write_kv_cache(queue, {rows.handle()}, {rows.handle()}, cache, metadata);
    std::vector<std::byte> all;
    for (const clattn::Buffer& buffer : {out, lse, cache.buffer}) {
      std::vector<std::byte> bytes(buffer.size_bytes());
      queue.read(buffer, bytes);
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
};

template <typename Span>
auto list(const Span& span) {
  return std::vector(span.begin(), span.end());
}

clattn::BuilderOptions options_of(std::int32_t graph_batch_size) {
  clattn::BuilderOptions options;
  options.limits.num_blocks = kBlocks;
  options.graph_batch_size = graph_batch_size;
  options.decode_threshold = 2;
  return options;
}

TEST(BuildOptions, A1_10_AnUpdatedBlockTableEqualsAFullBuild) {
  const Groups step({{1, 150}, {2, 40}, {0, 0}, {1, 0}, {9, 60}, {30, 90}});
  const Groups decodes({{1, 150}, {2, 40}, {0, 0}, {1, 0}});
  const Groups unordered({{9, 60}, {1, 150}, {30, 90}, {1, 0}});
  const struct {
    std::int32_t graph, pad_size;
    const Groups& groups;
  } cases[] = {{0, 0, step}, {5, 0, decodes}, {5, 4, decodes}, {0, 0, unordered}};
  for (const auto& context : all_contexts()) {
    for (const auto& backend : clattn::list_attn_backends()) {
      if (backend->is_mla()) continue;
      const clattn::Queue queue = context->create_queue();
      for (const auto& [graph, pad_size, groups] : cases) {
        const auto batch = [&, pad = pad_size, &own = groups](std::size_t table) {
          CommonAttentionMetadata made = own.batch(table);
          made.graph_pad_size = pad;
          return made;
        };
        const auto builder = [&, size = graph] {
          return backend->make_builder(context, small_config(), options_of(size));
        };
        const auto planning = builder(), updating = builder(), full = builder();
        const auto tokens = static_cast<std::size_t>(std::max(groups.starts.back(), graph * 2));
        const Forward one(context, queue, *backend, tokens);
        const Forward two(context, queue, *backend, tokens);
        const Forward other(context, queue, *backend, tokens);
        const auto& planned = planning->build(queue, batch(0));
        clattn::Event uploaded;
        const auto& updated =
            updating->update_block_table(queue, planned, groups.pages(1), &uploaded);
        EXPECT_TRUE(uploaded);
        const auto& built = full->build(queue, batch(1));
        EXPECT_TRUE(updating->supports_update_block_table());
        EXPECT_EQ(one(updated), two(built)) << backend->name() << " graph " << graph;
        EXPECT_EQ(list(updated.slot_mapping()), list(built.slot_mapping()));
        EXPECT_EQ(updated.split(), built.split());
        EXPECT_EQ(updated.max_seq_len(), built.max_seq_len());
        EXPECT_EQ(updated.max_query_len(), built.max_query_len());
        // The first group's metadata stays what it was.
        if (&groups != &unordered) {
          EXPECT_EQ(list(planned.slot_mapping()).at(0),
                    groups.tables[0][9] * kBlock + 150 % kBlock);
        }
        const auto& again = full->build(queue, batch(0));
        const Forward fresh(context, queue, *backend, tokens);
        EXPECT_EQ(other(planned), fresh(again));
      }
    }
  }
}

TEST(BuildOptions, A1_10_AWarmUpdateAllocatesNothing) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  const auto one = backend.make_builder(context, small_config(), options_of(0));
  const auto two = backend.make_builder(context, small_config(), options_of(0));
  const Groups groups({{1, 150}, {2, 40}, {9, 60}});
  const auto step = [&] {
    two->update_block_table(queue, one->build(queue, groups.batch(0)), groups.pages(1));
  };
  for (int warm = 0; warm < 4; ++warm) step();
  queue.finish();
  EXPECT_EQ(test::allocations_of([&] {
              for (int i = 0; i < 10; ++i) step();
            }),
            0U);
  queue.finish();
}

TEST(BuildOptions, A1_10_WhatCannotBeTakenOverIsRefused) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  const auto make = [&](auto change) {
    clattn::AttentionConfig config = small_config();
    clattn::BuilderOptions options = options_of(0);
    change(config, options);
    return clattn::get_attn_backend(config, nullptr)->make_builder(context, config, options);
  };
  const auto same = make([](auto&, auto&) {});
  const Groups groups({{1, 150}, {2, 40}, {9, 60}});
  const auto& metadata = same->build(queue, groups.batch(0));
  EXPECT_EQ(error_text([&] { same->update_block_table(queue, metadata, groups.pages(1)); }),
            "attn_metadata: this builder's own, legal: another builder's");
  const std::string other =
      "attn_metadata: of another configuration, legal: metadata of a builder with this one's "
      "backend, context, configuration and options";
  const auto refuses = [&](auto change) {
    const auto builder = make(change);
    return error_text([&] { builder->update_block_table(queue, metadata, groups.pages(1)); });
  };
  EXPECT_EQ(refuses([](auto& c, auto&) { c.sliding_window = 32; }), other);
  EXPECT_EQ(refuses([](auto& c, auto&) { c.block_size = 32; }), other);
  EXPECT_EQ(refuses([](auto&, auto& o) { o.num_splits = 2; }), other);
  const auto dense = clattn::get_attn_backend(small_config(), nullptr, "XFORMERS")
                         ->make_builder(context, small_config(), options_of(0));
  EXPECT_EQ(error_text([&] { dense->update_block_table(queue, metadata, groups.pages(1)); }),
            other);
  const auto fits = make([](auto&, auto&) {});
  Groups outside = groups;
  outside.tables[1][1] = kBlocks;
  EXPECT_EQ(error_text([&] { fits->update_block_table(queue, metadata, outside.pages(1)); }),
            "request 0: block_table[1] is 96, legal: 0 … 95 (num_blocks 96)");
  EXPECT_EQ(error_text([&] {
              fits->update_block_table(queue, metadata, {std::span(groups.tables[1]).first(9), 3});
            }),
            "request 0: seq_lens is 151, legal: 1 … 48 (its 3 pages of 16 hold 48 tokens, it needs "
            "10 pages)");
  clattn::AttentionConfig encoder = small_config();
  encoder.attn_type = clattn::AttentionType::kEncoder;
  const auto contiguous = backend.make_builder(context, encoder);
  EXPECT_FALSE(contiguous->supports_update_block_table());
  EXPECT_EQ(error_text([&] { contiguous->update_block_table(queue, metadata, groups.pages(1)); },
                       clattn::ErrorCode::kUnsupported),
            "update_block_table: this configuration has no block table");
  queue.finish();
}

// A1.1: whether this batch may replay a full graph. It may exactly when build() takes it.
TEST(BuildOptions, A1_1_CanRunInGraphIsWhatARecordedStepTakes) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(small_config(), nullptr);
  ASSERT_EQ(backend.graph_support(), clattn::AttentionCGSupport::kAlways);
  const auto eager = backend.make_builder(context, small_config(), options_of(0));
  const auto recorded = backend.make_builder(context, small_config(), options_of(3));
  const struct {
    std::vector<attention_test::Request> requests;
    bool causal, fits;
  } cases[] = {
      {{}, true, true},
      {{{1, 30}}, true, true},
      {{{2, 30}, {2, 0}, {2, 99}}, true, true},  // a uniform batch of 1 + 1 speculative tokens
      {{{1, 30}, {2, 0}, {0, 0}}, true, true},   // and one that is not
      {{{3, 30}}, true, false},
      {{{1, 3}, {1, 3}, {1, 3}, {1, 3}}, true, false},
      {{{1, 30}}, false, true},  // a single query sees all keys either way
      {{{2, 30}}, false, false},
  };
  for (const auto& c : cases) {
    const Groups step(c.requests);
    CommonAttentionMetadata batch = step.batch(0);
    batch.causal = c.causal;
    EXPECT_EQ(recorded->can_run_in_graph(batch), c.fits);
    EXPECT_FALSE(eager->can_run_in_graph(batch));
    bool built = true;
    try {
      recorded->build(queue, batch);
    } catch (const clattn::Error&) {
      built = false;
    }
    EXPECT_EQ(built, c.fits);
  }
  queue.finish();
}

// A1.1: default False; the heuristic of A6.8 where backend and layer cascade.
TEST(BuildOptions, A1_1_UseCascadeAttentionAsksBackendAndLayer) {
  const auto& context = all_contexts().front();
  const std::vector<std::int32_t> query_lens(16, 5);
  clattn::CascadeQuery query{.common_prefix_len = 512, .query_lens = query_lens};
  query.num_query_heads = 4;
  query.num_kv_heads = 2;
  query.num_sms = 8;
  const auto answer = [&](std::string_view backend, auto change) {
    clattn::AttentionConfig config = small_config();
    change(config);
    return clattn::get_attn_backend(config, nullptr, backend)
        ->make_builder(context, config)
        ->use_cascade_attention(query);
  };
  using Config = clattn::AttentionConfig;
  EXPECT_TRUE(answer("FLASHINFER", [](Config&) {}));
  EXPECT_TRUE(answer("FLASHINFER", [](Config& c) {
    c.logits_soft_cap = 30;
    c.sinks = {1, 2, 3, 4};
  }));
  EXPECT_FALSE(answer("FLASHINFER", [](Config& c) { c.alibi_slopes = {1, 2, 3, 4}; }));
  EXPECT_FALSE(answer("FLASHINFER", [](Config& c) { c.sliding_window = 64; }));
  EXPECT_FALSE(answer("FLASHINFER", [](Config& c) { c.window_left = 63; }));
  EXPECT_FALSE(answer("FLASHINFER", [](Config& c) { c.attention_chunk_size = 64; }));
  EXPECT_FALSE(answer("XFORMERS", [](Config&) {}));  // A5: False
  query.common_prefix_len = 240;
  EXPECT_FALSE(answer("FLASHINFER", [](Config&) {}));
}

}  // namespace test_build_options
