// Caches with a scale for each token and head: what the writer stores, by the oracle's judge, and
// what operations on blocks and tokens do to codes and scales.

#include <fmt/format.h>

#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <clattn/compat/packed_cache.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/registry.hpp>
#include <cmath>
#include <cstring>
#include <limits>

#include "device/cache_ops_support.hpp"
#include "oracle/row_scales.hpp"

namespace test_row_scales {

using cache_ops_test::all_contexts;
using cache_ops_test::download;
using cache_ops_test::element;
using cache_ops_test::encode;
using cache_ops_test::error_text;
using cache_ops_test::upload;
using clattn::DType;
using clattn::KVCache;
using clattn::KVCacheLayout;
using clattn::KVQuantMode;
using Bytes = std::vector<std::uint8_t>;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::uint8_t kPoison = 0xFF;  // of a scale: NaN

struct Shape {
  DType code = DType::kInt8;
  std::int32_t heads = 2, head_size = 64, block_size = 16;
  KVCacheLayout layout = KVCacheLayout::kNHD;
  std::int64_t blocks = 4;
};

/// A cache in the library's pages, all bytes poison.
KVCache make_cache(const clattn::Context& context, const clattn::Queue& queue, const Shape& shape,
                   std::size_t padding = 0) {
  clattn::KVCacheSpec spec{.block_size = shape.block_size,
                           .num_kv_heads = shape.heads,
                           .head_size = shape.head_size,
                           .dtype = shape.code,
                           .kv_quant_mode = KVQuantMode::kPerTokenHead};
  if (padding > 0) spec.page_size_padded = spec.page_size_bytes() + padding;
  const std::size_t bytes = spec.page_size_bytes() * static_cast<std::size_t>(shape.blocks);
  const clattn::Buffer memory = upload(context, queue, Bytes(bytes, kPoison));
  return clattn::reshape_kv_cache(memory, spec, *clattn::list_attn_backends()[0], shape.layout);
}

/// One row of a cache's bytes, each code in one.
struct Row {
  Bytes codes;
  float scale = 0;
};
std::size_t scale_at(const KVCache& cache, bool values, std::int64_t slot, std::int64_t head) {
  const KVCache::RowScales& at = *cache.row_scales;
  const std::int64_t first = values ? at.v_offset : at.k_offset;
  return static_cast<std::size_t>(first + slot / cache.block_size * at.block_stride +
                                  slot % cache.block_size * at.token_stride +
                                  head * at.head_stride);
}
std::size_t codes_at(const KVCache& cache, bool values, std::int64_t slot, std::int64_t head) {
  const std::int64_t block = slot / cache.block_size, token = slot % cache.block_size;
  return static_cast<std::size_t>(values ? cache.value_at(block, token, head, 0)
                                         : cache.key_at(block, token, head, 0));
}
Row row_of(const KVCache& cache, const Bytes& bytes, bool values, std::int64_t slot,
           std::int64_t head) {
  const std::size_t first = codes_at(cache, values, slot, head);
  Row row;
  for (std::size_t d = 0; d < static_cast<std::size_t>(cache.head_size); ++d) {
    if (cache.dtype != DType::kUInt4x2)
      row.codes.push_back(bytes[first + d]);
    else
      row.codes.push_back(bytes[first + d / 2] >> d % 2 * 4 & 15);
  }
  std::memcpy(&row.scale, &bytes[scale_at(cache, values, slot, head) * sizeof(float)],
              sizeof(float));
  return row;
}

/// Rows of K and V as `dtype` holds them, [tokens, heads, head_size].
struct Rows {
  std::vector<double> key, value;
  void round(DType dtype) {
    for (auto* side : {&key, &value})
      for (double& x : *side) x = oracle::round_to(element(dtype), x);
  }
};

void store(const clattn::Context& context, const clattn::Queue& queue, const KVCache& cache,
           DType dtype, const Rows& rows, const std::vector<std::int64_t>& slots) {
  const clattn::Buffer key = upload(context, queue, encode(dtype, rows.key));
  const clattn::Buffer value = upload(context, queue, encode(dtype, rows.value));
  const clattn::Buffer at = upload(context, queue, slots);
  clattn::reshape_and_cache_flash(context, queue, {.buffer = key.handle()},
                                  {.buffer = value.handle()}, dtype, cache, at.handle(), 0,
                                  static_cast<std::int64_t>(slots.size()));
  queue.finish();
}

/// Every stored row is legal, and every other byte is as it was.
void expect_stored(const KVCache& cache, const Rows& rows, const std::vector<std::int64_t>& slots,
                   Bytes bytes) {
  const auto width = static_cast<std::size_t>(cache.head_size);
  const std::int64_t num_slots = cache.num_blocks * cache.block_size;
  for (std::size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] < 0 || slots[t] >= num_slots) continue;
    for (std::int64_t head = 0; head < cache.num_kv_heads; ++head) {
      const std::size_t first =
          (t * static_cast<std::size_t>(cache.num_kv_heads) + static_cast<std::size_t>(head)) *
          width;
      for (const bool values : {false, true}) {
        const Row row = row_of(cache, bytes, values, slots[t], head);
        const std::vector<double>& given = values ? rows.value : rows.key;
        EXPECT_EQ(oracle::why_not_stored(std::span(given).subspan(first, width),
                                         {element(cache.dtype), row.codes, row.scale}),
                  "")
            << (values ? "value" : "key") << " of token " << t << " head " << head;
        std::fill_n(
            bytes.begin() + static_cast<std::ptrdiff_t>(codes_at(cache, values, slots[t], head)),
            cache.key_elements(), kPoison);
        std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(
                                        scale_at(cache, values, slots[t], head) * sizeof(float)),
                    sizeof(float), kPoison);
      }
    }
  }
  EXPECT_TRUE(std::ranges::all_of(bytes, [](std::uint8_t byte) { return byte == kPoison; }))
      << "bytes outside of the stored rows have changed";
}

