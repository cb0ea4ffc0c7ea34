#include "robustness/attention_model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace {

std::vector<float> random_floats(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return values;
}

std::string shape3(std::int64_t tokens, std::int32_t heads) {
  return "(" + std::to_string(tokens) + ", " + std::to_string(heads) + ", " +
         std::to_string(AttentionModel::kHeadSize) + ")";
}

std::string list_text(const std::vector<double>& values) {
  std::string text = "[";
  for (const double value : values) text += (text == "[" ? "" : ", ") + std::to_string(value);
  return text + "]";
}

constexpr std::size_t kRow =
    std::size_t{AttentionModel::kKvHeads} * std::size_t{AttentionModel::kHeadSize};

std::string cache_shape(std::int64_t blocks) {
  return "(" + std::to_string(blocks) + ", 4, 2, 16)";
}

AttentionModel with_queries(const std::vector<AttentionModel::Request>& requests) {
  AttentionModel model;
  oracle::AttentionCase& t = model.truth;
  t.num_heads = AttentionModel::kHeads;
  t.num_kv_heads = AttentionModel::kKvHeads;
  t.head_size = AttentionModel::kHeadSize;
  t.scale = 0.25;  // 1 / sqrt(16)
  t.query_start_loc = {0};
  for (const AttentionModel::Request& request : requests) {
    t.query_start_loc.push_back(t.query_start_loc.back() + request.query_len);
    t.seq_lens.push_back(request.seq_len);
  }
  const std::int32_t tokens = model.num_tokens();
  const std::vector<float> query = random_floats(static_cast<std::size_t>(tokens) * 2 * kRow, 1);
  t.query.assign(query.begin(), query.end());
  model.image.json =
      R"({"op": "attention", "num_heads": 4, "num_kv_heads": 2, "head_size": 16, "block_size": 4,
          "dtype": "f32", "return_lse": true})";
  model.image.files = {{"query.npy", npy_f32(query, shape3(tokens, AttentionModel::kHeads))},
                       {"query_start_loc.npy", npy_i32(t.query_start_loc)},
                       {"seq_lens.npy", npy_i32(t.seq_lens)}};
  return model;
}

}  // namespace

std::int32_t AttentionModel::max_seq_len() const {
  return *std::max_element(truth.seq_lens.begin(), truth.seq_lens.end());
}

AttentionModel AttentionModel::paged(const std::vector<Request>& requests) {
  AttentionModel model = with_queries(requests);
  oracle::AttentionCase& t = model.truth;
  t.block_size = kBlockSize;
  t.max_blocks = (model.max_seq_len() + kBlockSize - 1) / kBlockSize;
  const auto blocks = t.max_blocks * static_cast<std::int64_t>(requests.size()) + 2;
  for (std::int64_t i = 0; i < t.max_blocks * static_cast<std::int64_t>(requests.size()); ++i) {
    t.block_table.push_back(static_cast<std::int32_t>(blocks - 1 - i));  // 0 and 1 stay unused
  }
  const auto count = static_cast<std::size_t>(blocks) * kBlockSize * kRow;
  std::vector<float> key = random_floats(count, 2), value = random_floats(count, 3);
  std::fill_n(key.begin(), 2 * kBlockSize * kRow, NAN);
  std::fill_n(value.begin(), 2 * kBlockSize * kRow, NAN);
  t.key_cache.assign(key.begin(), key.end());
  t.value_cache.assign(value.begin(), value.end());
  model.image.files["key_cache.npy"] = npy_f32(key, cache_shape(blocks));
  model.image.files["value_cache.npy"] = npy_f32(value, cache_shape(blocks));
  model.set_table();
  return model;
}

void AttentionModel::set_table() {
  image.files["block_table.npy"] =
      npy_i32(truth.block_table, "(" + std::to_string(truth.seq_lens.size()) + ", " +
                                     std::to_string(truth.max_blocks) + ")");
}

void AttentionModel::share_prefix(std::int32_t tokens) {
  for (std::size_t i = 0; i < truth.block_table.size(); ++i) {
    const std::size_t page = i % static_cast<std::size_t>(truth.max_blocks);
    if (page < static_cast<std::size_t>(tokens / kBlockSize))
      truth.block_table[i] = truth.block_table[page];
  }
  set_table();
  add("\"common_prefix_len\": " + std::to_string(tokens));
}

