// prepare_qkv on every device: against the oracle, bit by bit against its parts done apart, and
// what it refuses.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/cache_ops.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/prepare_qkv.hpp>
#include <clattn/registry.hpp>
#include <utility>

#include "device/prepare_rows.hpp"

namespace test_prepare_qkv {

using cache_ops_test::all_contexts;
using cache_ops_test::decode;
using cache_ops_test::download;
using cache_ops_test::error_text;
using cache_ops_test::upload;
using clattn::Buffer;
using clattn::DType;
using prepare_test::kPositions;
using prepare_test::Model;
using prepare_test::Rows;

/// In place or not, in one call or by norm and rotation apart: equal bits, within the oracle's
/// bound, and nothing but the outputs changes.
void check(const clattn::Context& context, const Model& model, const std::string& what) {
  constexpr std::int64_t kTokens = 5;
  const clattn::Queue queue = context.create_queue();
  Rows rows(context, queue, model, kTokens);
  clattn::PrepareQKV call = rows.call(false);
  clattn::prepare_qkv(context, queue, call);
  const auto all = [&](const Buffer& of) {
    return decode(model.dtype, download<std::byte>(queue, of));
  };
  std::vector<double> queries = all(rows.query_out);
  queries.resize(queries.size() / (model.gate ? 2 : 1));
  const std::vector<double> keys = all(rows.key_out);
  EXPECT_EQ(all(rows.fused), rows.values) << what;
  rows.expect(rows.queries(rows.values), false, queries, what);
  rows.expect(rows.keys(rows.values), true, keys, what);
  if (model.gate) {
    std::vector<double> gates = all(rows.gate_out);
    gates.resize(gates.size() / 2);
    EXPECT_EQ(gates, rows.queries(rows.values, true)) << what;
    return;
  }
  call = rows.call(true);
  const auto rope = std::exchange(call.rope, std::nullopt);
  const Buffer positions = std::exchange(call.positions, {});
  if (call.norm && model.rounds && rope) {  // apart
    clattn::prepare_qkv(context, queue, call);
    call.norm.reset();
  }
  if (call.norm || rope) {
    call.rope = rope;
    call.positions = positions;
  }
  clattn::prepare_qkv(context, queue, call);
  EXPECT_EQ(rows.queries(all(rows.fused)), queries) << what << ", in place";
  EXPECT_EQ(rows.keys(all(rows.fused)), keys) << what << ", in place";
}

// D8.36, D8.38: sizes, styles and places of rotations, types and scales of tables.
TEST(PrepareQKV, NormsAndRotations) {
  const DType types[] = {DType::kF32, DType::kF16, DType::kBF16};
  for (const auto& context : all_contexts()) {
    int number = 0;
    for (const DType dtype : types) {
      for (const std::int32_t rotary_dim : {64, 32, 16, 2, 20, 0}) {
        Model model;
        model.dtype = dtype;
        model.rotary_dim = rotary_dim;
        model.neox = number % 2 == 0;
        model.tail = number % 3 == 1;
        model.table = types[number % 3];
        model.table_scale = number % 4 == 3 ? 1.2 : 1;
        model.norm = number % 5 != 4 || rotary_dim == 0;
        model.weights = number % 4 != 1;
        model.rounds = number % 6 != 2;
        model.beta = number % 4 == 2 ? 1 : 0;
        model.int32_positions = number % 2 == 1;
        check(*context, model, fmt::format("{}, number {}", clattn::to_string(dtype), number));
        ++number;
      }
    }
  }
}

// D8.37, D8.39: models with images, whose tokens have three positions, and with output gates.
TEST(PrepareQKV, SectionsAndGates) {
  Model qwen_vl{.head_size = 256,  // twice the model's, as that of the last one
                .dtype = DType::kF16,
                .rotary_dim = 128,
                .sections = {24, 20, 20},
                .in_turn = true};
  Model blocks = qwen_vl;
  blocks.in_turn = false;
  const Model qwen{.heads = 24,
                   .kv_heads = 4,
                   .head_size = 256,
                   .dtype = DType::kF16,
                   .gate = true,
                   .beta = 1,
                   .rotary_dim = 64,
                   .sections = {11, 11, 10},
                   .in_turn = true};
  for (const auto& context : all_contexts()) {
    check(*context, qwen_vl, "Qwen 3 VL");
    check(*context, blocks, "Qwen 2 VL");
    check(*context, qwen, "Qwen 3.5");
  }
}

// D8.39: heads of zeros without eps stay zeros; squares may exceed what f16 holds.
TEST(PrepareQKV, ZerosAndLargeNumbers) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    Model model{.head_size = 256, .dtype = DType::kF16, .eps = 0, .rotary_dim = 0};
    Rows rows(*context, queue, model, 2);
    for (std::size_t i = 0; i < rows.values.size(); ++i) {
      rows.values[i] = i < 256 ? 0 : 1e4 * (i % 2 == 0 ? 1 : -1);
    }
    clattn::prepare_qkv(*context, queue, rows.call(false));
    const auto queries = decode(model.dtype, download<std::byte>(queue, rows.query_out));
    rows.expect(rows.queries(rows.values), false, queries, "large");
  }
}

