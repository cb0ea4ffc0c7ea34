#include <algorithm>
#include <clattn/cascade.hpp>
#include <string_view>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {
namespace {

using detail::ceil_div, detail::checked_mul, detail::throw_invalid_if;

// vLLM 76b494444f, flash_attn.py: a shorter prefix or a smaller batch does not pay for the merge;
// tiles are those of FlashAttention.
constexpr std::int32_t kLeastPrefix = 256;
constexpr std::size_t kLeastRequests = 8;
constexpr std::int64_t kTile = 128;

void check(const CascadeQuery& query) {
  detail::check_at_least("common_prefix_len", query.common_prefix_len, 0);
  detail::check_at_least("num_kv_heads", query.num_kv_heads, 1);
  detail::check_at_least("num_query_heads", query.num_query_heads, 1);
  detail::check_at_least("num_sms", query.num_sms, 1);
  throw_invalid_if(query.num_query_heads % query.num_kv_heads != 0,
                   "num_query_heads is {}, legal: a multiple of num_kv_heads {}",
                   query.num_query_heads, query.num_kv_heads);
}

}  // namespace

std::vector<std::string> validate_cascade_configuration(const AttentionConfig& config) {
  const std::pair<bool, std::string_view> missing[] = {
      {!config.alibi_slopes.empty(), "ALiBi"},
      {config.sliding_window != 0, "sliding window"},
      {config.attention_chunk_size != 0, "local attention"},
      {config.custom_mask, "custom masks"},
      {config.output_fp8, "fp8 output"},
      {config.attn_type != AttentionType::kDecoder, "attn_type other than decoder"}};
  std::vector<std::string> reasons;
  for (const auto& [wanted, what] : missing)
    detail::append_if(reasons, wanted, "Cascade attention does not support {}.", what);
  return reasons;
}

bool use_cascade_attention(const CascadeQuery& query) {
  check(query);
  if (query.common_prefix_len < kLeastPrefix || query.query_lens.size() < kLeastRequests ||
      query.use_alibi || query.use_sliding_window || query.use_local_attention) {
    return false;
  }
  const std::int64_t group = query.num_query_heads / query.num_kv_heads;
  const bool flash_decoding =
      group > 1 &&
      std::ranges::all_of(query.query_lens, [](std::int32_t length) { return length == 1; });
  if (!flash_decoding) return true;

  const auto num_reqs = static_cast<std::int64_t>(query.query_lens.size());
  const auto tiles = ceil_div<std::int64_t>(query.common_prefix_len, kTile);
  const std::int64_t sms = query.num_sms;
  const auto cascade_groups =
      checked_mul<std::int64_t>(query.num_query_heads, ceil_div(num_reqs, kTile), "cascade groups");
  const std::int64_t decoding_groups =
      checked_mul(checked_mul<std::int64_t>(num_reqs, query.num_kv_heads, "decoding groups"),
                  checked_mul(ceil_div(group, kTile), tiles, "decoding groups"), "decoding groups");
  const std::int64_t cascade_time =
      checked_mul(ceil_div(cascade_groups, sms), tiles, "cascade time");
  return cascade_time < ceil_div(decoding_groups, sms);
}

}  // namespace clattn
