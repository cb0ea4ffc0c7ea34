#include "program/check/checks.hpp"

#include <fmt/format.h>

#include <clattn/cache_ops.hpp>
#include <clattn/mla.hpp>
#include <clattn/registry.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string_view>

#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

using Ints = std::vector<std::int32_t>;
using Longs = std::vector<std::int64_t>;
using Bytes = std::vector<std::byte>;

/// Where an operation runs, and with which types.
struct Place : OnDevice {
  DType dtype{}, cache_dtype{};
};

template <typename T>
Deviation compare_exactly(const std::vector<T>& got, const std::vector<T>& expected) {
  return compare_bytes(std::as_bytes(std::span(got)), std::as_bytes(std::span(expected)));
}

Bytes stored(const Place& place, const Bytes& rows, double scale) {
  return convert_elements(place.dtype, place.cache_dtype, rows, scale);
}

/// Blocks of this many bytes by pairs.
void move_blocks(const Bytes& from, Bytes& to, std::size_t block,
                 const std::vector<BlockPair>& pairs) {
  for (const BlockPair& pair : pairs) {
    std::memcpy(&to[to_size(pair.destination) * block], &from[to_size(pair.source) * block], block);
  }
}

/// copy_blocks in every layout of the first backend that has the type.
Verdict check_copy_blocks(const Place& place) {
  constexpr std::int64_t kBlocks = 5;
  const std::vector<BlockPair> pairs = {{0, 3}, {2, 1}};
  Verdict verdict;
  const AttentionBackend& backend = *list_attn_backends()[0];
  AttentionConfig config;
  config.kv_cache_dtype = place.cache_dtype;
  for (const KVCacheLayout layout : backend.supported_layouts()) {
    const bool any_size = layout == KVCacheLayout::kNHD || layout == KVCacheLayout::kHND;
    const KVCacheSpec spec{.block_size = any_size ? 3 : config.block_size,
                           .num_kv_heads = 2,
                           .head_size = 24,
                           .dtype = place.cache_dtype};
    const std::size_t bytes = to_size(kBlocks) * spec.page_size_bytes() / 2;
    const LogicalCache before{random_elements(DType::kF32, bytes / 4, 1),
                              random_elements(DType::kF32, bytes / 4, 2)};
    const KVCache cache = make_cache(*place.context, backend, layout, spec, kBlocks);
    upload_cache(place.queue, cache, before);
    Event event;
    copy_blocks(*place.context, place.queue, std::span(&cache, 1), pairs, &event);
    const LogicalCache after = download_cache(place.queue, cache);
    for (const auto& [was, is] :
         {std::pair(&before.key, &after.key), std::pair(&before.value, &after.value)}) {
      Bytes want = *was;
      move_blocks(*was, want, want.size() / kBlocks, pairs);
      verdict.deviation.merge(compare_bytes(*is, want));
    }
    verdict.launches = one_launch("copy_blocks", event);
  }
  return verdict;
}

MLACache latent_cache(const Place& place, const Bytes& content, std::int64_t num_blocks,
                      float scale) {
  MLACache cache{.buffer = place.up(content),
                 .dtype = place.cache_dtype,
                 .num_blocks = num_blocks,
                 .block_size = 4,
                 .kv_lora_rank = 32,
                 .rope_dim = 8,
                 .scale = {}};
  if (is_quantized(place.cache_dtype)) cache.scale = place.up(std::vector<float>{scale});
  return cache;
}

