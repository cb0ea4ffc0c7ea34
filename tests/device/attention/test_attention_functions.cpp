// attention() and paged_attention(): one call each, on every device, against the oracle.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/attention_functions.hpp>
#include <clattn/config_fields.hpp>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>
#include <thread>
#include <vector>

#include "device/attention/call_sequences.hpp"
#include "device/attention_case.hpp"
#include "oracle/oracle.hpp"
#include "support/error_text.hpp"

namespace test_attention_functions {

using attention_test::all_contexts;
using clattn::AttentionArguments;
using clattn::AttentionConfig;
using namespace call_test;  // NOLINT(google-build-using-namespace): of these tests

std::vector<AttentionConfig> options() {
  std::vector<AttentionConfig> all(4, config());
  all[1].sliding_window = 4;
  all[1].logits_soft_cap = 2;
  all[1].scale = 0.7F;
  all[1].alibi_slopes = {0.5F, 0.25F, 0, -0.125F};
  all[1].sinks = {0, 1, -2, 3};
  all[2].attention_chunk_size = 8;
  all[3].window_left = 3;
  all[3].window_right = 1;
  return all;
}

TEST(AttentionFunctions, ContiguousKeysWithEveryOption) {
  for (const auto& context : all_contexts()) {
    const Sequences sequences(context);
    for (const AttentionConfig& layer : options()) {
      for (const bool causal : {true, false}) {
        SCOPED_TRACE(fmt::format("{} causal {}", clattn::to_string(layer), causal));
        AttentionArguments call = sequences.call();
        call.causal = causal;
        clattn::attention(sequences.queue, call, layer);
        sequences.expect(sequences.truth(layer, causal));
      }
    }
  }
}

TEST(AttentionFunctions, QueriesAreTheirOwnKeysByDefault) {
  for (const auto& context : all_contexts()) {
    const Sequences sequences(context, {{5, 5}, {40, 40}, {1, 1}});
    AttentionArguments call = sequences.call();
    call.key_start_loc = {};
    clattn::attention(sequences.queue, call, config());
    sequences.expect(sequences.truth(config(), true));
  }
}

TEST(AttentionFunctions, PagesAsRowsAndAsLists) {
  for (const auto& context : all_contexts()) {
    const Sequences sequences(context, kCached);
    const Paged pages(sequences);
    for (const AttentionConfig& layer : options()) {
      AttentionArguments call = pages.call(sequences);
      clattn::paged_attention(sequences.queue, call, pages.cache, layer);
      sequences.expect(sequences.truth(layer, true));
      const std::vector<float> by_rows = sequences.download(sequences.out);
      sequences.queue.fill(sequences.out, 0, 0, sequences.out.size_bytes());
      call.block_table = pages.list;
      call.page_start_loc = pages.list_starts;
      clattn::paged_attention(sequences.queue, call, pages.cache, layer);
      EXPECT_EQ(sequences.download(sequences.out), by_rows) << clattn::to_string(layer);
    }
  }
}

TEST(AttentionFunctions, KeysOfTheCallAreStoredFirst) {
  for (const auto& context : all_contexts()) {
    const Sequences sequences(context, {{7, 7}, {3, 3}});
    Paged pages(sequences);
    sequences.queue.fill(pages.cache.buffer, 0x7fc00000, 0, pages.cache.buffer.size_bytes());
    AttentionArguments call = pages.call(sequences);
    call.key = {sequences.k.handle()};
    call.value = {sequences.v.handle()};
    clattn::paged_attention(sequences.queue, call, pages.cache, config());
    sequences.expect(sequences.truth(config(), true));
  }
}

TEST(AttentionFunctions, LseInEachOrderAndBase) {
  for (const auto& context : all_contexts()) {
    const Sequences sequences(context);
    AttentionArguments call = sequences.call();
    clattn::attention(sequences.queue, call, config());
    const std::vector<float> plain = sequences.download(sequences.lse);
    const auto tokens = static_cast<std::int64_t>(sequences.tokens());
    const clattn::Buffer turned =
        sequences.upload(std::vector<float>(plain.size() + 5, kUntouched));
    for (const clattn::LseBase base : {clattn::LseBase::kE, clattn::LseBase::k2}) {
      call.lse = {turned.handle(), 3, 1, tokens};
      call.lse_base = base;
      clattn::Event event;
      clattn::attention(sequences.queue, call, config(), &event);
      event.wait();
      const std::vector<float> got = sequences.download(turned);
      const float factor = base == clattn::LseBase::k2 ? std::numbers::log2e_v<float> : 1;
      for (std::size_t i = 0; i < plain.size(); ++i)
        EXPECT_EQ(got[3 + i % kHeads * sequences.tokens() + i / kHeads], plain[i] * factor);
      EXPECT_EQ((std::vector{got[0], got[2], got[3 + plain.size()], got.back()}),
                std::vector<float>(4, kUntouched));
    }
  }
}

TEST(AttentionFunctions, MasksOfBytesAndOfBits) {
  for (const auto& context : all_contexts()) {
    const Sequences sequences(context);
    constexpr std::size_t kKeys = 70, kBits = 10;
    std::vector<std::uint8_t> bytes(sequences.tokens() * kKeys);
    std::vector<std::uint8_t> bits(sequences.tokens() * kBits);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = i * 7 % 11 < 6 ? 1 : 0;
      const std::size_t key = i % kKeys;
      bits[i / kKeys * kBits + key / 8] |= static_cast<std::uint8_t>(bytes[i] << (key % 8));
    }
    const auto on_device = [&](const std::vector<std::uint8_t>& values) {
      const clattn::Buffer buffer = context->allocate(values.size());
      sequences.queue.write(buffer, std::as_bytes(std::span(values)));
      return buffer;
    };
    const clattn::Buffer by_bytes = on_device(bytes), by_bits = on_device(bits);
    AttentionArguments call = sequences.call();
    call.mask = {by_bytes.handle(), kKeys};
    clattn::attention(sequences.queue, call, config());
    sequences.expect(sequences.truth(config(), true, bytes));
    const std::vector<float> by_byte = sequences.download(sequences.out);
    sequences.queue.fill(sequences.out, 0, 0, sequences.out.size_bytes());
    call.mask = {by_bits.handle(), kBits, true};
    clattn::attention(sequences.queue, call, config());
    EXPECT_EQ(sequences.download(sequences.out), by_byte);
    call.mask.stride = 8;
    EXPECT_EQ(test::error_text([&] { clattn::attention(sequences.queue, call, config()); }),
              "mask.stride is 8, legal: at least 9 bytes (bits for 70 keys)");
  }
}

