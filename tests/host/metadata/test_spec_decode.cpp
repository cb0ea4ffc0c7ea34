#include <gtest/gtest.h>

#include <clattn/compat/spec_decode.hpp>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::error_text;

TEST(SpecDecode, A1_10_QueriesAsRequests) {
  const TensorRef query{.buffer = nullptr, .offset = 12, .token_stride = 640};
  const SpecDecodeTensor result = reshape_query_for_spec_decode(query, 12, 3);
  EXPECT_EQ(result.batch_size, 3);
  EXPECT_EQ(result.query_len, 4);
  const TensorRef back = reshape_attn_output_for_spec_decode(result);
  EXPECT_EQ(result.num_tokens(), 12);
  EXPECT_EQ(back.offset, 12);
  EXPECT_EQ(back.token_stride, 640);
  EXPECT_EQ(error_text([&] { reshape_query_for_spec_decode(query, 13, 3); }),
            "num_tokens is 13, legal: a multiple of batch_size 3");
  EXPECT_EQ(error_text([&] { reshape_query_for_spec_decode(query, 13, 0); }),
            "batch_size is 0, legal: at least 1");
}

TEST(AttentionCGSupport, A1_10_IsOrdered) {
  EXPECT_GT(AttentionCGSupport::kAlways, AttentionCGSupport::kUniformBatch);
  EXPECT_GT(AttentionCGSupport::kUniformBatch, AttentionCGSupport::kUniformSingleTokenDecode);
  EXPECT_GT(AttentionCGSupport::kUniformSingleTokenDecode, AttentionCGSupport::kNever);
  EXPECT_EQ(static_cast<int>(AttentionCGSupport::kAlways), 3);
  EXPECT_EQ(static_cast<int>(AttentionCGSupport::kNever), 0);
}

}  // namespace
}  // namespace clattn
