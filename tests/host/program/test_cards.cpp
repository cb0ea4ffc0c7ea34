#include <gtest/gtest.h>
#include <clattn/tuning.hpp>

#include <algorithm>
#include <array>
#include <clattn/error.hpp>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/choose/attention_kernels.hpp"
#include "kernels/choose/variants.hpp"
#include "metadata/plan/planner.hpp"
#include "program/bench/cards.hpp"
#include "support/error_text.hpp"
#include "tuning/tuning_table.hpp"

namespace {

using clattn::CostRow;
using clattn::DType;
using clattn::cli::Card;
using clattn::cli::LoopCount;

std::string file_text(const char* name) {
  std::ifstream file(std::string(CLATTN_SOURCE_DIR) + "/bench/cards/" + name);
  return {std::istreambuf_iterator<char>(file), {}};
}
std::vector<Card> all_cards() {
  return clattn::cli::parse_cards(file_text("cards.txt"), "cards.txt");
}
std::vector<LoopCount> all_loops() {
  return clattn::cli::parse_loops(file_text("loops.txt"), "loops.txt");
}
const Card& card_named(const std::vector<Card>& cards, std::string_view name) {
  return *std::ranges::find(cards, name, &Card::name);
}

/// 10 cores of 4 SIMDs, 1 GHz: a slot of 4 clocks takes 4 ns.
constexpr const char* kCard =
    "card toy A toy\n"
    "  device=toy chip=toy unit=mfma compute_units=10 cores=10 simds=4 slot=4\n"
    "  mhz=1000 tflops=1 gbs=100 local_kib=64 latency_ns=500\n";

TEST(Cards, EveryChipHasItsLoops) {
  const std::vector<LoopCount> loops = all_loops();
  for (const Card& card : all_cards()) {
    const bool counted = std::ranges::find(loops, card.chip, &LoopCount::chip) != loops.end();
    EXPECT_TRUE(counted || card.chip == "sm_90") << card.name;
    const std::vector<CostRow> rows = predicted_rows(card, loops);
    EXPECT_EQ(rows.empty(), !counted) << card.name;
    const clattn::TuningText read = clattn::parse_tuning(clattn::format_tuning({}, rows), "rows");
    EXPECT_TRUE(read.problems.empty());
    EXPECT_EQ(read.costs.size(), rows.size());
  }
}

/// A step of a lone group waits for memory; of many, the memory's rate or the slots bound them.
TEST(Cards, CostsFollowFromSlotsAndMemory) {
  const Card card = clattn::cli::parse_cards(kCard, "text").front();
  LoopCount loop{.chip = "toy", .variant = "any", .role = "decode", .head_size = 128};
  loop.waves = 2;
  loop.slots = 50;  // 200 ns
  loop.group_waves = 2;
  loop.keys = 32;  // 16384 bytes
  loop.rows = 16;
  clattn::KernelCosts costs = predicted_costs(card, loop, 20);
  EXPECT_DOUBLE_EQ(costs.read_gbs, 16384 / 500.0);
  // All 20 together get 90 % of the memory: 20 * 32.8 / (1 + 20 / groups) = 90.
  EXPECT_NEAR(20 * costs.read_gbs / (1 + 20 / costs.groups), 90, 1e-6);
  EXPECT_DOUBLE_EQ(costs.task_us, 2);
  loop.slots = 5000;  // 20 us a step: then a wave's slots decide, alone and together
  costs = predicted_costs(card, loop, 20);
  EXPECT_DOUBLE_EQ(costs.read_gbs, 16384 / 20000.0);
  EXPECT_DOUBLE_EQ(costs.groups, 0);
  EXPECT_NEAR(clattn::cli::decode_in_flight(card, {loop}), 10 * 4 * 16384 / 50000.0, 1e-9);
}

/// Traits are columns, not parts of a name: many rows share keys in a cache, and a kernel of
/// another role does not count as decode.
TEST(Cards, TraitsOfLoopsAreColumns) {
  const auto cost_of = [](const char* traits) {
    const Card card = clattn::cli::parse_cards(kCard, "text").front();
    const std::vector<LoopCount> loops = clattn::cli::parse_loops(
        std::string("toy any d128_f16_f16 9 0 9 2 1 1 1 1 1 1 50 9 9 2 32 ") + traits, "text");
    return std::pair{predicted_costs(card, loops.front(), 20).groups,
                     decode_in_flight(card, loops)};
  };
  EXPECT_GT(cost_of("16 decode").first, 0);
  EXPECT_EQ(cost_of("128 prefill").first, 0);
  EXPECT_GT(cost_of("16 decode").second, 0);
  EXPECT_EQ(cost_of("16 prefill").second, 0);
}

/// Loads in flight cover the way to memory with half as much to spare.
TEST(Cards, DecodeHasEnoughInFlight) {
  const std::vector<LoopCount> loops = all_loops();
  for (const Card& card : all_cards()) {
    const double in_flight = decode_in_flight(card, loops);
    if (in_flight > 0) {
      EXPECT_GE(in_flight, 1.5) << card.name;
    }
  }
}

/// A large decode batch comes to 70 to 90 % of the memory's rate whatever the cache holds, a long
/// prompt to the slots' share.
TEST(Cards, LargeStepsComeToTheBoundsOfTheCard) {
  const std::vector<Card> cards = all_cards();
  const Card& card = card_named(cards, "mi300x");
  const std::vector<CostRow> costs = predicted_rows(card, all_loops());
  clattn::AttentionConfig config{
      .num_heads = 32, .num_kv_heads = 8, .head_size = 128, .dtype = DType::kF16};
  constexpr int kRequests = 228;  // whole rounds of 2 and of 3 tasks a compute unit
  std::vector<std::int32_t> starts = {0};
  for (int i = 0; i < kRequests; ++i) starts.push_back(i + 1);
  const std::vector<std::int32_t> lengths(kRequests, 8192);
  clattn::CommonAttentionMetadata batch{.query_start_loc = starts,
                                        .seq_lens = lengths,
                                        .num_reqs = kRequests,
                                        .num_actual_tokens = kRequests};
  const auto time_us = [&] {
    double sum = 0;
    for (const auto& launch : predicted_launches(config, card.capabilities(), costs, batch))
      sum += launch.predicted_us;
    return sum;
  };
  for (const DType cache_dtype : {DType::kFp8E4M3, DType::kF16}) {
    config.kv_cache_dtype = cache_dtype;
    const double bytes = 2.0 * 128 * static_cast<double>(element_size_bytes(cache_dtype));
    const double gbs = kRequests * 8192 * 8 * bytes * 1e-3 / time_us();
    EXPECT_GT(gbs, 0.7 * card.gbs) << to_string(cache_dtype);
    EXPECT_LE(gbs, 0.9 * card.gbs) << to_string(cache_dtype);
  }
  starts = {0, 8192};
  const std::vector<std::int32_t> one = {8192};
  batch = {.query_start_loc = starts, .seq_lens = one, .num_reqs = 1, .num_actual_tokens = 8192};
  const double tflops = 2.0 * 8192 * 8193 * 128 * 32 * 1e-6 / time_us();
  EXPECT_GT(tflops, 0.4 * card.tflops);
  EXPECT_LT(tflops, 0.65 * card.tflops);
}

/// Kernels of a step of one prompt, as an H100 would plan it.
std::vector<std::string> h100_kernels(std::int32_t head_size, std::int32_t query_len,
                                      std::int32_t seq_len, DType dtype = DType::kBF16) {
  const std::vector<Card> cards = all_cards();
  const clattn::AttentionConfig config{.num_heads = 64,
                                       .num_kv_heads = 8,
                                       .head_size = head_size,
                                       .dtype = dtype,
                                       .kv_cache_dtype = dtype};
  const std::vector<std::int32_t> starts = {0, query_len}, lengths = {seq_len};
  const clattn::CommonAttentionMetadata batch{.query_start_loc = starts,
                                              .seq_lens = lengths,
                                              .num_reqs = 1,
                                              .num_actual_tokens = query_len};
  std::vector<std::string> names;
  const auto capabilities = card_named(cards, "h100").capabilities();
  for (const auto& launch : predicted_launches(config, capabilities, {}, batch))
    names.emplace_back(launch.kernel);
  return names;
}

// Tiles of 192 rows are faster where there are enough of them: docs/journal.md, "Three warpgroups".
TEST(Cards, LongPromptsOfHeadsOf64TakeWideTiles) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(h100_kernels(64, 8192, 8192), Names{"prefill_wgmma__r192_kv64"});
  EXPECT_EQ(h100_kernels(64, 512, 4096), Names{"prefill_wgmma__r128_kv128"});
  EXPECT_EQ(h100_kernels(64, 8192, 8192, DType::kF16), Names{"prefill_wgmma__r128_kv128"});
  EXPECT_EQ(h100_kernels(128, 8192, 8192), Names{"prefill_wgmma__r128_kv128"});
}