void expect_writes(const clattn::Context& context, const Shape& shape, DType dtype, Rows rows,
                   const std::vector<std::int64_t>& slots, std::size_t padding = 0) {
  const clattn::Queue queue = context.create_queue();
  const KVCache cache = make_cache(context, queue, shape, padding);
  rows.round(dtype);
  store(context, queue, cache, dtype, rows, slots);
  SCOPED_TRACE(fmt::format("{} from {}, {} heads of {}, pages of {}", to_string(cache.format()),
                           to_string(dtype), shape.heads, shape.head_size, shape.block_size));
  expect_stored(cache, rows, slots, download<std::uint8_t>(queue, cache.buffer));
}

/// Gaussian rows of different sizes: of a token 10^-4 ... 10^4 of its neighbour's.
Rows random_rows(std::size_t tokens, const Shape& shape, double spread = 4) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  Rows rows;
  for (std::size_t row = 0; row < tokens * static_cast<std::size_t>(shape.heads); ++row) {
    const double size = std::pow(10.0, spread * (static_cast<double>(row % 5) - 2) / 2);
    for (std::int32_t d = 0; d < shape.head_size; ++d) {
      rows.key.push_back(size * normal(random));
      rows.value.push_back(normal(random) / size);
    }
  }
  return rows;
}

void for_each_code(const auto& run) {
  for (const auto& context : all_contexts())
    for (const DType code : {DType::kInt8, DType::kFp8E4M3, DType::kUInt4x2}) run(*context, code);
}

// Slots out of order, the last of the last page, none, and outside of the cache.
const std::vector<std::int64_t> kSlots = {17, 3, -1, 63, 1000, 0, 16};

TEST(RowScaleWrite, RowsOfAnySizeInAnyShape) {
  for_each_code([](const clattn::Context& context, DType code) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      Shape shape{.code = code};
      expect_writes(context, shape, dtype, random_rows(7, shape, dtype == DType::kF16 ? 2 : 4),
                    kSlots);
      shape.layout = KVCacheLayout::kHND;
      expect_writes(context, shape, dtype, random_rows(7, shape, 1), kSlots, 64);
    }
    for (const Shape& shape : {Shape{code, 1, 8, 1, KVCacheLayout::kNHD, 70},
                               Shape{code, 8, 80, 5, KVCacheLayout::kHND, 13},
                               Shape{code, 3, 72, 5, KVCacheLayout::kNHD, 13},
                               Shape{code, 1, 512, 17}, Shape{code, 3, 128, 64}})
      expect_writes(context, shape, DType::kF16, random_rows(7, shape, 1), kSlots);
  });
}