void AttentionModel::halve_values() {
  constexpr std::size_t kSize = kHeadSize, kKept = kSize / 2;
  std::vector<float> values;
  for (std::size_t i = 0; i < truth.value_cache.size(); ++i) {
    if (i % kSize < kKept) {
      values.push_back(static_cast<float>(truth.value_cache[i]));
    } else {
      truth.value_cache[i] = 0;
    }
  }
  const std::string rows = std::to_string(truth.key_start_loc.back());
  image.files["value.npy"] = npy_f32(values, "(" + rows + ", 2, " + std::to_string(kKept) + ")");
  add("\"head_size_v\": " + std::to_string(kKept));
}

AttentionModel AttentionModel::encoder(const std::string& attn_type,
                                       const std::vector<Request>& requests) {
  AttentionModel model = with_queries(requests);
  oracle::AttentionCase& t = model.truth;
  t.causal = false;
  t.key_start_loc = {0};
  for (const std::int32_t keys : t.seq_lens) {
    t.key_start_loc.push_back(t.key_start_loc.back() + keys);
  }
  const std::int32_t rows = t.key_start_loc.back();
  const auto count = static_cast<std::size_t>(rows) * kRow;
  const std::vector<float> key = random_floats(count, 4), value = random_floats(count, 5);
  t.key_cache.assign(key.begin(), key.end());
  t.value_cache.assign(value.begin(), value.end());
  model.image.files["key.npy"] = npy_f32(key, shape3(rows, kKvHeads));
  model.image.files["value.npy"] = npy_f32(value, shape3(rows, kKvHeads));
  if (t.key_start_loc != t.query_start_loc) {
    model.image.files["key_start_loc.npy"] = npy_i32(t.key_start_loc);
  }
  model.add("\"attn_type\": \"" + attn_type + "\"");
  return model;
}

void AttentionModel::add(const std::string& json) {
  image.json.insert(1, json + ", ");
}

void AttentionModel::set_mask() {
  std::mt19937 random(6);
  std::bernoulli_distribution visible(0.5);
  truth.custom_mask_stride = max_seq_len();
  for (std::size_t r = 0; r < truth.seq_lens.size(); ++r) {
    const std::int32_t queries = truth.query_start_loc[r + 1] - truth.query_start_loc[r];
    for (std::int32_t i = 0; i < queries; ++i) {
      for (std::int32_t p = 0; p < truth.custom_mask_stride; ++p) {
        const bool own = p == truth.seq_lens[r] - queries + i;
        truth.custom_mask.push_back(own || visible(random) ? 1 : 0);
      }
    }
  }
  image.files["custom_mask.npy"] = npy_image(
      "|u1",
      "(" + std::to_string(num_tokens()) + ", " + std::to_string(truth.custom_mask_stride) + ")",
      std::string(truth.custom_mask.begin(), truth.custom_mask.end()));
}

void AttentionModel::set_directions(const std::vector<oracle::Looks>& looks) {
  truth.looks = looks;
  std::string bytes;
  for (const oracle::Looks each : looks) bytes += static_cast<char>(each);
  image.files["direction.npy"] = npy_image("|u1", "(" + std::to_string(looks.size()) + ",)", bytes);
}

void AttentionModel::set_spans(const std::vector<oracle::Span>& spans) {
  truth.spans = spans;
  std::vector<std::int32_t> starts(truth.seq_lens.size() + 1), pairs;
  for (const oracle::Span& span : spans) {
    for (auto r = static_cast<std::size_t>(span.request) + 1; r < starts.size(); ++r) ++starts[r];
    pairs.insert(pairs.end(), {span.first, span.end});
  }
  image.files["span_start_loc.npy"] = npy_i32(starts);
  image.files["spans.npy"] = npy_i32(pairs, "(" + std::to_string(spans.size()) + ", 2)");
}

void AttentionModel::set_first_keys(const std::vector<std::int32_t>& first_keys) {
  truth.first_keys = first_keys;
  image.files["first_keys.npy"] = npy_i32(first_keys);
}

void AttentionModel::set_keep_keys(const std::vector<std::int32_t>& keep_keys) {
  truth.keep_keys = keep_keys;
  image.files["keep_keys.npy"] = npy_i32(keep_keys);
}

void AttentionModel::poison_keys(std::int32_t request, std::int32_t first, std::int32_t end) {
  const std::size_t row = static_cast<std::size_t>(request * truth.max_blocks);
  for (const auto& [name, cache] : {std::pair{"key_cache.npy", &truth.key_cache},
                                    std::pair{"value_cache.npy", &truth.value_cache}}) {
    std::vector<float> values(cache->begin(), cache->end());
    for (std::int32_t p = first; p < end; ++p) {
      const std::int32_t page = truth.block_table[row + static_cast<std::size_t>(p / kBlockSize)];
      const auto slot = static_cast<std::size_t>(page * kBlockSize + p % kBlockSize);
      std::fill_n(&values[slot * kRow], kRow, NAN);
    }
    const auto blocks = static_cast<std::int64_t>(values.size() / kRow / kBlockSize);
    image.files[name] = npy_f32(values, cache_shape(blocks));
  }
}