/// Blocks from one cache to the host and on to another: all ways of swap_blocks but one.
Verdict check_swap_blocks(const Place& place) {
  constexpr std::size_t kBlocks = 4;
  const std::size_t block = std::size_t{4} * 40 * element_size_bytes(place.cache_dtype);
  const Bytes first = random_elements(DType::kF32, kBlocks * block / 4, 3);
  const Bytes second = random_elements(DType::kF32, kBlocks * block / 4, 4);
  Bytes image(kBlocks * block), want_image = image, want = second;
  const MLACache source = latent_cache(place, first, kBlocks, 1);
  const MLACache destination = latent_cache(place, second, kBlocks, 1);
  const std::vector<BlockPair> out = {{1, 0}, {2, 1}, {0, 3}}, in = {{3, 2}, {0, 0}};
  Event event;
  swap_blocks(*place.context, place.queue, source, std::span(image), out);
  place.queue.finish();
  swap_blocks(*place.context, place.queue, std::span(image), destination, in, &event);
  place.queue.finish();
  move_blocks(first, want_image, block, out);
  move_blocks(want_image, want, block, in);
  Verdict verdict{compare_bytes(image, want_image), one_launch("swap_blocks", event)};
  verdict.deviation.merge(
      compare_bytes(place.down<std::byte>(destination.buffer, want.size()), want));
  return verdict;
}

/// Latent rows to shuffled slots, and back by page table.
Verdict check_latent_rows(const Place& place) {
  constexpr std::size_t kRank = 32, kRope = 8, kWidth = kRank + kRope;
  constexpr std::int64_t kBlocks = 4;
  const float scale = 0.5F;
  const double factor = is_quantized(place.cache_dtype) ? static_cast<double>(scale) : 1;
  const Longs slots = {9, 8, kPadSlotId, 11, 10, 4};  // page 2 whole, the first slot of page 1
  const std::vector<std::size_t> in_order = {1, 0, 4, 3, 5};
  const Bytes kv_c = random_elements(place.dtype, slots.size() * kRank, 5);
  const Bytes k_pe = random_elements(place.dtype, slots.size() * kRope, 6);
  const Bytes latent = stored(place, kv_c, factor), rope = stored(place, k_pe, factor);
  const std::size_t element = element_size_bytes(place.cache_dtype);
  const Bytes before = random_elements(DType::kF32, to_size(kBlocks) * 4 * kWidth * element / 4, 7);
  Bytes want = before;
  for (std::size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] < 0) continue;
    std::byte* row = &want[to_size(slots[t]) * kWidth * element];
    std::memcpy(row, &latent[t * kRank * element], kRank * element);
    std::memcpy(row + kRank * element, &rope[t * kRope * element], kRope * element);
  }
  const MLACache cache = latent_cache(place, before, kBlocks, scale);
  const Buffer c = place.up(kv_c), pe = place.up(k_pe), mapping = place.up(slots);
  Event event;
  concat_and_cache_mla(*place.context, place.queue, {.buffer = c.handle()}, {.buffer = pe.handle()},
                       place.dtype, cache, mapping.handle(), 0, std::ssize(slots), &event);
  Verdict verdict{compare_bytes(place.down<std::byte>(cache.buffer, want.size()), want),
                  one_launch("concat_and_cache_mla", event)};

  std::vector<double> gathered;
  for (const std::size_t t : in_order) {
    const std::byte* row = &want[to_size(slots[t]) * kWidth * element];
    for (const double value : decode_elements(place.cache_dtype, {row, kWidth * element})) {
      gathered.push_back(value * factor);
    }
  }
  const Bytes want_rows = encode_elements(place.dtype, gathered);
  const Buffer rows = place.context->allocate(want_rows.size());
  const Ints starts = {0, 4, 5}, table = {2, 1};
  gather_and_maybe_dequant_cache(
      *place.context, place.queue, cache, {.buffer = rows.handle()}, place.dtype,
      {.cu_seq_lens = starts, .block_table = table, .block_table_stride = 1, .seq_starts = {}},
      &event);
  verdict.deviation.merge(compare_bytes(place.down<std::byte>(rows, want_rows.size()), want_rows));
  verdict.launches.push_back(one_launch("gather_and_maybe_dequant_cache", event).at(0));
  return verdict;
}

