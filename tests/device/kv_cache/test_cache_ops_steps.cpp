#include <fmt/format.h>
#include <clattn/cache_ops.hpp>
#include <clattn/compat/derived_batches.hpp>
#include <clattn/compat/page.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/mla.hpp>
#include <clattn/registry.hpp>

#include "device/cache_ops_support.hpp"

// Metadata on the device: advance_step and append_paged_kv_cache.
namespace test_cache_ops_steps {

using cache_ops_test::all_contexts;
using cache_ops_test::download;
using cache_ops_test::error_text;
using cache_ops_test::upload;
using clattn::DType;

/// The host's copy of everything that an advance_step reads and writes.
struct Step {
  std::int32_t num_seqs = 0, num_queries = 0, block_size = 4;
  std::int64_t num_blocks = 50, stride = 0;
  std::vector<std::int64_t> tokens, sampled, positions, slots;
  std::vector<std::int32_t> seq_lens, table, indices, indptr, last_page_len, bound;

  Step(std::int32_t seqs, std::int32_t queries, std::int64_t max_blocks, std::uint32_t seed)
      : num_seqs(seqs), num_queries(queries), stride(max_blocks) {
    std::mt19937 random(seed);
    const auto n = static_cast<std::size_t>(seqs);
    const auto below = [&](std::int64_t limit) {
      return static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(limit));
    };
    tokens.assign(n, 900);
    positions.assign(n, 901);
    slots.assign(n, 902);
    last_page_len.assign(n, 903);
    bound.assign(n, 904);
    indptr.assign(n + 1, 905);
    indices.assign(n * static_cast<std::size_t>(max_blocks) + 1, 906);
    for (std::size_t r = 0; r < n; ++r) {
      sampled.push_back(below(1000) + (std::int64_t{1} << 40));
      seq_lens.push_back(below(max_blocks * block_size));
    }
    for (std::size_t i = 0; i < n * static_cast<std::size_t>(max_blocks); ++i) {
      table.push_back(below(num_blocks));
    }
    // What lies past a row's pages is garbage.
    for (std::size_t r = 0; r < n; ++r) {
      for (std::int64_t c = seq_lens[r] / block_size + 1; c < stride; ++c) {
        table[r * static_cast<std::size_t>(stride) + static_cast<std::size_t>(c)] = -7;
      }
    }
  }
  std::int32_t& page(std::size_t row, std::size_t column) {
    return table[row * static_cast<std::size_t>(stride) + column];
  }

  /// A6.9 in plain loops; rows in `bad` become padding.
  void advance(const std::vector<std::size_t>& bad) {
    const auto queries = static_cast<std::size_t>(num_queries);
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      const bool is_bad = std::find(bad.begin(), bad.end(), r) != bad.end();
      if (r >= queries || is_bad) {
        tokens[r] = positions[r] = 0;
        slots[r] = -1;
        if (r < queries) bound[r] = 0;
        continue;
      }
      const std::int32_t len = seq_lens[r] + 1;
      tokens[r] = sampled[r];
      seq_lens[r] = len;
      positions[r] = len - 1;
      last_page_len[r] = (len - 1) % block_size + 1;
      slots[r] =
          std::int64_t{page(r, static_cast<std::size_t>((len - 1) / block_size))} * block_size +
          (len - 1) % block_size;
      bound[r] = (len + block_size - 1) / block_size;
    }
    indptr[0] = 0;
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      indptr[r + 1] = indptr[r] + (r < queries ? bound[r] : 0);
    }
    for (std::size_t r = 0; r < queries; ++r) {
      for (std::int32_t c = 0; c < bound[r]; ++c) {
        indices[static_cast<std::size_t>(indptr[r] + c)] = page(r, static_cast<std::size_t>(c));
      }
    }
  }
};

