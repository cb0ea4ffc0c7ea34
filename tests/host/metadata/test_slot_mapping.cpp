#include "metadata/page_list.hpp"

#include <gtest/gtest.h>

#include <random>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::Batch;
using test::error_text;
using test::make_batch;

constexpr std::int64_t kUnwritten = 0x5a5a5a5a5a;

std::vector<std::int64_t> slots_of(const Batch& batch, std::int32_t block_size,
                                   std::size_t padding = 0) {
  std::vector<std::int64_t> slots(static_cast<std::size_t>(batch.num_actual_tokens) + padding,
                                  kUnwritten);
  compute_slot_mapping(batch.view(), block_size, slots);
  return slots;
}

using Slots = std::vector<std::int64_t>;

// Slots 35, 2, 17 with pages of 16: places 3 of block 2, 2 of block 0 and 1 of block 1.
TEST(SlotMapping, DecodesOfThreeRequests) {
  Batch batch = make_batch({{1, 4}, {1, 3}, {1, 2}}, 16);
  batch.block_table = {2, -1, 0, -1, 1, -1};
  EXPECT_EQ(slots_of(batch, 16), (Slots{35, 2, 17}));
}

TEST(SlotMapping, PromptOverRepeatedBlocks) {
  Batch batch = make_batch({{10, 10}}, 4, 0);
  batch.block_table = {0, 1, 0};
  EXPECT_EQ(slots_of(batch, 4), (Slots{0, 1, 2, 3, 4, 5, 6, 7, 0, 1}));
}

TEST(SlotMapping, ChunkStartsInsideAPage) {
  Batch batch = make_batch({{6, 11}}, 4, 0);
  batch.block_table = {9, 3, 7};
  EXPECT_EQ(slots_of(batch, 4), (Slots{13, 14, 15, 28, 29, 30}));
}

TEST(SlotMapping, EmptyRequestsAndBatchesStoreNothing) {
  EXPECT_EQ(slots_of(make_batch({}, 16), 16), Slots{});
  const Batch batch = make_batch({{0, 0}, {0, 7}, {1, 5}, {0, 0}}, 4);
  EXPECT_EQ(slots_of(batch, 4), (Slots{12}));
}

TEST(SlotMapping, SlotsPastTheTokensArePadding) {
  EXPECT_EQ(slots_of(make_batch({{2, 2}}, 16), 16, 3),
            (Slots{0, 1, kPadSlotId, kPadSlotId, kPadSlotId}));
  EXPECT_EQ(slots_of(make_batch({}, 16), 16, 2), (Slots{kPadSlotId, kPadSlotId}));
}

TEST(SlotMapping, SlotsPast32Bits) {
  Batch batch = make_batch({{1, 1}}, 1 << 20, 0);
  batch.block_table = {1 << 30};
  EXPECT_EQ(slots_of(batch, 1 << 20), (Slots{std::int64_t{1} << 50}));
}

TEST(SlotMapping, EqualsTheFormula) {
  std::mt19937 random(7);
  const auto below = [&](std::uint32_t bound) {
    return static_cast<std::int32_t>(random() % bound);
  };
  for (int run = 0; run < 3000; ++run) {
    const std::int32_t block_size = 1 + below(20);
    std::vector<test::Request> requests(random() % 6);
    for (auto& request : requests) {
      request.query_len = below(60);
      request.seq_len = request.query_len + below(100);
    }
    Batch batch = make_batch(requests, block_size);
    for (auto& block : batch.block_table) {
      if (block != test::kPoisonBlock) block = below(1U << 31);
    }
    Slots expected;
    for (std::size_t r = 0; r < requests.size(); ++r) {
      for (std::int32_t i = 0; i < requests[r].query_len; ++i) {
        const std::int32_t p = requests[r].seq_len - requests[r].query_len + i;
        const auto at = static_cast<std::int64_t>(r) * batch.block_table_stride + p / block_size;
        expected.push_back(std::int64_t{batch.block_table[static_cast<std::size_t>(at)]} *
                               block_size +
                           p % block_size);
      }
    }
    ASSERT_EQ(slots_of(batch, block_size), expected) << "run " << run;
    Slots again(expected.size(), kUnwritten);
    detail::write_slot_mapping(batch.view(), block_size, again);
    ASSERT_EQ(again, expected) << "run " << run;
  }
}

