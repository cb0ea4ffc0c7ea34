// docs/howto.md's engine with a scheduler of its own and the recipes that continue it, as the page
// has them: each is interrupted in its middle, and nothing may be lost.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "device/attention_case.hpp"
#include "device/cache_ops_support.hpp"
#include "howto/fork.hpp"
#include "howto/prefix.hpp"
#include "howto/scheduler.hpp"
#include "howto/speculation.hpp"
#include "support/error_text.hpp"

namespace test_howto {

// A loop that preempts a request when blocks are short and then makes the same call again.
TEST(Howto, AStepThatIsTriedAgainCountsItsTokensOnce) {
  const auto& context = attention_test::all_contexts().front();
  const Queue queue = context->create_queue();
  Model model(context, queue, 2, 3);
  constexpr std::size_t kRow = 8 * 64;
  const Buffer in = context->allocate(48 * kRow * 2), out = context->allocate(48 * kRow * 2);
  queue.write(in, std::vector<std::byte>(48 * kRow * 2));
  const AttentionTensors tensors{.query = {in.handle()},
                                 .key = {in.handle()},
                                 .value = {in.handle()},
                                 .output = {out.handle()}};
  std::vector<Request> requests(2);
  model.step(queue, requests, std::vector{16, 32}, tensors);
  EXPECT_EQ(requests[0].seq_len, 16);
  EXPECT_EQ(requests[1].seq_len, 32);
  const auto decode = [&](std::span<Request> running) {
    model.step(queue, running, std::vector<std::int32_t>(running.size(), 1), tensors);
  };
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_NE(test::error_text([&] { decode(requests); }, ErrorCode::kOutOfBlocks), "no error");
    EXPECT_EQ(requests[0].seq_len, 16);
    EXPECT_EQ(requests[1].seq_len, 32);
  }
  model.pool.release(requests[1].blocks);
  requests.pop_back();
  decode(requests);
  EXPECT_EQ(requests[0].seq_len, 17);
  EXPECT_EQ(requests[0].blocks.size(), 2U);
  // A batch that is refused counts nothing, either.
  EXPECT_NE(test::error_text([&] { model.step(queue, requests, std::vector{-1}, tensors); }),
            "no error");
  EXPECT_EQ(requests[0].seq_len, 17);
  queue.finish();
}

// Rows of a step of Model's layers. Queries and keys are ones, so that a row's output is the mean
// of the values that it sees: what a lost block, or one of another request, would change.
class Rows {
 public:
  Rows(const Context& context, const Queue& queue, const std::vector<double>& values)
      : queue_(queue) {
    const std::size_t rows = values.size();
    std::vector<double> elements;
    for (const double value : values) elements.insert(elements.end(), kValueRow, value);
    value_ = upload(context, elements);
    key_ = upload(context, std::vector<double>(rows * kValueRow, 1));
    query_ = upload(context, std::vector<double>(rows * kQueryRow, 1));
    output_ = upload(context, std::vector<double>(rows * kQueryRow, -1));
  }
  AttentionTensors tensors() const {
    return {.query = {query_.handle()},
            .key = {key_.handle()},
            .value = {value_.handle()},
            .output = {output_.handle()}};
  }
  // All elements of a row have to be equal but for rounding; NaN if they are not.
  double output(std::size_t row) const {
    const std::vector<double> all =
        cache_ops_test::decode(DType::kF16, cache_ops_test::download<std::byte>(queue_, output_));
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(row * kQueryRow);
    const double mean = std::accumulate(begin, begin + kQueryRow, 0.0) / kQueryRow;
    const bool equal = std::all_of(begin, begin + kQueryRow,
                                   [&](double x) { return std::abs(x - mean) <= kRounding; });
    return equal ? mean : std::numeric_limits<double>::quiet_NaN();
  }

  static constexpr double kRounding = 0.02;

 private:
  static constexpr int kQueryRow = 8 * 64, kValueRow = 2 * 64;

  Buffer upload(const Context& context, const std::vector<double>& elements) const {
    return cache_ops_test::upload(context, queue_, cache_ops_test::encode(DType::kF16, elements));
  }

  const Queue& queue_;
  Buffer query_, key_, value_, output_;
};