struct DeviceStep {
  clattn::Queue queue;
  clattn::AdvanceStep step;
  clattn::AdvanceStepPages pages;
  clattn::DeviceErrors errors;
  DeviceStep(const clattn::Context& context, const Step& host)
      : queue(context.create_queue()), errors(context, queue) {
    step.num_seqs = host.num_seqs;
    step.num_queries = host.num_queries;
    step.block_size = host.block_size;
    step.num_blocks = host.num_blocks;
    step.block_table_stride = host.stride;
    step.input_tokens = upload(context, queue, host.tokens);
    step.sampled_token_ids = upload(context, queue, host.sampled);
    step.input_positions = upload(context, queue, host.positions);
    step.seq_lens = upload(context, queue, host.seq_lens);
    step.slot_mapping = upload(context, queue, host.slots);
    step.block_tables = upload(context, queue, host.table);
    pages.paged_kv_indices = upload(context, queue, host.indices);
    pages.paged_kv_indptr = upload(context, queue, host.indptr);
    pages.paged_kv_last_page_len = upload(context, queue, host.last_page_len);
    pages.block_table_bound = upload(context, queue, host.bound);
  }
  void expect_rows(const Step& want) const {
    EXPECT_EQ(download<std::int64_t>(queue, step.input_tokens), want.tokens);
    EXPECT_EQ(download<std::int64_t>(queue, step.input_positions), want.positions);
    EXPECT_EQ(download<std::int32_t>(queue, step.seq_lens), want.seq_lens);
    EXPECT_EQ(download<std::int64_t>(queue, step.slot_mapping), want.slots);
  }
  void expect_pages(const Step& want) const {
    EXPECT_EQ(download<std::int32_t>(queue, pages.paged_kv_indptr), want.indptr);
    EXPECT_EQ(download<std::int32_t>(queue, pages.paged_kv_indices), want.indices);
    EXPECT_EQ(download<std::int32_t>(queue, pages.paged_kv_last_page_len), want.last_page_len);
    EXPECT_EQ(download<std::int32_t>(queue, pages.block_table_bound), want.bound);
  }
  std::string refusal(const clattn::Context& context) {
    return error_text(
        [&] { clattn::advance_step_flashinfer(context, queue, step, pages, errors); });
  }
};

// A4.3: what the device makes of a mixed step is what advance_batch() makes of it for build().
TEST(AdvanceStep, A4_3_TheHostsNextBatchIsTheDevices) {
  const auto& context = all_contexts().at(0);
  const std::vector<std::int32_t> starts = {0, 1, 6, 7}, lens = {8, 5, 13};
  Step step(3, 3, 4, 1);
  step.seq_lens = lens;
  for (std::size_t i = 0; i < step.table.size(); ++i) step.table[i] = static_cast<std::int32_t>(i);
  DeviceStep device(*context, step);
  clattn::advance_step_flashinfer(*context, device.queue, device.step, device.pages, device.errors);
  device.errors.check(device.queue);
  const clattn::AdvancedBatch next =
      clattn::advance_batch(clattn::CommonAttentionMetadata::of(starts, lens, step.table), true);
  std::vector<std::int64_t> slots(3);
  clattn::compute_slot_mapping(next.metadata(), 4, slots);
  const clattn::PagedKVMetadata pages = clattn::build_paged_kv_metadata(next.metadata(), 4);
  EXPECT_EQ(download<std::int32_t>(device.queue, device.step.seq_lens), next.seq_lens);
  EXPECT_EQ(download<std::int64_t>(device.queue, device.step.slot_mapping), slots);
  EXPECT_EQ(download<std::int32_t>(device.queue, device.pages.paged_kv_indptr), pages.indptr);
  EXPECT_EQ(slots, (std::vector<std::int64_t>{2 * 4, 5 * 4 + 1, 11 * 4 + 1}));
  EXPECT_EQ(pages.last_page_len, (std::vector<std::int32_t>{1, 2, 2}));
}

// A6.9; three steps in a row, rows behind num_queries are padding.
TEST(AdvanceStep, MatchesPlainLoops) {
  for (const auto& context : all_contexts()) {
    struct Size {
      std::int32_t seqs, queries;
    };
    for (const Size size : {Size{1, 1}, Size{7, 5}, Size{3, 0}, Size{300, 300}, Size{0, 0}}) {
      SCOPED_TRACE(fmt::format("{} of {}", size.queries, size.seqs));
      Step host(size.seqs, size.queries, 6, 3);
      for (std::size_t r = 0; r < host.seq_lens.size(); ++r) {
        host.seq_lens[r] = std::min(host.seq_lens[r], 20);  // room for three tokens
        for (std::size_t c = 0; c < 6; ++c) host.page(r, c) = static_cast<std::int32_t>(r % 40 + c);
      }
      DeviceStep device(*context, host);
      for (int i = 0; i < 3; ++i) {
        host.advance({});
        clattn::advance_step_flashinfer(*context, device.queue, device.step, device.pages,
                                        device.errors);
      }
      device.expect_rows(host);
      device.expect_pages(host);
      EXPECT_NO_THROW(device.errors.check(device.queue));
    }
  }
}

