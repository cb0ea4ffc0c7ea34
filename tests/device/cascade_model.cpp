#include <clattn/cascade.hpp>

#include "device/cascade_model.hpp"

#include <clattn/kv_cache_spec.hpp>
#include <cmath>

#include "device/attention_host.hpp"

namespace cascade_test {

namespace {

using clattn::AttentionConfig;
using clattn::DType;

/// Random keys and values where sequences keep theirs, poison elsewhere.
Elements fill_cache(const Cascade& c, const Model& model, const clattn::KVCache& cache,
                    oracle::AttentionCase& truth) {
  Elements bits(cache.dtype, static_cast<std::int64_t>(cache.buffer.size_bytes() /
                                                       clattn::element_size_bytes(cache.dtype)));
  const std::int64_t row = std::int64_t{cache.num_kv_heads} * cache.head_size;
  truth.key_cache.assign(index(model.num_blocks * cache.block_size * row),
                         std::numeric_limits<double>::quiet_NaN());
  truth.value_cache = truth.key_cache;
  std::mt19937 random(21);
  std::normal_distribution<double> normal;
  for (const auto& keys : model.slots) {
    for (const std::int64_t slot : keys) {
      for (std::int64_t i = 0; i < row; ++i) {
        const std::int64_t token = slot % cache.block_size, dim = i % cache.head_size;
        const std::int64_t at = slot / cache.block_size * cache.block_stride +
                                i / cache.head_size * cache.head_stride +
                                token * cache.token_stride + dim;
        truth.key_cache[index(slot * row + i)] =
            bits.set(cache.k_offset + at, normal(random), c.cache_scale);
        truth.value_cache[index(slot * row + i)] =
            bits.set(cache.v_offset + at, normal(random), c.cache_scale);
      }
    }
  }
  return bits;
}

/// What the oracle sees of levels `first` to `last`: a request per token over pages of one slot.
oracle::AttentionCase view(const Cascade& c, const Model& model, const AttentionConfig& layer,
                           const oracle::AttentionCase& tensors, std::size_t first,
                           std::size_t last) {
  oracle::AttentionCase truth = tensors;
  truth.causal = false;
  truth.block_size = 1;
  truth.soft_cap = layer.logits_soft_cap;
  truth.scale = layer.scale ? double{*layer.scale} : 1.0 / std::sqrt(double(layer.head_size));
  if (last + 1 == model.levels.size()) truth.sinks.assign(layer.sinks.begin(), layer.sinks.end());
  std::vector<std::vector<std::int32_t>> rows;
  truth.query_start_loc = {0};
  for (std::int32_t token = 0; token < model.num_tokens; ++token) {
    std::vector<std::int32_t>& row = rows.emplace_back();
    for (std::size_t level = first; level <= last; ++level) {
      for (const std::int64_t slot : model.visible(c, level, token)) {
        row.push_back(static_cast<std::int32_t>(slot));
      }
    }
    truth.max_blocks = std::max(truth.max_blocks, static_cast<std::int64_t>(row.size()));
    truth.seq_lens.push_back(static_cast<std::int32_t>(row.size()));
    truth.query_start_loc.push_back(token + 1);
  }
  for (auto& row : rows) {
    row.resize(index(truth.max_blocks), -1);
    truth.block_table.insert(truth.block_table.end(), row.begin(), row.end());
  }
  return truth;
}

/// The oracle's answer over all levels at once. Its bound is of what a cascade rounds: each level's
/// result and each merge's, weighted with their share of the denominator.
oracle::AttentionResult expected(const Cascade& c, const Model& model, const AttentionConfig& layer,
                                 const oracle::AttentionCase& tensors, bool rounds_probabilities) {
  const std::size_t last = model.levels.size() - 1;
  const oracle::Element type = step_test::element(layer.dtype);
  oracle::AttentionResult want = oracle::attention(view(c, model, layer, tensors, 0, last), type);
  const std::size_t dims = index(layer.head_size);
  std::vector<double> bound(want.out.size(), 0.0);
  const auto add = [&](const oracle::AttentionResult& part, bool merge) {
    for (std::size_t i = 0; i < bound.size(); ++i) {
      const double lse = part.lse[i / dims];
      if (std::isinf(lse)) continue;
      const double share = std::exp(lse - want.lse[i / dims]);
      bound[i] += share * (merge ? oracle::half_ulp(type, part.out[i]) : part.bound[i]);
      if (!merge && rounds_probabilities) bound[i] += share * part.weight_rounding[i];
    }
  };
  for (std::size_t level = 0; level <= last; ++level) {
    add(oracle::attention(view(c, model, layer, tensors, level, level), type), false);
    if (level > 0) add(oracle::attention(view(c, model, layer, tensors, 0, level), type), true);
  }
  want.bound = std::move(bound);
  return want;
}

/// The planned cascade, in whichever form the case asks for.
class Runner {
 public:
  Runner(const std::shared_ptr<clattn::Context>& context, const clattn::AttentionBackend& backend,
         const Cascade& c, const Model& model, const clattn::Queue& queue) {
    clattn::BuilderOptions options;
    options.limits = {.max_num_reqs = 64, .max_num_batched_tokens = 256, .max_model_len = 8192};
    options.limits.num_blocks = model.num_blocks;
    options.num_splits = c.num_splits;
    if (c.as_batch) {
      const SharedBatch shared(c, model);
      batch_ = std::make_unique<clattn::CascadeAttention>(context, backend, c.config, options);
      const auto& metadata = batch_->build(queue, shared.batch(), shared.prefix_len);
      check_slots(model, metadata);
    } else {
      levels_ = std::make_unique<clattn::MultiLevelCascadeAttentionWrapper>(
          context, backend, c.config, static_cast<std::int32_t>(c.levels.size()), options);
      levels_->plan(queue, model.spans(c.causal));
    }
  }
  void run(const clattn::Queue& queue, const clattn::CascadeImpl& impl,
           const clattn::AttentionTensors& tensors, const clattn::KVCache& cache,
           std::vector<clattn::LaunchRecord>* launches) const {
    clattn::Event done;
    if (batch_ != nullptr) {
      batch_->forward(queue, impl, tensors, cache, &done, launches);
    } else {
      levels_->run(queue, impl, tensors, cache, &done, launches);
    }
    if (done) done.wait();
  }

