// Batches and masks that the library makes on the host from other descriptions of attention, run by
// the ordinary builder and judged by the oracle over the keys that the description means.
#include <clattn/compat/paged_bias.hpp>

#include "device/step_case.hpp"

namespace test_masks {

using attention_test::all_contexts;
using clattn::DType;
using step_test::Elements;
using step_test::index;
using Ints = std::vector<std::int32_t>;

/// A request's keys: `count` slots of its pages from slot `first` on.
struct KeyRun {
  std::int32_t queries = 1, first = 0, count = 0;
};

/// Of ForwardOptions::custom_mask.
struct MaskRows {
  std::vector<std::uint8_t> rows;
  std::int64_t stride = 0;
};

/// Requests over a cache in which everything but their keys is NaN.
class KeyRuns {
 public:
  KeyRuns(std::shared_ptr<clattn::Context> context, clattn::AttentionConfig config,
          std::string_view backend, std::vector<KeyRun> runs, std::int32_t pages)
      : context_(std::move(context)),
        queue_(context_->create_queue()),
        config_(std::move(config)),
        backend_(*clattn::get_attn_backend(config_, &context_->capabilities(), backend)),
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

  void expect_right(const clattn::CommonAttentionMetadata& batch, const MaskRows* mask) {
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
    if (step_test::rounds_probabilities(impl->kernels())) want.add_weight_rounding();
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
      EXPECT_FALSE(causal.needs_first_keys());
      test.expect_right(causal.metadata(), nullptr);
      const auto full = clattn::PagedBlockDiagonalPaddedKeysMask::from_seqlens(
          queries, keys, test.block_tables, 16);
      test.truth.causal = false;
      test.expect_right(full.metadata(), nullptr);
    }
  }
}

// A5: gaps that end on a page need no first keys.
TEST(PagedBiasOnDevice, A5_GapsOfWholePages) {
  const std::vector<KeyRun> runs = {{1, 32, 100}, {1, 176, 16}, {5, 16, 5}, {40, 64, 120}};
  for (const auto& context : all_contexts()) {
    KeyRuns test(context, small_config(false), "XFORMERS", runs, kPages);
    const auto bias = clattn::PagedBlockDiagonalCausalWithOffsetGappyKeysMask::from_seqlens(
        field(runs, &KeyRun::queries), field(runs, &KeyRun::first), field(runs, &KeyRun::count),
        test.block_tables, 16);
    EXPECT_FALSE(bias.needs_first_keys());
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
    clattn::AttentionConfig config = small_config(false);
    config.use_first_keys = true;
    KeyRuns test(context, config, "XFORMERS", runs, kPages);
    const auto causal =
        clattn::BlockDiagonalCausalWithOffsetGappyKeysMask{queries, starts, keys}.make_paged(
            test.block_tables, 16, 192);
    EXPECT_TRUE(causal.needs_first_keys());
    test.expect_right(causal.metadata(), nullptr);
    const auto full = clattn::BlockDiagonalGappyKeysMask{queries, starts, keys}.make_paged(
        test.block_tables, 16, 192);
    test.truth.causal = false;
    test.expect_right(full.metadata(), nullptr);
  }
}

// A6.11: multi-item scoring (FlashInfer's prefix_len_ptr and token_pos_in_items_ptr): tokens of an
// item see the prompt's common prefix and their own item up to themselves, no other item.
TEST(Masks, A6_11_ItemsOfAPromptSeeThePrefixAndThemselves) {
  const Ints prefix_lens = {20, 0, 33};
  const std::vector<Ints> items = {{1, 30, 16, 3}, {5, 5}, {70}};
  std::vector<KeyRun> runs;
  std::vector<Ints> begins;  // of each key, where its item begins; 0 in the prefix
  for (std::size_t r = 0; r < items.size(); ++r) {
    Ints& begin = begins.emplace_back(index(prefix_lens[r]), 0);
    for (const std::int32_t item : items[r])
      begin.insert(begin.end(), index(item), static_cast<std::int32_t>(begin.size()));
    // The first request's prefix is computed already, the others' are part of the step.
    const auto length = static_cast<std::int32_t>(begin.size());
    runs.push_back({r == 0 ? length - prefix_lens[r] : length, 0, length});
  }
  for (const auto& context : all_contexts()) {
    KeyRuns test(context, small_config(true), "FLASHINFER", runs, kPages);
    oracle::AttentionCase& truth = test.truth;
    MaskRows mask{.rows = {}, .stride = 103};
    for (std::size_t r = 0; r < runs.size(); ++r) {
      for (std::int32_t at = runs[r].count - runs[r].queries; at < runs[r].count; ++at) {
        for (std::int32_t j = 0; j < mask.stride; ++j) {
          const bool own = j >= begins[r][index(at)] && j <= at;
          mask.rows.push_back(j < runs[r].count && (j < prefix_lens[r] || own) ? 1 : 0);
        }
      }
    }
    // The oracle's own words: hidden keys are those between the prefix and the token's item.
    truth.custom_mask_stride = mask.stride;
    truth.custom_mask.assign(mask.rows.size(), 1);
    std::size_t row = 0;
    for (std::size_t r = 0; r < runs.size(); ++r) {
      for (std::int32_t at = runs[r].count - runs[r].queries; at < runs[r].count; ++at, ++row) {
        for (std::int32_t j = prefix_lens[r]; j < begins[r][index(at)]; ++j)
          truth.custom_mask[row * index(truth.custom_mask_stride) + index(j)] = 0;
      }
    }
    test.expect_right(clattn::CommonAttentionMetadata::of(truth.query_start_loc, truth.seq_lens,
                                                          test.block_tables),
                      &mask);
  }
}

}  // namespace test_masks
