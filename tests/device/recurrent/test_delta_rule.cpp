// The gated delta rule on every device, token by token and in chunks, against the oracle.
#include <gtest/gtest.h>

#include "device/attention_case.hpp"
#include "device/recurrent/rule_case.hpp"
#include "kernels/choose/traits.hpp"
#include "opencl/runtime.hpp"
#include "support/error_text.hpp"

namespace test_delta_rule {

using attention_test::all_contexts;
using clattn::DType;
using recurrent_test::families;
using recurrent_test::Fill;
using recurrent_test::Gates;
using recurrent_test::problem;
using recurrent_test::Request;
using recurrent_test::rounds_products;
using recurrent_test::RuleSpec;
using recurrent_test::run_rule;

void expect_right_on(const clattn::Context& context, const RuleSpec& spec, double rms) {
  EXPECT_EQ(problem(run_rule(context, spec), rms), "")
      << (spec.in_chunks ? "chunks" : "loop") << " of " << to_string(spec.dtype) << ", family "
      << to_string(spec.family) << ", fill " << static_cast<int>(spec.fill);
}

/// On every device, token by token and in chunks, by each family that computes chunks
/// differently. Matrix units take 16-bit activations only, so they get the call in bf16, too.
void expect_right(RuleSpec spec, double rms = 1.5) {
  for (const auto& context : all_contexts()) {
    spec.in_chunks = false;
    spec.family = clattn::KernelFamily::kAuto;
    expect_right_on(*context, spec, rms);
    spec.in_chunks = true;
    RuleSpec rounded = spec;
    if (spec.dtype == DType::kF32) rounded.dtype = DType::kBF16;
    for (const clattn::KernelFamily family : families(*context, spec)) {
      spec.family = family;
      expect_right_on(*context, spec, rms);
    }
    if (spec.dtype != DType::kF32) continue;
    for (const clattn::KernelFamily family : families(*context, rounded)) {
      rounded.family = family;
      if (rounds_products(*context, rounded)) expect_right_on(*context, rounded, rms);
    }
  }
}

TEST(DeltaRule, TypesOfTensorsStatesAndGates) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType state : {DType::kF32, DType::kF16, DType::kBF16}) {
      RuleSpec spec;
      spec.dtype = dtype;
      spec.state_dtype = state;
      spec.gate_dtype = dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
      spec.gates = dtype == DType::kF16 ? Gates::kRaw : Gates::kGiven;
      spec.requests = {{.tokens = 1}, {.tokens = 40}, {.tokens = 3, .initial = false}};
      expect_right(spec);
    }
  }
}

TEST(DeltaRule, HeadsAndSizes) {
  struct Sizes {
    std::int32_t k_heads, v_heads, k_dim, v_dim;
  };
  for (const Sizes of : {Sizes{1, 1, 128, 128},
                         {1, 8, 64, 128},
                         {3, 3, 96, 32},
                         {2, 6, 256, 64},
                         {1, 2, 16, 256},
                         {2, 2, 80, 48},
                         {1, 2, 144, 16}}) {
    RuleSpec spec;
    spec.num_k_heads = of.k_heads;
    spec.num_v_heads = of.v_heads;
    spec.head_k_dim = of.k_dim;
    spec.head_v_dim = of.v_dim;
    spec.requests = {{.tokens = 2}, {.tokens = 37}};
    expect_right(spec);
  }
}

TEST(DeltaRule, DecaysOfChannelsAndRawGates) {
  for (const Gates gates : {Gates::kGiven, Gates::kRaw, Gates::kBounded}) {
    for (const bool by_channel : {false, true}) {
      for (const bool dt_bias : {false, true}) {
        RuleSpec spec;
        spec.gates = gates;
        spec.by_channel = by_channel;
        spec.dt_bias = dt_bias;
        spec.gate_dtype = dt_bias ? DType::kF32 : DType::kBF16;
        spec.dtype = DType::kBF16;
        spec.requests = {{.tokens = 1}, {.tokens = 45, .initial = false}};
        expect_right(spec);
      }
    }
  }
}

TEST(DeltaRule, AdditiveAndWithoutNorm) {
  for (const bool by_channel : {false, true}) {
    RuleSpec spec;
    spec.additive = true;
    spec.by_channel = by_channel;
    spec.requests = {{.tokens = 3}, {.tokens = 50}};
    expect_right(spec);
    spec.l2_norm = false;
    expect_right(spec);
  }
}