Verdict check_append(const Place& place) {
  constexpr std::size_t kRow = std::size_t{2} * 16;
  constexpr std::int64_t kBlocks = 4;
  const AttentionBackend& backend = *list_attn_backends()[0];
  const KVCacheSpec spec{
      .block_size = 4, .num_kv_heads = 2, .head_size = 16, .dtype = place.cache_dtype};
  KVCache cache =
      make_cache(*place.context, backend, backend.supported_layouts().front(), spec, kBlocks);
  const std::size_t element = element_size_bytes(place.cache_dtype);
  const Bytes before = random_elements(DType::kF32, to_size(kBlocks) * 4 * kRow * element / 4, 8);
  upload_cache(place.queue, cache, {before, before});
  const std::vector<float> scales = {0.5F, 2};
  if (is_quantized(place.cache_dtype)) set_scales(*place.context, place.queue, scales, cache);
  // Request 0 has pages 3 and 0, request 1 page 2; the last row is padding.
  const Ints requests = {0, 0, 1, -1}, positions = {3, 4, 2, 0};
  const std::vector<std::size_t> slots = {15, 0, 10};
  const Bytes key = random_elements(place.dtype, requests.size() * kRow, 9);
  const Bytes value = random_elements(place.dtype, requests.size() * kRow, 10);
  const Buffer k = place.up(key), v = place.up(value);
  const PagedKVLists lists{place.up(Ints{3, 0, 2}), place.up(Ints{0, 2, 3}), 2};
  Event event;
  append_paged_kv_cache(*place.context, place.queue, {.buffer = k.handle()}, {.buffer = v.handle()},
                        place.dtype, cache, place.up(requests), place.up(positions),
                        std::ssize(requests), lists, &event);
  place.queue.finish();
  const LogicalCache after = download_cache(place.queue, cache);
  Verdict verdict{{}, one_launch("append_paged_kv_cache", event)};
  for (const bool values : {false, true}) {
    const double factor = is_quantized(place.cache_dtype) ? static_cast<double>(scales[values]) : 1;
    const Bytes rows = stored(place, values ? value : key, factor);
    Bytes want = before;
    for (std::size_t t = 0; t < slots.size(); ++t) {
      std::memcpy(&want[slots[t] * kRow * element], &rows[t * kRow * element], kRow * element);
    }
    verdict.deviation.merge(compare_bytes(values ? after.value : after.key, want));
  }
  return verdict;
}

/// Two states of 6 tokens and 3 heads; some have no key on one side, one on neither.
Verdict check_merge(const Place& place) {
  constexpr std::size_t kTokens = 6, kHeads = 3, kDims = 16;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const Bytes prefix = random_elements(place.dtype, kTokens * kHeads * kDims, 11);
  const Bytes suffix = random_elements(place.dtype, kTokens * kHeads * kDims, 12);
  std::vector<float> p(kTokens * kHeads), s(kTokens * kHeads);
  for (std::size_t i = 0; i < p.size(); ++i) {
    p[i] = i % 5 == 1 || i == 7 ? kNone : static_cast<float>(i % 7) - 3;
    s[i] = i % 6 == 2 || i == 7 ? kNone : static_cast<float>(i % 4);
  }
  const Buffer a = place.up(prefix), b = place.up(suffix), a_lse = place.up(p), b_lse = place.up(s);
  const Buffer out = place.context->allocate(prefix.size());
  const Buffer lse = place.context->allocate(p.size() * sizeof(float));
  Event event;
  merge_attn_states(
      *place.context, place.queue,
      {.num_tokens = kTokens, .num_heads = kHeads, .head_size = kDims, .dtype = place.dtype},
      {{.buffer = out.handle()}, {.buffer = lse.handle()}},
      {{.buffer = a.handle()}, {.buffer = a_lse.handle()}},
      {{.buffer = b.handle()}, {.buffer = b_lse.handle()}}, &event);
  oracle::AttentionResult truth;
  const std::vector<double> from_prefix = decode_elements(place.dtype, prefix);
  const std::vector<double> from_suffix = decode_elements(place.dtype, suffix);
  for (std::size_t row = 0; row < p.size(); ++row) {
    const double wp = std::exp(static_cast<double>(p[row]));
    const double ws = std::exp(static_cast<double>(s[row]));
    truth.lse.push_back(std::log(wp + ws));
    for (std::size_t d = row * kDims; d < (row + 1) * kDims; ++d) {
      const double sum = wp * from_prefix[d] + ws * from_suffix[d];
      const double exact = wp + ws > 0 ? sum / (wp + ws) : 0;
      truth.out.push_back(exact);
      truth.bound.push_back(std::abs(exact - oracle::round_to(element_of(place.dtype), exact)) +
                            1e-6);
    }
  }
  return {compare(place.dtype, place.down<std::byte>(out, prefix.size()),
                  place.down<float>(lse, p.size()), truth),
          one_launch("merge_attn_states", event)};
}

