
#include "metadata/validate.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::Batch;
using test::error_text;
using test::make_batch;

constexpr std::int32_t kBlockSize = 16;
constexpr std::int64_t kNumBlocks = 9;

/// Four requests, a block table of 4 columns: at most 64 tokens each.
Batch legal_batch() {
  Batch batch = make_batch({{1, 20}, {1, 1}, {0, 0}, {7, 64}}, kBlockSize, 0);
  batch.num_computed_tokens = {19, 0, 0, 57};
  batch.slot_mapping = {19, -1, 105, 106, 107, 108, 109, 110, 111, -5};
  batch.max_query_len = 8;
  return batch;
}

std::string error_of(const Batch& batch, std::int32_t block_size = kBlockSize,
                     std::int64_t num_blocks = kNumBlocks) {
  return error_text([&] { validate_batch(batch.view(), block_size, num_blocks); });
}

struct Spoilt {
  std::function<void(Batch&)> spoil;
  const char* message;
};

TEST(ValidateBatch, AcceptsLegalBatches) {
  EXPECT_EQ(error_of(legal_batch()), "no error");
  EXPECT_EQ(error_of(legal_batch(), kBlockSize, -1), "no error");
  EXPECT_EQ(error_of(make_batch({}, 1)), "no error");
  EXPECT_EQ(error_of(make_batch({}, 1, 0), 1, 0), "no error");
  EXPECT_EQ(error_of(make_batch({{0, 0}, {0, 0}}, 1, 0), 1, 0), "no error");
}

// M11: the batch may say how long its sequences are at most.
TEST(ValidateBatch, M11_MaxSeqLenIsABound) {
  Batch batch = legal_batch();
  batch.max_seq_len = 64;
  EXPECT_EQ(error_of(batch), "no error");
  batch.max_seq_len = 63;
  EXPECT_EQ(error_of(batch), "request 3: seq_lens is 64, legal: 0 … 63 (max_seq_len)");
}

TEST(ValidateBatch, NamesRequestFieldValueAndLegalRange) {
  const Spoilt table[] = {
      {[](Batch& b) { b.num_reqs = -1; }, "num_reqs is -1, legal: at least 0"},
      {[](Batch& b) { b.num_actual_tokens = -9; }, "num_actual_tokens is -9, legal: at least 0"},
      {[](Batch& b) { b.max_query_len = -1; }, "max_query_len is -1, legal: at least 0"},
      {[](Batch& b) { b.max_seq_len = -1; }, "max_seq_len is -1, legal: at least 0"},
      {[](Batch& b) { b.block_table_stride = -4; }, "block_table_stride is -4, legal: at least 0"},
      {[](Batch& b) { b.num_reqs = 5; },
       "query_start_loc holds 5 elements, legal: at least 6 (num_reqs + 1)"},
      {[](Batch& b) { b.num_reqs = 0x7fffffff; },
       "query_start_loc holds 5 elements, legal: at least 2147483648 (num_reqs + 1)"},
      {[](Batch& b) { b.seq_lens.pop_back(); },
       "seq_lens holds 3 elements, legal: at least 4 (num_reqs)"},
      {[](Batch& b) { b.num_computed_tokens.pop_back(); },
       "num_computed_tokens holds 3 elements, legal: at least 4 (num_reqs)"},
      {[](Batch& b) { b.block_table.pop_back(); },
       "block_table holds 15 elements, legal: at least 16 (num_reqs 4 x block_table_stride 4)"},
      {[](Batch& b) { b.block_table_stride = std::int64_t{1} << 62; },
       "num_reqs x block_table_stride: 4 * 4611686018427387904 overflows"},
      {[](Batch& b) { b.query_start_loc[0] = 1; }, "query_start_loc[0] is 1, legal: 0"},
      {[](Batch& b) { b.query_start_loc[2] = 0; },
       "request 1: query_start_loc[2] is 0, legal: 1 … 9 (query_start_loc[1] … "
       "num_actual_tokens)"},
      {[](Batch& b) { b.query_start_loc[1] = -2147483647; },
       "request 0: query_start_loc[1] is -2147483647, legal: 0 … 9 (query_start_loc[0] … "
       "num_actual_tokens)"},
      {[](Batch& b) { b.query_start_loc[4] = 10; },
       "request 3: query_start_loc[4] is 10, legal: 2 … 9 (query_start_loc[3] … "
       "num_actual_tokens)"},
      {[](Batch& b) { b.max_query_len = 6; },
       "request 3: query length is 7, legal: 0 … 6 (max_query_len)"},
      {[](Batch& b) { b.seq_lens[3] = 70; },
       "request 3: seq_lens is 70, legal: 7 … 64 (its 4 pages of 16 hold 64 tokens, it needs 5 "
       "pages)"},
      {[](Batch& b) { b.seq_lens[3] = 5; },
       "request 3: seq_lens is 5, legal: 7 … 64 (at least the query length)"},
      {[](Batch& b) { b.seq_lens[2] = -1; },
       "request 2: seq_lens is -1, legal: 0 … 64 (at least the query length)"},
      {[](Batch& b) { b.block_table_stride = 0; },
       "request 0: seq_lens is 20, legal: none (its 0 pages of 16 hold 0 tokens, it needs 2 "
       "pages)"},
      {[](Batch& b) { b.num_computed_tokens[0] = 18; },
       "request 0: num_computed_tokens is 18, legal: 19 (seq_lens 20 - query length 1)"},
      {[](Batch& b) { b.block_table[1] = 9; },
       "request 0: block_table[1] is 9, legal: 0 … 8 (num_blocks 9)"},
      {[](Batch& b) { b.block_table[15] = -1; },
       "request 3: block_table[3] is -1, legal: 0 … 8 (num_blocks 9)"},
      {[](Batch& b) { b.slot_mapping.resize(8); },
       "slot_mapping holds 8 elements, legal: at least 9 (the requests' tokens)"},
      {[](Batch& b) { b.slot_mapping[1] = -2; },
       "request 1: slot_mapping[1] is -2, legal: -1 … 143 (num_blocks 9 x block_size 16)"},
      {[](Batch& b) { b.slot_mapping[8] = 144; },
       "request 3: slot_mapping[8] is 144, legal: -1 … 143 (num_blocks 9 x block_size 16)"},
      {[](Batch& b) { b.slot_mapping[2] = std::numeric_limits<std::int64_t>::max(); },
       "request 3: slot_mapping[2] is 9223372036854775807, legal: -1 … 143 (num_blocks 9 x "
       "block_size 16)"},
      {[](Batch& b) { b.slot_mapping[0] = std::numeric_limits<std::int64_t>::min(); },
       "request 0: slot_mapping[0] is -9223372036854775808, legal: -1 … 143 (num_blocks 9 x "
       "block_size 16)"},
  };
  for (const Spoilt& row : table) {
    Batch batch = legal_batch();
    row.spoil(batch);
    EXPECT_EQ(error_of(batch), row.message);
  }
}

