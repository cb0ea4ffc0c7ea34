// Malformed and unsupported cases: one line, the right code, no output.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "robustness/program.hpp"

namespace test_run_malformed {

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

/// case.json with something in place of something else.
auto json_edit(std::string from, std::string to) {
  return [from = std::move(from), to = std::move(to)](CaseImage& image) {
    image.json = replaced(image.json, from, to);
  };
}

/// case.json with more keys.
auto json_more(std::string more) {
  return json_edit("\"op\"", std::move(more) + ", \"op\"");
}

auto file(std::string name, std::string bytes) {
  return [name = std::move(name), bytes = std::move(bytes)](CaseImage& image) {
    image.files[name] = bytes;
  };
}

auto both(std::function<void(CaseImage&)> one, std::function<void(CaseImage&)> other) {
  return [one = std::move(one), other = std::move(other)](CaseImage& image) {
    one(image);
    other(image);
  };
}

/// An array of bytes, one an element.
auto bytes(std::string name, std::string values) {
  const std::string shape = "(" + std::to_string(values.size()) + ",)";
  return file(std::move(name), npy_image("|u1", shape, values));
}

auto spans(const std::vector<std::int32_t>& starts, const std::vector<std::int32_t>& pairs) {
  return both(file("span_start_loc.npy", npy_i32(starts)),
              file("spans.npy", npy_i32(pairs, "(" + std::to_string(pairs.size() / 2) + ", 2)")));
}

auto no_file(std::string name) {
  return [name = std::move(name)](CaseImage& image) { image.files.erase(name); };
}

/// A list in a list in a list ...: valid JSON that no reader may follow by recursion.
std::string nested_list() {
  return std::string(200000, '[') + std::string(200000, ']');
}

/// One request of one token and one of two, without a cache.
CaseImage small_encoder_case() {
  CaseImage image = small_attention_case();
  for (const char* name :
       {"slot_mapping.npy", "key_cache.npy", "value_cache.npy", "block_table.npy"}) {
    image.files.erase(name);
  }
  image.json = replaced(image.json, "\"op\"", "\"attn_type\": \"encoder_only\", \"op\"");
  image.files["seq_lens.npy"] = npy_i32({1, 2});
  return image;
}

/// That case with something spoilt.
auto encoder_with(std::function<void(CaseImage&)> spoil) {
  return [spoil = std::move(spoil)](CaseImage& image) {
    image = small_encoder_case();
    spoil(image);
  };
}

struct BadCase {
  const char* name;
  std::function<void(CaseImage&)> spoil;
  int code;
  const char* says;
};

const std::vector<BadCase>& bad_cases() {
  static const std::vector<BadCase> rows = {
      // case.json itself
      {"empty", [](CaseImage& c) { c.json = " "; }, 2, "case.json"},
      {"absent", [](CaseImage& c) { c.json = ""; }, 2, "case.json"},
      {"not json", [](CaseImage& c) { c.json = "{\"op\": "; }, 2, "not valid JSON"},
      {"not an object", [](CaseImage& c) { c.json = "[1, 2]"; }, 2, "expected an object"},
      {"F6: deep", [](CaseImage& c) { c.json = std::string(200000, '['); }, 2,
       "nested deeper than 16 levels"},
      {"F6: deep list", [](CaseImage& c) { c.json = nested_list(); }, 2,
       "nested deeper than 16 levels"},
      {"F6: deep op", [](CaseImage& c) { c.json = "{\"op\": " + nested_list() + "}"; }, 2,
       "nested deeper than 16 levels"},
      {"list", [](CaseImage& c) { c.json = "[[1]]"; }, 2, "got a list of 1"},
      {"list op", [](CaseImage& c) { c.json = "{\"op\": [[1]]}"; }, 2,
       "op: expected a string, got a list of 1"},
      {"repeated key", json_more("\"num_heads\": 4"), 2, "\"num_heads\": given more than once"},
      {"bytes", [](CaseImage& c) { c.json = "{\"op\": \"\xff\xfe\n\"}"; }, 2, "case.json"},
      {"no op", json_edit("\"op\": \"attention\",", ""), 2, "op: missing"},
      {"op of another type", json_edit("\"attention\"", "7"), 2, "op: expected a string"},
      {"unknown op", json_edit("\"attention\"", "\"atention\\n\""), 2, "expected one of attention"},
      {"misspelt key", json_more("\"sliding_windows\": 4"), 2, "unknown key \"sliding_windows\""},
      {"endless op",
       [](CaseImage& c) { c.json = R"({"op": ")" + std::string(1 << 20, 'x') + "\"}"; }, 2,
       "xxx..."},
      // fields
      {"missing field", json_edit("\"head_size\": 8,", ""), 2, "head_size: missing"},
      {"string for a number", json_edit("\"head_size\": 8", "\"head_size\": \"8\""), 2,
       "head_size"},
      {"fraction", json_edit("\"head_size\": 8", "\"head_size\": 8.5"), 2, "head_size"},
      {"negative", json_edit("\"num_heads\": 2", "\"num_heads\": -2"), 2, "num_heads"},
      {"zero page", json_edit("\"block_size\": 4", "\"block_size\": 0"), 2, "block_size"},
      {"huge", json_edit("\"num_heads\": 2", "\"num_heads\": 4294967298"), 2, "num_heads"},
      {"beyond 64 bits", json_edit("\"num_heads\": 2", "\"num_heads\": 18446744073709551615"), 2,
       "num_heads"},
      {"beyond any integer", json_edit("\"num_heads\": 2", "\"num_heads\": 1e400"), 2, "clattn: "},
      {"heads do not divide", json_edit("\"num_kv_heads\": 1", "\"num_kv_heads\": 3"), 2,
       "not a multiple"},
      {"unknown dtype", json_edit("\"f32\"", "\"f64\""), 2, "dtype: expected one of"},
      {"infinite scale", json_more("\"scale\": 1e39"), 2, "scale: expected a finite number"},
      {"scale of another type", json_more("\"scale\": [1]"), 2, "scale"},
      {"scales of the wrong length", json_more("\"k_scale\": [1, 1, 1]"), 2, "k_scale"},
      {"causal of another type", json_more("\"causal\": 1"), 2, "causal: expected true or false"},
      {"unknown layout", json_more("\"layout\": \"DHN\""), 2, "layout"},
      {"unknown backend", json_more("\"backend\": \"FLASH\""), 2, "FLASH"},
      {"negative splits", json_more("\"num_splits\": -1"), 2, "num_splits"},
      {"unknown attention type", json_more("\"attn_type\": \"coder\""), 2, "attn_type"},
      // options
      {"negative window", json_more("\"sliding_window\": -3"), 2,
       "sliding_window: expected an integer in [0, 2147483647], got -3"},
      {"window of another type", json_more("\"sliding_window\": 2.5"), 2, "sliding_window"},
      {"side below -1", json_more("\"window_left\": -2"), 2,
       "window_left: expected an integer in [-1, 2147483647], got -2"},
      {"side of another type", json_more("\"window_right\": true"), 2, "window_right"},
      {"window said twice", json_more("\"sliding_window\": 3, \"window_right\": 0"), 3,
       "window_right is 0, supported with a sliding_window, which says both sides: -1"},
      {"negative chunk", json_more("\"attention_chunk_size\": -1"), 2, "attention_chunk_size"},
      {"negative lookback", json_more("\"chunk_lookback\": -1"), 2, "chunk_lookback"},
      {"lookback without chunks", json_more("\"chunk_lookback\": 2"), 3,
       "chunk_lookback is 2, supported without attention_chunk_size: 0"},
      {"negative cap", json_more("\"logits_soft_cap\": -1"), 2,
       "logits_soft_cap: expected finite numbers >= 0 (0 = none), got -1"},
      {"cap of another type", json_more("\"logits_soft_cap\": \"30\""), 2, "logits_soft_cap"},
      {"unknown cache type", json_more("\"kv_cache_dtype\": \"fp7\""), 2,
       "kv_cache_dtype: expected one of auto"},
      {"cache of another type", json_more("\"kv_cache_dtype\": \"fp8_e4m3\""), 2,
       "key_cache.npy: expected element type |u1, got <f4"},
      {"int8 cache as bytes", json_more("\"kv_cache_dtype\": \"int8\""), 2,
       "expected element type |i1"},
      {"NaN scale", json_more("\"k_scale\": NaN"), 2,
       "\"k_scale\": expected a finite number, got NaN"},
      {"NaN scale as text", json_more("\"k_scale\": \"nan\""), 2,
       "k_scale: expected a finite number"},
      {"zero scale", json_more("\"v_scale\": 0"), 2, "v_scale: expected numbers > 0, got 0"},
      {"negative scale", json_more("\"k_scale\": [-2]"), 2,
       "k_scale: expected numbers > 0, got -2"},
      {"vanishing scale", json_more("\"k_scale\": 1e-60"), 2, "k_scale: expected numbers > 0"},
      {"query scale of zero", json_more("\"q_scale\": 0"), 2,
       "q_scale: expected numbers > 0, got 0"},
      {"query scales of heads", json_more("\"q_scale\": [1, 1]"), 2, "q_scale"},
      {"products of another type", json_more("\"fp8_products\": 1"), 2,
       "fp8_products: expected true or false"},
      {"query scale of a plain cache", json_more("\"q_scale\": 0.5"), 3,
       "q_scale: 0.5 is not supported with a cache of f32"},
      {"scale of a plain cache", json_more("\"v_scale\": 0.5"), 3,
       "v_scale: 0.5 is not supported with a cache of f32"},
      {"slopes of other heads", file("alibi_slopes.npy", npy_f32({1}, "(1,)")), 2,
       "alibi_slopes.npy: expected shape [2], got [1]"},
      {"slopes of another type", file("alibi_slopes.npy", npy_i32({1, 2})), 2,
       "alibi_slopes.npy: expected element type <f4"},
      {"NaN slope", file("alibi_slopes.npy", npy_f32({1, NAN}, "(2,)")), 2,
       "alibi_slopes.npy: entry 1 is nan; expected finite numbers"},
      {"infinite sink", file("sinks.npy", npy_f32({INFINITY, 0}, "(2,)")), 2,
       "sinks.npy: entry 0 is inf; expected finite numbers and -inf"},
      {"mask too narrow",
       file("custom_mask.npy", npy_image("|u1", "(3, 4)", std::string(12, '\1'))), 2,
       "custom_mask.npy: expected shape [3, 5], got [3, 4]"},
      {"mask of another type",
       file("custom_mask.npy", npy_image("|i1", "(3, 5)", std::string(15, '\1'))), 2,
       "custom_mask.npy: expected element type |u1"},
      {"output scales", file("output_scale.npy", npy_f32({1, 2}, "(2,)")), 2,
       "output_scale.npy: expected shape [1]"},
      {"negative output scale", file("output_scale.npy", npy_f32({-1}, "(1,)")), 2,
       "output_scale.npy: entry 0 is -1; expected a number > 0"},
      {"infinite output scale", file("output_scale.npy", npy_f32({INFINITY}, "(1,)")), 2,
       "output_scale.npy: entry 0 is inf"},
      {"negative prefix", json_more("\"common_prefix_len\": -1"), 2, "common_prefix_len"},
      {"prefix of half a page", json_more("\"common_prefix_len\": 6"), 2,
       "common_prefix_len is 6, legal: multiples of block_size 4"},
      {"prefix longer than a request", json_more("\"common_prefix_len\": 4"), 2,
       "request 1: common_prefix_len is 4, legal: 0 … 2 (its seq_len)"},
      {"encoder with a prefix", encoder_with(json_more("\"common_prefix_len\": 4")), 2,
       "common_prefix_len is 4, legal: 0 (attn_type encoder_only has no pages to share)"},
      {"unknown policy", json_more("\"split_policy\": \"random\""), 2,
       "split_policy: expected one of balanced, deterministic"},
      {"some of the limits", json_more("\"max_num_reqs\": 2"), 2,
       "max_num_batched_tokens: missing"},
      {"more requests than any engine has",
       json_more(
           R"("max_num_reqs": 65537, "max_num_batched_tokens": 2147483647, "max_model_len": 9)"),
       2, "limits: max_num_reqs 65537, max_num_batched_tokens 2147483647: the largest step"},
      {"more tokens than any engine has",
       json_more(R"("max_num_reqs": 9, "max_num_batched_tokens": 2147483647, "max_model_len": 9)"),
       2, "limits: max_num_reqs 9, max_num_batched_tokens 2147483647: the largest step"},
      {"more tokens than a limit can say",
       json_more(R"("max_num_reqs": 9, "max_num_batched_tokens": 2147483648, "max_model_len": 9)"),
       2, "max_num_batched_tokens: expected an integer in [1, 2147483647], got 2147483648"},
      {"limits below the batch",
       json_more(R"("max_num_reqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8)"), 2,
       "num_reqs is 2"},
      {"packed with a backend", json_more(R"("layout": "packed", "backend": "FLASHINFER")"), 3,
       "layout: packed is paged_attention's, not backend FLASHINFER's"},
      {"packed with a window", json_more(R"("layout": "packed", "sliding_window": 2)"), 3,
       "sliding_window not supported"},
      {"lse of another type", json_edit("\"return_lse\": true", "\"return_lse\": 1"), 2,
       "return_lse: expected true or false"},
      // what the batch says of its requests beyond lengths
      {"causal beside directions",
       both(json_more("\"causal\": true"), bytes("direction.npy", "\1\1")), 2,
       "case.json: causal: expected nothing beside direction.npy"},
      {"direction of nothing", bytes("direction.npy", "\1\3"), 2,
       "direction.npy: entry 1 is 3; expected 0 (both ways), 1 (causal) or 2 (canvas)"},
      {"directions of other requests", bytes("direction.npy", "\1\1\1"), 2,
       "direction.npy: expected shape [2], got [3]"},
      {"directions of another type", file("direction.npy", npy_i32({1, 1})), 2,
       "direction.npy: expected element type |u1, got <i4"},
      {"directions of an encoder", encoder_with([](CaseImage& image) {
         image.json = replaced(image.json, "\"encoder_only\"", "\"encoder\"");
         bytes("direction.npy", "\1\1")(image);
       }),
       3, "use_directions is true, supported with attn_type encoder: false"},
      {"spans of no request", file("spans.npy", npy_i32({0, 2}, "(1, 2)")), 2,
       "spans.npy, span_start_loc.npy: expected both or neither"},
      {"starts of no spans", file("span_start_loc.npy", npy_i32({0, 0, 0})), 2,
       "spans.npy, span_start_loc.npy: expected both or neither"},
      {"spans of other requests", spans({0, 1}, {0, 2}), 2,
       "span_start_loc.npy: expected shape [3], got [2]"},
      {"starts of spans that fall", spans({0, 1, 0}, {0, 2}), 2,
       "span_start_loc.npy: entry 2 is 0; expected prefix sums"},
      {"more spans than starts say", spans({0, 1, 1}, {0, 2, 3, 4}), 2,
       "spans.npy: expected shape [1, 2], got [2, 2]"},
      {"a span that ends before it begins", spans({0, 0, 1}, {2, 1}), 2,
       "spans.npy: row 0 is 2, 1; expected a first position from 0 on"},
      {"a negative span", spans({0, 1, 1}, {-1, 1}), 2,
       "spans.npy: row 0 is -1, 1; expected a first position from 0 on"},
      {"spans that overlap", spans({0, 2, 2}, {0, 3, 2, 4}), 2,
       "spans.npy: row 1 is 2, 4; expected a first position from 3 on, behind the spans of "
       "request 0 before it"},
      {"unknown span rule", both(json_more("\"span_rule\": \"clip\""), spans({0, 1, 1}, {0, 3})), 2,
       "span_rule: expected one of whole, clip_left, clip_both, got \"clip\""},
      {"a rule without spans", json_more("\"span_rule\": \"clip_left\""), 3,
       "span_rule is clip_left, supported without use_spans: whole"},
      {"spans of another type", json_more("\"use_spans\": 1"), 2,
       "use_spans: expected true or false"},
      {"first keys of other requests", file("first_keys.npy", npy_i32({0})), 2,
       "first_keys.npy: expected shape [2], got [1]"},
      {"first key behind the last", file("first_keys.npy", npy_i32({5, 3})), 2,
       "first_keys.npy: entry 1 is 3; expected an integer in [0, 2], its seq_lens"},
      {"negative first key", file("first_keys.npy", npy_i32({-1, 0})), 2,
       "first_keys.npy: entry 0 is -1; expected an integer in [0, 5], its seq_lens"},
      {"spans of lengths on the device",
       both(file("seq_len_bounds.npy", npy_i32({6, 4})), spans({0, 1, 1}, {0, 3})), 3,
       "spans holds 2 elements, legal with device_seq_lens and use_spans: none"},
      {"more kept keys than there are",
       both(json_more("\"sliding_window\": 2"), file("keep_keys.npy", npy_i32({5, 3}))), 2,
       "keep_keys.npy: entry 1 is 3; expected an integer in [0, 2], its seq_lens"},
      {"packed with spans", both(json_more(R"("layout": "packed")"), spans({0, 1, 1}, {0, 3})), 3,
       "use_spans not supported"},
      // encoder types
      {"causal encoder", json_more(R"("attn_type": "encoder", "causal": true)"), 2,
       "causal: expected false or nothing with attn_type encoder, got true"},
      {"encoder without keys",
       [](CaseImage& c) {
         c = small_encoder_case();
         c.files.erase("key.npy");
         c.files.erase("value.npy");
       },
       2, "key.npy"},
      {"encoder's other keys",
       encoder_with(file("key.npy", npy_f32(std::vector<float>(8), "(1, 1, 8)"))), 2,
       "key.npy: expected shape [3, 1, 8], got [1, 1, 8]"},
      {"encoder's lengths", encoder_with(file("seq_lens.npy", npy_i32({1, 5}))), 2,
       "request 1: seq_lens is 5, legal: 2 (query_start_loc[2] - query_start_loc[1])"},
      {"encoder's key starts", encoder_with(file("key_start_loc.npy", npy_i32({0, 2, 1}))), 2,
       "key_start_loc.npy: entry 2 is 1; expected prefix sums"},
      {"encoder with chunks", encoder_with([](CaseImage& image) {
         image.json = replaced(image.json, "\"encoder_only\"", "\"encoder\"");
         json_more("\"attention_chunk_size\": 2")(image);
       }),
       3, "attention_chunk_size with attn_type encoder not supported"},
      {"encoder with a cache type", encoder_with(json_more("\"kv_cache_dtype\": \"f16\"")), 3,
       "kv_cache_dtype f16 with attn_type encoder_only"},
      {"NaN", json_more("\"scale\": NaN"), 2,
       "case.json: \"scale\": expected a finite number, got NaN (line 1, column 11)"},
      {"minus infinity in a list", json_more("\"k_scale\":\n [1, -Infinity]"), 2,
       "case.json: \"k_scale\": expected a finite number, got -Infinity (line 2, column 6)"},
      {"a number too large", json_more("\"scale\": 1e999"), 2,
       "case.json: \"scale\": expected a finite number, got one that is too large"},
      {"a word", json_more("\"scale\": nine"), 2, "case.json: not valid JSON"},
      // arrays
      {"no query", no_file("query.npy"), 2, "query.npy"},
      {"no cache", no_file("key_cache.npy"), 2, "key_cache.npy"},
      {"no value", no_file("value.npy"), 2, "expected both or neither"},
      {"no slots", no_file("slot_mapping.npy"), 2, "slot_mapping.npy"},
      {"no starts", no_file("query_start_loc.npy"), 2, "query_start_loc.npy"},
      {"not npy", file("query.npy", "PK\3\4 an archive"), 2, "query.npy: not a .npy file"},
      {"empty npy", file("query.npy", ""), 2, "query.npy: not a .npy file"},
      {"truncated", file("query.npy", npy_image("<f4", "(3, 2, 8)", "abc")), 2,
       "query.npy: holds 3"},
      {"huge claim", file("query.npy", npy_image("<f4", "(3, 2, 4611686018427387904)", "")), 2,
       "overflows"},
      {"large claim", file("query.npy", npy_image("<f4", "(1099511627776, 2, 8)", "")), 2,
       "holds 0"},
      {"big endian", file("query.npy", npy_image(">f4", "(3, 2, 8)", std::string(192, 'x'))), 2,
       ">f4"},
      {"pickle", file("query.npy", npy_image("|O", "(3, 2, 8)", std::string(192, 'x'))), 2, "|O"},
      {"wrong dtype", file("query.npy", npy_image("<f2", "(3, 2, 8)", std::string(96, 'x'))), 2,
       "expected element type <f4, got <f2"},
      {"wrong shape", file("query.npy", npy_f32(std::vector<float>(48), "(3, 8, 2)")), 2,
       "expected shape [3, 2, 8], got [3, 8, 2]"},
      {"caches differ", file("value_cache.npy", npy_f32(std::vector<float>(64), "(2, 4, 1, 8)")), 2,
       "value_cache.npy: expected shape"},
      {"float indices", file("seq_lens.npy", npy_f32({5, 2}, "(2,)")), 2, "seq_lens.npy"},
      {"table of other rows", file("block_table.npy", npy_i32({1, 0}, "(1, 2)")), 2,
       "block_table.npy"},
      {"a misspelt array", file("slot_maping.npy", npy_i64({0, 8, 9})), 2,
       "slot_maping.npy: unknown array, is it slot_mapping.npy?"},
      {"an array of encoders alone", file("key_start_loc.npy", npy_i32({0, 1, 3})), 2,
       "key_start_loc.npy: unknown array"},
      // the batch
      {"starts fall", file("query_start_loc.npy", npy_i32({0, 2, 1})), 2, "query_start_loc"},
      {"starts not at 0", file("query_start_loc.npy", npy_i32({1, 2, 3})), 2, "query_start_loc"},
      {"starts negative", file("query_start_loc.npy", npy_i32({0, 1, -3})), 2, "query_start_loc"},
      {"query longer than sequence", file("seq_lens.npy", npy_i32({5, 1})), 2, "seq_len"},
      {"negative length", file("seq_lens.npy", npy_i32({5, -1})), 2, "seq_len"},
      {"length beyond the table", file("seq_lens.npy", npy_i32({9, 2})), 2, "seq_len"},
      {"length beyond int32", file("seq_lens.npy", npy_i64({std::int64_t{1} << 40, 2})), 2,
       "seq_len"},
      {"bounds of other requests", file("seq_len_bounds.npy", npy_i32({5})), 2,
       "seq_len_bounds.npy: expected shape [2], got [1]"},
      {"bound below its length", file("seq_len_bounds.npy", npy_i32({4, 2})), 2,
       "request 0: seq_len_bounds is 4, legal: 5 … 8 (from its seq_len to its block table's end)"},
      {"bound beyond the table", file("seq_len_bounds.npy", npy_i32({5, 9})), 2,
       "request 1: seq_len_bounds is 9, legal: 2 … 8"},
      {"block out of range", file("block_table.npy", npy_i32({1, 3, 2, 0}, "(2, 2)")), 2, "block"},
      {"block negative", file("block_table.npy", npy_i32({1, -1, 2, 0}, "(2, 2)")), 2, "block"},
      {"slot out of range", file("slot_mapping.npy", npy_i64({0, 8, 12})), 2, "slot"},
      {"slot below -1", file("slot_mapping.npy", npy_i64({0, -2, 9})), 2, "slot"},
      {"too few slots", file("slot_mapping.npy", npy_i64({0, 8})), 2, "slot_mapping.npy: holds 2"},
  };
  return rows;
}

TEST(Run, MalformedAndUnsupportedCasesGiveOneLineAndNoOutput) {
  for (const BadCase& row : bad_cases()) {
    SCOPED_TRACE(row.name);
    const ScratchDirectory scratch;
    CaseImage image = small_attention_case();
    row.spoil(image);
    image.write(scratch.path() / "case");
    expect_refusal(run_program("run " + (scratch.path() / "case").string()), row.code, row.says);
    std::size_t entries = 0;
    for (const auto& entry : std::filesystem::directory_iterator(scratch.path() / "case")) {
      entries +=
          entry.path().extension() == ".npy" || entry.path().filename() == "case.json" ? 0U : 1U;
    }
    EXPECT_EQ(entries, 0U) << "something was written";
  }
}

}  // namespace test_run_malformed