TEST(DeltaRule, RequestsOfEveryLength) {
  RuleSpec spec;
  for (const std::int32_t tokens : {0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 0, 31, 32, 33, 64, 65})
    spec.requests.push_back({.tokens = tokens, .initial = tokens % 2 == 1});
  expect_right(spec);
}

TEST(DeltaRule, ARequestWithoutTokensAmongOthers) {
  RuleSpec spec;
  spec.requests = {{.tokens = 0}, {.tokens = 1}, {.tokens = 0, .initial = false}};
  expect_right(spec);
}

TEST(DeltaRule, APromptOfOneTokenNeverReadsItsPage) {
  RuleSpec spec;  // pages that are not read are NaN
  spec.requests = {{.tokens = 1, .initial = false}, {.tokens = 20, .initial = false}};
  expect_right(spec);
}

TEST(DeltaRule, PagesThatStandForNone) {
  RuleSpec spec;
  spec.num_pages = 6;
  spec.requests = {{.tokens = 2, .pages = {3}},
                   {.tokens = 20, .pages = {-1}},
                   {.tokens = 18, .pages = {0}},
                   {.tokens = 1, .pages = {-1}}};
  expect_right(spec);
  spec.null_block_id = 0;  // vLLM's
  expect_right(spec);
}

TEST(DeltaRule, DraftsWithEveryNumberOfAcceptedTokens) {
  for (const std::int32_t accepted : {1, 2, 4}) {
    for (const std::int32_t tokens : {0, 1, 3, 4}) {
      RuleSpec spec;
      spec.columns = 4;
      spec.requests = {{.tokens = tokens, .accepted = accepted}, {.tokens = 4, .accepted = 3}};
      expect_right(spec);
    }
  }
}

TEST(DeltaRule, DraftsDecodesAndPromptsOfOneBatch) {
  RuleSpec spec;
  spec.dtype = DType::kBF16;
  spec.columns = 3;
  spec.requests = {{.tokens = 1}, {.tokens = 3, .accepted = 2}, {.tokens = 40, .initial = false},
                   {.tokens = 0}, {.tokens = 2, .accepted = 1}, {.tokens = 33}};
  expect_right(spec);
}

TEST(DeltaRule, ColumnsOfDraftsInAnyOrderAndWithoutPages) {
  RuleSpec spec;
  spec.num_pages = 12;
  spec.columns = 4;
  spec.requests = {
      {.tokens = 4, .accepted = 3, .pages = {7, 2, 5, 1}},  // reads what token 2 writes
      {.tokens = 2, .accepted = 1, .pages = {4, 9, -1, -1}},
      {.tokens = 3, .accepted = 2, .pages = {8, 10, -1, -1}},  // token 2 has no page
      {.tokens = 3, .accepted = 3, .pages = {3, 6, -1, -1}}};  // no page to read
  expect_right(spec);
}

TEST(DeltaRule, NumbersOnWhichRecurrencesBreak) {
  for (const Fill fill : {Fill::kNoDecay, Fill::kEqualKeys, Fill::kAlternatingKeys,
                          Fill::kStrongDecay, Fill::kOneErasure, Fill::kErasure, Fill::kZeroKeys,
                          Fill::kZeroQueries, Fill::kBetaOfTwo, Fill::kAligned}) {
    for (const bool by_channel : {false, true}) {
      RuleSpec spec;
      spec.head_k_dim = spec.head_v_dim = by_channel ? 32 : 128;
      spec.by_channel = by_channel;
      spec.fill = fill;
      spec.requests = {{.tokens = 150}, {.tokens = 2, .initial = false}};
      expect_right(spec, fill == Fill::kAligned ? 3 : 1.5);
    }
  }
}

// Softplus at its threshold, betas of exactly 0 and 1, no decay and all of it.
TEST(DeltaRule, GatesAtTheirEnds) {
  for (const bool by_channel : {false, true}) {
    RuleSpec spec;
    spec.by_channel = by_channel;
    spec.gates = Gates::kRaw;
    spec.fill = Fill::kExtremeGates;
    spec.requests = {{.tokens = 50}, {.tokens = 7, .initial = false}};
    expect_right(spec);
  }
}