TEST(SlotMapping, RefusesTooFewSlotsAndBadBatches) {
  const Batch batch = make_batch({{5, 5}}, 4);
  Slots slots(4, kUnwritten);
  EXPECT_EQ(error_text([&] { compute_slot_mapping(batch.view(), 4, slots); }),
            "slots holds 4 elements, legal: at least 5 (num_actual_tokens)");
  EXPECT_EQ(slots, Slots(4, kUnwritten));
  Batch bad = batch;
  bad.block_table[1] = -3;
  EXPECT_EQ(error_text([&] { slots_of(bad, 4); }),
            "request 0: block_table[1] is -3, legal: 0 … 2147483647");
}

// A6.1: hybrid block sizes of V1.
TEST(MapToKernelBlocks, A6_1_ALogicalBlockIsItsParts) {
  std::vector<std::int32_t> mapped(9, 77);
  map_to_kernel_blocks(std::vector<std::int32_t>{3, -1, 0}, 48, 16, mapped);
  EXPECT_EQ(mapped, (std::vector<std::int32_t>{9, 10, 11, -1, -1, -1, 0, 1, 2}));
  mapped.resize(4);
  map_to_kernel_blocks(std::vector<std::int32_t>{(1 << 30) - 1, 1 << 30}, 2, 1, mapped);
  EXPECT_EQ(mapped, (std::vector<std::int32_t>{INT32_MAX - 1, INT32_MAX, -1, -1}));
  map_to_kernel_blocks({}, 16, 8, {});
  const auto refuse = [&](std::int32_t block_size, std::int32_t kernel_block_size) {
    return error_text([&] {
      map_to_kernel_blocks(std::vector<std::int32_t>{1, 2}, block_size, kernel_block_size, mapped);
    });
  };
  EXPECT_EQ(refuse(16, 12),
            "kernel_block_size 12 must divide kv_manager_block_size size 16 evenly");
  EXPECT_EQ(refuse(16, 0), "kernel_block_size 0 must divide kv_manager_block_size size 16 evenly");
  EXPECT_EQ(refuse(48, 16), "kernel_block_table holds 4 elements, legal: 3 for each of 2");
}

// A6.1: no token moves: slots by kernel blocks are those by logical blocks.
TEST(MapToKernelBlocks, A6_1_EveryTokenKeepsItsSlot) {
  std::mt19937 random(11);
  const auto below = [&](std::uint32_t bound) {
    return static_cast<std::int32_t>(random() % bound);
  };
  for (int run = 0; run < 300; ++run) {
    const std::int32_t kernel_size = 1 + below(8), parts = 1 + below(5);
    std::vector<test::Request> requests(1 + random() % 5);
    for (auto& request : requests) {
      request.query_len = below(40);
      request.seq_len = request.query_len + below(60);
    }
    Batch batch = make_batch(requests, kernel_size * parts);
    for (auto& block : batch.block_table) {
      if (block != test::kPoisonBlock) block = below(1U << 20);
    }
    Batch kernels = batch;
    kernels.block_table.resize(batch.block_table.size() * static_cast<std::size_t>(parts));
    kernels.block_table_stride *= parts;
    map_to_kernel_blocks(batch.block_table, kernel_size * parts, kernel_size, kernels.block_table);
    ASSERT_EQ(slots_of(kernels, kernel_size), slots_of(batch, kernel_size * parts)) << run;
  }
}

TEST(PadSlotMapping, A1_2_PadsWhatNoTokenOwns) {
  std::vector<std::int64_t> slots{7, 8, 9, 10};
  pad_slot_mapping(slots, 3);
  EXPECT_EQ(slots, (std::vector<std::int64_t>{7, 8, 9, -1}));
  pad_slot_mapping(slots, 0);
  EXPECT_EQ(slots, std::vector<std::int64_t>(4, -1));
  EXPECT_EQ(test::error_text([&] { pad_slot_mapping(slots, 5); }),
            "num_actual_tokens is 5, legal: 0 … 4 (elements of slot_mapping)");
}

}  // namespace
}  // namespace clattn
