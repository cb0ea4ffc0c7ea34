// Kernels of CPUs take their work from a queue (kernels_cl/attention/cpu/queue.clh): every task
// once, whatever the number of groups, and a counter that each launch leaves as it found it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <clattn/clattn.hpp>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device/attention_case.hpp"
#include "kernels/step/paged_step.hpp"

namespace test_work_queue {

using attention_test::all_contexts;
using attention_test::CaseSpec;
using clattn::CommonAttentionMetadata;
using clattn::KernelFamily;

constexpr std::int32_t kPage = 16, kColumns = 24, kBlocks = 512;

clattn::AttentionConfig queue_config() {
  clattn::AttentionConfig config = attention_test::small_config();
  config.dtype = clattn::DType::kF32;
  return config;
}

std::vector<std::shared_ptr<clattn::Context>> cpus() {
  std::vector<std::shared_ptr<clattn::Context>> found;
  for (const auto& context : all_contexts())
    if (context->capabilities().kind == clattn::DeviceKind::kCpu) found.push_back(context);
  return found;
}

/// So many requests of very different lengths over shared blocks.
struct Batch {
  std::vector<std::int32_t> starts{0}, lens, table;
  CommonAttentionMetadata view;

  Batch(std::int32_t num_reqs, unsigned seed, std::int32_t most_tokens = 1) {
    std::mt19937 random(seed);
    for (std::int32_t r = 0; r < num_reqs; ++r) {
      const auto tokens =
          static_cast<std::int32_t>(1 + random() % static_cast<unsigned>(most_tokens));
      starts.push_back(starts.back() + tokens);
      const unsigned longest = r % 5 == 0 ? kPage * kColumns : 40;
      lens.push_back(std::max(tokens, static_cast<std::int32_t>(1 + random() % longest)));
      for (std::int32_t p = 0; p < kColumns; ++p) {
        table.push_back((r * kColumns + p * 5 + 3) % kBlocks);
      }
    }
    view = CommonAttentionMetadata::of(starts, lens, table);
  }
};

/// A layer with its cache, queries and an output on a queue of its own.
struct Layer {
  std::shared_ptr<clattn::Context> context;
  clattn::Queue queue;
  const clattn::AttentionBackend* backend;
  std::shared_ptr<const clattn::AttentionImpl> impl;
  clattn::KVCache cache;
  clattn::Buffer q, out;

  Layer(const std::shared_ptr<clattn::Context>& on, std::int32_t tokens)
      : context(on),
        queue(on->create_queue()),
        backend(clattn::get_attn_backend(queue_config(), &on->capabilities()).get()),
        impl(backend->make_impl(on, queue_config())),
        cache(clattn::make_kv_cache(*on, queue, *backend, queue_config(), kBlocks)),
        q(on->allocate(static_cast<std::size_t>(tokens) * 4 * 64 * sizeof(float))),
        out(on->allocate(q.size_bytes())) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (const clattn::Buffer* buffer : {&cache.buffer, &q}) {
      std::vector<float> values(buffer->size_bytes() / sizeof(float));
      for (float& value : values) value = normal(random);
      queue.write(*buffer, std::as_bytes(std::span(values)));
    }
  }
  clattn::BuilderOptions options() const {
    clattn::BuilderOptions options;
    options.limits.num_blocks = kBlocks;
    options.workspace = std::make_shared<clattn::AttentionWorkspace>();
    return options;
  }
  void launch(const clattn::AttentionMetadata& step) const {
    impl->forward(queue, {.query = {q.handle()}, .output = {out.handle()}}, cache, step);
  }
  void forget() const { queue.fill(out, 0x12345678, 0, out.size_bytes()); }
  std::vector<std::byte> result() const {
    std::vector<std::byte> bytes(out.size_bytes());
    queue.read(out, bytes);
    return bytes;
  }
  /// Whether the workspace's counters are as every launch must leave them.
  bool all_zero(const clattn::AttentionWorkspace& workspace) const {
    std::vector<std::byte> counters(workspace.counter_bytes);
    queue.read(workspace.buffer, counters);
    return std::all_of(counters.begin(), counters.end(),
                       [](std::byte b) { return b == std::byte{0}; });
  }
};

/// What one launch of a batch gives where nothing was launched before.
std::vector<std::byte> fresh_result(const Layer& layer, const CommonAttentionMetadata& batch) {
  const auto builder = layer.backend->make_builder(layer.context, queue_config(), layer.options());
  layer.forget();
  layer.launch(builder->build(layer.queue, batch));
  return layer.result();
}

