#include <gtest/gtest.h>

#include <CL/cl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <clattn/graph.hpp>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "capture/capture_pause.hpp"
#include "device/small_call.hpp"
#include "opencl/staging.hpp"

namespace test_held_queue {

using small_test::Batch;
using small_test::Call;

constexpr std::int32_t kSteps = 10;

/// A queue that waits for its caller. Should the caller wait for the queue, it is released after
/// some seconds, which is_held() tells.
class HeldQueue {
 public:
  HeldQueue(const clattn::Context& context, cl_command_queue queue) {
    cl_int status = CL_SUCCESS;
    gate_ = clCreateUserEvent(context.handle(), &status);
    EXPECT_EQ(status, CL_SUCCESS);
    EXPECT_EQ(clEnqueueBarrierWithWaitList(queue, 1, &gate_, nullptr), CL_SUCCESS);
    watchdog_ = std::thread([this] {
      for (int i = 0; i < 500 && !released_; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      released_ = true;
      clSetUserEventStatus(gate_, CL_COMPLETE);
    });
  }
  HeldQueue(const HeldQueue&) = delete;
  HeldQueue& operator=(const HeldQueue&) = delete;
  ~HeldQueue() {
    released_ = true;
    watchdog_.join();
    clReleaseEvent(gate_);
  }
  bool is_held() const { return !released_; }

 private:
  cl_event gate_ = nullptr;
  std::atomic<bool> released_ = false;
  std::thread watchdog_;
};

Batch step_of(std::int32_t i) {
  return {{0, 1, 2}, {5 + 2 * i, 30 - i}, {3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 11, 12, 13, 14, 15, 0}};
}

/// Keeps the output of a step, in the queue's order.
clattn::Buffer copy_of(const Call& call) {
  clattn::Buffer copy = call.context->allocate(call.out.size_bytes());
  EXPECT_EQ(clEnqueueCopyBuffer(call.queue, call.out.handle(), copy.handle(), 0, 0,
                                copy.size_bytes(), 0, nullptr, nullptr),
            CL_SUCCESS);
  return copy;
}

/// `run` launches a step. Steps give the same whether the queue is held meanwhile or not.
template <typename Run>
void expect_no_wait(const Call& call, const Run& run) {
  const clattn::detail::CapturePause paused;  // captures wait for the queue
  const auto all = [&](bool held) {
    std::vector<clattn::Buffer> copies;
    {
      std::unique_ptr<HeldQueue> hold;
      if (held) hold = std::make_unique<HeldQueue>(*call.context, call.queue);
      for (std::int32_t i = 0; i < kSteps; ++i) {
        const Batch batch = step_of(i);
        run(call.builder->build(call.queue, batch.metadata));
        copies.push_back(copy_of(call));
        if (!held) call.queue.finish();
      }
      EXPECT_TRUE(hold == nullptr || hold->is_held()) << "a call waited for the queue";
    }
    std::vector<std::vector<float>> outputs;
    for (const clattn::Buffer& copy : copies) outputs.push_back(call.download(copy));
    return outputs;
  };
  const auto want = all(false);
  EXPECT_NE(want.front(), want.back());
  EXPECT_EQ(all(true), want);
}

TEST(HeldQueue, BuildsAndForwardsDoNotWaitForIt) {
  for (const auto& context : small_test::all_contexts()) {
    const Call call(context);
    expect_no_wait(call, [&](const clattn::AttentionMetadata& step) { call.forward(step); });
  }
}

TEST(HeldQueue, TheFirstBuildDoesNotWaitForIt) {
  const Call call(small_test::all_contexts().at(0));
  const clattn::detail::CapturePause paused;
  const Batch batch = step_of(0);
  const HeldQueue hold(*call.context, call.queue);
  call.forward(call.builder->build(call.queue, batch.metadata));
  EXPECT_TRUE(hold.is_held());
}

TEST(HeldQueue, RecordedStepsDoNotWaitForIt) {
  for (const auto& context : small_test::all_contexts()) {
    clattn::BuilderOptions options = Call::builder_options();
    options.graph_batch_size = 2;
    const Call call(context, small_test::config(), options);
    const Batch batch = step_of(0);
    const clattn::AttentionMetadata& metadata = call.builder->build(call.queue, batch.metadata);
    clattn::GraphCapture capture(call.queue);
    call.forward(metadata);
    const clattn::Graph graph = capture.end();
    expect_no_wait(call, [&](const clattn::AttentionMetadata&) { graph.replay(call.queue); });
  }
}

TEST(HeldQueue, StagingThatGrowsDoesNotWaitForIt) {
  for (const auto& context : small_test::all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    clattn::detail::StagedUpload staging(context->runtime());
    std::vector<clattn::Buffer> copies;
    {
      const HeldQueue hold(*context, queue);
      for (const std::size_t size : {100U, 300U, 200000U, 200U, 900000U}) {
        std::ranges::fill(staging.host(queue, size), static_cast<std::byte>(copies.size() + 1));
        staging.upload(queue, size);
        copies.push_back(context->allocate(size));
        EXPECT_EQ(clEnqueueCopyBuffer(queue, staging.buffer().handle(), copies.back().handle(), 0,
                                      0, size, 0, nullptr, nullptr),
                  CL_SUCCESS);
      }
      EXPECT_TRUE(hold.is_held());
    }
    for (std::size_t i = 0; i < copies.size(); ++i) {
      std::vector<std::byte> got(copies[i].size_bytes());
      queue.read(copies[i], got);
      EXPECT_EQ(got, std::vector<std::byte>(got.size(), static_cast<std::byte>(i + 1)));
    }
  }
}

}  // namespace test_held_queue