/// Two sequences and a padding row; the first one's token starts a page.
Verdict check_advance_step(const Place& place) {
  const AdvanceStep step{.num_seqs = 3,
                         .num_queries = 2,
                         .block_size = 4,
                         .num_blocks = 8,
                         .input_tokens = place.up(Longs(3, -7)),
                         .sampled_token_ids = place.up(Longs{42, 43}),
                         .input_positions = place.up(Longs(3, -7)),
                         .seq_lens = place.up(Ints{4, 2, 1}),
                         .slot_mapping = place.up(Longs(3, -7)),
                         .block_tables = place.up(Ints{5, 7, 3, 0, 1, 1}),
                         .block_table_stride = 2};
  const AdvanceStepPages pages{place.up(Ints(6, -7)), place.up(Ints(4, -7)),
                               place.up(Ints{4, 2, 1}), place.up(Ints(3, -7))};
  DeviceErrors errors(*place.context, place.queue);
  Event event;
  advance_step_flashinfer(*place.context, place.queue, step, pages, errors, &event);
  errors.check(place.queue);
  Verdict verdict{compare_exactly(place.down<std::int64_t>(step.input_tokens, 3), {42, 43, 0}),
                  one_launch("advance_step_flashinfer", event)};
  const auto expect = [&](const Deviation& deviation) { verdict.deviation.merge(deviation); };
  expect(compare_exactly(place.down<std::int64_t>(step.input_positions, 3), {4, 2, 0}));
  expect(compare_exactly(place.down<std::int64_t>(step.slot_mapping, 3), {28, 14, kPadSlotId}));
  expect(compare_exactly(place.down<std::int32_t>(step.seq_lens, 2), {5, 3}));
  expect(compare_exactly(place.down<std::int32_t>(pages.paged_kv_indices, 3), {5, 7, 3}));
  expect(compare_exactly(place.down<std::int32_t>(pages.paged_kv_indptr, 3), {0, 2, 3}));
  expect(compare_exactly(place.down<std::int32_t>(pages.paged_kv_last_page_len, 2), {1, 3}));
  return verdict;
}

struct CheckedOp {
  std::string_view name;
  Verdict (*check)(const Place& place);
  DType dtype, cache_dtype;
};
constexpr CheckedOp kOps[] = {
    {"copy_blocks", check_copy_blocks, DType::kF16, DType::kF16},
    {"swap_blocks", check_swap_blocks, DType::kF16, DType::kF16},
    {"latent rows in and out", check_latent_rows, DType::kF16, DType::kF16},
    {"latent rows in and out", check_latent_rows, DType::kF32, DType::kFp8E4M3},
    {"append_paged_kv_cache", check_append, DType::kBF16, DType::kBF16},
    {"append_paged_kv_cache", check_append, DType::kF16, DType::kInt8},
    {"merge_attn_states", check_merge, DType::kF32, DType::kF32},
    {"merge_attn_states", check_merge, DType::kF16, DType::kF16},
    {"advance_step", check_advance_step, DType::kF16, DType::kF16},
};

}  // namespace

void plan_cache_ops(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan) {
  for (const CheckedOp& op : kOps) {
    const std::string types = types_of(op.dtype, op.cache_dtype);
    const auto call = [=] { return op.check({{context}, op.dtype, op.cache_dtype}); };
    // Nothing makes these kernels but a call.
    plan.add({fmt::format("{}, {}", op.name, types), call, [=, &report] {
                CheckLine line{.what = std::string(op.name), .types = types};
                line.run(line.what, call);
                report.add(line);
              }});
  }
}

}  // namespace clattn::cli
