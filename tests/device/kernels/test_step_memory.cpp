// What steps take of host and device: nothing once the first is built, and as much workspace as
// was told before.

#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <clattn/registry.hpp>
#include <random>
#include <vector>

#include "device/attention_case.hpp"
#include "device/costs_of_all.hpp"
#include "device/counting_buffers.hpp"
#include "kernels/step/paged_step.hpp"
#include "support/counting_new.hpp"

namespace test_step_memory {

using attention_test::all_contexts;
using attention_test::small_config;
using clattn::CommonAttentionMetadata;

constexpr std::int32_t kNumBlocks = 64;

/// One latent row a token, of 512 numbers and 64 for its position.
clattn::AttentionConfig latent_config() {
  clattn::AttentionConfig config = small_config();
  config.use_mla = true;
  config.num_kv_heads = 1;
  config.head_size = 576;
  return config;
}

struct Request {
  std::int32_t query_len = 0;
  std::int32_t seq_len = 0;
};

/// Requests over the same few blocks, decodes first.
struct Batch {
  std::vector<std::int32_t> starts = {0}, lens, table;
  CommonAttentionMetadata view;

  explicit Batch(std::vector<Request> requests) {
    std::stable_sort(requests.begin(), requests.end(), [](const Request& a, const Request& b) {
      return (a.query_len > 1) < (b.query_len > 1);
    });
    std::int32_t longest = 0;
    for (const Request& request : requests) {
      starts.push_back(starts.back() + request.query_len);
      lens.push_back(request.seq_len);
      longest = std::max(longest, request.seq_len);
    }
    const auto pages = static_cast<std::size_t>((longest + 15) / 16);
    table.resize(requests.size() * pages);
    for (std::size_t i = 0; i < table.size(); ++i) {
      table[i] = static_cast<std::int32_t>(i * 7 % kNumBlocks);
    }
    view = CommonAttentionMetadata::of(starts, lens, table);
  }
};

std::vector<Request> with(std::vector<Request> requests, std::size_t more, Request request) {
  requests.insert(requests.end(), more, request);
  return requests;
}

// A1.1: a builder sizes its memory by its limits, so steps that grow and mix take nothing new.
TEST(StepMemory, ABuilderWarmedByTheSmallestBatchNeverGrows) {
  std::vector<Batch> growing;
  for (const std::size_t count : {8U, 64U, 201U, 256U}) {
    growing.emplace_back(std::vector<Request>(count, {1, 700}));
  }
  growing.emplace_back(with(std::vector<Request>(16, {1, 1000}), 2, {100, 600}));
  growing.emplace_back(with(std::vector<Request>(200, {1, 500}), 4, {1900, 2000}));
  growing.emplace_back(std::vector<Request>{{1, 30000}});
  growing.emplace_back(std::vector<Request>{{8192, 131072}});
  const Batch smallest({{1, 1}});
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    int num_backends = 0;
    for (const auto& backend : clattn::list_attn_backends()) {
      const auto config = backend->is_mla() ? latent_config() : small_config();
      if (!backend->validate_configuration(config, &context->capabilities()).empty()) continue;
      SCOPED_TRACE(std::string(backend->name()));
      ++num_backends;
      const auto builder = backend->make_builder(context, config);
      for (int warm = 0; warm < 4; ++warm) {
        builder->build(queue, smallest.view);
        queue.finish();
      }
      for (const Batch& batch : growing) {
        const std::size_t buffers = test::num_buffers();
        EXPECT_EQ(test::allocations_of([&] { builder->build(queue, batch.view); }), 0U)
            << batch.lens.size() << " requests";
        EXPECT_EQ(test::num_buffers() - buffers, 0U) << batch.lens.size() << " requests";
        queue.finish();  // steps that wait in a queue hold memory that later ones do without
      }
    }
    EXPECT_EQ(num_backends, 3);  // FLASHINFER, XFORMERS, CLATTN_MLA
  }
}

