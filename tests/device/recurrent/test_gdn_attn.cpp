// What gated delta nets are told of a step, against lists worked out by hand and against vLLM's
// rules written down anew.
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/gdn_attn.hpp>
#include <numeric>
#include <random>

#include "device/cache_ops_support.hpp"

namespace test_gdn_attn {

using cache_ops_test::all_contexts;
using cache_ops_test::download;
using cache_ops_test::error_text;
using clattn::GDNAttentionMetadata;
using clattn::GDNAttentionMetadataBuilder;
using clattn::KVCacheSpec;
using clattn::MambaCacheMode;
using Ints = std::vector<std::int32_t>;
using Bytes = std::vector<std::uint8_t>;

KVCacheSpec gdn_spec(std::int32_t num_spec, MambaCacheMode mode = MambaCacheMode::kNone) {
  return {.kind = clattn::KVCacheKind::kMamba,
          .block_size = 8,
          .states = {{{4, 16}}, {{1, 16, 16}}},
          .mamba_cache_mode = mode,
          .num_speculative_blocks = num_spec};
}

/// A step's lists, and a builder.
struct GdnCase {
  Ints starts, seq_lens, table, accepted = {}, drafts = {};
  clattn::Context& context = *all_contexts().at(0);
  clattn::Queue queue = context.create_queue();
  GDNAttentionMetadataBuilder builder;