// clattn tune --costs relies on this: it measures each tile uncut and cut into forced splits.
TEST(Cards, ATuningRowMakesAWideTileTakeForcedSplits) {
  const std::vector<Card> cards = all_cards();
  const auto device = card_named(cards, "h100").capabilities();
  const std::string wide = "prefill_wgmma__r192_kv64";
  const clattn::AttentionConfig config{
      .num_heads = 8, .num_kv_heads = 2, .head_size = 64, .dtype = DType::kBF16};
  const std::vector<std::int32_t> starts = {0, 48}, lengths = {4096};
  const auto batch = clattn::CommonAttentionMetadata::of(starts, lengths, {});
  const auto kernels_of_plan = [&](std::vector<clattn::TuningRow> rows, std::int32_t num_splits) {
    const clattn::detail::TuningTable table({.rows = std::move(rows)});
    const auto kernels = clattn::detail::imagined_kernels(
        {device, table}, clattn::detail::kernel_shape(config), config.kernel_family);
    clattn::detail::PlannerConfig planner = kernels->planner;
    planner.num_splits = num_splits;
    planner.max_partial_rows = 1 << 20;
    const clattn::detail::AttentionPlan plan(planner, batch);
    std::vector<std::pair<std::string, std::int32_t>> used;
    for (std::size_t i = 0; i < kernels->stages.size(); ++i) {
      const std::int32_t items = plan.counts().num_items.at(i);
      if (items > 0) used.emplace_back(kernels->stages[i].variant->name, items);
    }
    return used;
  };
  using Used = std::vector<std::pair<std::string, std::int32_t>>;
  clattn::TuningRow row;
  row.device = device.name;
  row.role = "prefill";
  row.variant = wide;
  for (const std::int32_t splits : {1, 3}) {
    EXPECT_EQ(kernels_of_plan({row}, splits), (Used{{wide, splits}}));
    EXPECT_NE(kernels_of_plan({}, splits).at(0).first, wide);
  }
}