TEST(AdvanceStep, TheSubsetWithoutPageListsLeavesThemAlone) {
  for (const auto& context : all_contexts()) {
    Step host(9, 6, 5, 4);
    const Step before = host;
    DeviceStep device(*context, host);
    host.advance({});
    clattn::advance_step_flashattn(*context, device.queue, device.step, device.errors);
    device.expect_rows(host);
    device.expect_pages(before);
    EXPECT_NO_THROW(device.errors.check(device.queue));
  }
}

// A9.12: nothing outside a table or a cache is touched, and the lowest bad row is told.
TEST(AdvanceStep, BadRowsBecomePaddingAndAreTold) {
  for (const auto& context : all_contexts()) {
    Step host(9, 8, 5, 4);
    host.seq_lens[2] = 20;  // the 21st token of 5 pages of 4
    host.seq_lens[4] = 9;
    host.page(4, 0) = host.page(4, 2) = 3;
    host.page(4, 1) = 50;  // an older page
    host.seq_lens[6] = -5;
    host.seq_lens[7] = INT32_MAX;
    DeviceStep device(*context, host);
    host.advance({2, 4, 6, 7});
    clattn::advance_step_flashinfer(*context, device.queue, device.step, device.pages,
                                    device.errors);
    device.expect_rows(host);
    device.expect_pages(host);
    EXPECT_EQ(error_text([&] { device.errors.check(device.queue); }),
              "advance_step: row 2 was left out: its new token lies past its block table");
    EXPECT_NO_THROW(device.errors.check(device.queue));

    // The same again, one fault at a time.
    const auto told = [&](const Step& step) {
      DeviceStep one(*context, step);
      clattn::advance_step_flashattn(*context, one.queue, one.step, one.errors);
      return error_text([&] { one.errors.check(one.queue); });
    };
    Step block(9, 8, 5, 4);
    block.page(5, 0) = 50;
    EXPECT_EQ(told(block),
              "advance_step: row 5 was left out: its block table names a block outside the cache");
    Step negative(9, 8, 5, 4);
    negative.seq_lens[7] = -2;
    EXPECT_EQ(told(negative),
              "advance_step: row 7 was left out: its seq_len is outside 0 … 2147483646");
  }
}

// A6.9, A9.12: the first row whose pages do not fit, and every row with pages behind it, becomes
// padding.
TEST(AdvanceStep, RowsWhosePagesDoNotFitBecomePaddingToo) {
  for (const auto& context : all_contexts()) {
    Step host(400, 390, 6, 5);
    host.page(7, 0) = -1;  // padding that takes no room
    Step unlimited = host;
    unlimited.advance({7});
    for (const std::size_t first :
         {std::size_t{0}, std::size_t{1}, std::size_t{8}, std::size_t{131}, std::size_t{389}}) {
      SCOPED_TRACE(first);
      const auto full = static_cast<std::size_t>(unlimited.indptr[first + 1]);
      Step want = host;
      want.indices.resize(full - 1);  // one too few for row `first`
      DeviceStep device(*context, want);
      clattn::advance_step_flashinfer(*context, device.queue, device.step, device.pages,
                                      device.errors);
      std::vector<std::size_t> bad = {7};
      for (std::size_t r = first; r < 390; ++r) bad.push_back(r);
      want.advance(bad);
      device.expect_rows(want);
      device.expect_pages(want);
      EXPECT_EQ(error_text([&] { device.errors.check(device.queue); }),
                first > 7 ? "advance_step: row 7 was left out: its block table names a block "
                            "outside the cache"
                          : fmt::format("advance_step: row {} was left out: its pages do not fit "
                                        "paged_kv_indices",
                                        first));
    }
  }
}