TEST(StepMemory, TheCounterCounts) {
  const auto& context = all_contexts().at(0);  // the first one's self-tests take buffers
  const std::size_t before = test::num_buffers();
  const clattn::Buffer buffer = context->allocate(64);
  EXPECT_EQ(test::num_buffers() - before, 1U);
}

/// Partial rows that the items of a built step write, found from the items alone.
std::int64_t rows_used(const clattn::detail::PagedStepView& step) {
  std::int64_t rows = 0;
  for (const auto& items : step.plan.items) {
    for (const ClaWorkItem& item : items) {
      if (item.partial_row < 0) continue;
      rows = std::max<std::int64_t>(rows, std::int64_t{item.partial_row} + item.q_count);
    }
  }
  return rows;
}

std::vector<Request> random_requests(std::mt19937& random, std::int32_t most_tokens) {
  std::vector<Request> requests;
  std::int32_t tokens = 0;
  for (auto count = random() % 24; count > 0; --count) {
    const std::int32_t longest[] = {1, 1, 1, 5, 17, 150};
    const std::int32_t histories[] = {0, 20, 300, 3000};
    Request request;
    request.query_len =
        static_cast<std::int32_t>(random() % 8 == 0 ? 0 : 1) *
        static_cast<std::int32_t>(1 + random() % static_cast<unsigned>(longest[random() % 6]));
    request.seq_len =
        request.query_len +
        static_cast<std::int32_t>(random() % static_cast<unsigned>(1 + histories[random() % 4]));
    tokens += request.query_len;
    if (tokens > most_tokens) break;
    requests.push_back(request);
  }
  return requests;
}

// A4: workspace_bytes() is what a build uses, whatever the batch, and the memory taken at the first
// step holds it.
TEST(StepMemory, WorkspaceQueriesAreWhatStepsUse) {
  struct Options {
    std::int32_t num_splits;
    clattn::SplitPolicy policy;
    std::int32_t decode_threshold;
  };
  const Options table[] = {{0, clattn::SplitPolicy::kBalanced, 1},
                           {0, clattn::SplitPolicy::kDeterministic, 1},
                           {7, clattn::SplitPolicy::kBalanced, 4}};
  constexpr int kRuns = 3400;  // 10 200 batches
  for (const auto& context : all_contexts()) {
    const test::CostsOfAll costs(*context, test::kCutsCostNothing);
    const clattn::Queue queue = context->create_queue();
    const auto config = small_config();
    const auto& backend = *clattn::get_attn_backend(config, &context->capabilities());
    for (const Options& options : table) {
      clattn::BuilderOptions with;
      with.limits = {.max_num_reqs = 24, .max_num_batched_tokens = 400, .max_model_len = 3200};
      with.num_splits = options.num_splits;
      with.split_policy = options.policy;
      with.decode_threshold = options.decode_threshold;
      with.workspace = std::make_shared<clattn::AttentionWorkspace>();
      const auto builder = backend.make_builder(context, config, with);
      builder->build(queue, Batch({{1, 1}}).view);
      const std::size_t buffers = test::num_buffers();
      const std::size_t row_bytes = 4U * (64 + 1) * sizeof(float);  // heads, dims and lse
      std::mt19937 random(20251121);
      int num_split = 0;
      for (int run = 0; run < kRuns; ++run) {
        Batch batch(random_requests(random, 400));
        const std::size_t told = builder->workspace_bytes(batch.view);
        const auto rows =
            static_cast<std::size_t>(rows_used(*builder->build(queue, batch.view).step()));
        queue.finish();
        ASSERT_EQ(rows * row_bytes, told) << "run " << run;
        const clattn::detail::WorkspaceBytes room = clattn::detail::room_of(*with.workspace);
        ASSERT_LE(rows * 4 * 64 * sizeof(float), room.partial_out);
        ASSERT_LE(rows * 4 * sizeof(float), room.partial_lse2);
        if (rows > 0) ++num_split;
      }
      EXPECT_GT(num_split, kRuns / 4);
      EXPECT_EQ(test::num_buffers(), buffers);
      queue.finish();
    }
  }
}

}  // namespace test_step_memory
