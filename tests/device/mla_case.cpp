#include "device/mla_case.hpp"

#include "device/bounded_batch.hpp"
#include "kernels/step/paged_step.hpp"

namespace mla_test {

using clattn::DType;
using step_test::Elements;
using step_test::FencedOutput;
using step_test::index;
using step_test::Layout;

namespace {

constexpr std::int64_t kInfiniteElement = 3;  ///< a latent one

/// What the batch says of its requests beyond lengths, as far as the layer takes it. keep_keys,
/// which change nothing without a window, are for every layer.
struct Lists {
  std::vector<clattn::Direction> direction;
  std::vector<std::int32_t> span_start_loc, spans, first_keys, keep_keys, tree_start_loc,
      tree_parents;

  /// `truth` learns the same.
  Lists(const Case& c, oracle::AttentionCase& truth) {
    if (c.config.use_spans) span_start_loc = {0};
    if (c.config.use_trees) tree_start_loc = {0};
    for (std::size_t r = 0; r < c.requests.size(); ++r) {
      const Request& request = c.requests[r];
      keep_keys.push_back(request.keep_keys);
      if (c.config.use_directions) {
        direction.push_back(request.direction.value_or(clattn::Direction::kCausal));
        truth.looks.push_back(static_cast<oracle::Looks>(direction.back()));
      }
      if (c.config.use_first_keys) first_keys.push_back(request.first_key);
      if (c.config.use_spans) {
        for (const auto& [first, end] : request.spans) {
          spans.insert(spans.end(), {first, end});
          truth.spans.push_back({static_cast<std::int32_t>(r), first, end});
        }
        span_start_loc.push_back(static_cast<std::int32_t>(spans.size() / 2));
      }
      if (!c.config.use_trees) continue;
      tree_parents.insert(tree_parents.end(), request.parents.begin(), request.parents.end());
      tree_start_loc.push_back(static_cast<std::int32_t>(tree_parents.size()));
      truth.tree_parents.push_back(request.parents);
    }
    truth.first_keys = first_keys;
  }
  clattn::CommonAttentionMetadata batch(const Layout& layout) const {
    clattn::CommonAttentionMetadata batch = layout.batch();
    clattn::for_each_list([](auto& list, const auto& own) { list = own; }, batch, *this);
    return batch;
  }
};

oracle::AttentionCase truth_of(const Case& c, const Layout& layout) {
  oracle::AttentionCase truth;
  truth.num_heads = c.config.num_heads;
  truth.num_kv_heads = 1;
  truth.head_size = c.config.kv_lora_rank + c.config.rope_dim;
  truth.block_size = c.config.block_size;
  truth.scale = c.config.scale ? static_cast<double>(*c.config.scale)
                               : 1.0 / std::sqrt(static_cast<double>(truth.head_size));
  truth.query_start_loc = layout.query_start_loc;
  truth.seq_lens = layout.seq_lens;
  truth.block_table = layout.block_table;
  truth.max_blocks = layout.max_blocks;
  return truth;
}

/// Rows of all requests; what no request owns stays poison on the device and NaN for the oracle.
Elements make_cache(const Case& c, const Layout& layout, oracle::AttentionCase& truth) {
  const std::int64_t width = truth.head_size;
  const std::int64_t count = layout.num_blocks * c.config.block_size * width;
  Elements cache(c.config.cache_dtype(), count);
  truth.key_cache.assign(index(count), std::numeric_limits<double>::quiet_NaN());
  std::mt19937 random(11);
  std::normal_distribution<double> normal;
  for (std::size_t r = 0; r < layout.seq_lens.size(); ++r) {
    const std::int32_t first_key = c.config.use_first_keys ? c.requests[r].first_key : 0;
    for (std::int64_t p = first_key; p < layout.seq_lens[r]; ++p) {
      const std::int64_t at = layout.slot(r, p, c.config.block_size) * width;
      for (std::int64_t d = 0; d < width; ++d) {
        const bool inf =
            (c.last_token_overflows && p + 1 == layout.seq_lens[r]) ||
            (c.infinity_has_no_weight && p + 2 == layout.seq_lens[r] && d == kInfiniteElement);
        truth.key_cache[index(at + d)] = cache.set(
            at + d, inf ? std::numeric_limits<double>::infinity() : normal(random), c.cache_scale);
      }
    }
  }
  truth.value_cache = truth.key_cache;
  return cache;
}

Elements make_query(const Case& c, const Layout& layout, oracle::AttentionCase& truth) {
  const std::int64_t row = std::int64_t{c.config.num_heads} * truth.head_size;
  const std::int64_t stride = row + c.query_padding;
  Elements query(c.config.dtype, layout.num_tokens() * stride);
  std::mt19937 random(12);
  std::normal_distribution<double> normal;
  for (std::int64_t t = 0; t < layout.num_tokens(); ++t) {
    for (std::int64_t i = 0; i < row; ++i) {
      const bool below_0 = c.infinity_has_no_weight && i % truth.head_size == kInfiniteElement;
      const double value = normal(random);
      truth.query.push_back(query.set(t * stride + i, below_0 ? -0.5 - std::abs(value) : value));
    }
  }
  return query;
}

/// Compares with the oracle, whose rows are cut to their latent part. Rows with a logit of +inf or
/// NaN have no right answer; in the others a NaN of the oracle must be one.
void expect_truth(const Case& c, const oracle::AttentionCase& truth, const Outcome& outcome) {
  oracle::AttentionResult want = oracle::attention(truth, step_test::element(c.config.dtype));
  if (outcome.rounds_probabilities) want.add_weight_rounding();
  const std::size_t width = index(truth.head_size), rank = index(c.config.kv_lora_rank);
  std::vector<double> got = outcome.out, got_lse = outcome.lse, want_lse = want.lse;
  std::vector<double> want_out(got.size(), 0.0), bound(got.size(), 0.0);
  ASSERT_EQ(want_lse.size() * rank, got.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t row = i / rank, from = row * width + i % rank;
    const bool answered = want.lse[row] < std::numeric_limits<double>::infinity();
    if (answered && std::isfinite(want.out[from])) {
      want_out[i] = want.out[from];
      bound[i] = want.bound[from];
      continue;
    }
    ASSERT_TRUE(!answered || std::isnan(got[i])) << describe(c) << " out " << i << " is " << got[i];
    got[i] = 0.0;
    if (!answered) got_lse[row] = want_lse[row] = 0.0;
  }
  // An infinite key has no error bound.
  const auto* bounds = c.infinity_has_no_weight ? nullptr : &bound;
  step_test::expect_close(got, want_out, bounds, describe(c) + " out");
  step_test::expect_close(got_lse, want_lse, nullptr, describe(c) + " lse");
}

const clattn::AttentionMetadata& build_step(const clattn::Context& context,
                                            const clattn::Queue& queue,
                                            clattn::AttentionMetadataBuilder& builder,
                                            const Case& c, const Layout& layout,
                                            const Lists& lists) {
  const clattn::BuildOptions options{.fast_build = c.fast_build};
  if (c.bounds_above < 0) return builder.build(queue, lists.batch(layout), nullptr, options);
  const attention_test::BoundedBatch bounded(layout.batch(), c.config.block_size, c.bounds_above);
  const auto& metadata = builder.build(queue, bounded.batch, nullptr, options);
  attention_test::give_lengths(context, queue, metadata, layout.seq_lens);
  return metadata;
}

}  // namespace

std::string describe(const Case& c) {
  return fmt::format("{} heads x ({} + {}) page {} {}/{} family {} splits {}", c.config.num_heads,
                     c.config.kv_lora_rank, c.config.rope_dim, c.config.block_size,
                     to_string(c.config.dtype), to_string(c.config.cache_dtype()),
                     to_string(c.config.kernel_family), c.num_splits);
}

Outcome run(const std::shared_ptr<clattn::Context>& context, const Case& c) {
  const Layout layout(c.requests, c.config.block_size);
  oracle::AttentionCase truth = truth_of(c, layout);
  const Lists lists(c, truth);
  const clattn::Queue queue = context->create_queue();
  const Elements rows = make_cache(c, layout, truth);
  const Elements query = make_query(c, layout, truth);
  clattn::MLACache cache{.buffer = rows.upload(*context, queue),
                         .dtype = c.config.cache_dtype(),
                         .num_blocks = layout.num_blocks,
                         .block_size = c.config.block_size,
                         .kv_lora_rank = c.config.kv_lora_rank,
                         .rope_dim = c.config.rope_dim,
                         .scale = {}};
  if (c.cache_scale != 1.0) {
    Elements scale(DType::kF32, 1);
    scale.set(0, c.cache_scale);
    cache.scale = scale.upload(*context, queue);
  }
  const clattn::Buffer q = query.upload(*context, queue);
  const std::int64_t num_rows = layout.num_tokens() * c.config.num_heads;
  FencedOutput out(*context, queue, c.config.dtype, num_rows * c.config.kv_lora_rank,
                   FencedOutput::kGuard);
  FencedOutput lse(*context, queue, DType::kF32, num_rows, 0);

  const auto impl = clattn::make_mla_impl(*context, c.config);
  clattn::BuilderOptions options = layout.options(c.num_splits);
  options.graph_batch_size = c.graph_batch_size;
  options.decode_threshold = 4;
  options.split_policy = c.split_policy;
  options.device_seq_lens = c.bounds_above >= 0;
  const auto builder = clattn::make_mla_builder(context, c.config, options);
  const auto& metadata = build_step(*context, queue, *builder, c, layout, lists);
  const std::int64_t stride = std::int64_t{c.config.num_heads} * truth.head_size + c.query_padding;
  std::vector<clattn::LaunchRecord> launches;
  impl->forward(queue,
                {.query = {q.handle(), 0, stride},
                 .output = {out.buffer.handle(), FencedOutput::kGuard},
                 .lse = lse.buffer.handle()},
                cache, metadata, nullptr, &launches);
  const Outcome outcome{step_test::Launches(launches), out.read(queue), lse.read(queue),
                        step_test::rounds_probabilities(impl->kernels()),
                        metadata.step()->planned.rebalanced};

  expect_truth(c, truth, outcome);
  return outcome;
}

Case small_case(DType dtype) {
  Case c;
  c.config.num_heads = 16;
  c.config.kv_lora_rank = kSmallRow.rank;
  c.config.rope_dim = kSmallRow.rope;
  c.config.block_size = 16;
  c.config.dtype = dtype;
  c.requests = {{1, 40}, {0, 0}, {1, 0}, {4, 30}, {16, 9}, {0, 20}, {1, 200}};
  return c;
}

}  // namespace mla_test
