// Batches and masks that the library makes on the host from other descriptions of attention, run by
// the ordinary builder and judged by the oracle over the keys that the description means.
#include <clattn/compat/paged_bias.hpp>
#include <clattn/custom_mask.hpp>

#include "device/step_case.hpp"

namespace {

using attention_test::all_contexts;
using clattn::DType;
using step_test::Elements;
using step_test::index;
using Ints = std::vector<std::int32_t>;

/// A request's keys: `count` slots of its pages from slot `first` on.
struct KeyRun {
  std::int32_t queries = 1, first = 0, count = 0;
};

/// Requests over a cache in which everything but their keys is NaN.
class KeyRuns {
 public:
  KeyRuns(std::shared_ptr<clattn::Context> context, clattn::AttentionConfig config,
          std::string_view backend, std::vector<KeyRun> runs, std::int32_t pages)
      : context_(std::move(context)),
        queue_(context_->create_queue()),
        config_(std::move(config)),
        backend_(clattn::get_attn_backend(config_, &context_->capabilities(), backend)),
        runs_(std::move(runs)),
        columns_(pages),
        query_(config_.dtype, 0) {
    block_tables.resize(runs_.size() * index(columns_));
    std::iota(block_tables.begin(), block_tables.end(), 0);
    std::shuffle(block_tables.begin(), block_tables.end(), random_);
    lay_out();
    fill();
  }

  Ints block_tables;            // [requests, pages]
  oracle::AttentionCase truth;  // over the keys alone; the test sets what hides some of them

  void expect_right(const clattn::CommonAttentionMetadata& batch, const clattn::CustomMask* mask) {
    clattn::BuilderOptions options;
    options.limits.num_blocks = cache_.num_blocks;
    const auto builder = backend_.make_builder(context_, config_, options);
    const auto impl = backend_.make_impl(context_, config_);
    clattn::ForwardOptions extra;
    clattn::Buffer rows;
    if (mask != nullptr) {
      rows = context_->allocate(mask->rows.size());
      queue_.write(rows, std::as_bytes(std::span(mask->rows)));
      extra.custom_mask = rows.handle();
      extra.custom_mask_stride = mask->stride;
    }
    const clattn::Buffer query = query_.upload(*context_, queue_);
    const std::int64_t heads = truth.query_start_loc.back() * config_.num_heads;
    step_test::FencedOutput out(*context_, queue_, config_.dtype, heads * config_.head_size, 64);
    step_test::FencedOutput lse(*context_, queue_, DType::kF32, heads, 0);
    impl->forward(queue_,
                  {.query = {query.handle()},
                   .output = {out.buffer.handle(), out.front},
                   .lse = lse.buffer.handle()},
                  cache_, builder->build(queue_, batch), extra);
    queue_.finish();
    auto want = oracle::attention(truth, step_test::element(config_.dtype));
    if (step_test::rounds_weights(impl->kernels())) want.add_weight_rounding();
    step_test::expect_close(out.read(queue_), want.out, &want.bound, "out");
    step_test::expect_close(lse.read(queue_), want.lse, nullptr, "lse");
  }

 private:
  /// The oracle's keys stand in a row, request after request: no pages, no gaps.
  void lay_out() {
    truth.num_heads = config_.num_heads;
    truth.num_kv_heads = config_.num_kv_heads;
    truth.head_size = config_.head_size;
    truth.block_size = 0;
    truth.scale = 1.0 / std::sqrt(config_.head_size);
    truth.query_start_loc = truth.key_start_loc = {0};
    for (const KeyRun& run : runs_) {
      truth.query_start_loc.push_back(truth.query_start_loc.back() + run.queries);
      truth.key_start_loc.push_back(truth.key_start_loc.back() + run.count);
      truth.seq_lens.push_back(run.count);
    }
  }