  GdnCase(const KVCacheSpec& spec, Ints query_start_loc, Ints lengths, Ints pages)
      : starts(std::move(query_start_loc)),
        seq_lens(std::move(lengths)),
        table(std::move(pages)),
        builder(context, spec, 0) {}
  const GDNAttentionMetadata& build() {
    return builder.build(queue, clattn::CommonAttentionMetadata::of(starts, seq_lens, table),
                         accepted, drafts);
  }
  Ints listed(const clattn::DeviceList& list, std::size_t count) const {
    if (!list.buffer) return {};
    const auto all = download<std::byte>(queue, list.buffer);
    const auto* const first = reinterpret_cast<const std::int32_t*>(all.data()) + list.offset;
    return {first, first + count};
  }
};

TEST(GDNMetadata, DecodesStandBeforePromptsWithoutDrafts) {
  GdnCase step(gdn_spec(2), {0, 1, 2, 5, 75}, {9, 1, 3, 90},
               {4, 5, 6, 7, 8, 9, 1, 2, 3, 10, 11, 12});
  const GDNAttentionMetadata& made = step.build();
  EXPECT_EQ(
      (Ints{made.num_decodes, made.num_decode_tokens, made.num_prefills, made.num_prefill_tokens,
            made.num_spec_decodes, made.num_spec_decode_tokens, made.num_actual_tokens}),
      (Ints{2, 2, 2, 73, 0, 0, 75}));
  EXPECT_EQ(made.has_initial_state, (Bytes{1, 0, 0, 1}));
  EXPECT_EQ(made.non_spec_query_start_loc, step.starts);
  EXPECT_EQ(made.non_spec_state_indices_tensor, (Ints{4, 7, 1, 10}));
  EXPECT_EQ(made.prefill_query_start_loc, (Ints{0, 3, 73}));
  EXPECT_EQ(made.prefill_state_indices, (Ints{1, 10}));
  EXPECT_EQ(made.prefill_has_initial_state, (Bytes{0, 1}));
  EXPECT_EQ(made.chunk_indices, (Ints{0, 0, 1, 0, 1, 1}));
  EXPECT_EQ(made.chunk_offsets, (Ints{0, 1, 3}));
  EXPECT_TRUE(made.spec_query_start_loc.empty() && made.spec_state_indices_tensor.empty() &&
              made.spec_sequence_masks.empty() && made.spec_token_indx.empty() &&
              made.non_spec_token_indx.empty() && made.num_accepted_tokens.empty());
  EXPECT_EQ(made.metadata.state_columns, 1);
  EXPECT_EQ(made.metadata.null_block_id, 0);
  EXPECT_EQ(step.listed(made.metadata.state_indices, 4), (Ints{4, 7, 1, 10}));
}

TEST(GDNMetadata, BesideDraftsDecodesArePrefills) {
  // Drafts of 2, a decode, drafts of 0, a prompt; states begin with the last token's block.
  GdnCase step(gdn_spec(2, MambaCacheMode::kAlign), {0, 3, 4, 5, 9}, {17, 8, 9, 4},
               {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20});
  step.accepted = {3, 7, 2, 7};
  step.drafts = {2, -1, 0, -1};
  const GDNAttentionMetadata& made = step.build();
  EXPECT_EQ(
      (Ints{made.num_decodes, made.num_decode_tokens, made.num_prefills, made.num_prefill_tokens,
            made.num_spec_decodes, made.num_spec_decode_tokens, made.num_actual_tokens}),
      (Ints{0, 0, 2, 5, 2, 4, 9}));
  EXPECT_EQ(made.spec_sequence_masks, (Bytes{1, 0, 1, 0}));
  EXPECT_EQ(made.spec_query_start_loc, (Ints{0, 3, 4}));
  EXPECT_EQ(made.non_spec_query_start_loc, (Ints{0, 1, 5}));
  EXPECT_EQ(made.spec_state_indices_tensor, (Ints{3, 4, 5, 12, 13, 14}));
  EXPECT_EQ(made.non_spec_state_indices_tensor, (Ints{6, 16}));
  EXPECT_EQ(made.spec_token_indx, (Ints{0, 1, 2, 4}));
  EXPECT_EQ(made.non_spec_token_indx, (Ints{3, 5, 6, 7, 8}));
  EXPECT_EQ(made.num_accepted_tokens, (Ints{3, 2}));
  EXPECT_EQ(made.has_initial_state, (Bytes{1, 0}));
  EXPECT_EQ(made.prefill_query_start_loc, (Ints{0, 1, 5}));
  // What our operations take is in the batch's order.
  EXPECT_EQ(step.listed(made.metadata.state_indices, 12),
            (Ints{3, 4, 5, 6, -1, -1, 12, 13, 14, 16, -1, -1}));
  EXPECT_EQ(step.listed(made.metadata.num_accepted_tokens, 4), (Ints{3, -1, 2, -1}));
  EXPECT_EQ(step.listed(made.metadata.query_start_loc, 5), step.starts);
}

// vLLM's build(): boolean masks, a stable sort, cumulative sums.
TEST(GDNMetadata, RandomStepsAreVllms) {
  constexpr std::int32_t kSpec = 3;
  constexpr std::size_t kColumns = 12;
  std::mt19937 random(5);
  const auto below = [&](std::uint32_t n) { return static_cast<std::int32_t>(random() % n); };
  for (int round = 0; round < 50; ++round) {
    const bool align = below(2) == 0;
    GdnCase step(gdn_spec(kSpec, align ? MambaCacheMode::kAlign : MambaCacheMode::kNone), {0}, {},
                 {});
    const auto requests = static_cast<std::size_t>(1 + below(6));
    Bytes mask, of_tokens;
    Ints starts[2] = {{0}, {0}}, pages[2], accepted;
    std::int32_t prefills = 0;
    for (std::size_t r = 0; r < requests; ++r) {
      const std::size_t spec = below(2) == 0 ? 1 : 0;
      mask.push_back(static_cast<std::uint8_t>(spec));
      std::int32_t tokens = below(3) == 0 ? 1 : below(20);
      if (spec == 1) tokens = 1 + below(kSpec + 1);
      of_tokens.insert(of_tokens.end(), static_cast<std::size_t>(tokens), mask.back());
      step.starts.push_back(step.starts.back() + tokens);
      step.seq_lens.push_back(tokens + (spec == 1 ? 1 : 0) + below(20));
      step.drafts.push_back(spec == 1 ? tokens - 1 : -1);
      step.accepted.push_back(1 + below(kSpec + 1));
      for (std::size_t c = 0; c < kColumns; ++c)
        step.table.push_back(static_cast<std::int32_t>(1 + r * kColumns + c));
      starts[spec].push_back(starts[spec].back() + tokens);
      const std::int32_t column = align ? std::max(step.seq_lens.back() - 1, 0) / 8 : 0;
      const auto row = step.table.end() - kColumns + column;
      pages[spec].insert(pages[spec].end(), row, row + (spec == 1 ? 1 + kSpec : 1));
      if (spec == 1) accepted.push_back(step.accepted.back());
      if (spec == 0 && tokens > 0) ++prefills;
    }
    if (std::ranges::none_of(step.drafts, [](std::int32_t d) { return d > 0; })) continue;
    const GDNAttentionMetadata& made = step.build();
    Ints order(of_tokens.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(
        order, {}, [&](std::int32_t token) { return of_tokens[static_cast<std::size_t>(token)]; });
    Ints joined = made.non_spec_token_indx;
    joined.insert(joined.end(), made.spec_token_indx.begin(), made.spec_token_indx.end());
    EXPECT_EQ(joined, order);
    EXPECT_EQ(made.spec_sequence_masks, mask);
    EXPECT_EQ(made.spec_query_start_loc, starts[1]);
    EXPECT_EQ(made.non_spec_query_start_loc, starts[0]);
    EXPECT_EQ(made.spec_state_indices_tensor, pages[1]);
    EXPECT_EQ(made.non_spec_state_indices_tensor, pages[0]);
    EXPECT_EQ(made.num_accepted_tokens, accepted);
    EXPECT_EQ(made.num_prefills, prefills);
    EXPECT_EQ(made.num_spec_decode_tokens, starts[1].back());
    EXPECT_EQ(made.num_prefill_tokens, starts[0].back());
  }
}

TEST(GDNMetadata, NamesWhatItRefuses) {
  const auto& context = *all_contexts().at(0);
  EXPECT_EQ(error_text([&] { GDNAttentionMetadataBuilder(context, KVCacheSpec()); }),
            "GDNAttentionMetadataBuilder: spec is of kind full, legal: mamba");
  EXPECT_EQ(
      error_text([&] { GDNAttentionMetadataBuilder(context, gdn_spec(0, MambaCacheMode::kAll)); }),
      "GDNAttentionMetadataBuilder: mamba_cache_mode is all, legal: none, align");
  GdnCase step(gdn_spec(2), {0, 3, 4}, {9, 9}, {1, 2, 3, 4, 5, 6});
  const auto refused = [&] { return error_text([&] { step.build(); }); };
  step.drafts = {2};
  EXPECT_EQ(refused(),
            "GDNAttentionMetadataBuilder::build: num_decode_draft_tokens has 1 elements, legal: 2");
  step.drafts = {2, -1};
  EXPECT_EQ(refused(),
            "GDNAttentionMetadataBuilder::build: num_accepted_tokens has 0 elements, legal: 2");
  step.accepted = {4, 1};
  EXPECT_EQ(refused(),
            "RecurrentMetadataBuilder::build: num_accepted_tokens[0] is 4, legal: 1 … 3 "
            "(state_columns), or negative without drafts");
  step.drafts = {1, -1};
  EXPECT_EQ(refused(),
            "GDNAttentionMetadataBuilder::build: num_decode_draft_tokens[0] is 1, legal: 2 (its "
            "query tokens but one), at most 2 (num_speculative_blocks); or -1");
  step.table = {1, 2, 3, 4};
  step.drafts = {2, -1};
  EXPECT_EQ(refused(),
            "GDNAttentionMetadataBuilder::build: block_table has 2 columns, legal: at least 3 "
            "(request 0)");
  step.starts = {0, 4, 3};
  EXPECT_EQ(refused(),
            "GDNAttentionMetadataBuilder::build: num_decode_draft_tokens[0] is 2, legal: 3 (its "
            "query tokens but one), at most 2 (num_speculative_blocks); or -1");
}

}  // namespace test_gdn_attn
