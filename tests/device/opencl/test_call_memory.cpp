#define CL_USE_DEPRECATED_OPENCL_1_2_APIS  // clCreateCommandQueue: every platform has it
#include <clattn/cache_ops.hpp>

#include "opencl/call_memory.hpp"

#include <array>
#include <thread>

#include "capture/capture.hpp"
#include "device/cache_blocks.hpp"
#include "opencl/runtime.hpp"
#include "support/error_text.hpp"

namespace test_call_memory {

using cache_ops_test::all_contexts;
using clattn::detail::CallMemory;

std::vector<std::byte> filled(std::size_t size, std::uint8_t with) {
  return std::vector<std::byte>(size, std::byte{with});
}

void expect_holds(const clattn::Queue& queue, const CallMemory::Lease& lease,
                  const std::vector<std::byte>& want) {
  std::vector<std::byte> got(want.size());
  queue.read(lease.buffer(), got);
  EXPECT_TRUE(got == want);
}

TEST(CallMemory, IsUsedAgainOnceItsUseHasEnded) {
  for (const auto& context : all_contexts()) {
    CallMemory memory(context->runtime());
    const clattn::Queue queue = context->create_queue();
    cl_mem first = nullptr, second = nullptr;
    {
      const CallMemory::Lease lease = memory.upload(queue, filled(100, 1));
      const CallMemory::Lease other = memory.upload(queue, filled(300, 2));
      first = lease.buffer().handle();
      second = other.buffer().handle();
      EXPECT_NE(first, second);  // of two calls at once
      expect_holds(queue, lease, filled(100, 1));
      expect_holds(queue, other, filled(300, 2));
    }
    const CallMemory::Lease again = memory.upload(queue, filled(10, 3));
    EXPECT_TRUE(memory.reserve(0).buffer());
    EXPECT_TRUE(again.buffer().handle() == first || again.buffer().handle() == second);
    expect_holds(queue, again, filled(10, 3));
  }
}

TEST(CallMemory, GrowsAndKeepsTheContentOfCallsInFlight) {
  for (const auto& context : all_contexts()) {
    CallMemory memory(context->runtime());
    const clattn::Queue queue = context->create_queue();
    std::vector<clattn::Buffer> copies;
    for (std::uint8_t call = 0; call < 40; ++call) {  // more than it keeps
      const std::size_t size = call % 2 == 0 ? 64 : 200000;
      CallMemory::Lease lease = memory.upload(queue, filled(size, call));
      EXPECT_GE(lease.buffer().size_bytes(), size);
      copies.push_back(context->allocate(size));
      cl_event copied = nullptr;
      ASSERT_EQ(clEnqueueCopyBuffer(queue, lease.buffer().handle(), copies.back().handle(), 0, 0,
                                    size, 0, nullptr, &copied),
                CL_SUCCESS);
      clattn::Event done;
      done.reset(copied);
      lease.used_until(done);
    }
    for (std::uint8_t call = 0; call < 40; ++call) {
      EXPECT_TRUE(cache_ops_test::download<std::byte>(queue, copies[call]) ==
                  filled(copies[call].size_bytes(), call));
    }
  }
}

// Calls of a queue that waits for its caller: none of them waits for another.
TEST(CallMemory, ManyCallsDoNotWaitForAQueueThatIsHeldBack) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const block_test::Layer layer(*context, queue, {.num_blocks = 64}, block_test::kOrders[0], 1);
    block_test::Bytes want = layer.image;
    cl_int status = CL_SUCCESS;
    const cl_event gate = clCreateUserEvent(context->runtime().context(), &status);
    ASSERT_EQ(status, CL_SUCCESS);
    ASSERT_EQ(clEnqueueBarrierWithWaitList(queue, 1, &gate, nullptr), CL_SUCCESS);
    const clattn::detail::CapturePause paused;  // captures wait for the queue
    for (std::int64_t call = 0; call < 32; ++call) {
      const clattn::BlockPair pair{call, 32 + call};
      clattn::copy_blocks(*context, queue, std::span(&layer.cache, 1), std::span(&pair, 1));
      block_test::apply(layer.cache, block_test::Bytes(want), layer.cache, want, {pair});
    }
    ASSERT_EQ(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
    EXPECT_TRUE(cache_ops_test::download<std::uint8_t>(queue, layer.cache.buffer) == want);
    clReleaseEvent(gate);
  }
}

