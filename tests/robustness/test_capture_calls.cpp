// Captured calls that were made with options of their own: their cases give the same bits again.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <clattn/cache_ops.hpp>
#include <clattn/cascade.hpp>
#include <clattn/clattn.hpp>
#include <clattn/compat/paged_attention.hpp>
#include <clattn/mla.hpp>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "robustness/attention_model.hpp"
#include "robustness/capture.hpp"
#include "support/error_text.hpp"

namespace test_capture_calls {

using clattn::SplitPolicy;

struct Batch {
  std::vector<std::int32_t> query_lens, seq_lens;
};

const Batch kDecode = {{1, 1}, {1500, 700}};
const Batch kPrefill = {{9, 5}, {40, 1100}};
const Batch kMixed = {{1, 1, 7}, {1400, 33, 600}};
/// Decodes of up to three tokens first: in no order for a threshold of 1.
const Batch kSpeculative = {{3, 1, 9}, {900, 1300, 20}};

/// A layer over pages of 16 in f32, whose outputs are what out.npy holds.
class CaptureOfCalls : public CaptureInProcess {
 protected:
  static constexpr std::int64_t kBlocks = 256;
  clattn::AttentionConfig config_{.num_heads = 8,
                                  .num_kv_heads = 1,
                                  .head_size = 128,
                                  .block_size = 16,
                                  .dtype = clattn::DType::kF32};
  std::shared_ptr<clattn::Context> context_ = clattn::Context::create();
  clattn::Queue queue_ = context_->create_queue();
  const clattn::AttentionBackend& backend_ = *clattn::list_attn_backends()[0];

  /// The arrays of a batch whose requests share their first `shared` pages.
  struct Arrays {
    std::vector<std::int32_t> starts = {0}, lens, table;
    explicit Arrays(const Batch& batch, std::int32_t shared = 0) : lens(batch.seq_lens) {
      for (const std::int32_t len : batch.query_lens) starts.push_back(starts.back() + len);
      const std::int32_t width = (*std::max_element(lens.begin(), lens.end()) + 15) / 16;
      std::int32_t next = kBlocks;
      for (std::size_t r = 0; r < lens.size(); ++r) {
        for (std::int32_t i = 0; i < width; ++i)
          table.push_back(i < shared ? i + 3 : (i * 16 < lens[r] ? --next : 0));
      }
    }
    clattn::CommonAttentionMetadata batch() const {
      return clattn::CommonAttentionMetadata::of(starts, lens, table);
    }
  };

  clattn::KVCache make_cache() const {
    const clattn::KVCache cache = make_kv_cache(*context_, queue_, backend_, config_, kBlocks);
    fill(queue_, cache.buffer, 1);
    return cache;
  }
  clattn::Buffer make_rows(std::int32_t tokens) const {
    const clattn::Buffer rows = context_->allocate(static_cast<std::size_t>(tokens) * 8 * 128 * 4);
    fill(queue_, rows, 2);
    return rows;
  }
  /// Runs the newest case: it must give these bits.
  void expect_again(const clattn::Buffer& out, const std::string& what) const {
    const RunCase again(RunCase::InPlace{}, newest());
    EXPECT_EQ(again.array<float>("out"), floats_in(queue_, out)) << what;
  }
  /// Runs steps of kDecode, whose lengths are the bounds, with other lengths. A request that the
  /// device refuses attends to nothing, another one to something.
  template <typename MakeBuilder, typename Forward>
  void expect_again_by_bounds(const clattn::Buffer& out, const MakeBuilder& make_builder,
                              const Forward& forward) {
    const Arrays bounds(kDecode);
    for (const SplitPolicy policy : {SplitPolicy::kBalanced, SplitPolicy::kDeterministic}) {
      clattn::BuilderOptions options;
      options.split_policy = policy;
      options.device_seq_lens = true;
      const auto builder = make_builder(options);
      const clattn::AttentionMetadata& metadata = builder->build(queue_, bounds.batch());
      clattn::DeviceErrors errors(*context_, queue_);
      for (const GivenLengths& given : kGivenLengths) {
        const std::string what =
            fmt::format("lengths {} on the device", fmt::join(given.lens, ", "));
        const clattn::Buffer device_lens = upload(*context_, queue_, given.lens);
        clattn::update_seq_lens(queue_, metadata, {device_lens}, errors);
        forward(metadata);
        EXPECT_EQ(test::error_text([&] { errors.check(queue_); }), given.error) << what;
        expect_rows(floats_in(queue_, out), given.refused);
        expect_again(out, what);
      }
    }
  }