TEST(AttentionFunctions, AnEightBitOutputBesides) {
  for (const auto& context : all_contexts()) {
    const Sequences sequences(context);
    const float scale = 0.5F;
    const clattn::Buffer codes = context->allocate(sequences.tokens() * kRow);
    sequences.queue.fill(codes, 0x7f7f7f7f, 0, codes.size_bytes());  // NaN
    const clattn::Buffer factor = sequences.upload({scale});
    AttentionArguments call = sequences.call();
    call.output_fp8 = codes.handle();
    call.output_scale = factor.handle();
    clattn::attention(sequences.queue, call, config());
    std::vector<std::uint8_t> got(codes.size_bytes());
    sequences.queue.read(codes, std::as_writable_bytes(std::span(got)));
    const std::vector<float> out = sequences.download(sequences.out);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double real = scale * oracle::decode(oracle::Element::kFp8E4M3, got[i]);
      EXPECT_NEAR(real, out[i], std::abs(out[i]) / 16 + scale * 0.001) << i;
    }
  }
}

TEST(AttentionFunctions, FindTheContextOfAQueue) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    EXPECT_EQ(clattn::Context::of(queue), context);
  }
  EXPECT_EQ(test::error_text([] { clattn::Context::of(nullptr); }), "queue: null");
}