TEST(ValidateBatch, BlockSizeAndCacheSize) {
  EXPECT_EQ(error_of(legal_batch(), 0), "block_size is 0, legal: at least 1");
  EXPECT_EQ(error_of(legal_batch(), -16), "block_size is -16, legal: at least 1");
  EXPECT_EQ(error_of(legal_batch(), kBlockSize, 0),
            "request 0: block_table[0] is 0, legal: none (num_blocks 0)");
  EXPECT_EQ(error_of(legal_batch(), kBlockSize, 1),
            "request 0: block_table[1] is 1, legal: 0 (num_blocks 1)");
  Batch batch = legal_batch();
  batch.slot_mapping[2] = std::int64_t{1} << 35;
  EXPECT_EQ(error_of(batch, kBlockSize, -1),
            "request 3: slot_mapping[2] is 34359738368, legal: -1 … 34359738367");
  batch = make_batch({{1, 1}}, 1, 0);
  batch.block_table_stride = std::int64_t{1} << 33;
  EXPECT_EQ(error_of(batch, 1 << 30),
            "block_table holds 1 elements, legal: at least 8589934592 (num_reqs 1 x "
            "block_table_stride 8589934592)");
}

TEST(ValidateBatch, UnusedEntriesAreNotLookedAt) {
  Batch batch = legal_batch();
  batch.query_start_loc.push_back(-1);
  batch.seq_lens.push_back(-1);
  batch.num_computed_tokens.push_back(77);
  EXPECT_EQ(error_of(batch), "no error");  // its table tails and last slot are poison already
}

TEST(ValidateLengths, Summary) {
  const detail::BatchSummary summary = detail::validate_lengths(legal_batch().view(), kBlockSize);
  EXPECT_EQ(summary.max_query_len, 7);
  EXPECT_EQ(summary.max_seq_len, 64);
  EXPECT_EQ(summary.num_pages, 2 + 1 + 0 + 4);
}