/// Every row of two heads the same: `first` elements, then zeros.
Rows special(const std::vector<double>& first, const Shape& shape) {
  std::vector<double> row = first;
  row.resize(static_cast<std::size_t>(shape.head_size));
  Rows rows;
  for (std::int32_t head = 0; head < shape.heads; ++head) {
    rows.key.insert(rows.key.end(), row.begin(), row.end());
    for (const double x : row) rows.value.push_back(-x);
  }
  return rows;
}

TEST(RowScaleWrite, EdgesOfNumbers) {
  const std::vector<std::vector<double>> edges = {
      {0, -0.0},                                         // zeros
      {3, 3, 3, 3},                                      // a constant row
      {1e-5, 3e-6, -7e-6},                               // below vLLM's floor
      {6e-8, -6e-8},                                     // subnormal f16
      {65504, 1, -65504},                                // the largest f16
      {127, .5, 1.5, 2.5, -.5, -1.5, -2.5, -127},        // ties of int8, both ends
      {448, 432, 464, 0.0009765625, 0.001953125, 17.0},  // ties of e4m3
      {1, kInf, 2},
      {1, -kInf, 2},
      {1, kNaN, 2},
      std::vector<double>(64, 3.0),    // constant rows of one sign (A7.1)
      std::vector<double>(64, -1e-5),  // and below vLLM's floor
      {7.5, 1, 2, 3, -7.5, 0.5, 1.5},  // a zero between two codes
      {kInf},
      {kNaN, kInf, -kInf}};
  for_each_code([&](const clattn::Context& context, DType code) {
    const Shape shape{.code = code};
    for (const auto& edge : edges)
      for (const DType dtype : {DType::kF32, DType::kF16})
        expect_writes(context, shape, dtype, special(edge, shape), {5});
    for (const double size : {3e38, 1e30, 1e-30, 1e-38, 1e-40})
      expect_writes(context, shape, DType::kF32, special({size, size / 3, -size / 7}, shape), {5});
    // A 15th of it in f32 has a mantissa of ones alone.
    expect_writes(context, shape, DType::kF32, special({30 - 0x1p-19, 10, 0}, shape), {5});
  });
}

/// A row's values in [1, 2], whose range has 0 all the same: it would else take a fourth of the
/// codes.
TEST(RowScaleWrite, RowsOfOneSign) {
  for_each_code([](const clattn::Context& context, DType code) {
    const Shape shape{.code = code};
    std::vector<double> row;
    for (int d = 0; d < shape.head_size; ++d) row.push_back(1 + d / 64.0);
    expect_writes(context, shape, DType::kF32, special(row, shape), {5});
  });
}

/// vLLM's bytes of two tokens, of one head of 8 dims each: codes of K, scale of K, codes of V,
/// scale of V. The lower half of a byte is the even dim; a scale's 4 lowest bits are its zero.
TEST(RowScaleWrite, FourBitsAreVllmsBytes) {
  constexpr std::int64_t kRow = 16;
  const Rows rows{{-2, 13, 0, 1, 3, -1, 5, 12, 0, 0, 0, 0, 0, 0, 0, 0},
                  {0, -7.5, -.5, -1, -2, -3, -4, -5, 30, 0, 2, 4, 6, 8, 10, 12}};
  const Bytes wanted = {0xF0, 0x32, 0x15, 0xE7,   // + 2
                        0x02, 0x00, 0x80, 0x3F,   // 1, 2
                        0x0F, 0xDE, 0x9B, 0x57,   // / 0.5 + 15
                        0x0F, 0x00, 0x00, 0x3F,   // 0.5, 15
                        0x00, 0x00, 0x00, 0x00,   // zeros
                        0x00, 0x00, 0x00, 0x00,   // 0, 0
                        0x0F, 0x21, 0x43, 0x65,   // / 2
                        0x00, 0x00, 0x00, 0x40};  // 2, 0
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    KVCache cache{.buffer = upload(*context, queue, Bytes(2 * kRow, kPoison)),
                  .dtype = DType::kUInt4x2,
                  .num_blocks = 1,
                  .block_size = 2,
                  .num_kv_heads = 1,
                  .head_size = 8,
                  .v_offset = 8,
                  .block_stride = 2 * kRow,
                  .token_stride = kRow,
                  .head_stride = kRow};
    cache.scales = cache.buffer;
    cache.row_scales = {.k_offset = 1,
                        .v_offset = 3,
                        .block_stride = kRow / 2,
                        .token_stride = kRow / 4,
                        .head_stride = kRow / 4};
    store(*context, queue, cache, DType::kF16, rows, {0, 1});
    EXPECT_EQ(download<std::uint8_t>(queue, cache.buffer), wanted);
  }
}