TEST(AttentionFunctions, StartAnewAfterBeingCleared) {
  for (const auto& context : all_contexts()) {
    const Sequences sequences(context);
    clattn::attention(sequences.queue, sequences.call(), config());
    const std::vector<float> before = sequences.download(sequences.out);
    clattn::clear_attention_functions();
    sequences.queue.fill(sequences.out, 0, 0, sequences.out.size_bytes());
    clattn::attention(sequences.queue, sequences.call(), config());
    EXPECT_EQ(sequences.download(sequences.out), before);
  }
}

TEST(AttentionFunctions, ServeSeveralThreads) {
  for (const auto& context : all_contexts()) {
    const Sequences first(context), second(context, kCached);
    const auto work = [](const Sequences& sequences) {
      for (int i = 0; i < 20; ++i) clattn::attention(sequences.queue, sequences.call(), config());
    };
    std::thread other(work, std::cref(second));
    work(first);
    other.join();
    first.expect(first.truth(config(), true));
    second.expect(second.truth(config(), true));
  }
}

TEST(AttentionFunctions, RefuseByName) {
  for (const auto& context : all_contexts()) {
    const Sequences sequences(context, kCached);
    const Paged pages(sequences);
    const auto contiguous = [&](auto change) {
      AttentionArguments call = sequences.call();
      change(call);
      return test::error_text([&] { clattn::attention(sequences.queue, call, config()); });
    };
    const auto paged = [&](auto change) {
      AttentionArguments call = pages.call(sequences);
      change(call);
      return test::error_text(
          [&] { clattn::paged_attention(sequences.queue, call, pages.cache, config()); });
    };
    using Call = AttentionArguments;
    EXPECT_EQ(contiguous([](Call& c) { c.query_start_loc = {}; }),
              "query_start_loc holds 0 elements, legal: the number of sequences + 1");
    EXPECT_EQ(contiguous([&](Call& c) { c.seq_lens = sequences.seq_lens; }),
              "seq_lens holds 5 elements, legal in attention(): 0");
    EXPECT_EQ(paged([&](Call& c) { c.seq_lens = c.seq_lens.first(2); }),
              "seq_lens holds 2 elements, legal: at least 5 (sequences)");
    EXPECT_EQ(contiguous([&](Call& c) { c.key_start_loc = c.key_start_loc.first(3); }),
              "key_start_loc holds 3 elements, legal: at least 6 (sequences + 1)");
    const std::vector<std::int32_t> huge = {0, 0, 0, 0, 0, 2000000000};
    EXPECT_EQ(contiguous([&](Call& c) { c.query_start_loc = huge; }).find("query"), 0U);
    EXPECT_EQ(contiguous([&](Call& c) { c.key_start_loc = huge; }).find("key"), 0U);
    EXPECT_NE(contiguous([](Call& c) { c.lse.head_stride = -1; }).find("lse: "), std::string::npos);
    EXPECT_EQ(contiguous([&](Call& c) {
                c.lse = {sequences.lse.handle(), 0, 1, 1};
              }).find("lse: token_stride 1 and head_stride 1, legal: those that keep"),
              0U);
    EXPECT_EQ(contiguous([&](Call& c) {
                c.lse = {sequences.out.handle()};
                c.lse_base = clattn::LseBase::k2;
              }).find("lse: in a buffer with other tensors"),
              0U);
    EXPECT_NE(contiguous([&](Call& c) { c.output = c.query; }).find("output"), std::string::npos);
    EXPECT_EQ(paged([&](Call& c) { c.key_start_loc = sequences.key_starts; }),
              "key_start_loc holds 6 elements, legal in paged_attention(): 0");
    EXPECT_EQ(paged([](Call& c) { c.block_table = c.block_table.first(4); }),
              "block_table holds 4 elements, legal: a multiple of 5 sequences");
    const std::vector<std::int32_t> falling = {0, 3, 2, 4, 5, 6};
    EXPECT_EQ(paged([&](Call& c) { c.page_start_loc = falling; }),
              fmt::format("page_start_loc[1] is 3 and the next 2, legal: 0 … {} (elements of "
                          "block_table), never falling",
                          pages.rows.size()));
    EXPECT_EQ(sequences.download(sequences.out),
              std::vector<float>(sequences.tokens() * kRow, kUntouched));
  }
}

}  // namespace test_attention_functions
