// Values of fewer elements than keys in pages (AttentionConfig::head_size_v), and large heads: in
// every variant that takes them, and in the operations on caches.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "device/value_cases.hpp"
#include "support/error_text.hpp"

namespace test_value_pages {

using attention_test::all_contexts;
using attention_test::CaseSpec;
using clattn::DType;
using clattn::KernelFamily;
using clattn::KVCacheLayout;
using clattn::detail::Role;
using clattn::detail::Variant;
using value_test::expect_right;
using value_test::Sizes;

/// MiMo's, two of a power of two, and Gemma 4's.
constexpr std::array kSizes = {Sizes{192, 128}, Sizes{256, 128}, Sizes{512, 256}, Sizes{512, 512}};
constexpr std::array kDTypes = {DType::kBF16, DType::kF16, DType::kF32};

CaseSpec case_of(Sizes sizes, DType dtype, KernelFamily family) {
  CaseSpec spec;
  spec.config.num_heads = 4;
  spec.config.num_kv_heads = 2;
  spec.config.head_size = sizes.key;
  spec.config.head_size_v = sizes.value;
  spec.config.dtype = dtype;
  spec.config.kernel_family = family;
  spec.requests = {{1, 40, 1}, {5, 33, 2}, {40, 30, 3}};
  return spec;
}

class ValuePagesOfVariant : public testing::TestWithParam<const Variant*> {};

TEST_P(ValuePagesOfVariant, IsRight) {
  const Variant& variant = *GetParam();
  const bool decodes = variant.role == Role::kDecode;
  const std::string_view name = decodes ? "prefill_gpu__r8_wg32" : "decode_gpu__r4_local";
  const Variant& partner = *std::ranges::find(clattn::detail::variants(), name, &Variant::name);
  std::vector<const Variant*> rows = {&variant};
  if (variant.family() != KernelFamily::kCpu) rows.push_back(&partner);
  const auto row = static_cast<std::size_t>(&variant - clattn::detail::variants().data());
  std::vector<CaseSpec> cases;
  for (std::size_t i = row % 2; i < kSizes.size(); i += 2) {  // kernels take long to compile
    CaseSpec& spec =
        cases.emplace_back(case_of(kSizes.at(i), kDTypes.at(i % kDTypes.size()), variant.family()));
    if (clattn::detail::unit_of(variant.unit_id).queries != clattn::detail::kAnyType)
      spec.config.dtype = DType::kF16;
    if (variant.family() == KernelFamily::kCpu || !decodes) continue;
    spec.config.num_heads = 2 * variant.block_rows;
    spec.requests = {{1, 0, 1}, {1, 77, 2}};
  }
  if (!value_test::expect_row_right(variant, rows, cases))
    GTEST_SKIP() << "no device runs it, or it takes neither";
}

INSTANTIATE_TEST_SUITE_P(Rows, ValuePagesOfVariant,
                         testing::ValuesIn(attention_test::variants_of({Role::kPrefill,
                                                                        Role::kDecode})),
                         [](const auto& tested) { return std::string(tested.param->name); });

/// With one kernel family, on the devices that have it.
class ValuePages : public testing::TestWithParam<KernelFamily> {
 protected:
  static void check(const CaseSpec& spec) {
    for (const auto& context : all_contexts()) {
      const auto& backend = *clattn::get_attn_backend(spec.config, nullptr, "FLASHINFER");
      if (backend.validate_configuration(spec.config, &context->capabilities()).empty())
        expect_right(context, spec);
    }
  }
};

TEST_P(ValuePages, SplitStoredAndInEightBits) {
  CaseSpec spec = case_of({192, 128}, DType::kBF16, GetParam());
  spec.layout = KVCacheLayout::kNHD;
  spec.write_cache = true;
  spec.num_splits = 3;
  check(spec);
  spec.layout = KVCacheLayout::kHND;
  spec.config.kv_cache_dtype = DType::kFp8E4M3;
  spec.scales_per_head = true;
  spec.config.sinks = {0.5F, 9.0F, -3.0F, 2.0F};
  spec.config.sliding_window = 40;
  spec.config.output_fp8 = true;
  check(spec);
}

INSTANTIATE_TEST_SUITE_P(Families, ValuePages,
                         testing::Values(KernelFamily::kCpu, KernelFamily::kGpu),
                         attention_test::family_name<testing::TestParamInfo<KernelFamily>>);

// ---- operations on the pages ----

constexpr std::int32_t kHeads = 2, kKey = 24, kValue = 16, kTokens = 4;
constexpr std::int64_t kBlocks = 4;
constexpr std::size_t kRow = std::size_t{kHeads} * (kKey + kValue);  // of a token
constexpr std::size_t kPage = kRow * kTokens;

/// A cache [block, token, head, key and value] of f16 that holds its elements' numbers.
struct NumberedPages {
  explicit NumberedPages(const std::shared_ptr<clattn::Context>& given)
      : context(given), queue(given->create_queue()) {
    clattn::AttentionConfig config{.num_heads = kHeads, .num_kv_heads = kHeads, .head_size = kKey};
    config.head_size_v = kValue;
    config.block_size = kTokens;
    const auto& backend = *clattn::get_attn_backend(config, &context->capabilities());
    cache = make_kv_cache(*context, queue, backend, config, kBlocks, KVCacheLayout::kNHD);
    std::iota(want.begin(), want.end(), std::uint16_t{1});
    queue.write(cache.buffer, std::as_bytes(std::span(want)));
  }
  void expect_elements() {
    std::array<std::uint16_t, kBlocks * kPage> got{};
    queue.read(cache.buffer, std::as_writable_bytes(std::span(got)));
    EXPECT_EQ(got, want);
  }
  void copy(std::size_t from, std::size_t to, std::size_t count) {
    std::copy_n(want.begin() + static_cast<std::ptrdiff_t>(from), count,
                want.begin() + static_cast<std::ptrdiff_t>(to));
  }