TEST(RowScaleWrite, NeighboursOfOtherSizesAreExact) {  // 19, 20: an index by token and by head
  for_each_code([](const clattn::Context& context, DType code) {
    const Shape shape{.code = code, .heads = 4};
    Rows rows;
    for (const double size : {1e-4, 1e4})
      for (int head = 0; head < 4; ++head)
        for (int d = 0; d < 64; ++d) {
          rows.key.push_back((head == 2 ? 1000 : 1) * size * (d - 31.5));
          rows.value.push_back((head == 1 ? 1000 : 1) * size * (40.25 - d));
        }
    expect_writes(context, shape, DType::kF32, rows, {7, 8});
  });
}

TEST(RowScaleWrite, TokenByTokenAsInOneCallAndOverwritten) {
  for_each_code([](const clattn::Context& context, DType code) {
    const Shape shape{.code = code};
    const clattn::Queue queue = context.create_queue();
    const KVCache one = make_cache(context, queue, shape);
    const KVCache other = make_cache(context, queue, shape);
    Rows rows = random_rows(4, shape, 2);
    rows.round(DType::kF16);
    store(context, queue, one, DType::kF16, rows, {4, 5, 6, 20});
    const Rows large = special({60000, -60000}, shape);
    const auto width = static_cast<std::ptrdiff_t>(shape.heads) * shape.head_size;
    for (std::ptrdiff_t t = 0; t < 4; ++t) {
      const std::int64_t slot = t == 3 ? 20 : 4 + t;
      store(context, queue, other, DType::kF16, large, {slot});
      const auto part = [&](const std::vector<double>& side) {
        return std::vector<double>(side.begin() + t * width, side.begin() + (t + 1) * width);
      };
      store(context, queue, other, DType::kF16, {part(rows.key), part(rows.value)}, {slot});
    }
    EXPECT_EQ(download<std::uint8_t>(queue, one.buffer),
              download<std::uint8_t>(queue, other.buffer));
  });
}

/// A cache with something in its first three pages.
KVCache filled(const clattn::Context& context, const clattn::Queue& queue, const Shape& shape) {
  const KVCache cache = make_cache(context, queue, shape);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(shape.block_size) * 3);
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
  Rows rows = random_rows(slots.size(), shape, 1);
  rows.round(DType::kF16);
  store(context, queue, cache, DType::kF16, rows, slots);
  return cache;
}

void expect_page(const KVCache& cache, const Bytes& before, std::int64_t from, const Bytes& after,
                 std::int64_t to) {
  const std::int64_t slots = cache.block_size;
  for (std::int64_t token = 0; token < slots; ++token)
    for (std::int64_t head = 0; head < cache.num_kv_heads; ++head)
      for (const bool values : {false, true}) {
        const Row want = row_of(cache, before, values, from * slots + token, head);
        const Row got = row_of(cache, after, values, to * slots + token, head);
        EXPECT_EQ(got.codes, want.codes);
        EXPECT_EQ(got.scale, want.scale);
      }
}