clattn::KVCache cache_of(const Buffer& memory, const Model& model, DType dtype,
                         clattn::KVCacheLayout layout) {
  return clattn::reshape_kv_cache(memory,
                                  {.block_size = 4,
                                   .num_kv_heads = model.kv_heads,
                                   .head_size = model.head_size,
                                   .dtype = dtype},
                                  *clattn::list_attn_backends()[0], layout);
}

// D8.40: what the cache holds has the bits of the write apart, in every type; padded rows are
// prepared but not stored.
TEST(PrepareQKV, CachesHoldWhatAWriteApartStores) {
  constexpr std::int64_t kTokens = 7;
  const std::vector<std::int64_t> slots = {9, -1, 3, 8, 1000, 0, 4};  // the last is not read
  const std::pair<DType, DType> types[] = {{DType::kBF16, DType::kBF16},
                                           {DType::kBF16, DType::kFp8E4M3},
                                           {DType::kF16, DType::kInt8},
                                           {DType::kF32, DType::kFp8E5M2}};
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    for (const auto& [dtype, cache_dtype] : types) {
      const bool hnd = cache_dtype != DType::kBF16;
      Model model{.dtype = dtype, .rotary_dim = 32};
      Rows rows(*context, queue, model, kTokens);
      clattn::PrepareQKV call = rows.call(false);
      const std::size_t bytes = 3 * 2 * 4 * 2 * 64 * clattn::element_size_bytes(cache_dtype);
      const Buffer fused = upload(*context, queue, std::vector<std::uint8_t>(bytes, 0x5a));
      const Buffer apart = upload(*context, queue, std::vector<std::uint8_t>(bytes, 0x5a));
      const auto layout = hnd ? clattn::KVCacheLayout::kHND : clattn::KVCacheLayout::kNHD;
      call.cache = cache_of(fused, model, cache_dtype, layout);
      if (clattn::is_quantized(cache_dtype)) {
        call.cache.scales =
            upload(*context, queue, std::vector<float>{1.0F / 3, 0.5F, 0.02F, 0.7F});
        call.cache.scales_per_head = true;
      }
      call.value = {rows.fused.handle(), call.key.offset + 128, call.key.token_stride};
      const Buffer slot_buffer = upload(*context, queue, slots);
      call.slot_mapping = slot_buffer.handle();
      call.num_slots = kTokens - 1;
      clattn::prepare_qkv(*context, queue, call);
      clattn::KVCache other = call.cache;
      other.buffer = apart;
      clattn::reshape_and_cache_flash(*context, queue, call.key_out, call.value, dtype, other,
                                      call.slot_mapping, 0, kTokens - 1);
      EXPECT_EQ(download<std::uint8_t>(queue, fused), download<std::uint8_t>(queue, apart))
          << clattn::to_string(dtype) << " in " << clattn::to_string(cache_dtype);
      rows.expect(rows.keys(rows.values), true,
                  decode(dtype, download<std::byte>(queue, rows.key_out)), "with a cache");
      const std::vector<std::uint8_t> stored = download<std::uint8_t>(queue, fused);
      call.key_out = {};  // keys go to the cache alone
      queue.fill(fused, 0x5a5a5a5a, 0, bytes);
      clattn::prepare_qkv(*context, queue, call);
      EXPECT_EQ(download<std::uint8_t>(queue, fused), stored);
    }
  }
}

// D8.36: what lies beyond the table.
TEST(PrepareQKV, PositionsOutsideTheTableAreNotedAndStoreNothing) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const Model model{.norm = false, .rotary_dim = 32};
    Rows rows(*context, queue, model, 3);
    rows.positions = {{0, kPositions, -1}};
    clattn::PrepareQKV call = rows.call(false);
    clattn::DeviceErrors errors(*context, queue);
    call.errors = &errors;
    const std::vector<std::uint8_t> untouched(std::size_t{2 * 4 * 2 * 64 * 2}, 0x5a);
    const Buffer memory = upload(*context, queue, untouched);
    const Buffer slots = upload(*context, queue, std::vector<std::int64_t>{-1, 1, 2});
    call.cache = cache_of(memory, model, DType::kBF16, clattn::KVCacheLayout::kNHD);
    call.value = {rows.fused.handle(), call.key.offset + 128, call.key.token_stride};
    call.slot_mapping = slots.handle();
    clattn::prepare_qkv(*context, queue, call);
    EXPECT_EQ(error_text([&] { errors.check(queue); }),
              "prepare_qkv: token 1 was left out: one of its positions is outside cos_sin_cache");
    rows.expect(rows.keys(rows.values), true,
                decode(model.dtype, download<std::byte>(queue, rows.key_out)), "outside");
    EXPECT_EQ(download<std::uint8_t>(queue, memory), untouched);
  }
}