// What an application's model may do between two layers.
void run_layers(const Model& model, const Queue& queue, const AttentionMetadata& metadata,
                const Rows& rows, bool fails) {
  for (const auto& layer : model.layers) {
    if (fails && layer != model.layers.front()) throw std::runtime_error("a projection");
    layer->forward(queue, rows.tensors(), &metadata);
  }
}

TEST(Howto, APromptThatFailsIsNeitherPublishedNorLost) {
  const auto& context = attention_test::all_contexts().front();
  const Queue queue = context->create_queue();
  Model model(context, queue, 2, 4);
  BlockPool& pool = model.pool;
  // Computes what is not in the cache yet; its values are all `value`. The last row's output.
  const auto compute = [&](CachedPrompt& prompt, double value, bool fails) {
    prompt.reserve();
    const std::size_t count = prompt.tokens.size() - prompt.num_computed;
    const Rows rows(*context, queue, std::vector<double>(count, value));
    const std::vector starts{0, static_cast<std::int32_t>(count)};
    const std::vector seq_lens{static_cast<std::int32_t>(prompt.tokens.size())};
    run_layers(
        model, queue,
        model.builder->build(queue, CommonAttentionMetadata::of(starts, seq_lens, prompt.blocks)),
        rows, fails);
    prompt.finish_step();
    return rows.output(count - 1);
  };
  std::vector<std::int32_t> tokens(40, 7);
  auto first = std::make_unique<CachedPrompt>(pool, tokens);
  EXPECT_EQ(first->num_computed, 0U);
  EXPECT_THROW(compute(*first, 5, true), std::runtime_error);
  EXPECT_EQ(first->num_computed, 0U);
  EXPECT_TRUE(pool.find_prefix(tokens).empty());
  EXPECT_NEAR(compute(*first, 1, false), 1, Rows::kRounding);
  EXPECT_EQ(pool.num_used(), 3);

  tokens.resize(32);
  tokens.resize(52, 9);  // 32 tokens are the first one's, and 20 are not
  {
    CachedPrompt second(pool, tokens);
    EXPECT_EQ(second.num_computed, 32U);
    EXPECT_EQ(pool.reference_count(second.blocks[1]), 2);
    const std::vector<std::int32_t> shared = second.blocks;
    for (int attempt = 0; attempt < 2; ++attempt) {  // one block is free, and two are needed
      EXPECT_NE(test::error_text([&] { second.reserve(); }, ErrorCode::kOutOfBlocks), "no error");
      EXPECT_EQ(second.blocks, shared);
      EXPECT_EQ(pool.num_used(), 3);
    }
    first.reset();
    EXPECT_EQ(pool.num_used(), 2);
    EXPECT_THROW(compute(second, 5, true), std::runtime_error);
    EXPECT_EQ(second.num_computed, 32U);
    EXPECT_NEAR(compute(second, 2, false), (32 * 1 + 20 * 2) / 52.0, Rows::kRounding);
    EXPECT_EQ(CachedPrompt(pool, tokens, 1).num_computed, 0U);  // of another salt
  }
  EXPECT_EQ(pool.num_used(), 0);
  EXPECT_EQ(CachedPrompt(pool, tokens).num_computed, 48U);
  EXPECT_EQ(pool.num_used(), 0);
}