TEST(RowScaleBlocks, CopiesAndSwapsMoveScalesWithCodes) {
  for_each_code([](const clattn::Context& context, DType code) {
    for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
      const Shape shape{.code = code, .layout = layout};
      const clattn::Queue queue = context.create_queue();
      const KVCache cache = filled(context, queue, shape);
      const Bytes before = download<std::uint8_t>(queue, cache.buffer);
      const std::vector<clattn::BlockPair> pairs = {{1, 3}};
      clattn::copy_blocks(context, queue, std::vector{cache}, pairs);
      queue.finish();
      const Bytes copied = download<std::uint8_t>(queue, cache.buffer);
      expect_page(cache, before, 1, copied, 3);
      expect_page(cache, before, 0, copied, 0);
      // To the host and back, to another page.
      std::vector<std::byte> host(before.size());
      const std::span<std::byte> image(host);
      clattn::swap_blocks(context, queue, cache, image, std::vector<clattn::BlockPair>{{2, 0}});
      queue.finish();  // a driver may read the image when its copy is enqueued
      clattn::swap_blocks(context, queue, image, cache, std::vector<clattn::BlockPair>{{0, 1}});
      queue.finish();
      expect_page(cache, before, 2, download<std::uint8_t>(queue, cache.buffer), 1);
      const KVCache other = make_cache(context, queue, shape);
      clattn::swap_blocks(context, queue, cache, other, std::vector<clattn::BlockPair>{{0, 2}});
      queue.finish();
      expect_page(cache, before, 0, download<std::uint8_t>(queue, other.buffer), 2);
    }
  });
}

TEST(RowScaleBlocks, MovedTokensKeepTheirScales) {
  for_each_code([](const clattn::Context& context, DType code) {
    const Shape shape{.code = code, .layout = KVCacheLayout::kHND};
    const clattn::Queue queue = context.create_queue();
    const KVCache cache = filled(context, queue, shape);
    const Bytes before = download<std::uint8_t>(queue, cache.buffer);
    const std::vector<std::int64_t> src = {5, 9, 33}, dst = {4, 5, 60};
    const std::vector<std::int32_t> starts = {0, 2, 3};
    clattn::move_tokens(context, queue, std::vector{cache}, clattn::TokenMoves{src, dst, starts});
    queue.finish();
    const Bytes after = download<std::uint8_t>(queue, cache.buffer);
    for (std::size_t i = 0; i < src.size(); ++i)
      for (std::int64_t head = 0; head < shape.heads; ++head)
        for (const bool values : {false, true}) {
          const Row want = row_of(cache, before, values, src[i], head);
          const Row got = row_of(cache, after, values, dst[i], head);
          EXPECT_EQ(got.codes, want.codes);
          EXPECT_EQ(got.scale, want.scale);
        }
  });
}

TEST(RowScaleCaches, AreRefusedByNameWhereTheyCannotBe) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  const KVCache cache = make_cache(*context, queue, {});
  KVCache e5m2 = cache;
  e5m2.dtype = DType::kFp8E5M2;
  const clattn::Buffer some = context->allocate(4096);
  using clattn::ErrorCode;
  const auto write = [&](const KVCache& to, ErrorCode code = ErrorCode::kInvalidArgument) {
    const auto call = [&] {
      clattn::reshape_and_cache_flash(*context, queue, {.buffer = some.handle()},
                                      {.buffer = some.handle()}, DType::kF16, to, some.handle(), 0,
                                      1);
    };
    return error_text(call, code);
  };
  EXPECT_EQ(write(e5m2, ErrorCode::kUnsupported),
            "kv_cache: row_scales: cache format: k.code is fp8_e5m2, supported with group kRow: "
            "int8, fp8_e4m3, uint4x2");
  KVCache outside = cache;
  outside.row_scales->v_offset = 1 << 30;
  EXPECT_NE(write(outside).find("kv_cache: row_scales: its last scale is number"),
            std::string::npos)
      << write(outside);
  KVCache none = cache;
  none.scales = {};
  EXPECT_EQ(write(none), "kv_cache: no scales, legal with row_scales: f32");
  KVCache elsewhere = cache;
  elsewhere.scales = context->allocate(cache.buffer.size_bytes());
  const auto copy = [&] {
    clattn::copy_blocks(*context, queue, std::vector{elsewhere},
                        std::vector<clattn::BlockPair>{{0, 1}});
  };
  EXPECT_NE(
      error_text(copy, ErrorCode::kUnsupported).find("row_scales elsewhere than in its pages"),
      std::string::npos);
  const clattn::AttentionBackend& backend = *clattn::list_attn_backends()[0];
  const auto reshape = [&](clattn::KVCacheSpec spec) {
    spec.kv_quant_mode = KVQuantMode::kPerTokenHead;
    const clattn::Buffer memory = context->allocate(spec.page_size_bytes());
    const auto view = [&] {
      static_cast<void>(clattn::reshape_kv_cache(memory, spec, backend, KVCacheLayout::kNHD));
    };
    return error_text(view, ErrorCode::kUnsupported);
  };
  EXPECT_EQ(reshape({.head_size = 64, .dtype = DType::kFp8E5M2}),
            "KV cache: dtype is fp8_e5m2, supported with kv_quant_mode kPerTokenHead: int8, "
            "fp8_e4m3, uint4x2");
  EXPECT_EQ(reshape({.head_size = 64, .dtype = DType::kInt8, .head_size_v = 32}),
            "KV cache: kv_quant_mode is kPerTokenHead, supported with head_size_v 32: kNone");
}