TEST(AdvanceStep, SizesAreChecked) {
  const auto& context = *all_contexts().at(0);
  DeviceStep device(context, Step(3, 2, 5, 4));
  device.step.num_queries = 4;
  EXPECT_EQ(device.refusal(context), "advance_step: num_queries is 4, legal: 0 … 3 (num_seqs)");
  device.step.num_queries = 2;
  device.step.block_table_stride = 6;
  EXPECT_EQ(device.refusal(context),
            "advance_step: block_tables holds 60 bytes, legal: at least 72 (18 elements of 4)");
  device.step.block_table_stride = 5;
  device.pages.paged_kv_indptr = context.allocate(12);
  EXPECT_EQ(device.refusal(context),
            "advance_step: paged_kv_indptr holds 12 bytes, legal: at least 16 (4 elements of 4)");
}

// Kernels that check numbers in one buffer while another of theirs writes it could be led anywhere.
TEST(AdvanceStep, BuffersMayNotOverlap) {
  const auto& context = *all_contexts().at(0);
  DeviceStep device(context, Step(3, 2, 5, 4));
  device.pages.block_table_bound = device.pages.paged_kv_indptr;
  EXPECT_EQ(device.refusal(context),
            "advance_step: paged_kv_indptr and block_table_bound overlap, legal: memory "
            "of its own for each");
  device.pages.block_table_bound = context.allocate(64);
  const cl_buffer_region behind = {.origin = 0, .size = 12};
  const cl_mem part = clCreateSubBuffer(device.step.slot_mapping.handle(), 0,
                                        CL_BUFFER_CREATE_TYPE_REGION, &behind, nullptr);
  device.step.seq_lens = clattn::Buffer::adopt(part);
  clReleaseMemObject(part);
  EXPECT_EQ(device.refusal(context),
            "advance_step: seq_lens and slot_mapping overlap, legal: memory of its own for each");
}

// A6.10: by batch index and position; what lies outside the lists or the cache is not stored.
TEST(AppendPagedKVCache, StoresEveryTokenWhereItsListSays) {
  constexpr std::int32_t kHeads = 2, kDims = 8, kBlock = 16;
  constexpr std::int64_t kBlocks = 4;
  constexpr std::size_t kRow = kHeads * kDims, kPlane = kBlock * kRow;
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const std::vector<std::int32_t> batch = {0, 2, -1, 1, 2, 2, 3, 0, 2};
    const std::vector<std::int32_t> position = {3, 17, 0, 0, 31, 32, 0, -1, 0};
    const std::vector<std::int32_t> indptr = {0, 1, 1, 3}, indices = {2, 9, 1};
    // Request 1 has no page, request 2's first page is outside the cache and it has no third.
    const std::vector<std::int64_t> slots = {35, 17, -1, -1, 31, -1, -1, -1, -1};
    std::vector<float> key(batch.size() * kRow), value(key.size());
    for (std::size_t i = 0; i < key.size(); ++i) {
      key[i] = static_cast<float>(i);
      value[i] = -static_cast<float>(i);
    }
    std::vector<float> want(2 * kBlocks * kPlane, 0.5F);
    clattn::KVCacheSpec spec;
    spec.block_size = kBlock;
    spec.num_kv_heads = kHeads;
    spec.head_size = kDims;
    spec.dtype = DType::kF32;
    const clattn::KVCache cache =
        clattn::reshape_kv_cache(upload(*context, queue, want), spec,
                                 *clattn::list_attn_backends()[0], clattn::KVCacheLayout::kNHD);
    clattn::PagedKVLists lists{upload(*context, queue, indices), upload(*context, queue, indptr),
                               3};
    const clattn::Buffer keys = upload(*context, queue, key);
    const clattn::Buffer values = upload(*context, queue, value);
    clattn::append_paged_kv_cache(*context, queue, {.buffer = keys.handle()},
                                  {.buffer = values.handle()}, DType::kF32, cache,
                                  upload(*context, queue, batch), upload(*context, queue, position),
                                  static_cast<std::int64_t>(batch.size()), lists);
    for (std::size_t t = 0; t < slots.size(); ++t) {
      for (std::size_t i = 0; i < kRow && slots[t] >= 0; ++i) {
        const auto slot = static_cast<std::size_t>(slots[t]);
        const auto at =
            static_cast<std::size_t>(
                cache.k_offset + cache.block_stride * static_cast<std::int64_t>(slot / kBlock)) +
            slot % kBlock * kRow + i;
        want[at] = key[t * kRow + i];
        want[at + static_cast<std::size_t>(cache.v_offset)] = value[t * kRow + i];
      }
    }
    EXPECT_EQ(download<float>(queue, cache.buffer), want);
  }
}