  void fill() {
    const std::int64_t blocks = static_cast<std::int64_t>(block_tables.size());
    cache_ = clattn::make_kv_cache(*context_, queue_, backend_, config_, blocks);
    const std::int64_t elems = static_cast<std::int64_t>(cache_.buffer.size_bytes()) / 2;
    Elements bits(config_.dtype, elems);  // all NaN
    std::normal_distribution<double> normal;
    for (std::size_t r = 0; r < runs_.size(); ++r) {
      for (std::int32_t j = 0; j < runs_[r].count; ++j) {
        const std::int32_t slot = runs_[r].first + j;
        const std::int64_t page =
            block_tables[r * index(columns_) + index(slot / cache_.block_size)];
        const std::int64_t token =
            page * cache_.block_stride + slot % cache_.block_size * cache_.token_stride;
        for (std::int64_t i = 0; i < std::int64_t{config_.num_kv_heads} * config_.head_size; ++i) {
          const std::int64_t at =
              token + i / config_.head_size * cache_.head_stride + i % config_.head_size;
          truth.key_cache.push_back(bits.set(cache_.k_offset + at, normal(random_)));
          truth.value_cache.push_back(bits.set(cache_.v_offset + at, normal(random_)));
        }
      }
    }
    queue_.write(cache_.buffer, bits.bytes());
    const std::int64_t queries =
        std::int64_t{truth.query_start_loc.back()} * config_.num_heads * config_.head_size;
    query_ = Elements(config_.dtype, queries);
    for (std::int64_t i = 0; i < queries; ++i)
      truth.query.push_back(query_.set(i, normal(random_)));
  }