TEST(Cards, ADeviceIsTheCardOfItsNameAndSize) {
  const std::vector<Card> cards = all_cards();
  clattn::DeviceCapabilities device;
  device.name = "gfx942:sramecc+:xnack-";
  device.compute_units = 304;
  EXPECT_EQ(card_of(cards, device), &card_named(cards, "mi300x"));
  device.compute_units = 220;
  EXPECT_EQ(card_of(cards, device), &card_named(cards, "mi300a"));
  device.name = "pthread";
  EXPECT_EQ(card_of(cards, device), nullptr);
}

// Latent rows are read once a key: no layer is predicted to read them faster than memory does.
TEST(Cards, LatentLayersArePredicted) {
  const std::vector<Card> cards = all_cards();
  const Card& card = card_named(cards, "mi300x");
  const std::vector<LoopCount> loops = all_loops();
  EXPECT_NE(std::ranges::find(loops, "mla_decode", &LoopCount::role), loops.end());
  const clattn::AttentionConfig config{.num_heads = 64,
                                       .num_kv_heads = 1,
                                       .head_size = 576,
                                       .block_size = 64,
                                       .dtype = DType::kF16,
                                       .use_mla = true,
                                       .rope_dim = 64};
  constexpr int kRequests = 304;
  std::vector<std::int32_t> starts(kRequests + 1);
  std::ranges::generate(starts, [next = 0]() mutable { return next++; });
  const std::vector<std::int32_t> lengths(kRequests, 8192);
  const auto launches = predicted_launches(config, card.capabilities(), predicted_rows(card, loops),
                                           {.query_start_loc = starts,
                                            .seq_lens = lengths,
                                            .num_reqs = kRequests,
                                            .num_actual_tokens = kRequests});
  ASSERT_FALSE(launches.empty());
  EXPECT_EQ(launches.front().kernel, "mla_decode_mfma__r64");
  const double gbs = kRequests * 8192.0 * 576 * 2 * 1e-3 / launches.front().predicted_us;
  EXPECT_GT(gbs, 0.3 * card.gbs);
  EXPECT_LE(gbs, 0.9 * card.gbs);
}