  std::shared_ptr<clattn::Context> context;
  clattn::Queue queue;
  clattn::KVCache cache;
  std::array<std::uint16_t, kBlocks * kPage> want{};
};

TEST(ValuePagesInCaches, HoldEachValueBehindItsKey) {
  NumberedPages pages(all_contexts().at(0));
  const clattn::KVCache& cache = pages.cache;
  EXPECT_EQ(cache.value_size(), kValue);
  EXPECT_EQ(cache.buffer.size_bytes(), kBlocks * kPage * 2);
  EXPECT_EQ(cache.key_at(1, 2, 1, 3), std::int64_t{kPage + 2 * kRow} + 40 + 3);
  EXPECT_EQ(cache.value_at(1, 2, 1, 3), cache.key_at(1, 2, 1, 3) + kKey);
  EXPECT_EQ(std::ranges::count(cache.shape, kKey + kValue), 1);
  EXPECT_EQ(std::ranges::count(cache.shape, 2), 1);  // heads: K and V are no dimension
}

TEST(ValuePagesInCaches, AreCopiedMovedSwappedAndFilled) {
  for (const auto& context : all_contexts()) {
    NumberedPages pages(context);
    const clattn::Queue& queue = pages.queue;
    const std::span<const clattn::KVCache> caches(&pages.cache, 1);
    copy_blocks(*context, queue, caches, std::array{clattn::BlockPair{0, 2}});
    pages.copy(0, 2 * kPage, kPage);
    const std::array<std::int64_t, 1> from = {1}, to = {7};
    const std::array<std::int32_t, 2> starts = {0, 1};
    move_tokens(*context, queue, caches, {from, to, starts});
    pages.copy(kRow, 7 * kRow, kRow);
    std::vector<std::byte> image(kPage * 2);
    swap_blocks(*context, queue, pages.cache, std::span(image),
                std::array{clattn::BlockPair{1, 0}});
    queue.finish();  // a driver may read the image when its copy is enqueued
    swap_blocks(*context, queue, std::span(image), pages.cache,
                std::array{clattn::BlockPair{0, 3}});
    pages.copy(kPage, 3 * kPage, kPage);
    queue.finish();
    pages.expect_elements();

    const std::vector<std::uint16_t> key(kHeads * kKey, 7), value(kHeads * kValue, 9);
    const auto up = [&](const auto& list) {
      const clattn::Buffer buffer = context->allocate(std::span(list).size_bytes());
      queue.write(buffer, std::as_bytes(std::span(list)));
      return buffer;
    };
    const clattn::Buffer k = up(key), v = up(value), slot = up(std::vector<std::int64_t>{5});
    reshape_and_cache_flash(*context, queue, {k.handle()}, {v.handle()}, DType::kF16, pages.cache,
                            slot.handle(), 0, 1);
    for (std::size_t i = 0; i < kRow; ++i)
      pages.want.at(5 * kRow + i) = i % (kKey + kValue) < kKey ? 7 : 9;
    pages.expect_elements();
  }
}

TEST(ValuePagesInCaches, OtherPlacesAreRefused) {
  NumberedPages pages(all_contexts().at(0));
  clattn::KVCache cache = pages.cache;
  const auto copy = [&] {
    return test::error_text([&] {
      copy_blocks(*pages.context, pages.queue, std::span<const clattn::KVCache>(&cache, 1),
                  std::array{clattn::BlockPair{0, 1}});
    });
  };
  cache.v_offset += 8;
  EXPECT_EQ(copy(),
            "kv_cache: v_offset is 32, legal: 24 (values of 16 elements follow their keys "
            "of 24)");
  cache.v_offset -= 8;
  cache.head_size_v = 32;
  EXPECT_EQ(copy(), "kv_cache: head_size_v is 32, legal: 0 (head_size), or 8 … 24 in steps of 8");
}

}  // namespace test_value_pages