TEST(PrepareQKV, RefusesWhatDoesNotFit) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  Rows rows(*context, queue, {}, 4);
  const auto refused = [&](const auto& change) {
    clattn::PrepareQKV call = rows.call(false);
    change(call);
    return error_text([&] { clattn::prepare_qkv(*context, queue, call); });
  };
  const Buffer pages = upload(*context, queue, std::vector<std::uint8_t>(6144, 0));
  const auto with_cache = [&](clattn::PrepareQKV& call) {
    call.value = call.key;
    call.slot_mapping = call.positions.handle();
    call.cache = cache_of(pages, {}, DType::kBF16, clattn::KVCacheLayout::kNHD);
  };
  using Call = clattn::PrepareQKV;
  const std::pair<std::string, std::string> texts[] = {
      {refused([&](Call& c) {
         with_cache(c);
         c.cache.head_size = 56;
       }),
       "cache: 2 heads of 56, legal: 2 of 64 (num_kv_heads, head_size)"},
      {refused([&](Call& c) {
         with_cache(c);
         c.cache.head_size_v = 32;
       }),
       "cache: head_size_v is 32, legal: 64 (head_size)"},
      {refused([](Call& c) { c.rope->rotary_dim = 7; }), "rotary_dim is 7, legal: even, 2 … 64"},
      {refused([](Call& c) { c.rope->rotary_dim = 66; }), "rotary_dim is 66"},
      {refused([](Call& c) {
         c.rope->mrope_section = {8, 8, 8};
       }),
       "with the sum 32"},
      {refused([](Call& c) {
         c.rope->mrope_section = {0, 16, 16};
         c.rope->mrope_interleaved = true;
       }),
       "height up to 11, width up to 10"},
      {refused([](Call& c) {
         c.rope->mrope_section = {16, 8, 8};
       }),
       "positions holds 32 bytes"},
      {refused([](Call& c) { c.rope->dtype = DType::kInt8; }), "rope: dtype is int8"},
      {refused([](Call& c) { c.position_bits = 16; }), "position_bits is 16, legal: 64, 32"},
      {refused([](Call& c) { c.num_tokens = 5; }), "positions holds 32 bytes"},
      {refused([](Call& c) {
         c.num_tokens = 5;
         c.rope.reset();
         c.positions = {};
       }),
       "query: its 5 rows end at"},
      {refused([](Call& c) { c.rope.reset(); }), "positions is given, legal without rope: none"},
      {refused([](Call& c) { c.head_size = 12; }), "head_size is 12, legal: 8 … 512"},
      {refused([](Call& c) { c.query = {}; }), "query_out is given, legal without query: none"},
      {refused([](Call& c) { c.key = {}; }), "key_out is given, legal without key: none"},
      {refused([](Call& c) { c.key_out = {}; }), "key is given without key_out and cache"},
      {refused([](Call& c) { c.value = c.key; }), "value is given, legal without a cache: none"},
      {refused([](Call& c) { c.key_out = c.query_out; }), "key_out overlaps query_out"},
      {refused([](Call& c) { c.query_out = c.key; }), "query_out overlaps key"},
      {refused([](Call& c) { c.norm->eps = -1; }), "eps is -1, legal: >= 0"},
      {refused([](Call& c) { c.norm->q_weight = c.positions; }), "q_weight holds 32 bytes"},
      {refused([](Call& c) { c.num_slots = 3; }), "num_slots is 3"}};
  for (const auto& [text, wanted] : texts)
    EXPECT_NE(text.find(wanted), std::string::npos) << text << ", expected " << wanted;
  clattn::PrepareQKV none = rows.call(false);
  none.num_tokens = 0;
  clattn::prepare_qkv(*context, queue, none);
  clattn::PrepareQKV cross = rows.call(false);  // a layer that attends to another's keys
  cross.key = cross.key_out = {};
  cross.norm->k_weight = {};
  clattn::prepare_qkv(*context, queue, cross);
  rows.expect(rows.queries(rows.values), false,
              decode(DType::kBF16, download<std::byte>(queue, rows.query_out)), "queries alone");
}

}  // namespace test_prepare_qkv