// Shapes that no latent layer has, the first of which would divide by a rank of 0.
TEST(Cards, LatentLayersOfOtherShapesAreRefused) {
  clattn::AttentionConfig config{.num_heads = 64,
                                 .num_kv_heads = 1,
                                 .head_size = 64,
                                 .dtype = DType::kF16,
                                 .use_mla = true,
                                 .rope_dim = 64};
  const std::vector<std::int32_t> starts = {0, 1}, lengths = {8};
  const clattn::CommonAttentionMetadata batch{
      .query_start_loc = starts, .seq_lens = lengths, .num_reqs = 1, .num_actual_tokens = 1};
  const std::vector<Card> cards = all_cards();
  const auto refusal = [&] {
    return test::error_text(
        [&] { predicted_launches(config, card_named(cards, "mi300x").capabilities(), {}, batch); },
        clattn::ErrorCode::kUnsupported);
  };
  EXPECT_EQ(refusal(),
            "head_size 64 not supported: rope_dim (64) more than 16 … 512 in steps of 16 are");
  config.head_size = 576;
  config.num_kv_heads = 2;
  EXPECT_EQ(refusal(), "num_kv_heads is 2, supported: 1");
  config.num_kv_heads = 1;
  config.rope_dim = 60;
  EXPECT_EQ(refusal(),
            "head_size 576 not supported: rope_dim (60) more than 16 … 512 in steps of 16 are; "
            "rope_dim is 60, supported: 8 … 64 in steps of 8");
  config.rope_dim = 64;
  config.sliding_window = 1024;
  EXPECT_EQ(refusal(), "MLA is not supported for sliding_window");
}

// A tuning file holds what predictions say of a card until something was measured on it.
TEST(Cards, MeasuredCostsComeBeforePredictedOnes) {
  const std::vector<Card> cards = all_cards();
  std::vector<CostRow> rows = predicted_rows(card_named(cards, "mi300x"), all_loops());
  CostRow measured;
  measured.device = "gfx942:sramecc+:xnack-";
  measured.driver = "6.4";
  measured.kernel = "decode_mfma__r16";
  measured.costs = {.launch_us = 1, .read_gbs = 99};
  rows.insert(rows.begin(), measured);
  const clattn::detail::TuningTable table({.costs = rows});
  clattn::detail::TuningQuery query{.device = measured.device,
                                    .driver = measured.driver,
                                    .classes = {"gpu"},
                                    .kernel = measured.kernel,
                                    .head_size = 128,
                                    .group = 4};
  EXPECT_EQ(table.find_costs(query)->costs, measured.costs);
  query.device = "gfx942:sramecc-";
  EXPECT_EQ(table.find_costs(query)->device, "gfx942*");
}

void expect_says(const std::string& error, std::string_view what) {
  EXPECT_NE(error.find(what), std::string::npos) << error;
}

TEST(Cards, BadLinesAreNamed) {
  const auto fault = [](const std::string& text) {
    return test::error_text([&] { static_cast<void>(clattn::cli::parse_cards(text, "f")); });
  };
  expect_says(fault("mhz=1\n"), "f:1: 'mhz=1' before the first card");
  expect_says(fault("card a\n"), "f:1: card:");
  expect_says(fault(std::string(kCard) + " mhz=fast\n"), "f:4: mhz: 'fast'");
  expect_says(fault(std::string(kCard) + " weight=3\n"), "f:4: weight");
  expect_says(fault("card a A card\n chip=x\n"), "card a: compute_units");
  const auto loop_fault = [](const std::string& text) {
    return test::error_text([&] { static_cast<void>(clattn::cli::parse_loops(text, "f")); });
  };
  expect_says(loop_fault("gfx942 k d128_f16_f16 1\n"), "f:1: 4 columns");
  expect_says(loop_fault("gfx942 k d128_f64_f16 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 decode\n"),
              "shape: 'd128_f64_f16'");
}

}  // namespace
