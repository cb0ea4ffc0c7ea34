#include <gtest/gtest.h>

#include <clattn/compat/v0_slot_mapping.hpp>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::error_text;
using Ints = std::vector<std::int32_t>;

using Slots = std::vector<std::int64_t>;

Slots v0_slots(const V0SlotMappingRequest& request) {
  Slots slots{99};  // appended to
  append_v0_slot_mapping(request, slots);
  EXPECT_EQ(slots.front(), 99);
  slots.erase(slots.begin());
  return slots;
}

TEST(V0SlotMapping, A6_1_ExampleWithReusedBlocks) {
  const std::int32_t start = compute_v0_slot_mapping_start_idx(V0Phase::kPrompt, 10, 8);
  EXPECT_EQ(start, 2);
  const Ints table{0, 1, 0};
  EXPECT_EQ(v0_slots({.seq_len = 10, .start_idx = start, .block_size = 4, .block_table = table}),
            (Slots{-1, -1, 2, 3, 4, 5, 6, 7, 0, 1}));
}

TEST(V0SlotMapping, A6_1_StartOfTheWindow) {
  EXPECT_EQ(compute_v0_slot_mapping_start_idx(V0Phase::kPrompt, 10, 0), 0);   // no window
  EXPECT_EQ(compute_v0_slot_mapping_start_idx(V0Phase::kPrompt, 10, 10), 0);  // all inside
  EXPECT_EQ(compute_v0_slot_mapping_start_idx(V0Phase::kPrompt, 10, 11), 0);
  EXPECT_EQ(compute_v0_slot_mapping_start_idx(V0Phase::kDecode, 10, 8), 0);
  EXPECT_EQ(error_text([] { compute_v0_slot_mapping_start_idx(V0Phase::kPrompt, -1, 8); }),
            "query_len is -1, legal: at least 0");
}

TEST(V0SlotMapping, A6_1_ProfileRunPadsTheWholeSequence) {
  EXPECT_EQ(v0_slots({.seq_len = 3, .context_len = 2, .is_profile_run = true}),
            (Slots{-1, -1, -1}));
}

TEST(V0SlotMapping, A6_1_ContextIsNotMapped) {
  const Ints table{5, 3};
  EXPECT_EQ(v0_slots({.seq_len = 6, .context_len = 3, .block_size = 4, .block_table = table}),
            (Slots{23, 12, 13}));
  EXPECT_EQ(
      v0_slots(
          {.seq_len = 6, .context_len = 3, .start_idx = 5, .block_size = 4, .block_table = table}),
      (Slots{-1, -1, 13}));
  EXPECT_EQ(v0_slots({.seq_len = 6, .context_len = 6, .block_size = 4}), Slots{});
}

TEST(V0SlotMapping, A6_1_TableIsChecked) {
  const Ints table{5, -3};
  Slots slots{7};
  const auto append = [&](std::int32_t seq_len) {
    return error_text([&] {
      append_v0_slot_mapping({.seq_len = seq_len, .block_size = 4, .block_table = table}, slots);
    });
  };
  EXPECT_EQ(append(9), "block_table holds 2 elements, legal: at least 3 (seq_len 9, block_size 4)");
  EXPECT_EQ(append(8), "block_table[1] is -3, legal: at least 0");
  EXPECT_EQ(slots, Slots{7});  // an error appends nothing
}

TEST(V0SlotMapping, A6_1_EmptyTables) {
  using Tables = std::vector<std::optional<Ints>>;
  EXPECT_TRUE(is_v0_block_tables_empty({}));
  EXPECT_TRUE(is_v0_block_tables_empty(Tables{std::nullopt, std::nullopt}));
  EXPECT_FALSE(is_v0_block_tables_empty(Tables{std::nullopt, Ints{}}));
  EXPECT_FALSE(is_v0_block_tables_empty(Tables{Ints{1}}));
}

}  // namespace
}  // namespace clattn
