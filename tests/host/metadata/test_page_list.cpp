
#include "metadata/page_list.hpp"

#include <gtest/gtest.h>

#include <clattn/compat/page.hpp>
#include <random>

#include "host/metadata_batch.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using test::Batch;
using test::error_text;
using test::make_batch;
using Ints = std::vector<std::int32_t>;

TEST(PageList, SpecExample) {
  Batch batch = make_batch({{0, 48}, {0, 33}, {0, 17}}, 16, 0);
  batch.block_table = {0, 5, 8, 1, 6, 7, 3, 4, test::kPoisonBlock};
  const PagedKVMetadata pages = build_paged_kv_metadata(batch.view(), 16);
  EXPECT_EQ(pages.indices, (Ints{0, 5, 8, 1, 6, 7, 3, 4}));
  EXPECT_EQ(pages.indptr, (Ints{0, 3, 6, 8}));
  EXPECT_EQ(pages.last_page_len, (Ints{16, 1, 1}));
}

TEST(PageList, NeedsNoQueries) {
  Batch batch = make_batch({{1, 5}}, 4);
  batch.query_start_loc.clear();
  EXPECT_EQ(build_paged_kv_metadata(batch.view(), 4).last_page_len, Ints{1});
}

TEST(PageList, EmptyBatchAndEmptyRequests) {
  const PagedKVMetadata none = build_paged_kv_metadata(make_batch({}, 16).view(), 16);
  EXPECT_EQ(none.indptr, Ints{0});
  EXPECT_TRUE(none.indices.empty());
  EXPECT_TRUE(none.last_page_len.empty());
  const PagedKVMetadata some =
      build_paged_kv_metadata(make_batch({{0, 0}, {1, 4}, {0, 0}}, 4).view(), 4);
  EXPECT_EQ(some.indptr, (Ints{0, 0, 1, 1}));
  EXPECT_EQ(some.indices, Ints{0});
  EXPECT_EQ(some.last_page_len, (Ints{0, 4, 0}));
}

TEST(PageList, PagesOfOneToken) {
  const PagedKVMetadata pages = build_paged_kv_metadata(make_batch({{1, 3}}, 1).view(), 1);
  EXPECT_EQ(pages.indices, (Ints{0, 1, 2}));
  EXPECT_EQ(pages.last_page_len, Ints{1});
}

TEST(PageList, RefusesABadTable) {
  Batch batch = make_batch({{1, 9}, {1, 9}}, 4, 0);
  batch.block_table[4] = -1;
  EXPECT_EQ(error_text([&] { build_paged_kv_metadata(batch.view(), 4); }),
            "request 1: block_table[1] is -1, legal: 0 … 2147483647");
  batch.seq_lens[0] = -2;
  EXPECT_EQ(error_text([&] { build_paged_kv_metadata(batch.view(), 4); }),
            "request 0: seq_lens is -2, legal: 0 … 12 (at least the query length)");
}

// One bad id at every place of rows of every length around the vector width.
TEST(AppendPages, FindsABadIdAnywhere) {
  constexpr std::int32_t kLast = 1000;
  constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
  for (std::size_t count = 0; count < 70; ++count) {
    Ints row(count);
    for (std::size_t i = 0; i < count; ++i) row[i] = i % 3 == 0 ? kLast : static_cast<int>(i);
    Ints copy(count + 1, -9);
    ASSERT_TRUE(detail::append_pages(copy.data(), row.data(), count, kLast));
    ASSERT_TRUE(detail::pages_in_range(row.data(), count, kLast));
    ASSERT_EQ(copy.back(), -9);
    copy.pop_back();
    ASSERT_EQ(copy, row);
    for (std::size_t at = 0; at < count; ++at) {
      for (const std::int32_t bad : {kLast + 1, -1, kMax, -kMax - 1}) {
        Ints spoilt = row;
        spoilt[at] = bad;
        ASSERT_FALSE(detail::append_pages(copy.data(), spoilt.data(), count, kLast));
        ASSERT_FALSE(detail::pages_in_range(spoilt.data(), count, kLast));
      }
    }
  }
}

TEST(AppendPages, ExtremeRanges) {
  const Ints ids{0, std::numeric_limits<std::int32_t>::max()};
  EXPECT_TRUE(detail::pages_in_range(ids.data(), 2, detail::last_block_id(-1)));
  EXPECT_TRUE(detail::pages_in_range(ids.data(), 2, detail::last_block_id(std::int64_t{1} << 60)));
  EXPECT_FALSE(detail::pages_in_range(ids.data(), 2, detail::last_block_id(0x7fffffff)));
  EXPECT_FALSE(detail::pages_in_range(ids.data(), 1, detail::last_block_id(0)));
  EXPECT_TRUE(detail::pages_in_range(ids.data(), 0, detail::last_block_id(0)));
}

}  // namespace
}  // namespace clattn
