
#include "device/attention_host.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

namespace attention_test {

using clattn::DType;

oracle::Element element(DType dtype) {
  constexpr std::array kElements = {oracle::Element::kF32,     oracle::Element::kF16,
                                    oracle::Element::kBF16,    oracle::Element::kFp8E4M3,
                                    oracle::Element::kFp8E5M2, oracle::Element::kInt8,
                                    oracle::Element::kUInt4};
  return kElements.at(static_cast<std::size_t>(dtype));
}

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

std::uint32_t poison_bits(DType dtype) {
  constexpr std::array<std::uint32_t, 7> kBits = {0x7FC00001U, 0x7E01U, 0x7FC1U, 0x7F,
                                                  0x7F,        0x80,    0xFF};
  return kBits.at(static_cast<std::size_t>(dtype));
}

double cache_scale(const CaseSpec& spec, bool of_values, std::int64_t head) {
  if (!clattn::is_quantized(spec.config.cache_dtype())) return 1.0;
  const double tensor = spec.config.cache_dtype() == DType::kInt8 ? 0x1p-5 : 0.5;
  const double mine = spec.scales_per_head ? std::ldexp(1.0, -static_cast<int>(head % 3)) : 1.0;
  return tensor * mine * (of_values ? 2.0 : 1.0);
}

ValueStrides value_strides(const clattn::AttentionConfig& config, const clattn::KVCache& cache) {
  const std::int64_t head = config.output_head_size();
  if (head == cache.head_size) return {cache.token_stride, cache.head_stride};
  return {config.num_kv_heads * head + 8, head};  // with poison between the rows
}

namespace {

/// What the batch says of its requests beyond lengths.
void list_requests(const CaseSpec& spec, HostCase& host) {
  oracle::AttentionCase& t = host.truth;
  t.span_cut = static_cast<oracle::SpanCut>(spec.config.span_rule);
  host.span_start_loc = host.tree_start_loc = {0};
  for (std::size_t r = 0; r < spec.requests.size(); ++r) {
    const Request& request = spec.requests[r];
    if (request.direction) {
      host.direction.push_back(*request.direction);
      t.looks.push_back(static_cast<oracle::Looks>(*request.direction));
    }
    host.tree_parents.insert(host.tree_parents.end(), request.parents.begin(),
                             request.parents.end());
    host.tree_start_loc.push_back(static_cast<std::int32_t>(host.tree_parents.size()));
    t.tree_parents.push_back(request.parents);
    if (spec.config.use_first_keys) t.first_keys.push_back(request.first_key);
    if (spec.config.use_keep_keys) t.keep_keys.push_back(request.keep_keys);
    for (const auto& [first, end] : request.spans) {
      host.spans.insert(host.spans.end(), {first, end});
      if (spec.config.use_spans) t.spans.push_back({static_cast<std::int32_t>(r), first, end});
    }
    host.span_start_loc.push_back(static_cast<std::int32_t>(host.spans.size() / 2));
  }
}

}  // namespace

HostCase lay_out(const CaseSpec& spec) {
  std::mt19937 random(spec.page_seed);
  HostCase host;
  const clattn::AttentionConfig& c = spec.config;
  oracle::AttentionCase& t = host.truth;
  t.num_heads = c.num_heads;
  t.num_kv_heads = c.num_kv_heads;
  t.head_size = c.head_size;
  t.block_size = c.contiguous_kv() ? 1 : c.block_size;
  t.scale = c.scale ? static_cast<double>(*c.scale) : 1.0 / std::sqrt(c.head_size);
  const bool decoder = c.attn_type == clattn::AttentionType::kDecoder;
  t.causal = decoder ? spec.causal : spec.causal_encoder;
  t.soft_cap = c.logits_soft_cap;
  t.window_left = c.sliding_window > 0 ? c.sliding_window - 1 : c.window_left;
  t.window_right = c.sliding_window > 0 ? c.sliding_window - 1 : c.window_right;
  t.chunk = c.attention_chunk_size;
  t.chunk_lookback = c.chunk_lookback;
  t.alibi_slopes.assign(c.alibi_slopes.begin(), c.alibi_slopes.end());
  t.sinks.assign(c.sinks.begin(), c.sinks.end());
  t.query_start_loc = {0};
  std::int64_t used = 0;
  std::int64_t widest = 1;
  for (const Request& request : spec.requests) {
    t.query_start_loc.push_back(t.query_start_loc.back() + request.query_len);
    t.seq_lens.push_back(request.query_len + request.context_len);
    const std::int64_t pages = (t.seq_lens.back() + t.block_size - 1) / t.block_size;
    used += pages;
    widest = std::max(widest, pages);
  }
  list_requests(spec, host);
  host.num_tokens = t.query_start_loc.back();
  host.num_blocks = used + 2;
  t.max_blocks = widest + 1;  // every row has at least one unused entry
  std::vector<std::int32_t> pages(index(host.num_blocks));
  std::iota(pages.begin(), pages.end(), 0);
  // Contiguous keys stand in order, behind an unused row.
  if (c.contiguous_kv()) std::rotate(pages.begin(), pages.begin() + 1, pages.end());
  if (!c.contiguous_kv()) std::shuffle(pages.begin(), pages.end(), random);
  host.block_table.assign(spec.requests.size() * index(t.max_blocks),
                          std::numeric_limits<std::int32_t>::max());
  std::size_t next = 0;
  for (std::size_t r = 0; r < spec.requests.size(); ++r) {
    const std::int64_t count = (t.seq_lens[r] + t.block_size - 1) / t.block_size;
    for (std::int64_t p = 0; p < count; ++p) {
      host.block_table[r * index(t.max_blocks) + index(p)] = pages[next++];
    }
  }
  t.block_table = host.block_table;
  return host;
}

namespace {

/// Whether some query of request `r` may see the key at position `p`.
bool is_seen(const oracle::AttentionCase& t, std::size_t r, std::int64_t p) {
  for (std::int32_t token = t.query_start_loc[r]; token < t.query_start_loc[r + 1]; ++token) {
    if (oracle::sees(t, static_cast<std::int32_t>(r), token, static_cast<std::int32_t>(p)))
      return true;
  }
  return false;
}

/// CaseSpec::rise: dim 0 of each query, which e4m3 has, too, if its scale is a power of two.
constexpr double kRiseQuery = 8;

}  // namespace

void fill_cache(const CaseSpec& spec, HostCase& host, CacheImage& image, Tensor& key,
                Tensor& value) {
  const auto heads = spec.config.num_kv_heads;
  const auto dims = spec.config.head_size, values = spec.config.output_head_size();
  for (std::size_t r = 0; r < spec.requests.size(); ++r) {
    const std::int64_t context = spec.requests[r].context_len;
    const double length = host.truth.seq_lens[r];
    std::mt19937 random(1000 + spec.requests[r].identity);
    std::normal_distribution<double> normal;
    for (std::int64_t p = 0; p < host.truth.seq_lens[r]; ++p) {
      const bool written = spec.write_cache && p >= context;
      const bool unseen = spec.unseen_is_nan && !is_seen(host.truth, r, p);
      const std::int64_t row = host.truth.query_start_loc[r] + (p - context);
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t d = 0; d < dims; ++d) {
          double k = normal(random);
          if (spec.rise != 0 && d == 0)
            k = spec.rise * static_cast<double>(p) / (kRiseQuery * host.truth.scale * length);
          double v = spec.value_mean + normal(random);
          if (spec.unit_values) {
            k = 0;
            v = d == p ? 1 : 0;
          }
          if ((spec.last_token_overflows && p + 1 == host.truth.seq_lens[r]) ||
              (spec.first_token_overflows && p == 0)) {
            k = v = spec.overflow_value;
          }
          if (unseen) k = v = std::numeric_limits<double>::quiet_NaN();
          if (written) {
            k = key.set(index((row * heads + h) * dims + d), k);
            if (d < values) v = value.set(index((row * heads + h) * values + d), v);
          }
          image.put(r, p, h, d, k, v, !written);
        }
      }
    }
  }
}

