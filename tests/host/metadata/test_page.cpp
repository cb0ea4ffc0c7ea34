#include <gtest/gtest.h>

#include <clattn/compat/page.hpp>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::error_text;
using Ints = std::vector<std::int32_t>;

TEST(PageOps, A6_10_SeqLens) {
  // A9.14: padding has no page and no last page.
  EXPECT_EQ(get_seq_lens(Ints{0, 2, 2, 3, 7}, Ints{5, 0, 16, 1}, 16), (Ints{21, 0, 16, 49}));
  EXPECT_EQ(get_seq_lens(Ints{0}, Ints{}, 16), Ints{});
  EXPECT_EQ(error_text([] {
              get_seq_lens(Ints{0, 2}, Ints{17}, 16);
            }),
            "request 0: last_page_len is 17, legal: 1 … 16 (2 pages of 16)");
  EXPECT_EQ(error_text([] {
              get_seq_lens(Ints{0, 1, 1}, Ints{1, 3}, 16);
            }),
            "request 1: last_page_len is 3, legal: 0 … 0 (0 pages of 16)");
  EXPECT_EQ(error_text([] {
              get_seq_lens(Ints{0, 3, 2}, Ints{1, 1}, 16);
            }),
            "request 1: indptr[2] is 2, legal: at least 3");
  EXPECT_EQ(error_text([] {
              get_seq_lens(Ints{0, 1 << 20}, Ints{1}, 1 << 20);
            }),
            "seq_lens: 1048575 * 1048576 overflows");
}

TEST(PageOps, A6_10_BatchIndicesAndPositions) {
  // FlashInfer's documented example.
  const BatchIndicesPositions result =
      get_batch_indices_positions(Ints{0, 1, 3, 6, 10}, Ints{5, 5, 5, 5}, 12);
  EXPECT_EQ(result.batch_indices, (Ints{0, 1, 1, 2, 2, 2, 3, 3, 3, 3, -1, -1}));
  EXPECT_EQ(result.positions, (Ints{4, 3, 4, 2, 3, 4, 1, 2, 3, 4, 0, 0}));
  EXPECT_EQ(error_text([] {
              get_batch_indices_positions(Ints{0, 3}, Ints{5}, 2);
            }),
            "nnz is 2, legal: at least 3 (append_indptr[1])");
  EXPECT_EQ(error_text([] {
              get_batch_indices_positions(Ints{0, 3}, Ints{2}, 3);
            }),
            "request 0: seq_lens is 2, legal: at least 3 (its new tokens)");
  EXPECT_EQ(error_text([] { get_batch_indices_positions(Ints{}, Ints{}, 0); }),
            "append_indptr holds 0 elements, legal: 1 (num_reqs + 1)");
}

}  // namespace
}  // namespace clattn