TEST(DeltaRule, SquaresOfKeysBeyondF16) {
  RuleSpec spec;
  spec.dtype = DType::kF16;
  spec.fill = Fill::kHugeKeys;
  spec.requests = {{.tokens = 20}};
  expect_right(spec);
}

TEST(DeltaRule, StatesBeyondF16AreInfinite) {
  RuleSpec spec;
  spec.state_dtype = DType::kF16;
  spec.fill = Fill::kHugeValues;
  spec.requests = {{.tokens = 20}, {.tokens = 2, .initial = false}};
  expect_right(spec);
}

TEST(DeltaRule, ThousandsOfTokensWithoutDecay) {
  RuleSpec spec;
  spec.num_k_heads = spec.num_v_heads = 1;
  spec.head_k_dim = spec.head_v_dim = 32;
  spec.fill = Fill::kNoDecay;
  spec.requests = {{.tokens = 4096}};
  expect_right(spec);
}

/// Values of request r's tokens first ... end - 1, of a result.
std::vector<double> values_of(const RuleSpec& spec, const recurrent_test::RuleResult& result,
                              std::int32_t first, std::int32_t end) {
  const std::int64_t width = std::int64_t{spec.num_v_heads} * spec.head_v_dim;
  return {result.values.begin() + first * width, result.values.begin() + end * width};
}

TEST(DeltaRule, EqualRequestsGiveEqualBitsInAnyBatch) {
  for (const auto& context : all_contexts()) {
    for (const bool in_chunks : {false, true}) {
      RuleSpec spec;
      spec.dtype = DType::kBF16;
      spec.in_chunks = in_chunks;
      for (const clattn::KernelFamily family : families(*context, spec)) {
        spec.family = family;
        spec.requests = {{.tokens = 30, .seed = 9}, {.tokens = 5}, {.tokens = 30, .seed = 9}};
        const auto together = run_rule(*context, spec);
        EXPECT_EQ(values_of(spec, together, 0, 30), values_of(spec, together, 35, 65));
        spec.requests = {{.tokens = 30, .seed = 9}};
        const auto alone = run_rule(*context, spec);
        EXPECT_EQ(values_of(spec, together, 0, 30), values_of(spec, alone, 0, 30));
      }
    }
  }
}

/// A request's tokens in one step and in two, the loop with equal bits.
TEST(DeltaRule, AnySplitOfAPromptGivesTheSame) {
  constexpr std::int32_t kTokens = 50;
  for (const auto& context : all_contexts()) {
    for (const bool in_chunks : {false, true}) {
      RuleSpec whole;
      whole.in_chunks = in_chunks;
      whole.num_pages = 2;
      whole.requests = {{.tokens = kTokens, .initial = false, .pages = {1}, .seed = 4}};
      const auto at_once = run_rule(*context, whole);
      EXPECT_EQ(problem(at_once), "");
      for (const std::int32_t first : {1, 15, 16, 33, 49}) {
        RuleSpec part = whole;
        part.requests[0].tokens = first;
        const auto before = run_rule(*context, part);
        part.requests[0] = {.tokens = kTokens - first, .pages = {1}, .seed = 4, .passed = first};
        part.states = before.pages;
        const auto after = run_rule(*context, part);
        EXPECT_EQ(problem(after), "");
        if (in_chunks) continue;
        EXPECT_EQ(values_of(whole, at_once, first, kTokens),
                  values_of(whole, after, 0, kTokens - first));
        EXPECT_TRUE(std::equal(at_once.pages.end() - 4 * 64 * 64, at_once.pages.end(),
                               after.pages.end() - 4 * 64 * 64));
      }
    }
  }
}

/// The same on matrix units, cut at the end of a chunk, at the end of a block in it, and elsewhere.
TEST(DeltaRule, AnySplitOfAPromptIsRightByMatrixUnits) {
  constexpr std::int32_t kTokens = 150;
  for (const auto& context : all_contexts()) {
    RuleSpec whole;
    whole.dtype = DType::kBF16;
    whole.in_chunks = true;
    for (const clattn::KernelFamily family : families(*context, whole)) {
      whole.family = family;
      if (!rounds_products(*context, whole)) continue;
      whole.num_pages = 2;
      whole.requests = {{.tokens = kTokens, .initial = false, .pages = {1}, .seed = 4}};
      EXPECT_EQ(problem(run_rule(*context, whole)), "");
      for (const std::int32_t first : {16, 64, 80, 133}) {
        RuleSpec part = whole;
        part.requests[0].tokens = first;
        const auto before = run_rule(*context, part);
        part.requests[0] = {.tokens = kTokens - first, .pages = {1}, .seed = 4, .passed = first};
        part.states = before.pages;
        EXPECT_EQ(problem(run_rule(*context, part)), "");
      }
    }
  }
}