Tensor make_query(const CaseSpec& spec, HostCase& host, std::int64_t stride) {
  const std::int64_t row = std::int64_t{spec.config.num_heads} * spec.config.head_size;
  Tensor query(spec.config.dtype, std::max<std::size_t>(index(host.num_tokens * stride), 1));
  for (std::size_t i = 0; i < query.size(); ++i) query.set_bits(i, poison_bits(spec.config.dtype));
  for (std::size_t r = 0; r < spec.requests.size(); ++r) {
    std::mt19937 random(500000 + spec.requests[r].identity);
    std::normal_distribution<double> normal(0.0, spec.sharpness);
    for (std::int64_t t = host.truth.query_start_loc[r]; t < host.truth.query_start_loc[r + 1];
         ++t) {
      for (std::int64_t i = 0; i < row; ++i) {
        const double x = normal(random);
        const bool rises = spec.rise != 0 && i % spec.config.head_size == 0;
        host.truth.query.push_back(query.set(index(t * stride + i), rises ? kRiseQuery : x));
      }
    }
  }
  return query;
}

clattn::CommonAttentionMetadata describe_batch(const CaseSpec& spec, const HostCase& host,
                                               std::vector<std::int32_t>& key_start_loc) {
  clattn::CommonAttentionMetadata batch;
  batch.query_start_loc = host.truth.query_start_loc;
  batch.seq_lens = host.truth.seq_lens;
  batch.num_reqs = static_cast<std::int32_t>(spec.requests.size());
  batch.num_actual_tokens = static_cast<std::int32_t>(host.num_tokens);
  if (spec.config.attn_type == clattn::AttentionType::kDecoder) batch.causal = spec.causal;
  if (spec.causal_encoder) batch.causal = true;
  batch.direction = host.direction;
  if (!host.direction.empty()) batch.causal.reset();
  batch.first_keys = host.truth.first_keys;
  batch.keep_keys = host.truth.keep_keys;
  if (spec.config.use_trees) {
    batch.tree_start_loc = host.tree_start_loc;
    batch.tree_parents = host.tree_parents;
  }
  if (!host.spans.empty()) {
    batch.span_start_loc = host.span_start_loc;
    batch.spans = host.spans;
  }
  if (spec.config.contiguous_kv()) {
    key_start_loc = {0};
    for (const std::int32_t keys : host.truth.seq_lens)
      key_start_loc.push_back(key_start_loc.back() + keys);
    batch.key_start_loc = key_start_loc;
  } else {
    batch.block_table = host.block_table;
    batch.block_table_stride = host.truth.max_blocks;
  }
  return batch;
}

}  // namespace attention_test