/// Codes of 4 bits have scales in their pages, whatever the call.
TEST(RowScaleCaches, FourBitsAreRefusedWithoutScalesOfRows) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  KVCache cache = make_cache(*context, queue, {.code = DType::kUInt4x2});
  cache.row_scales.reset();
  const clattn::Buffer some = context->allocate(1 << 16);
  using clattn::ErrorCode;
  const auto write = [&] {
    clattn::reshape_and_cache_flash(*context, queue, {.buffer = some.handle()},
                                    {.buffer = some.handle()}, DType::kF16, cache, some.handle(), 0,
                                    1);
  };
  const std::string wanted =
      "kv_cache: dtype is uint4x2, supported in pages with a scale for each token and head; here: "
      "types of whole bytes";
  EXPECT_EQ(error_text(write, ErrorCode::kUnsupported), wanted);
  clattn::MLACache latent{.buffer = some,
                          .dtype = DType::kUInt4x2,
                          .num_blocks = 1,
                          .block_size = 16,
                          .kv_lora_rank = 64,
                          .rope_dim = 8};
  const auto write_latent = [&] {
    clattn::concat_and_cache_mla(*context, queue, {.buffer = some.handle()},
                                 {.buffer = some.handle()}, DType::kF16, latent, some.handle(), 0,
                                 1);
  };
  EXPECT_EQ(error_text(write_latent, ErrorCode::kUnsupported), wanted);
  const clattn::MLAConfig mla{.num_heads = 1, .kv_cache_dtype = DType::kUInt4x2};
  const auto reasons = clattn::validate_mla_configuration(mla, nullptr);
  EXPECT_EQ(std::ranges::count(reasons,
                               "kv_cache_dtype uint4x2 not supported by MLA: types of "
                               "whole bytes are"),
            1);
  // A format without a name is a reason, too, and no error.
  const auto& backend = *clattn::list_attn_backends().front();
  const auto of_layer =
      backend.validate_configuration({.kv_cache_dtype = DType::kUInt4x2}, nullptr);
  EXPECT_TRUE(std::ranges::any_of(of_layer, [](const std::string& reason) {
    return reason.find("codes of 4 bits have scales in their pages alone") != std::string::npos;
  }));
  clattn::PackedKVCache packed{.key = some.handle(),
                               .value = some.handle(),
                               .dtype = DType::kUInt4x2,
                               .num_blocks = 1,
                               .block_size = 16,
                               .num_kv_heads = 1,
                               .head_size = 64};
  const auto write_packed = [&] {
    clattn::reshape_and_cache(*context, queue, {.buffer = some.handle()}, {.buffer = some.handle()},
                              DType::kF16, packed, some.handle(), 0, 1);
  };
  EXPECT_EQ(error_text(write_packed, ErrorCode::kUnsupported), wanted);
}

}  // namespace test_row_scales
