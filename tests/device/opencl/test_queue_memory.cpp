// Memory that the launches of one call leave to each other.
#include <gtest/gtest.h>

#include "device/attention_case.hpp"
#include "opencl/recorder.hpp"
#include "opencl/runtime.hpp"

namespace test_queue_memory {

using clattn::detail::QueueMemory;

TEST(QueueMemory, CallsOnAQueueShareABufferThatGrows) {
  for (const auto& context : attention_test::all_contexts()) {
    QueueMemory& memory = context->runtime().queue_memory();
    const clattn::Queue queue = context->create_queue(), other = context->create_queue();
    const clattn::Buffer first = memory.reserve(queue, 4).buffer();
    EXPECT_EQ(memory.reserve(queue, first.size_bytes()).buffer().handle(), first.handle());
    const clattn::Buffer apart = memory.reserve(other, 4).buffer();
    EXPECT_NE(apart.handle(), first.handle());
    const std::size_t more = first.size_bytes() + 1;
    const clattn::Buffer grown = memory.reserve(queue, more).buffer();
    EXPECT_GE(grown.size_bytes(), more);
    EXPECT_EQ(memory.reserve(queue, 4).buffer().handle(), grown.handle());
    EXPECT_EQ(memory.reserve(other, 4).buffer().handle(), apart.handle());
  }
}

TEST(QueueMemory, ARecordingHasItsOwn) {
  for (const auto& context : attention_test::all_contexts()) {
    QueueMemory& memory = context->runtime().queue_memory();
    const clattn::Queue queue = context->create_queue();
    const clattn::Buffer of_calls = memory.reserve(queue, 4).buffer();
    clattn::detail::Recorder recorder(queue);
    const clattn::Buffer recorded = memory.reserve(queue, 4).buffer();
    EXPECT_NE(recorded.handle(), of_calls.handle());
    EXPECT_EQ(memory.reserve(queue, 4).buffer().handle(), recorded.handle());
  }
}

}  // namespace test_queue_memory