TEST(Howto, AForkThatCannotBeCopiedKeepsItsBlocks) {
  const auto& context = attention_test::all_contexts().front();
  const Queue queue = context->create_queue();
  Model model(context, queue, 2, 3);
  BlockPool& pool = model.pool;
  std::vector<KVCache> caches;
  for (const auto& layer : model.layers) caches.push_back(*layer->kv_cache());
  const auto step = [&](Request& request, std::int32_t count, double value) {
    const Rows rows(*context, queue, std::vector<double>(static_cast<std::size_t>(count), value));
    model.step(queue, {&request, 1}, std::vector{count}, rows.tensors());
    return rows.output(static_cast<std::size_t>(count) - 1);
  };
  Request first;
  EXPECT_NEAR(step(first, 20, 1), 1, Rows::kRounding);
  Request second{.seq_len = first.seq_len, .blocks = fork_blocks(pool, first.blocks)};
  EXPECT_EQ(pool.num_used(), 2);

  const auto make_second_writable = [&](std::span<const KVCache> of) {
    make_writable(*context, queue, of, pool, second.blocks, second.seq_len);
  };
  const auto is_unchanged = [&] {
    return second.blocks == first.blocks && pool.reference_count(first.blocks[0]) == 2 &&
           pool.reference_count(first.blocks[1]) == 2;
  };
  std::vector<KVCache> refused = caches;
  refused.back().dtype = DType::kF32;
  EXPECT_NE(test::error_text([&] { make_second_writable(refused); }), "no error");
  EXPECT_TRUE(is_unchanged());
  EXPECT_EQ(pool.num_used(), 2);
  const std::vector<std::int32_t> taken = pool.allocate(1);
  EXPECT_NE(test::error_text([&] { make_second_writable(caches); }, ErrorCode::kOutOfBlocks),
            "no error");
  EXPECT_TRUE(is_unchanged());
  pool.release(taken);

  make_second_writable(caches);
  EXPECT_EQ(second.blocks[0], first.blocks[0]);
  EXPECT_NE(second.blocks[1], first.blocks[1]);
  const std::vector<std::int32_t> own = second.blocks;
  make_second_writable(caches);  // it is the only holder now
  EXPECT_EQ(second.blocks, own);
  EXPECT_NEAR(step(second, 1, 22), (20 * 1 + 22) / 21.0, Rows::kRounding);
  EXPECT_NEAR(step(first, 1, 1), 1, Rows::kRounding);
  pool.release(second.blocks);
  EXPECT_EQ(pool.num_used(), 2);
  pool.release(first.blocks);
  EXPECT_EQ(pool.num_used(), 0);
}

TEST(Howto, AVerificationThatFailsCountsNoToken) {
  const auto& context = attention_test::all_contexts().front();
  const Queue queue = context->create_queue();
  Model model(context, queue, 2, 4);
  BlockPool& pool = model.pool;
  const Attention& layer = *model.layers.front();
  const auto builder =
      layer.get_attn_backend()->make_builder(context, layer.config(), verifying(3, 4));
  Request prompt;
  const Rows prompt_rows(*context, queue, std::vector<double>(30, 1));
  model.step(queue, {&prompt, 1}, std::vector{30}, prompt_rows.tensors());
  Speculation request{.tokens = std::vector<std::int32_t>(31, 7), .blocks = prompt.blocks};
  const std::vector<std::int32_t> before = request.tokens;
  const std::vector drafts{5, 6, 8};
  const auto attempt = [&](std::span<const std::int32_t> of, const Rows& rows, bool fails) {
    verify(queue, *builder, pool, request, of, [&](const AttentionMetadata& metadata) {
      run_layers(model, queue, metadata, rows, fails);
      std::vector<std::int32_t> sampled{5, 9, 9, 9};  // the first draft is right
      sampled.resize(of.size() + 1);
      return sampled;
    });
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Rows wrong(*context, queue, {nan, nan, nan, nan}), rows(*context, queue, {1, 1, nan, nan});

  const std::vector<std::int32_t> taken = pool.allocate(2);  // 34 tokens need a third block
  EXPECT_NE(test::error_text([&] { attempt(drafts, rows, false); }, ErrorCode::kOutOfBlocks),
            "no error");
  EXPECT_EQ(request.tokens, before);
  EXPECT_EQ(request.blocks, prompt.blocks);
  pool.release(taken);
  EXPECT_THROW(attempt(drafts, wrong, true), std::runtime_error);
  EXPECT_EQ(request.tokens, before);
  EXPECT_EQ(pool.num_used(), 3);

  attempt(drafts, rows, false);
  EXPECT_EQ(pool.num_used(), 3);
  std::vector<std::int32_t> confirmed = before;
  confirmed.insert(confirmed.end(), {5, 9});
  EXPECT_EQ(request.tokens, confirmed);
  EXPECT_NEAR(rows.output(0), 1, Rows::kRounding);
  EXPECT_NEAR(rows.output(1), 1, Rows::kRounding);

  // Behind the 33 tokens that this step sees stands a NaN of the last draft.
  const Rows next(*context, queue, {1});
  attempt({}, next, false);
  EXPECT_EQ(request.tokens.size(), 34U);
  EXPECT_NEAR(next.output(0), 1, Rows::kRounding);
  pool.release(request.blocks);
  EXPECT_EQ(pool.num_used(), 0);
}

}  // namespace test_howto
