#include <gtest/gtest.h>

#include <clattn/cascade.hpp>

#include "host/metadata_batch.hpp"
#include "metadata/cascade_batch.hpp"

namespace clattn {
namespace {

using test::error_text;
using Ints = std::vector<std::int32_t>;

/// 8 requests of one token, 32 heads over 8, on 132 units.
CascadeQuery decodes(const Ints& query_lens, std::int32_t prefix) {
  return {.common_prefix_len = prefix,
          .query_lens = query_lens,
          .num_query_heads = 32,
          .num_kv_heads = 8,
          .num_sms = 132};
}

TEST(UseCascadeAttention, A6_8_WhatRulesItOut) {
  const Ints prefills(8, 100), few(7, 100);
  EXPECT_TRUE(use_cascade_attention(decodes(prefills, 256)));
  EXPECT_FALSE(use_cascade_attention(decodes(prefills, 255)));
  EXPECT_FALSE(use_cascade_attention(decodes(few, 4096)));
  for (bool CascadeQuery::*option : {&CascadeQuery::use_alibi, &CascadeQuery::use_sliding_window,
                                     &CascadeQuery::use_local_attention}) {
    CascadeQuery query = decodes(prefills, 4096);
    query.*option = true;
    EXPECT_FALSE(use_cascade_attention(query));
  }
}

TEST(UseCascadeAttention, A6_8_DecodesOfGroupedHeadsCompareWaves) {
  const Ints eight(8, 1), many(256, 1);
  // cdiv(32 * 1, 132) * 2 = 2 against cdiv(8 * 8 * 1 * 2, 132) = 1
  EXPECT_FALSE(use_cascade_attention(decodes(eight, 256)));
  // cdiv(32 * 2, 132) * 32 = 32 against cdiv(256 * 8 * 1 * 32, 132) = 497
  EXPECT_TRUE(use_cascade_attention(decodes(many, 4096)));
  // Equal is not less: on 16 units, 2 * 2 = 4 against cdiv(8 * 4 * 1 * 2, 16) = 4
  CascadeQuery tie = decodes(eight, 256);
  tie.num_kv_heads = 4;
  tie.num_sms = 16;
  EXPECT_FALSE(use_cascade_attention(tie));
  // A query of two tokens or one head a KV head: not split decoding, so always.
  Ints mixed = eight;
  mixed[3] = 2;
  EXPECT_TRUE(use_cascade_attention(decodes(mixed, 256)));
  CascadeQuery mha = decodes(eight, 256);
  mha.num_kv_heads = 32;
  EXPECT_TRUE(use_cascade_attention(mha));
}

TEST(UseCascadeAttention, A6_8_EqualsTheFormula) {
  const auto cdiv = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  for (const std::int32_t group : {2, 8, 160}) {
    for (const std::int32_t num_kv_heads : {1, 8}) {
      for (const std::int32_t sms : {1, 20, 132}) {
        for (const std::int32_t num_reqs : {8, 128, 129, 1000}) {
          for (const std::int32_t prefix : {256, 257, 5000}) {
            const Ints lens(static_cast<std::size_t>(num_reqs), 1);
            const std::int64_t heads = std::int64_t{group} * num_kv_heads;
            const std::int64_t tiles = cdiv(prefix, 128);
            const std::int64_t cascade = cdiv(heads * cdiv(num_reqs, 128), sms) * tiles;
            const std::int64_t split =
                cdiv(num_reqs * num_kv_heads * cdiv(group, 128) * tiles, sms);
            EXPECT_EQ(use_cascade_attention({.common_prefix_len = prefix,
                                             .query_lens = lens,
                                             .num_query_heads = static_cast<std::int32_t>(heads),
                                             .num_kv_heads = num_kv_heads,
                                             .num_sms = sms}),
                      cascade < split);
          }
        }
      }
    }
  }
}

TEST(UseCascadeAttention, RefusesNonsense) {
  const Ints eight(8, 1);
  CascadeQuery query = decodes(eight, 256);
  query.num_sms = 0;
  EXPECT_EQ(error_text([&] { use_cascade_attention(query); }), "num_sms is 0, legal: at least 1");
  query = decodes(eight, 256);
  query.num_kv_heads = 5;
  EXPECT_EQ(error_text([&] { use_cascade_attention(query); }),
            "num_query_heads is 32, legal: a multiple of num_kv_heads 5");
}

// The prefix's one sequence has the requests' tokens, not the padding behind them.
TEST(CascadeBatch, S5_PaddingIsInNoLevel) {
  test::Batch batch = test::make_batch({{1, 20}, {3, 40}}, 16);
  batch.num_actual_tokens = 64;
  detail::CascadeBatch level;
  level.set_prefix(batch.view(), 16, 16);
  EXPECT_EQ(level.num_tokens(), 4);
  EXPECT_EQ(level.batch().seq_lens[0], 16);
  level.set_suffix(batch.view(), 16, 16);
  EXPECT_EQ(level.num_tokens(), 4);
  EXPECT_EQ(level.batch().num_actual_tokens, 4);
}

}  // namespace
}  // namespace clattn