 private:
  /// The step's slots are those of the batch's newest tokens.
  static void check_slots(const Model& model, const clattn::AttentionMetadata& metadata) {
    const auto slots = metadata.slot_mapping();
    ASSERT_EQ(slots.size(), index(model.num_tokens));
    for (std::int32_t token = 0; token < model.num_tokens; ++token) {
      EXPECT_EQ(slots[index(token)], model.own_slot(1, token));
    }
  }

  std::unique_ptr<clattn::CascadeAttention> batch_;
  std::unique_ptr<clattn::MultiLevelCascadeAttentionWrapper> levels_;
};

std::string describe(const Cascade& c, const AttentionConfig& layer) {
  std::string text = fmt::format(
      "{} {} {}/{}x{} page {} {}/{} family {} cap {} sinks {} causal {} batch {} splits {}:",
      c.backend, to_string(c.layout), layer.num_heads, layer.num_kv_heads, layer.head_size,
      layer.block_size, to_string(layer.dtype), to_string(layer.cache_dtype()),
      to_string(layer.kernel_family), layer.logits_soft_cap, !layer.sinks.empty(), c.causal,
      c.as_batch, c.num_splits);
  for (const auto& level : c.levels) {
    text += " |";
    for (const Sequence& s : level) text += fmt::format(" {}:{}", s.query_len, s.keys);
  }
  return text;
}

}  // namespace

Outcome run(const std::shared_ptr<clattn::Context>& context, const Cascade& c) {
  const AttentionConfig& config = c.config;
  const Model model(c);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(config, &context->capabilities(), c.backend);
  const clattn::KVCacheSpec spec{.block_size = config.block_size,
                                 .num_kv_heads = config.num_kv_heads,
                                 .head_size = config.head_size,
                                 .dtype = config.cache_dtype()};
  clattn::KVCache cache = clattn::reshape_kv_cache(
      context->allocate(index(model.num_blocks) * spec.page_size_bytes()), spec, backend, c.layout);
  oracle::AttentionCase truth;
  truth.num_heads = config.num_heads;
  truth.num_kv_heads = config.num_kv_heads;
  truth.head_size = config.head_size;
  Elements bits = fill_cache(c, model, cache, truth);
  queue.write(cache.buffer, bits.bytes());
  if (c.cache_scale != 1.0) {
    Elements scales(DType::kF32, 2);
    for (const std::int64_t i : {0, 1}) scales.set(i, c.cache_scale);
    cache.scales = scales.upload(*context, queue);
  }
  const std::int64_t row = std::int64_t{config.num_heads} * config.head_size;
  const std::int64_t stride = row + c.query_padding;
  Elements query(config.dtype, model.num_tokens * stride);
  std::mt19937 random(22);
  std::normal_distribution<double> normal;
  for (std::int64_t i = 0; i < model.num_tokens * row; ++i) {
    truth.query.push_back(query.set(i / row * stride + i % row, normal(random)));
  }
  const clattn::Buffer q = query.upload(*context, queue);

  const Runner runner(context, backend, c, model, queue);
  Outcome outcome;
  const auto layers = c.layers.empty() ? std::vector{config} : c.layers;
  for (const AttentionConfig& layer : layers) {
    const clattn::CascadeImpl impl(context, backend, layer);
    const bool rounds =
        step_test::rounds_probabilities(backend.make_impl(context, layer)->kernels());
    const oracle::AttentionResult want = expected(c, model, layer, truth, rounds);
    using step_test::FencedOutput;
    for (const bool with_lse : {true, false}) {
      FencedOutput out(*context, queue, config.dtype, model.num_tokens * row, FencedOutput::kGuard);
      FencedOutput lse(*context, queue, DType::kF32,
                       std::int64_t{model.num_tokens} * config.num_heads, 0);
      std::vector<clattn::LaunchRecord> launches;
      runner.run(queue, impl,
                 {.query = {q.handle(), 0, stride},
                  .output = {out.buffer.handle(), FencedOutput::kGuard},
                  .lse = with_lse ? lse.buffer.handle() : nullptr},
                 cache, with_lse ? &launches : nullptr);
      const std::string what = describe(c, layer);
      step_test::expect_close(out.read(queue), want.out, &want.bound, what + " out");
      if (!with_lse) continue;
      step_test::expect_close(lse.read(queue), want.lse, nullptr, what + " lse");
      outcome = {};
      for (const auto& launch : launches) {
        EXPECT_GT(launch.work_group_size, 0) << launch.kernel;
        outcome.kernels.emplace_back(launch.kernel);
        outcome.tasks.push_back(launch.tasks);
      }
    }
  }
  return outcome;
}

}  // namespace cascade_test