// The oracle's results where there are far more tasks than groups, in decodes, prefills and both.
TEST(WorkQueue, RaggedBatchesAreServedByTwoGroupsAComputeUnit) {
  for (const auto& context : cpus()) {
    const std::int64_t units = context->capabilities().compute_units;
    for (const std::int32_t prefills : {0, 3}) {
      CaseSpec spec;
      spec.config = queue_config();
      spec.config.kernel_family = KernelFamily::kCpu;
      spec.num_splits = 1;  // no merge: a launch a kernel
      for (std::int32_t i = 0; i < 70; ++i) spec.requests.push_back({1, i % 7 * i % 211});
      for (std::int32_t i = 0; i < prefills; ++i) spec.requests.push_back({70 * i + 5, 40 * i});
      const auto result = attention_test::run_case(context, spec);
      EXPECT_EQ(result.fault, "");
      EXPECT_LE(result.worst_share, 1.0) << result.worst_place;
      ASSERT_EQ(result.kernels.size(), prefills > 0 ? 2U : 1U);
      EXPECT_GE(result.tasks[0], 70);
      for (std::size_t i = 0; i < result.tasks.size(); ++i)
        EXPECT_EQ(result.work_groups[i], std::min(result.tasks[i], 2 * units)) << result.kernels[i];
    }
  }
}

// One more than the groups, as many, fewer, none: each launch finds the counter at 0.
TEST(WorkQueue, EveryLaunchLeavesTheCountersAtZero) {
  for (const auto& context : cpus()) {
    const Layer layer(context, 90 * 5);
    clattn::BuilderOptions options = layer.options();
    const auto builder = layer.backend->make_builder(context, queue_config(), options);
    const std::int32_t units = context->capabilities().compute_units;
    for (const std::int32_t num_reqs : {2 * units, 2 * units + 1, 90, 1, 0, 33}) {
      for (const std::int32_t tokens : {1, 5}) {
        const Batch batch(num_reqs, static_cast<unsigned>(num_reqs), tokens);
        const auto want = fresh_result(layer, batch.view);
        const auto& step = builder->build(layer.queue, batch.view);
        for (int layers = 0; layers < 20; ++layers) {
          layer.forget();
          layer.launch(step);
        }
        ASSERT_EQ(layer.result(), want) << num_reqs << " requests of up to " << tokens;
        ASSERT_TRUE(layer.all_zero(*options.workspace)) << num_reqs;
      }
    }
  }
}

// Recorded for 40 requests or 8, replayed with fewer than that, and with none.
TEST(WorkQueue, ReplaysServeWhatTheStepHas) {
  for (const auto& context : cpus()) {
    for (const auto mode : {clattn::ReplayMode::kLaunchList, clattn::ReplayMode::kAuto}) {
      const Layer layer(context, 40);
      clattn::BuilderOptions options = layer.options();
      clattn::AttentionState state(context, *layer.backend, queue_config(), options);
      std::array<clattn::Graph, 2> graphs;  // of 40 requests, then of 8
      {
        const auto capturing = state.graph_capture(40);
        for (const std::int32_t size : {40, 8}) {
          const auto& step = state.graph_capture_get_metadata_for_batch(layer.queue, size);
          clattn::GraphCapture capture(layer.queue, mode);
          for (int layers = 0; layers < 3; ++layers) layer.launch(step);
          graphs.at(size == 40 ? 0 : 1) = capture.end();
        }
      }
      for (const std::int32_t num_reqs : {40, 1, 8, 0, 9, 40, 3}) {
        const Batch batch(num_reqs, static_cast<unsigned>(100 + num_reqs));
        const auto want = fresh_result(layer, batch.view);
        const clattn::ForwardStep planned = state.begin_forward(layer.queue, batch.view);
        ASSERT_EQ(planned.graph_batch_size, num_reqs <= 8 ? 8 : 40);
        layer.forget();
        for (int replays = 0; replays < 3; ++replays)
          graphs.at(num_reqs <= 8 ? 1 : 0).replay(layer.queue);
        ASSERT_EQ(layer.result(), want) << num_reqs << " requests";
        ASSERT_TRUE(layer.all_zero(*options.workspace)) << num_reqs << " requests";
      }
    }
  }
}

// Each builder has a workspace, and so a counter, of its own.
TEST(WorkQueue, TwoQueuesRunAtOnce) {
  for (const auto& context : cpus()) {
    const Batch batches[] = {Batch(60, 1), Batch(45, 2)};
    const Layer layers[] = {Layer(context, 60), Layer(context, 60)};
    std::array<std::vector<std::byte>, 2> want;
    for (std::size_t i = 0; i < 2; ++i) want.at(i) = fresh_result(layers[i], batches[i].view);
    std::array<int, 2> wrong{};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        const auto builder =
            layers[i].backend->make_builder(context, queue_config(), layers[i].options());
        for (int step = 0; step < 30; ++step) {
          const auto& metadata = builder->build(layers[i].queue, batches[i].view);
          layers[i].forget();
          for (int each = 0; each < 4; ++each) layers[i].launch(metadata);
          if (layers[i].result() != want.at(i)) ++wrong.at(i);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, (std::array<int, 2>{}));
  }
}

}  // namespace test_work_queue