// Three requests of 2^30 pages each: the table itself is never read.
TEST(ValidateLengths, PagesPast32Bits) {
  Batch batch = make_batch({{1, 1}, {1, 1}, {1, 1}}, 1, 0);
  batch.seq_lens.assign(3, 1 << 30);
  batch.block_table_stride = 1 << 30;
  CommonAttentionMetadata view = batch.view();
  view.block_table = {batch.block_table.data(), std::size_t{3} << 30};
  EXPECT_EQ(error_text([&] { detail::validate_lengths(view, 1); }),
            "the requests use 3221225472 pages, legal: at most 2147483647");
}

TEST(ValidateLimits, NamesTheLimit) {
  const Batch batch = legal_batch();
  const detail::BatchSummary summary = detail::validate_lengths(batch.view(), kBlockSize);
  const auto error = [&](const BatchLimits& limits) {
    return error_text([&] { detail::validate_limits(batch.view(), summary, limits); });
  };
  EXPECT_EQ(error({.max_num_reqs = 4, .max_num_batched_tokens = 9, .max_model_len = 64}),
            "no error");
  EXPECT_EQ(error({.max_num_reqs = 3}),
            "num_reqs is 4, legal: 0 … 3 (BuilderOptions::limits.max_num_reqs)");
  EXPECT_EQ(error({.max_num_batched_tokens = 8}),
            "num_actual_tokens is 9, legal: 0 … 8 (BuilderOptions::limits.max_num_batched_tokens)");
  EXPECT_EQ(error({.max_model_len = 63}),
            "request 3: seq_lens is 64, legal: 0 … 63 (max_model_len)");
}

// Kernels that go from tile to tile would come round to the first one again.
TEST(ValidateLimits, TilesPastTheLastKeyAreCountedIn32Bits) {
  Batch batch = legal_batch();
  const BatchLimits limits{.max_model_len = INT32_MAX};
  detail::BatchSummary summary = detail::validate_lengths(batch.view(), kBlockSize);
  const auto error = [&](std::int32_t seq_len) {
    summary.max_seq_len = batch.seq_lens[3] = seq_len;
    return error_text([&] { detail::validate_limits(batch.view(), summary, limits); });
  };
  EXPECT_EQ(error(2147482624), "no error");
  EXPECT_EQ(error(2147482625),
            "request 3: seq_lens is 2147482625, legal: 0 … 2147482624 (tiles are counted in 32 "
            "bits)");
  EXPECT_EQ(error(INT32_MAX).substr(0, 33), "request 3: seq_lens is 2147483647");
}

// Rows of the query behind the requests' tokens are nobody's: no array holds anything for them.
TEST(ValidateBatch, PaddingNeedsNothing) {
  Batch batch = legal_batch();
  batch.num_actual_tokens = 4096;
  EXPECT_EQ(error_of(batch), "no error");
  batch.slot_mapping.resize(9);
  EXPECT_EQ(error_of(batch), "no error");
  const detail::BatchSummary summary = detail::validate_lengths(batch.view(), kBlockSize);
  EXPECT_EQ(error_text([&] {
              detail::validate_limits(batch.view(), summary, {.max_num_batched_tokens = 9});
            }),
            "no error");
}

// The contract once more, field by field, without any of the library's arithmetic.
bool is_legal(const Batch& b, std::int64_t block_size, std::int64_t num_blocks) {
  const std::int64_t reqs = b.num_reqs;
  if (reqs < 0 || b.num_actual_tokens < 0 || b.max_query_len < 0 || block_size < 1) return false;
  if (static_cast<std::int64_t>(b.query_start_loc.size()) < reqs + 1) return false;
  if (static_cast<std::int64_t>(b.seq_lens.size()) < reqs || b.block_table_stride < 0) return false;
  if (b.block_table_stride > std::numeric_limits<std::int64_t>::max() / block_size) return false;
  if (reqs > 0 && b.block_table_stride > 1 << 20) return false;  // no table here is that large
  if (static_cast<std::int64_t>(b.block_table.size()) < reqs * b.block_table_stride) return false;
  const bool history = !b.num_computed_tokens.empty();
  if (history && static_cast<std::int64_t>(b.num_computed_tokens.size()) < reqs) return false;
  if (b.query_start_loc[0] != 0) return false;
  for (std::size_t r = 0; r < static_cast<std::size_t>(reqs); ++r) {
    const std::int64_t query_len = std::int64_t{b.query_start_loc[r + 1]} - b.query_start_loc[r];
    const std::int64_t seq_len = b.seq_lens[r];
    if (query_len < 0 || (b.max_query_len > 0 && query_len > b.max_query_len)) return false;
    if (seq_len < query_len || seq_len > b.block_table_stride * block_size) return false;
    if (history && b.num_computed_tokens[r] != seq_len - query_len) return false;
    for (std::int64_t page = 0; page * block_size < seq_len; ++page) {
      const auto at = static_cast<std::int64_t>(r) * b.block_table_stride + page;
      const std::int32_t id = b.block_table[static_cast<std::size_t>(at)];
      if (id < 0 || (num_blocks >= 0 && id >= num_blocks)) return false;
    }
  }
  const std::int64_t tokens = b.query_start_loc[static_cast<std::size_t>(reqs)];
  if (tokens > b.num_actual_tokens) return false;
  if (b.slot_mapping.empty()) return true;
  if (static_cast<std::int64_t>(b.slot_mapping.size()) < tokens) return false;
  for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
    if (b.slot_mapping[t] < -1) return false;
    if (b.slot_mapping[t] / block_size >= (num_blocks < 0 ? std::int64_t{1} << 31 : num_blocks)) {
      return false;
    }
  }
  return true;
}