/// Requests whose chunks lie beside those of others in memory, and of some none; then the same with
/// so little memory that value heads take turns.
TEST(DeltaRule, PromptsOfUnlikeLengthsByMatrixUnits) {
  for (const auto& context : all_contexts()) {
    RuleSpec spec;
    spec.dtype = DType::kBF16;
    spec.in_chunks = true;
    for (const std::int32_t tokens : {130, 1, 0, 64, 63, 16, 1, 15, 66, 0, 128})
      spec.requests.push_back({.tokens = tokens, .initial = tokens % 3 != 0});
    for (const clattn::KernelFamily family : families(*context, spec)) {
      spec.family = family;
      if (!rounds_products(*context, spec)) continue;
      const auto at_once = run_rule(*context, spec);
      EXPECT_EQ(problem(at_once), "");
      clattn::detail::QueueMemory& memory = context->runtime().queue_memory();
      const std::size_t most_bytes = memory.most_bytes();
      memory.set_most_bytes(1);
      const auto in_turns = run_rule(*context, spec);
      memory.set_most_bytes(most_bytes);
      EXPECT_EQ(in_turns.values, at_once.values);
      EXPECT_EQ(problem(in_turns), "");
    }
  }
}

/// A recording's launches have memory of their own, which outlives the recorder.
TEST(DeltaRule, ARecordedCallIsRight) {
  for (const auto& context : all_contexts()) {
    RuleSpec spec;
    spec.dtype = DType::kBF16;
    spec.in_chunks = true;
    spec.recorded = true;
    spec.requests = {{.tokens = 70}, {.tokens = 2}};
    for (const clattn::KernelFamily family : families(*context, spec)) {
      spec.family = family;
      EXPECT_EQ(problem(run_rule(*context, spec)), "");
    }
  }
}

// Rows that begin where no vector may be loaded whole, and which matrix units do not take.
TEST(DeltaRule, RowsAtAnyElement) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t before : {3, 4}) {
      RuleSpec spec;
      spec.dtype = dtype;
      spec.before = before;
      spec.requests = {{.tokens = 1}, {.tokens = 37, .initial = false}};
      for (const auto& context : all_contexts()) {
        for (const bool in_chunks : {false, true}) {
          spec.in_chunks = in_chunks;
          EXPECT_FALSE(rounds_products(*context, spec));
          expect_right_on(*context, spec, 1.5);
        }
      }
    }
  }
}

/// A family is refused by its name where the device has nothing of it, and where its units do not
/// take the call.
TEST(DeltaRule, AFamilyThatTheDeviceLacksIsRefused) {
  for (const auto& context : all_contexts()) {
    clattn::GatedDeltaRule rule;
    for (const clattn::KernelFamily family :
         {clattn::KernelFamily::kGpuPtx, clattn::KernelFamily::kGpuMatrix}) {
      rule.kernel_family = family;
      RuleSpec spec;  // in f32
      spec.family = family;
      spec.in_chunks = true;
      spec.requests = {{.tokens = 20}};
      const std::string text =
          test::error_text([&] { run_rule(*context, spec); }, clattn::ErrorCode::kUnsupported);
      EXPECT_NE(text.find(to_string(family)), std::string::npos) << text;
      if (!clattn::detail::unmet_need(family, context->capabilities())) continue;
      const std::string lacking = test::error_text([&] { rounds_products(*context, spec); },
                                                   clattn::ErrorCode::kUnsupported);
      EXPECT_NE(lacking.find(to_string(family)), std::string::npos) << lacking;
    }
    rule.kernel_family = clattn::KernelFamily::kGpu;
    EXPECT_FALSE(clattn::rounds_products(*context, rule));
  }
}

}  // namespace test_delta_rule
