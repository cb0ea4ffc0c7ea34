#include "cli/check_batches.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <numeric>
#include <random>

#include "cli/elements.hpp"

namespace clattn::cli {

const std::vector<BatchFamily>& batch_families() {
  static const std::vector<BatchFamily> families = {
      {"decode", {{1, 1}, {1, 15}, {1, 16}, {1, 17}, {1, 130}, {1, 513}}},
      {"decode, 4 splits", {{1, 300}, {1, 9}, {1, 64}, {1, 1000}}, 4},
      {"decode, 2-16 tokens", {{4, 4}, {2, 61}, {16, 257}, {5, 700}}},
      {"prefill", {{33, 33}, {128, 128}, {17, 17}}},
      {"chunk over history", {{40, 150}, {64, 513}, {17, 65}}},
      {"mixed, some empty", {{1, 20}, {50, 50}, {0, 0}, {0, 33}, {1, 200}, {20, 90}, {3, 3}}},
      {"not causal", {{20, 60}, {1, 40}, {7, 7}}, 0, false},
  };
  return families;
}

std::vector<std::byte> random_elements(DType dtype, std::size_t count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(generator); });
  return encode_elements(dtype, values);
}

AttentionCall make_call(const BatchFamily& family, const AttentionConfig& config,
                        std::uint32_t seed) {
  constexpr std::int32_t kSparePages = 3;
  const std::int32_t block_size = config.block_size;
  AttentionCall call;
  call.config = config;
  call.causal = family.causal;
  call.num_splits = family.num_splits;
  call.query_start_loc = {0};
  std::int32_t num_pages = 0;
  for (const RequestShape& request : family.requests) {
    const std::int32_t pages = (request.seq_len + block_size - 1) / block_size;
    call.query_start_loc.push_back(call.query_start_loc.back() + request.query_len);
    call.seq_lens.push_back(request.seq_len);
    call.max_blocks = std::max<std::int64_t>(call.max_blocks, pages + 1);
    num_pages += pages;
  }
  std::vector<std::int32_t> pages(static_cast<std::size_t>(num_pages + kSparePages));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(seed));
  call.num_blocks = num_pages + kSparePages;

  const auto tokens = static_cast<std::size_t>(call.num_tokens());
  const auto row =
      static_cast<std::size_t>(config.num_kv_heads) * static_cast<std::size_t>(config.head_size);
  const std::size_t query_row =
      static_cast<std::size_t>(config.num_heads) * static_cast<std::size_t>(config.head_size);
  call.query = random_elements(config.dtype, tokens * query_row, seed + 1);
  call.key = random_elements(config.dtype, tokens * row, seed + 2);
  call.value = random_elements(config.dtype, tokens * row, seed + 3);

  const std::size_t row_bytes = row * element_size_bytes(config.cache_dtype());
  const std::size_t cache_bytes =
      static_cast<std::size_t>(call.num_blocks) * static_cast<std::size_t>(block_size) * row_bytes;
  std::vector<std::byte> poison(cache_bytes);
  for (std::size_t i = 0; i < cache_bytes; i += sizeof(kPoison)) {
    std::memcpy(&poison[i], &kPoison, std::min(sizeof(kPoison), cache_bytes - i));
  }
  call.cache = {poison, poison};
  const std::vector<std::byte> history = random_elements(
      config.cache_dtype(),
      static_cast<std::size_t>(num_pages) * static_cast<std::size_t>(block_size) * row, seed + 4);

  call.block_table.assign(call.seq_lens.size() * static_cast<std::size_t>(call.max_blocks),
                          INT_MAX);
  std::size_t next_page = 0, next_row = 0;
  for (std::size_t r = 0; r < call.seq_lens.size(); ++r) {
    const std::int32_t seq_len = call.seq_lens[r];
    const std::int32_t context = seq_len - family.requests[r].query_len;
    std::int32_t* table = &call.block_table[r * static_cast<std::size_t>(call.max_blocks)];
    for (std::int32_t p = 0; p < seq_len; ++p) {
      if (p % block_size == 0) table[p / block_size] = pages[next_page++];
      const std::int64_t slot = std::int64_t{table[p / block_size]} * block_size + p % block_size;
      if (p >= context) {
        call.slot_mapping.push_back(slot);
        continue;
      }
      // Keys and values of one position differ: they start a row apart in the same random pool.
      const std::size_t at = static_cast<std::size_t>(slot) * row_bytes;
      std::memcpy(&call.cache.key[at], &history[next_row * row_bytes], row_bytes);
      const std::size_t other = (next_row + 1) % (history.size() / row_bytes);
      std::memcpy(&call.cache.value[at], &history[other * row_bytes], row_bytes);
      ++next_row;
    }
  }
  return call;
}

}  // namespace clattn::cli
