#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <clattn/cascade.hpp>
#include <clattn/clattn.hpp>
#include <clattn/compat/page.hpp>
#include <clattn/compat/paged_attention.hpp>
#include <clattn/graph.hpp>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/cache_ops_support.hpp"
#include "support/error_text.hpp"

/// Steps that take their lengths from the device: one after the other without the host, recorded,
/// with wrong lengths; and what is refused.
namespace test_device_length_steps {

using attention_test::small_config;
using cache_ops_test::all_contexts;
using cache_ops_test::download;
using cache_ops_test::upload;
using clattn::CommonAttentionMetadata;
using test::error_text;

/// Latent rows whose outputs are as wide as those of small_config().
clattn::AttentionConfig latent_config() {
  clattn::AttentionConfig config = small_config();
  config.use_mla = true;
  config.num_kv_heads = 1;
  config.rope_dim = 16;
  config.head_size = 64 + config.rope_dim;
  return config;
}

/// Runs of both cache forms: pages of keys and values, and of latent rows.
class DeviceLengthRuns : public testing::TestWithParam<bool> {
 protected:
  const clattn::AttentionConfig config_ = GetParam() ? latent_config() : small_config();
};
INSTANTIATE_TEST_SUITE_P(Forms, DeviceLengthRuns, testing::Bool(), [](const auto& tested) {
  return std::string(tested.param ? "latent" : "paged");
});

/// Decodes of one token over a cache of random halves, the same in each: one whose lengths the
/// device knows, and a twin that a host plans.
struct Twin {
  static constexpr std::int32_t kPages = 6, kPage = 16;
  const clattn::Context& context;
  clattn::AttentionConfig config;
  clattn::Queue queue;
  const clattn::AttentionBackend& backend;
  std::shared_ptr<const clattn::AttentionImpl> impl;
  std::int32_t num_reqs;
  std::vector<std::int32_t> starts{0}, table;
  clattn::KVCache cache;
  clattn::Buffer rows, out, lse;