void AttentionModel::set_per_head(const std::string& name, const std::vector<double>& values) {
  (name == "sinks" ? truth.sinks : truth.alibi_slopes) = values;
  image.files[name + ".npy"] = npy_f32({values.begin(), values.end()}, "(4,)");
}

void AttentionModel::quantize(oracle::Element to, const std::string& dtype,
                              const std::vector<double>& k_factors,
                              const std::vector<double>& v_factors) {
  element = to;
  k_scale = k_factors;
  v_scale = v_factors;
  const auto convert = [&](std::vector<double>& cache, const std::vector<double>& scale) {
    std::string bytes;
    for (std::size_t i = 0; i < cache.size(); ++i) {
      const double factor = scale[i / kHeadSize % scale.size()];
      const std::uint32_t bits = oracle::encode(to, cache[i] / factor);
      bytes += static_cast<char>(bits);
      cache[i] = oracle::decode(to, bits) * factor;
    }
    return bytes;
  };
  expected_key_cache = convert(truth.key_cache, k_scale);
  expected_value_cache = convert(truth.value_cache, v_scale);
  const std::string shape =
      cache_shape(static_cast<std::int64_t>(truth.key_cache.size() / kRow / kBlockSize));
  const char* descr = dtype == "int8" ? "|i1" : "|u1";
  image.files["key_cache.npy"] = npy_image(descr, shape, expected_key_cache);
  image.files["value_cache.npy"] = npy_image(descr, shape, expected_value_cache);
  add("\"kv_cache_dtype\": \"" + dtype +
      "\", \"k_scale\": " + (k_scale.size() > 1 ? list_text(k_scale) : std::to_string(k_scale[0])) +
      ", \"v_scale\": " + (v_scale.size() > 1 ? list_text(v_scale) : std::to_string(v_scale[0])));
}

void AttentionModel::store_newest() {
  const auto tokens = static_cast<std::size_t>(num_tokens());
  const std::vector<float> key = random_floats(tokens * kRow, 7),
                           value = random_floats(tokens * kRow, 8);
  std::vector<std::int64_t> slots(tokens, -1);
  const auto store = [&](std::int64_t slot, std::size_t token, const std::vector<float>& rows,
                         const std::vector<double>& scale, std::string& bytes,
                         std::vector<double>& cache) {
    for (std::size_t i = 0; i < kRow; ++i) {
      const double factor = scale[i / kHeadSize % scale.size()];
      const std::uint32_t bits =
          oracle::encode(element, static_cast<double>(rows[token * kRow + i]) / factor);
      const std::size_t at = static_cast<std::size_t>(slot) * kRow + i;
      bytes[at] = static_cast<char>(bits);
      cache[at] = oracle::decode(element, bits) * factor;
    }
  };
  for (std::size_t r = 0; r < truth.seq_lens.size(); ++r) {
    const std::int32_t p = truth.seq_lens[r] - 1;
    const auto token = static_cast<std::size_t>(truth.query_start_loc[r + 1] - 1);
    const std::int64_t page = truth.block_table[r * static_cast<std::size_t>(truth.max_blocks) +
                                                static_cast<std::size_t>(p / kBlockSize)];
    slots[token] = page * kBlockSize + p % kBlockSize;
    store(slots[token], token, key, k_scale, expected_key_cache, truth.key_cache);
    store(slots[token], token, value, v_scale, expected_value_cache, truth.value_cache);
  }
  image.files["key.npy"] = npy_f32(key, shape3(num_tokens(), kKvHeads));
  image.files["value.npy"] = npy_f32(value, shape3(num_tokens(), kKvHeads));
  image.files["slot_mapping.npy"] = npy_i64(slots);
}

void expect_truth(const AttentionModel& model, const RunCase& run) {
  const oracle::AttentionResult truth = oracle::attention(model.truth, oracle::Element::kF32);
  const auto out = run.array<float>("out");
  const auto lse = run.array<float>("lse");
  ASSERT_EQ(out.size(), truth.out.size());
  ASSERT_EQ(lse.size(), truth.lse.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(out[i]), truth.out[i], 2 * truth.bound[i] + 1e-6) << i;
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (std::isinf(truth.lse[i])) {
      ASSERT_EQ(static_cast<double>(lse[i]), truth.lse[i]) << i;
    } else {
      ASSERT_NEAR(static_cast<double>(lse[i]), truth.lse[i], 2e-5) << i;
    }
  }
}