// A6.10: the same places for latent rows.
TEST(AppendPagedKVCache, StoresLatentRowsWhereTheirListsSay) {
  constexpr std::size_t kRank = 16, kRope = 8, kWidth = kRank + kRope, kBlock = 4;
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const std::vector<std::int32_t> batch = {1, 0, -1, 1, 0, 2, 1};
    const std::vector<std::int32_t> position = {5, 0, 0, 4, 3, 0, 12};
    const std::vector<std::int32_t> indptr = {0, 1, 4, 4}, indices = {2, 3, 0, 5};
    // Request 1 has three pages, the third outside the cache; request 2 has none.
    const std::vector<std::int64_t> slots = {1, 8, -1, 0, 11, -1, -1};
    constexpr std::size_t kStride = kRank + 3;
    std::vector<float> ckv(batch.size() * kStride), kpe(batch.size() * kRope);
    for (std::size_t i = 0; i < ckv.size(); ++i) ckv[i] = static_cast<float>(i);
    for (std::size_t i = 0; i < kpe.size(); ++i) kpe[i] = -static_cast<float>(i);
    std::vector<float> want(5 * kBlock * kWidth, 0.5F);
    clattn::MLACache cache;
    cache.buffer = upload(*context, queue, want);
    cache.dtype = DType::kF32;
    cache.num_blocks = 5;
    cache.block_size = kBlock;
    cache.kv_lora_rank = kRank;
    cache.rope_dim = kRope;
    const clattn::Buffer latent = upload(*context, queue, ckv);
    const clattn::Buffer rope = upload(*context, queue, kpe);
    const clattn::PagedKVLists lists{upload(*context, queue, indices),
                                     upload(*context, queue, indptr), 3};
    clattn::append_paged_mla_kv_cache(
        *context, queue, {latent.handle(), 0, kStride}, {.buffer = rope.handle()}, DType::kF32,
        cache, upload(*context, queue, batch), upload(*context, queue, position),
        static_cast<std::int64_t>(batch.size()), lists);
    for (std::size_t t = 0; t < slots.size(); ++t) {
      for (std::size_t d = 0; d < kWidth && slots[t] >= 0; ++d) {
        want[static_cast<std::size_t>(slots[t]) * kWidth + d] =
            d < kRank ? ckv[t * kStride + d] : kpe[t * kRope + d - kRank];
      }
    }
    EXPECT_EQ(download<float>(queue, cache.buffer), want);
    cache.rope_dim = 4;
    EXPECT_EQ(error_text([&] {
                clattn::append_paged_mla_kv_cache(*context, queue, {latent.handle(), 0, kStride},
                                                  {.buffer = rope.handle()}, DType::kF32, cache,
                                                  latent, latent, 1, lists);
              }),
              "kv_cache: rope_dim is 4, legal: multiples of 8");
  }
}

TEST(AppendPagedKVCache, NonsenseIsRefused) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const clattn::Buffer memory = context.allocate(16);
  clattn::KVCache cache;
  cache.block_size = 16;
  EXPECT_EQ(error_text([&] {
              clattn::append_paged_kv_cache(context, queue, {}, {}, DType::kF16, cache, memory,
                                            memory, 5, {memory, memory, 1});
            }),
            "append_paged_kv_cache: batch_indices holds 16 bytes, legal: at least 20 (i32 [5])");
  EXPECT_EQ(error_text([&] {
              clattn::append_paged_kv_cache(context, queue, {}, {}, DType::kF16, cache, memory,
                                            memory, 4, {memory, memory, 4});
            }),
            "append_paged_kv_cache: indptr holds 16 bytes, legal: at least 20 (i32 [5])");
  clattn::MLACache latent;
  latent.block_size = 16;
  EXPECT_EQ(error_text([&] {
              clattn::append_paged_mla_kv_cache(context, queue, {}, {}, DType::kF16, latent, memory,
                                                {}, 4, {memory, memory, 1});
            }),
            "append_paged_mla_kv_cache: positions holds 0 bytes, legal: at least 16 (i32 [4])");
}

}  // namespace test_cache_ops_steps