  Twin(const std::shared_ptr<clattn::Context>& made, std::int32_t requests,
       const clattn::AttentionConfig& of = small_config())
      : context(*made),
        config(of),
        queue(made->create_queue()),
        backend(*clattn::get_attn_backend(config, &made->capabilities())),
        impl(backend.make_impl(made, config)),
        num_reqs(requests) {
    for (std::int32_t r = 0; r < requests; ++r) {
      starts.push_back(r + 1);
      for (std::int32_t p = 0; p < kPages; ++p) table.push_back(p * requests + r);
    }
    cache = clattn::make_kv_cache(context, queue, backend, config, std::ssize(table));
    fill(cache.buffer, 1);
    const std::size_t heads = static_cast<std::size_t>(requests) * 4;
    rows = context.allocate(heads * static_cast<std::size_t>(config.head_size) * 2);
    out = context.allocate(heads * 64 * 2);
    lse = context.allocate(heads * 4);
  }
  void fill(const clattn::Buffer& buffer, unsigned seed) const {
    std::mt19937 random(seed);
    std::vector<std::uint16_t> halves(buffer.size_bytes() / 2);
    for (std::uint16_t& half : halves)
      half = static_cast<std::uint16_t>(0x3800U | (random() & 0x83FFU));
    queue.write(buffer, std::as_bytes(std::span(halves)));
  }
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder(
      const std::shared_ptr<clattn::Context>& owner, bool device_seq_lens) const {
    clattn::BuilderOptions options;
    options.limits.num_blocks = static_cast<std::int64_t>(table.size());
    options.num_splits = 3;  // the same cuts by any bound
    options.device_seq_lens = device_seq_lens;
    return backend.make_builder(owner, config, options);
  }
  CommonAttentionMetadata batch(const std::vector<std::int32_t>& lens) const {
    return CommonAttentionMetadata::of(starts, lens, table);
  }
  void launch(const clattn::AttentionMetadata& metadata) const {
    impl->write_kv_cache(queue, {rows.handle()}, {rows.handle()}, cache, metadata);
    impl->forward(queue, {.query = {rows.handle()}, .output = {out.handle()}, .lse = lse.handle()},
                  cache, metadata);
  }
  void step(const clattn::AttentionMetadata& metadata, unsigned seed) const {
    fill(rows, seed);
    launch(metadata);
  }
  void expect_same(const Twin& other) const {
    EXPECT_EQ(download<std::uint16_t>(queue, out), download<std::uint16_t>(other.queue, other.out));
    EXPECT_EQ(download<float>(queue, lse), download<float>(other.queue, other.lse));
    EXPECT_EQ(download<std::uint16_t>(queue, cache.buffer),
              download<std::uint16_t>(other.queue, other.cache.buffer));
  }
};

/// The results of both are the same, but these requests of the device attended to nothing.
void expect_same_but(const Twin& device, const Twin& host,
                     std::initializer_list<std::size_t> requests, std::int32_t len = 0) {
  auto out = download<std::uint16_t>(host.queue, host.out);
  auto lse = download<float>(host.queue, host.lse);
  for (const std::size_t r : requests) {
    std::fill_n(out.begin() + static_cast<std::ptrdiff_t>(r * 256), 256, std::uint16_t{0});
    std::fill_n(lse.begin() + static_cast<std::ptrdiff_t>(r * 4), 4, -INFINITY);
  }
  EXPECT_EQ(download<std::uint16_t>(device.queue, device.out), out) << len;
  EXPECT_EQ(download<float>(device.queue, device.lse), lse) << len;
  EXPECT_EQ(download<std::uint16_t>(device.queue, device.cache.buffer),
            download<std::uint16_t>(host.queue, host.cache.buffer))
      << len;
}

/// An advance_step of the twin's requests, all but `padding` of them.
clattn::AdvanceStep advance_of(const Twin& twin, const std::vector<std::int32_t>& lens,
                               std::int32_t padding) {
  const auto rows = static_cast<std::size_t>(twin.num_reqs);
  clattn::AdvanceStep step;
  step.num_seqs = twin.num_reqs;
  step.num_queries = twin.num_reqs - padding;
  step.block_size = Twin::kPage;
  step.num_blocks = static_cast<std::int64_t>(twin.table.size());
  step.block_table_stride = Twin::kPages;
  step.input_tokens = twin.context.allocate(rows * 8);
  step.sampled_token_ids = upload(twin.context, twin.queue, std::vector<std::int64_t>(rows, 7));
  step.input_positions = twin.context.allocate(rows * 8);
  step.slot_mapping = twin.context.allocate(rows * 8);
  step.seq_lens = upload(twin.context, twin.queue, lens);
  step.block_tables = upload(twin.context, twin.queue, twin.table);
  return step;
}

/// FlashInfer's paging arrays of the same requests.
clattn::AdvanceStepPages pages_of(const Twin& twin, const std::vector<std::int32_t>& lens) {
  const auto rows = static_cast<std::size_t>(twin.num_reqs);
  const auto pages = clattn::build_paged_kv_metadata(twin.batch(lens), Twin::kPage);
  std::vector<std::int32_t> indices = pages.indices, bound;
  indices.resize(twin.table.size());
  for (std::size_t r = 0; r < rows; ++r) bound.push_back(pages.indptr[r + 1] - pages.indptr[r]);
  return {.paged_kv_indices = upload(twin.context, twin.queue, indices),
          .paged_kv_indptr = upload(twin.context, twin.queue, pages.indptr),
          .paged_kv_last_page_len = upload(twin.context, twin.queue, pages.last_page_len),
          .block_table_bound = upload(twin.context, twin.queue, bound)};
}

// M9: eight steps with nothing between them but advance_step, against a build a step.
TEST_P(DeviceLengthRuns, M9_StepsFollowEachOtherWithoutTheHost) {
  constexpr int kSteps = 8;
  for (const auto& context : all_contexts()) {
    for (const bool with_pages : {false, true}) {
      const Twin device(context, 5, config_), host(context, 5, config_);
      std::vector<std::int32_t> lens = {1, 15, 28, 80, 33}, bounds = lens;
      for (std::int32_t& bound : bounds) bound += kSteps;
      const auto planned = device.builder(context, true), built = host.builder(context, false);
      clattn::AdvanceStep advance = advance_of(device, lens, 0);
      const clattn::AdvanceStepPages pages = pages_of(device, lens);
      advance.metadata = &planned->build(device.queue, device.batch(bounds));
      clattn::DeviceErrors errors(*context, device.queue);
      const auto advance_step = [&](clattn::Event* event) {
        if (with_pages) {
          clattn::advance_step_flashinfer(*context, device.queue, advance, pages, errors, event);
        } else {
          clattn::advance_step_flashattn(*context, device.queue, advance, errors, event);
        }
      };
      for (int step = 0; step < kSteps; ++step) {
        clattn::Event event;
        advance_step(&event);
        device.step(*advance.metadata, 10 + static_cast<unsigned>(step));
        for (std::int32_t& len : lens) ++len;
        host.step(built->build(host.queue, host.batch(lens)), 10 + static_cast<unsigned>(step));
        device.expect_same(host);
        EXPECT_TRUE(event);
      }
      errors.check(device.queue);
      advance_step(nullptr);
      EXPECT_EQ(
          error_text([&] { errors.check(device.queue); }),
          "update_seq_lens: request 0 was left out: its seq_len is more than the bound that the "
          "step was planned with");
    }
  }
}

// A row that cannot advance, and one of padding, keep their lengths; their slots of the step before
// are not written again, and they attend to nothing.
TEST_P(DeviceLengthRuns, RowsThatCannotAdvanceStoreAndAttendToNothing) {
  const auto& context = all_contexts().at(0);
  const Twin device(context, 4, config_), host(context, 4, config_);
  const std::vector<std::int32_t> full = {Twin::kPages * Twin::kPage, 20, 30, 40};
  const auto planned = device.builder(context, true), built = host.builder(context, false);
  clattn::AdvanceStep advance = advance_of(device, full, 1);
  std::vector<std::int32_t> table = device.table;
  table[2 * Twin::kPages] = 24;  // a block that the cache does not have
  advance.block_tables = upload(*context, device.queue, table);
  const std::vector<std::int32_t> bounds(4, full[0]);
  advance.metadata = &planned->build(device.queue, device.batch(bounds));
  clattn::DeviceErrors errors(*context, device.queue);
  clattn::advance_step_flashattn(*context, device.queue, advance, errors);
  device.step(*advance.metadata, 4);
  EXPECT_EQ(error_text([&] { errors.check(device.queue); }),
            "advance_step: row 0 was left out: its new token lies past its block table");
  // Of the host's batch, too, only the second request stores a token.
  const std::vector<std::int32_t> next = {full[0], 21, 30, 40};
  const std::vector<std::int64_t> slots = {-1, (1 * 4 + 1) * Twin::kPage + 4, -1, -1};
  CommonAttentionMetadata batch = host.batch(next);
  batch.slot_mapping = slots;
  host.step(built->build(host.queue, batch), 4);
  expect_same_but(device, host, {0, 2, 3});
  EXPECT_EQ(download<std::int32_t>(device.queue, advance.seq_lens), next);
}

TEST_P(DeviceLengthRuns, WrongOnesAreReportedAndAttendToNothing) {
  for (const auto& context : all_contexts()) {
    const Twin device(context, 4, config_), host(context, 4, config_);
    const auto planned = device.builder(context, true), built = host.builder(context, false);
    const auto& metadata =
        planned->build(device.queue, device.batch(std::vector<std::int32_t>(4, 50)));
    clattn::DeviceErrors errors(*context, device.queue);
    struct Wrong {
      std::int32_t len;
      std::string reason;
    };
    const Wrong wrongs[] = {{51, "more than the bound that the step was planned with"},
                            {2147483647, "more than the bound that the step was planned with"},
                            {0, "less than its query tokens"},
                            {-2147483647 - 1, "less than its query tokens"}};
    for (const Wrong& wrong : wrongs) {
      const std::vector<std::int32_t> lens = {50, wrong.len, 17, wrong.len};
      clattn::update_seq_lens(device.queue, metadata, {upload(*context, device.queue, lens)},
                              errors);
      device.step(metadata, 3);
      EXPECT_EQ(error_text([&] { errors.check(device.queue); }),
                "update_seq_lens: request 1 was left out: its seq_len is " + wrong.reason);
      errors.check(device.queue);  // a report is made once
      // The twin's request without keys to see is one of another length whose slot stores nothing.
      const std::vector<std::int32_t> right = {50, 1, 17, 1};
      const std::vector<std::int64_t> slots = {(3 * 4 + 0) * 16 + 1, -1, (1 * 4 + 2) * 16 + 0, -1};
      CommonAttentionMetadata batch = host.batch(right);
      batch.slot_mapping = slots;
      host.step(built->build(host.queue, batch), 3);
      expect_same_but(device, host, {1, 3}, wrong.len);
    }
  }
}

// Before the first update the bounds are the lengths.
TEST(DeviceLengthSteps, AreTheBoundsUntilTheyCome) {
  const auto& context = all_contexts().at(0);
  const Twin device(context, 3), host(context, 3);
  const std::vector<std::int32_t> lens = {40, 7, 96};
  device.step(device.builder(context, true)->build(device.queue, device.batch(lens)), 2);
  host.step(host.builder(context, false)->build(host.queue, host.batch(lens)), 2);
  device.expect_same(host);
}

// A graph that begins with update_seq_lens() reads the lengths that stand on the device by then.
TEST_P(DeviceLengthRuns, ReplaysReadThemAnew) {
  for (const auto& context : all_contexts()) {
    for (const auto mode : {clattn::ReplayMode::kLaunchList, clattn::ReplayMode::kAuto}) {
      const Twin device(context, 4, config_), host(context, 4, config_);
      clattn::BuilderOptions options;
      options.limits = {
          .max_num_reqs = 4, .max_num_batched_tokens = 4, .max_model_len = 96, .num_blocks = 24};
      options.num_splits = 3;
      options.device_seq_lens = true;
      clattn::AttentionState state(context, device.backend, config_, options);
      const clattn::Buffer lens_buffer =
          upload(*context, device.queue, std::vector<std::int32_t>(4, 1));
      clattn::DeviceErrors errors(*context, device.queue);
      clattn::Graph graph;
      {
        const auto capturing = state.graph_capture(4);
        const clattn::Queue other = context->create_queue();
        const auto& metadata = state.graph_capture_get_metadata_for_batch(other, 4);
        other.finish();
        clattn::GraphCapture capture(device.queue, mode);
        clattn::update_seq_lens(device.queue, metadata, {lens_buffer}, errors);
        device.launch(metadata);
        graph = capture.end();
      }
      const auto built = host.builder(context, false);
      state.prepare_graph_input_buffers(device.queue, 4,
                                        device.batch(std::vector<std::int32_t>(4, 90)));
      std::vector<std::int32_t> lens = {3, 60, 17, 86};
      for (unsigned step = 0; step < 4; ++step) {
        device.queue.write(lens_buffer, std::as_bytes(std::span(lens)));
        device.fill(device.rows, step);
        graph.replay(device.queue);
        host.step(built->build(host.queue, host.batch(lens)), step);
        device.expect_same(host);
        for (std::int32_t& len : lens) ++len;
      }
      errors.check(device.queue);
    }
  }
}

TEST(DeviceLengthSteps, OtherMetadataAndSmallBuffersAreRefused) {
  const auto& context = all_contexts().at(0);
  const Twin twin(context, 3);
  const auto builder = twin.builder(context, true), other = twin.builder(context, false);
  const std::vector<std::int32_t> lens = {5, 6, 7};
  const auto& metadata = builder->build(twin.queue, twin.batch(lens));
  clattn::DeviceErrors errors(*context, twin.queue);
  const auto update = [&](const clattn::AttentionMetadata& made, clattn::DeviceLengths lengths) {
    return error_text([&] { clattn::update_seq_lens(twin.queue, made, lengths, errors); });
  };
  const clattn::Buffer small = context->allocate(8), enough = context->allocate(12);
  EXPECT_EQ(update(other->build(twin.queue, twin.batch(lens)), {enough}),
            "update_seq_lens: attn_metadata: its lengths are on the host, legal: metadata of a "
            "builder with device_seq_lens");
  EXPECT_EQ(update(metadata, {small}),
            "update_seq_lens: seq_lens holds 8 bytes, legal: at least 12 (3 elements of 4)");
  EXPECT_EQ(update(metadata, {}),
            "update_seq_lens: seq_lens holds 0 bytes, legal: at least 12 (3 elements of 4)");
  EXPECT_EQ(update(metadata, {enough, enough}),
            "update_seq_lens: slot_mapping holds 12 bytes, legal: at least 24 (3 elements of 8)");
  EXPECT_EQ(update(metadata, {clattn::Buffer::adopt(metadata.slot_mapping_buffer())}),
            "update_seq_lens: seq_lens lies in the step's metadata, legal: memory of its own");
}

TEST(DeviceLengthSteps, ARefusedAdvanceMovesNoRow) {
  const auto& context = all_contexts().at(0);
  const Twin twin(context, 3);
  const auto builder = twin.builder(context, false);
  const std::vector<std::int32_t> lens = {5, 6, 7};
  clattn::AdvanceStep advance = advance_of(twin, lens, 0);
  advance.metadata = &builder->build(twin.queue, twin.batch(lens));
  clattn::DeviceErrors errors(*context, twin.queue);
  EXPECT_EQ(
      error_text([&] { clattn::advance_step_flashattn(*context, twin.queue, advance, errors); }),
      "update_seq_lens: attn_metadata: its lengths are on the host, legal: metadata of a "
      "builder with device_seq_lens");
  EXPECT_EQ(download<std::int32_t>(twin.queue, advance.seq_lens), lens);
}

// Slots are of rows, but read by query token: those of other batches would go to other requests.
TEST(DeviceLengthSteps, AnAdvanceOfOtherBatchesIsRefused) {
  const auto& context = all_contexts().at(0);
  const std::vector<std::int32_t> lens = {50, 60, 70}, bounds = {51, 61, 71}, legal = {0, 1, 2, 2};
  for (const auto& starts :
       {legal, {0, 1, 3, 3}, {0, 2, 2, 2}, std::vector<std::int32_t>{0, 0, 1, 2}}) {
    Twin twin(context, 3);
    twin.starts = starts;
    const auto builder = twin.builder(context, true);
    clattn::AdvanceStep advance = advance_of(twin, lens, 0);
    advance.metadata = &builder->build(twin.queue, twin.batch(bounds));
    clattn::DeviceErrors errors(*context, twin.queue);
    EXPECT_EQ(
        error_text([&] { clattn::advance_step_flashattn(*context, twin.queue, advance, errors); }),
        starts == legal ? "no error"
                        : "advance_step: metadata: its requests are not the rows, legal: a query "
                          "token of each of the first up to 3 rows, none of others");
    EXPECT_EQ(download<std::int32_t>(twin.queue, advance.seq_lens),
              starts == legal ? bounds : lens);
  }
}

TEST(DeviceLengthSteps, WhatNeedsThemOnTheHostIsRefused) {
  const auto& context = all_contexts().at(0);
  const Twin twin(context, 3);
  const auto builder = twin.builder(context, true);
  const std::vector<std::int32_t> lens = {17, 18, 19};
  const std::vector<std::int64_t> slots = {1, 2, 3};
  CommonAttentionMetadata batch = twin.batch(lens);
  EXPECT_FALSE(builder->supports_update_block_table());
  EXPECT_FALSE(builder->use_cascade_attention({}));
  const auto unsupported = clattn::ErrorCode::kUnsupported;
  EXPECT_EQ(
      error_text([&] { builder->build(twin.queue, batch, nullptr, {.common_prefix_len = 16}); }),
      "common_prefix_len is 16, legal with device_seq_lens: 0");
  const auto twins = twin.builder(context, true);
  EXPECT_EQ(error_text(
                [&] {
                  twins->update_block_table(
                      twin.queue, builder->build(twin.queue, batch),
                      {.block_table = twin.table, .block_table_stride = Twin::kPages});
                },
                unsupported),
            "update_block_table: device_seq_lens is true, legal: false");
  batch.slot_mapping = slots;
  EXPECT_EQ(error_text([&] { builder->build(twin.queue, batch); }),
            "slot_mapping holds 3 elements, legal with device_seq_lens: none (the device computes "
            "them)");

  clattn::BuilderOptions options;
  options.device_seq_lens = true;
  clattn::AttentionConfig cross = small_config();
  cross.attn_type = clattn::AttentionType::kEncoderDecoder;
  EXPECT_EQ(error_text([&] { twin.backend.make_builder(context, cross, options); }, unsupported),
            "device_seq_lens: true, legal with attn_type encoder_decoder: false");
  EXPECT_EQ(
      error_text([&] { clattn::make_paged_attention_builder(context, small_config(), options); },
                 unsupported),
      "device_seq_lens: true, supported by paged_attention: false (it cuts by the longest "
      "request)");
  EXPECT_EQ(
      error_text([&] { clattn::CascadeAttention(context, twin.backend, small_config(), options); },
                 unsupported),
      "device_seq_lens: true, supported by cascades: false (levels are cut by the host's "
      "lengths)");
}

}  // namespace test_device_length_steps