 private:
  struct GivenLengths {
    std::vector<std::int32_t> lens;
    int refused;  // a request, or none: -1
    std::string error;
  };
  inline static const std::vector<GivenLengths> kGivenLengths = {
      {{1100, 3}, -1, "no error"},
      {{1500, 699}, -1, "no error"},
      {{1501, 699},
       0,
       "update_seq_lens: request 0 was left out: its seq_len is more than the bound that the step "
       "was planned with"},
      {{1100, 0},
       1,
       "update_seq_lens: request 1 was left out: its seq_len is less than its query tokens"}};

  /// Of two requests: zeroes of the refused one, other numbers of the others.
  static void expect_rows(const std::vector<float>& out, int refused) {
    const auto is_zero = [](float value) { return value == 0; };
    for (int request = 0; request < 2; ++request) {
      const auto row = std::span(out).subspan(out.size() / 2 * static_cast<std::size_t>(request),
                                              out.size() / 2);
      if (request == refused) {
        EXPECT_TRUE(std::ranges::all_of(row, is_zero)) << "request " << request;
      } else {
        EXPECT_TRUE(std::ranges::none_of(row, is_zero)) << "request " << request;
      }
    }
  }
};

TEST_F(CaptureOfCalls, PlansOfEveryPolicy) {
  const clattn::KVCache cache = make_cache();
  const auto impl = backend_.make_impl(context_, config_);
  clattn::BatchLimits many;  // so many tokens that deterministic cuts must be longer than usual
  many.max_num_reqs = many.max_num_batched_tokens = 1 << 17;
  many.max_model_len = 4096;
  const struct {
    std::string name;
    const Batch& batch;
    std::int32_t decode_threshold;
  } rows[] = {{"decode", kDecode, 1},
              {"prefill", kPrefill, 1},
              {"mixed", kMixed, 1},
              {"speculative", kSpeculative, 3}};
  for (const SplitPolicy policy : {SplitPolicy::kBalanced, SplitPolicy::kDeterministic}) {
    clattn::BuilderOptions options;
    options.split_policy = policy;
    options.limits = many;
    for (const auto& row : rows) {
      options.decode_threshold = row.decode_threshold;
      const auto builder = backend_.make_builder(context_, config_, options);
      const Arrays arrays(row.batch);
      const clattn::Buffer query = make_rows(arrays.starts.back());
      for (const bool fast : {false, true}) {
        const auto& metadata =
            builder->build(queue_, arrays.batch(), nullptr, {.fast_build = fast});
        const clattn::Buffer out = make_rows(arrays.starts.back());
        impl->forward(queue_, {.query = {query.handle()}, .output = {out.handle()}}, cache,
                      metadata);
        expect_again(out, row.name + (fast ? ", fast" : "") +
                              (policy == SplitPolicy::kBalanced ? "" : ", deterministic"));
      }
    }
  }
}

/// The case has the lengths that were on the device, and the bounds that the plan is made of.
TEST_F(CaptureOfCalls, LengthsThatOnlyTheDeviceKnows) {
  const clattn::KVCache cache = make_cache();
  const auto impl = backend_.make_impl(context_, config_);
  const clattn::Buffer query = make_rows(2), out = make_rows(2);
  expect_again_by_bounds(
      out,
      [&](const clattn::BuilderOptions& options) {
        return backend_.make_builder(context_, config_, options);
      },
      [&](const clattn::AttentionMetadata& metadata) {
        impl->forward(queue_, {.query = {query.handle()}, .output = {out.handle()}}, cache,
                      metadata);
      });
}

/// The case has the rows that requests had on the device, and none of padding.
TEST_F(CaptureOfCalls, QueryLengthsThatOnlyTheDeviceKnows) {
  const clattn::KVCache cache = make_cache();
  const auto impl = backend_.make_impl(context_, config_);
  clattn::BuilderOptions options;
  options.num_splits = 3;
  options.device_seq_lens = options.device_query_lens = true;
  const auto builder = backend_.make_builder(context_, config_, options);
  const Arrays bounds(kDecode);
  const clattn::AttentionMetadata& metadata = builder->build(queue_, bounds.batch());
  clattn::DeviceErrors errors(*context_, queue_);
  const std::vector<std::int32_t> starts = {0, 0, 1}, lens = {1100, 600};
  clattn::update_query_lens(queue_, metadata,
                            {upload(*context_, queue_, starts), upload(*context_, queue_, lens)},
                            errors);
  const clattn::Buffer query = make_rows(2), out = make_rows(2);
  impl->forward(queue_, {.query = {query.handle()}, .output = {out.handle()}}, cache, metadata);
  errors.check(queue_);
  const RunCase again(RunCase::InPlace{}, newest());
  std::vector<float> row = floats_in(queue_, out);
  row.resize(row.size() / 2);
  EXPECT_EQ(again.array<float>("out"), row);
}

/// Another group's block table, planned by a fast build.
TEST_F(CaptureOfCalls, APlanThatWasTakenOver) {
  const clattn::KVCache cache = make_cache();
  const auto impl = backend_.make_impl(context_, config_);
  const auto first = backend_.make_builder(context_, config_, {});
  const auto second = backend_.make_builder(context_, config_, {});
  const Arrays arrays(kDecode);
  const clattn::Buffer query = make_rows(2), out = make_rows(2);
  const auto& planned = first->build(queue_, arrays.batch(), nullptr, {.fast_build = true});
  const clattn::CommonAttentionMetadata batch = arrays.batch();
  const auto& metadata = second->update_block_table(
      queue_, planned,
      {.block_table = batch.block_table, .block_table_stride = batch.block_table_stride});
  impl->forward(queue_, {.query = {query.handle()}, .output = {out.handle()}}, cache, metadata);
  expect_again(out, "taken over");
}

TEST_F(CaptureOfCalls, KernelsOfAForcedFamily) {
  config_.kernel_family = clattn::KernelFamily::kGpu;
  const clattn::KVCache cache = make_cache();
  const auto impl = backend_.make_impl(context_, config_);
  const auto builder = backend_.make_builder(context_, config_, {});
  const Arrays arrays(kMixed);
  const clattn::Buffer query = make_rows(9), out = make_rows(9);
  impl->forward(queue_, {.query = {query.handle()}, .output = {out.handle()}}, cache,
                builder->build(queue_, arrays.batch()));
  expect_again(out, "kernels of GPUs");
}

TEST_F(CaptureOfCalls, LatentDecodes) {
  clattn::MLAConfig config{.num_heads = 4, .kv_lora_rank = 32, .rope_dim = 8, .block_size = 16};
  config.dtype = clattn::DType::kF32;
  config.scale = 0.17F;
  const auto impl = make_mla_impl(*context_, config);
  clattn::MLACache cache;
  cache.buffer = context_->allocate(std::size_t{kBlocks} * 16 * 40 * 4);
  fill(queue_, cache.buffer, 3);
  cache.dtype = clattn::DType::kF32;
  cache.num_blocks = kBlocks;
  cache.block_size = 16;
  cache.kv_lora_rank = 32;
  cache.rope_dim = 8;
  const Arrays arrays(kDecode);
  const clattn::Buffer query = context_->allocate(std::size_t{2} * 4 * 40 * 4);
  const clattn::Buffer out = context_->allocate(std::size_t{2} * 4 * 32 * 4);
  fill(queue_, query, 4);
  for (const bool fast : {false, true}) {
    for (const SplitPolicy policy : {SplitPolicy::kBalanced, SplitPolicy::kDeterministic}) {
      clattn::BuilderOptions options;
      options.split_policy = policy;
      const auto builder = make_mla_builder(context_, config, options);
      const auto& metadata = builder->build(queue_, arrays.batch(), nullptr, {.fast_build = fast});
      impl->forward(queue_, {.query = {query.handle()}, .output = {out.handle()}}, cache, metadata);
      expect_again(out, "latent rows");
    }
  }
  expect_again_by_bounds(
      out,
      [&](const clattn::BuilderOptions& options) {
        return make_mla_builder(context_, config, options);
      },
      [&](const clattn::AttentionMetadata& metadata) {
        impl->forward(queue_, {.query = {query.handle()}, .output = {out.handle()}}, cache,
                      metadata);
      });
}

/// A cascade is one call, and so one case; its prefix stands in it.
TEST_F(CaptureOfCalls, ACascadeIsOneCase) {
  config_.sinks = {0, 1, 2, 3, -1, -2, 0.5, -0.5};
  const clattn::KVCache cache = make_cache();
  const clattn::CascadeImpl layer(context_, backend_, config_);
  for (const SplitPolicy policy : {SplitPolicy::kBalanced, SplitPolicy::kDeterministic}) {
    clattn::BuilderOptions options;
    options.split_policy = policy;
    clattn::CascadeAttention cascade(context_, backend_, config_, options);
    for (const Batch& batch :
         {Batch{{1, 1, 1}, {700, 650, 641}}, Batch{{4, 0, 1}, {660, 5, 900}}}) {
      const Arrays arrays(batch, 40);
      const clattn::Buffer query = make_rows(arrays.starts.back());
      const clattn::Buffer out = make_rows(arrays.starts.back());
      const std::size_t before = cases().size();
      cascade.build(queue_, arrays.batch(), 640);
      cascade.forward(queue_, layer, {.query = {query.handle()}, .output = {out.handle()}}, cache);
      ASSERT_EQ(cases().size(), before + 1);
      EXPECT_NE(read_bytes(newest() / "case.json").find("\"common_prefix_len\": 640"),
                std::string::npos);
      expect_again(out, "cascade");
    }
  }
}

/// Writes and decodes of x-packed caches, keys and values in one buffer.
class CaptureOfPackedCalls : public CaptureOfCalls,
                             public testing::WithParamInterface<clattn::DType> {};

TEST_P(CaptureOfPackedCalls, GiveTheirBitsAgain) {
  config_.kv_cache_dtype = GetParam();
  clattn::KVCacheSpec spec{.block_size = 16, .num_kv_heads = 1, .head_size = 128};
  spec.dtype = GetParam();
  const clattn::Buffer raw = context_->allocate(kBlocks * spec.page_size_bytes());
  queue_.fill(raw, 0, 0, raw.size_bytes());
  clattn::PackedKVCache cache = split_kv_cache(raw, spec);
  if (is_quantized(GetParam())) cache.scales = upload(*context_, queue_, std::vector{0.5F, 0.25F});
  const Arrays arrays({{1, 1, 1}, {1500, 700, 16}});

  constexpr std::int32_t kRows = 1500;
  std::vector<std::string> written;  // keys and values of each request
  const clattn::Buffer key = context_->allocate(std::size_t{kRows} * 128 * 4);
  const clattn::Buffer value = context_->allocate(std::size_t{kRows} * 128 * 4);
  fill(queue_, key, 5);
  fill(queue_, value, 6);
  for (std::size_t r = 0; r < 2; ++r) {
    std::vector<std::int64_t> slots;
    for (std::int32_t t = 0; t < arrays.lens[r]; ++t) {
      const std::size_t page = r * arrays.table.size() / 3 + static_cast<std::size_t>(t / 16);
      slots.push_back(std::int64_t{arrays.table[page]} * 16 + t % 16);
    }
    const clattn::Buffer mapping = upload(*context_, queue_, slots);
    reshape_and_cache(*context_, queue_, {key.handle()}, {value.handle()}, config_.dtype, cache,
                      mapping.handle(), 0, arrays.lens[r]);
    const RunCase write(RunCase::InPlace{}, newest());
    for (const std::string name : {"key_cache", "value_cache"})
      written.push_back(npy_data(write.bytes(name + "_out.npy")));
  }
  const auto attention = make_paged_attention(*context_, config_);
  for (const std::int32_t num_splits : {0, 1, 3}) {
    clattn::BuilderOptions options;
    options.num_splits = num_splits;
    const auto builder = make_paged_attention_builder(context_, config_, options);
    const clattn::Buffer query = make_rows(3), out = make_rows(3);
    attention->forward(queue_, {.query = {query.handle()}, .output = {out.handle()}}, cache,
                       builder->build(queue_, arrays.batch()));
    expect_again(out, "splits " + std::to_string(num_splits));
  }
  // The replayed writes left in their pages what the writes did.
  const std::size_t page_bytes = std::size_t{16} * 128 * element_size_bytes(GetParam());
  for (std::size_t i = 0; i < written.size(); ++i) {
    const std::string file = i % 2 == 0 ? "key_cache.npy" : "value_cache.npy";
    const std::string stored = npy_data(read_bytes(newest() / file));
    ASSERT_EQ(written[i].size(), stored.size());
    const std::size_t row = i / 2 * arrays.table.size() / 3;
    for (std::int32_t t = 0; t < arrays.lens[i / 2]; t += 16) {
      const auto page =
          static_cast<std::size_t>(arrays.table[row + static_cast<std::size_t>(t / 16)]);
      ASSERT_EQ(written[i].substr(page * page_bytes, page_bytes),
                stored.substr(page * page_bytes, page_bytes))
          << file << " page " << page;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CaptureOfPackedCalls,
                         testing::Values(clattn::DType::kF32, clattn::DType::kFp8E4M3));

}  // namespace test_capture_calls