class HostileBatches {
 public:
  explicit HostileBatches(std::uint32_t seed) : random_(seed) {}

  std::uint32_t below(std::uint32_t bound) { return static_cast<std::uint32_t>(random_() % bound); }

  template <typename T>
  T nasty() {
    constexpr T kValues[] = {0,
                             1,
                             2,
                             3,
                             15,
                             16,
                             17,
                             -1,
                             -2,
                             std::numeric_limits<T>::min(),
                             std::numeric_limits<T>::max(),
                             std::numeric_limits<T>::max() - 1};
    return kValues[below(std::size(kValues))];
  }

  template <typename T>
  void spoil(std::vector<T>& values) {
    if (values.empty() || below(4) == 0) {
      values.resize(below(6));
    } else {
      values[below(static_cast<std::uint32_t>(values.size()))] = nasty<T>();
    }
  }

  Batch next(std::int32_t block_size) {
    std::vector<test::Request> requests(below(5));
    for (auto& request : requests) {
      request.query_len = static_cast<std::int32_t>(below(4));
      request.seq_len = request.query_len + static_cast<std::int32_t>(below(40));
    }
    Batch batch = make_batch(requests, block_size, below(2));
    if (below(2) == 0) {
      batch.slot_mapping.assign(static_cast<std::size_t>(batch.num_actual_tokens) + below(2), 5);
    }
    if (below(2) == 0) {
      for (const auto& request : requests) {
        batch.num_computed_tokens.push_back(request.seq_len - request.query_len);
      }
    }
    const std::function<void()> spoilers[] = {
        [&] { spoil(batch.query_start_loc); },
        [&] { spoil(batch.seq_lens); },
        [&] { spoil(batch.num_computed_tokens); },
        [&] { spoil(batch.block_table); },
        [&] { spoil(batch.slot_mapping); },
        [&] { batch.num_reqs = nasty<std::int32_t>(); },
        [&] { batch.num_actual_tokens = nasty<std::int32_t>(); },
        [&] { batch.max_query_len = nasty<std::int32_t>(); },
        [&] { batch.block_table_stride = nasty<std::int64_t>(); }};
    for (std::uint32_t n = below(3); n > 0; --n) spoilers[below(std::size(spoilers))]();
    return batch;
  }

 private:
  std::mt19937 random_;
};

// Exactly the illegal ones are refused, with kInvalidArgument and nothing else; run under the
// address sanitizer this also shows that no span is read past its end.
TEST(ValidateBatch, HostileBatchesAreRefusedExactlyWhenIllegal) {
  constexpr std::uint32_t kSeed = 99;
  HostileBatches batches(kSeed);
  int num_legal = 0;
  constexpr int kRuns = 20000;
  for (int run = 0; run < kRuns; ++run) {
    const std::int32_t block_size = batches.below(50) == 0
                                        ? -1 * static_cast<std::int32_t>(batches.below(2))
                                        : 1 + static_cast<std::int32_t>(batches.below(17));
    const std::int64_t num_blocks = static_cast<std::int64_t>(batches.below(200)) - 20;
    const Batch batch = batches.next(std::max(block_size, 1));
    const bool legal = is_legal(batch, block_size, num_blocks);
    const std::string error = error_of(batch, block_size, num_blocks);
    ASSERT_EQ(error == "no error", legal) << "seed " << kSeed << ", run " << run << ": " << error;
    ASSERT_TRUE(error.find("wrong code") == std::string::npos &&
                error.find("foreign") == std::string::npos)
        << error;
    num_legal += legal ? 1 : 0;
  }
  EXPECT_GT(num_legal, kRuns / 10);
  EXPECT_LT(num_legal, kRuns - kRuns / 10);
}

}  // namespace
}  // namespace clattn