  std::shared_ptr<clattn::Context> context_;
  clattn::Queue queue_;
  clattn::AttentionConfig config_;
  const clattn::AttentionBackend& backend_;
  std::vector<KeyRun> runs_;
  std::int32_t columns_;
  std::mt19937 random_{11};
  clattn::KVCache cache_;
  Elements query_;
};

clattn::AttentionConfig small_config(bool custom_mask) {
  clattn::AttentionConfig config;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_size = 64;
  config.block_size = 16;
  config.custom_mask = custom_mask;
  return config;
}

Ints field(const std::vector<KeyRun>& runs, std::int32_t KeyRun::*member) {
  Ints values;
  for (const KeyRun& run : runs) values.push_back(run.*member);
  return values;
}

constexpr std::int32_t kPages = 12;

// A5: padded keys, each query as far from the last one as the key it may see at most.
TEST(PagedBiasOnDevice, A5_PaddedKeysCausalWithOffsetAndNot) {
  const std::vector<KeyRun> runs = {{1, 0, 100}, {1, 0, 1}, {1, 0, 16}, {7, 0, 30}, {40, 0, 190}};
  const Ints queries = field(runs, &KeyRun::queries), keys = field(runs, &KeyRun::count);
  for (const auto& context : all_contexts()) {
    for (const char* backend : {"XFORMERS", "FLASHINFER"}) {
      KeyRuns test(context, small_config(false), backend, runs, kPages);
      const auto causal = clattn::PagedBlockDiagonalCausalWithOffsetPaddedKeysMask::from_seqlens(
          queries, keys, test.block_tables, 16);
      EXPECT_FALSE(causal.needs_custom_mask());
      test.expect_right(causal.metadata(), nullptr);
      const auto full = clattn::PagedBlockDiagonalPaddedKeysMask::from_seqlens(
          queries, keys, test.block_tables, 16);
      test.truth.causal = false;
      test.expect_right(full.metadata(), nullptr);
    }
  }
}

// A5: gaps that end on a page need no mask.
TEST(PagedBiasOnDevice, A5_GapsOfWholePages) {
  const std::vector<KeyRun> runs = {{1, 32, 100}, {1, 176, 16}, {5, 16, 5}, {40, 64, 120}};
  for (const auto& context : all_contexts()) {
    KeyRuns test(context, small_config(false), "XFORMERS", runs, kPages);
    const auto bias = clattn::PagedBlockDiagonalCausalWithOffsetGappyKeysMask::from_seqlens(
        field(runs, &KeyRun::queries), field(runs, &KeyRun::first), field(runs, &KeyRun::count),
        test.block_tables, 16);
    EXPECT_FALSE(bias.needs_custom_mask());
    test.expect_right(bias.metadata(), nullptr);
  }
}

// A5: other gaps hide the rest of their page, whatever stands there; starts from one tensor.
TEST(PagedBiasOnDevice, A5_GapsInsidePagesFromOneTensor) {
  const std::vector<KeyRun> runs = {
      {1, 37, 100}, {1, 191, 1}, {1, 0, 20}, {5, 15, 5}, {40, 65, 120}};
  Ints starts;  // in a tensor cut into 192 keys a request
  for (std::size_t r = 0; r < runs.size(); ++r) {
    starts.push_back(static_cast<std::int32_t>(r) * 192 + runs[r].first);
  }
  starts.push_back(static_cast<std::int32_t>(runs.size()) * 192);
  const Ints queries = field(runs, &KeyRun::queries), keys = field(runs, &KeyRun::count);
  for (const auto& context : all_contexts()) {
    KeyRuns test(context, small_config(true), "XFORMERS", runs, kPages);
    const auto causal =
        clattn::BlockDiagonalCausalWithOffsetGappyKeysMask{queries, starts, keys}.make_paged(
            test.block_tables, 16, 192);
    EXPECT_TRUE(causal.needs_custom_mask());
    clattn::CustomMask mask = causal.custom_mask();
    test.expect_right(causal.metadata(), &mask);
    const auto full = clattn::BlockDiagonalGappyKeysMask{queries, starts, keys}.make_paged(
        test.block_tables, 16, 192);
    mask = full.custom_mask();
    test.truth.causal = false;
    test.expect_right(full.metadata(), &mask);
  }
}

// A1.10: spans that attend to themselves in both directions, with and without a window.
TEST(MMPrefixOnDevice, A1_10_SpansAreBidirectional) {
  const std::vector<KeyRun> runs = {{1, 0, 40}, {6, 0, 90}, {45, 0, 180}, {20, 0, 20}};
  const std::vector<clattn::MMSpan> spans = {{0, 3, 20},    {1, 80, 95},   {2, 10, 60},
                                             {2, 140, 160}, {2, 170, 180}, {3, 0, 11}};
  for (const auto& context : all_contexts()) {
    for (const std::int32_t window : {0, 9}) {
      clattn::AttentionConfig config = small_config(true);
      config.use_mm_prefix = true;
      KeyRuns test(context, config, "FLASHINFER", runs, kPages);
      auto batch = clattn::CommonAttentionMetadata::of(test.truth.query_start_loc,
                                                       test.truth.seq_lens, test.block_tables);
      batch.causal = false;
      const clattn::CustomMask mask =
          clattn::make_mm_prefix_mask(batch, clattn::compute_mm_prefix_range(spans, 4), window);

      oracle::AttentionCase& truth = test.truth;
      truth.causal = false;
      truth.custom_mask_stride = 180;
      truth.custom_mask.assign(index(truth.query_start_loc.back() * 180), 0);
      for (std::int32_t r = 0; r < 4; ++r) {
        const std::int32_t last = truth.query_start_loc[index(r) + 1];
        for (std::int32_t t = truth.query_start_loc[index(r)]; t < last; ++t) {
          const std::int32_t at = truth.seq_lens[index(r)] - last + t;
          for (std::int32_t j = 0; j < truth.seq_lens[index(r)]; ++j) {
            bool sees = j <= at && (window == 0 || at - j < window);
            for (const clattn::MMSpan& span : spans) {
              const auto holds = [&](std::int32_t x) { return span.start <= x && x < span.end; };
              sees = sees || (span.request == r && holds(at) && holds(j));
            }
            truth.custom_mask[index(t * 180 + j)] = sees ? 1 : 0;
          }
        }
      }
      test.expect_right(batch, &mask);
    }
  }
}

}  // namespace