/// Empty where the device has none.
clattn::Queue out_of_order_queue(const clattn::Context& context) {
  cl_int status = CL_SUCCESS;
  const cl_command_queue raw =
      clCreateCommandQueue(context.runtime().context(), context.runtime().device(),
                           CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, &status);
  if (status != CL_SUCCESS) return {};
  clattn::Queue queue = clattn::Queue::adopt(raw);
  clReleaseCommandQueue(raw);
  return queue;
}

TEST(CallMemory, TheEventOfManyLaunchesSpeaksForAllOutOfOrder) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = out_of_order_queue(*context);
    if (queue == nullptr) continue;
    std::vector<block_test::Layer> layers;
    std::vector<clattn::KVCache> caches;
    for (std::uint32_t i = 0; i < 9; ++i) {  // 18 planes: two launches
      layers.emplace_back(*context, queue, block_test::Shape{}, block_test::kOrders[0], i);
      caches.push_back(layers.back().cache);
    }
    queue.finish();
    const clattn::BlockPair pair{0, 3};
    clattn::Event event;
    clattn::copy_blocks(*context, queue, caches, std::span(&pair, 1), &event);
    event.wait();
    const clattn::Queue other = context->create_queue();
    for (const block_test::Layer& layer : layers) {
      block_test::Bytes want = layer.image;
      block_test::apply(layer.cache, layer.image, layer.cache, want, {pair});
      EXPECT_TRUE(cache_ops_test::download<std::uint8_t>(other, layer.cache.buffer) == want);
    }
  }
}

TEST(CallMemory, CallsThatRelyOnTheQueuesOrderWantOne) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = out_of_order_queue(*context);
    if (queue == nullptr) continue;
    const clattn::Queue in_order = context->create_queue();
    clattn::DeviceErrors errors(*context, in_order);
    const std::string refused = "queue: an out-of-order queue was given, legal: in-order queues";
    EXPECT_EQ(test::error_text([&] { advance_step_flashattn(*context, queue, {}, errors); }),
              refused);
    EXPECT_EQ(test::error_text([&] { advance_step_flashinfer(*context, queue, {}, {}, errors); }),
              refused);
    EXPECT_EQ(test::error_text([&] {
                clattn::swap_blocks(*context, queue, std::span<std::byte>{}, std::span<std::byte>{},
                                    {});
              }),
              refused);
  }
}

TEST(CallMemory, UploadsPrecedeTheirKernelsOutOfOrder) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = out_of_order_queue(*context);
    if (queue == nullptr) continue;
    const block_test::Layer layer(*context, queue, {.num_blocks = 64}, block_test::kOrders[0], 1);
    queue.finish();
    block_test::Bytes want = layer.image;
    for (std::int64_t call = 0; call < 20; ++call) {
      const clattn::BlockPair pair{call, 32 + call};
      clattn::copy_blocks(*context, queue, std::span(&layer.cache, 1), std::span(&pair, 1));
      block_test::apply(layer.cache, block_test::Bytes(want), layer.cache, want, {pair});
    }
    queue.finish();
    EXPECT_TRUE(cache_ops_test::download<std::uint8_t>(queue, layer.cache.buffer) == want);
  }
}

// Threads that copy at once, on queues of their own, each through mappings of changing sizes.
TEST(CallMemory, ThreadsShareIt) {
  using clattn::BlockPair;
  for (const auto& context : all_contexts()) {
    std::array<bool, 4> right{};
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < right.size(); ++t) {
      threads.emplace_back([&, t] {
        const clattn::Queue queue = context->create_queue();
        const block_test::Layer layer(*context, queue, {.num_blocks = 64}, block_test::kOrders[0],
                                      static_cast<std::uint32_t>(t));
        block_test::Bytes want = layer.image;
        for (std::int64_t round = 0; round < 30; ++round) {
          std::vector<BlockPair> mapping;
          for (std::int64_t i = 0; i <= round % 7; ++i) {
            mapping.push_back({(round + i) % 32, 32 + (5 * round + 3 * i) % 32});
          }
          clattn::copy_blocks(*context, queue, std::span(&layer.cache, 1), mapping);
          block_test::apply(layer.cache, block_test::Bytes(want), layer.cache, want, mapping);
        }
        right.at(t) = cache_ops_test::download<std::uint8_t>(queue, layer.cache.buffer) == want;
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const bool each : right) EXPECT_TRUE(each);
  }
}

}  // namespace test_call_memory
