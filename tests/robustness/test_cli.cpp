#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "robustness/program.hpp"

namespace {

/// The only acceptable way to fail: the documented code and exactly one line that names the
/// trouble.
void expect_refusal(const ProgramResult& result, int code, std::string_view says) {
  EXPECT_EQ(result.code, code) << result.standard_error;
  EXPECT_EQ(result.error_lines(), 1U) << result.standard_error;
  EXPECT_EQ(result.standard_error.rfind("clattn: ", 0), 0U) << result.standard_error;
  EXPECT_NE(result.standard_error.find(says), std::string::npos)
      << "'" << says << "' not in: " << result.standard_error;
}

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

auto no_file(std::string name) {
  return [name = std::move(name)](CaseImage& image) { image.files.erase(name); };
}

/// A list in a list in a list ...: valid JSON that no reader may follow by recursion.
std::string nested_list() {
  return std::string(200000, '[') + std::string(200000, ']');
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
      {"deep", [](CaseImage& c) { c.json = std::string(200000, '['); }, 2, "not valid JSON"},
      {"deep list", [](CaseImage& c) { c.json = nested_list(); }, 2, "got a list of 1"},
      {"deep op", [](CaseImage& c) { c.json = "{\"op\": " + nested_list() + "}"; }, 2,
       "op: expected a string, got a list of 1"},
      {"repeated key", json_more("\"num_heads\": 4"), 2, "\"num_heads\": given more than once"},
      {"bytes", [](CaseImage& c) { c.json = "{\"op\": \"\xff\xfe\n\"}"; }, 2, "case.json"},
      {"no op", json_edit("\"op\": \"attention\",", ""), 2, "op: missing"},
      {"op of another type", json_edit("\"attention\"", "7"), 2, "op: expected a string"},
      {"unknown op", json_edit("\"attention\"", "\"atention\\n\""), 2, "expected one of attention"},
      {"unsupported op", json_edit("\"attention\"", "\"mla_decode\""), 3, "mla_decode"},
      {"misspelt key", json_more("\"sliding_windows\": 4"), 2, "unknown key \"sliding_windows\""},
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
      {"zero window", json_more("\"sliding_window\": 0"), 2, "sliding_window"},
      // valid, but not built yet: never silently ignored
      {"window", json_more("\"sliding_window\": 4"), 3, "sliding_window"},
      {"chunk", json_more("\"attention_chunk_size\": 4"), 3, "attention_chunk_size"},
      {"soft cap", json_more("\"logits_soft_cap\": 30"), 3, "logits_soft_cap"},
      {"encoder", json_more("\"attn_type\": \"encoder\""), 3, "attn_type encoder"},
      {"fp8 cache", json_more("\"kv_cache_dtype\": \"fp8_e4m3\""), 3, "kv_cache_dtype"},
      {"cache scale", json_more("\"v_scale\": 0.5"), 3, "v_scale"},
      {"alibi", file("alibi_slopes.npy", npy_f32({1, 2}, "(2,)")), 3, "alibi_slopes"},
      {"sinks", file("sinks.npy", npy_f32({1, 2}, "(2,)")), 3, "sinks"},
      {"mask", file("custom_mask.npy", npy_image("|u1", "(3, 5)", std::string(15, '\1'))), 3,
       "custom_mask"},
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
      // the batch
      {"starts fall", file("query_start_loc.npy", npy_i32({0, 2, 1})), 2, "query_start_loc"},
      {"starts not at 0", file("query_start_loc.npy", npy_i32({1, 2, 3})), 2, "query_start_loc"},
      {"starts negative", file("query_start_loc.npy", npy_i32({0, 1, -3})), 2, "query_start_loc"},
      {"query longer than sequence", file("seq_lens.npy", npy_i32({5, 1})), 2, "seq_len"},
      {"negative length", file("seq_lens.npy", npy_i32({5, -1})), 2, "seq_len"},
      {"length beyond the table", file("seq_lens.npy", npy_i32({9, 2})), 2, "seq_len"},
      {"length beyond int32", file("seq_lens.npy", npy_i64({std::int64_t{1} << 40, 2})), 2,
       "seq_len"},
      {"block out of range", file("block_table.npy", npy_i32({1, 3, 2, 0}, "(2, 2)")), 2, "block"},
      {"block negative", file("block_table.npy", npy_i32({1, -1, 2, 0}, "(2, 2)")), 2, "block"},
      {"slot out of range", file("slot_mapping.npy", npy_i64({0, 8, 12})), 2, "slot"},
      {"slot below -1", file("slot_mapping.npy", npy_i64({0, -2, 9})), 2, "slot"},
      {"too few slots", file("slot_mapping.npy", npy_i64({0, 8})), 2, "slot_mapping.npy: holds 2"},
  };
  return rows;
}

TEST(Cli, MalformedAndUnsupportedCasesGiveOneLineAndNoOutput) {
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

struct BadOperation {
  const char* name;
  CaseImage image;
  const char* says;
};

TEST(Cli, MalformedHostOperationsGiveOneLine) {
  const std::vector<BadOperation> rows = {
      {"prefill before decode",
       {R"({"op": "split_decodes_and_prefills"})", {{"query_start_loc.npy", npy_i32({0, 5, 6})}}},
       "request"},
      {"no starts",
       {R"({"op": "split_decodes_and_prefills"})", {{"query_start_loc.npy", npy_i32({})}}},
       "query_start_loc"},
      {"negative threshold",
       {R"({"op": "split_decodes_and_prefills", "decode_threshold": -1})",
        {{"query_start_loc.npy", npy_i32({0, 1})}}},
       "decode_threshold"},
      {"negative tokens",
       {R"({"op": "reorder_batch_to_split_decodes_and_prefills"})",
        {{"num_scheduled_tokens.npy", npy_i32({1, -5})}}},
       "num_scheduled_tokens"},
      {"table too short",
       {R"({"op": "paged_kv_metadata", "block_size": 4})",
        {{"seq_lens.npy", npy_i32({9})}, {"block_table.npy", npy_i32({0, 1}, "(1, 2)")}}},
       "seq_len"},
      {"negative block",
       {R"({"op": "compute_slot_mapping", "block_size": 4})",
        {{"seq_lens.npy", npy_i32({5})},
         {"query_start_loc.npy", npy_i32({0, 5})},
         {"block_table.npy", npy_i32({0, -7}, "(1, 2)")}}},
       "block"},
      {"output far larger than the case",
       {R"({"op": "compute_slot_mapping", "block_size": 16777216})",
        {{"seq_lens.npy", npy_i32({268435457})},
         {"query_start_loc.npy", npy_i32({0, 268435457})},
         {"block_table.npy", npy_i32(std::vector<std::int32_t>(17), "(1, 17)")}}},
       "query_start_loc.npy: the last entry is 268435457; expected at most 268435456"},
      {"chunk that blocks do not fill",
       {R"({"op": "make_local_attention_virtual_batches", "attn_chunk_size": 6, "block_size": 4})",
        {{"seq_lens.npy", npy_i32({5})},
         {"query_start_loc.npy", npy_i32({0, 5})},
         {"block_table.npy", npy_i32({0, 1}, "(1, 2)")}}},
       "attn_chunk_size 6 is not divisible by block_size 4"},
      {"virtual table far larger than the case",
       {R"({"op": "make_local_attention_virtual_batches", "attn_chunk_size": 2147483646,
           "block_size": 1})",
        {{"seq_lens.npy", npy_i32({1})},
         {"query_start_loc.npy", npy_i32({0, 1})},
         {"block_table.npy", npy_i32({0}, "(1, 1)")}}},
       "1 virtual requests of 2147483646 blocks; expected at most 268435456 entries"},
      {"unknown backend",
       {R"({"op": "kv_cache_shape", "backend": "X", "num_blocks": 1, "block_size": 16,
           "num_kv_heads": 1, "head_size": 64})",
        {}},
       "expected one of FLASHINFER"},
      {"no backend",
       {R"({"op": "kv_cache_shape", "num_blocks": 1, "block_size": 16, "num_kv_heads": 1,
           "head_size": 64})",
        {}},
       "backend: missing"},
      {"overflowing cache",
       {R"({"op": "kv_cache_shape", "backend": "FLASHINFER", "num_blocks": 2147483647,
           "block_size": 16777216, "num_kv_heads": 65536, "head_size": 65536})",
        {}},
       "overflow"},
      {"no dtype", {R"({"op": "select_backend", "head_size": 64})", {}}, "dtype: missing"},
  };
  for (const BadOperation& row : rows) {
    SCOPED_TRACE(row.name);
    const ScratchDirectory scratch;
    row.image.write(scratch.path() / "case");
    expect_refusal(run_program("run " + (scratch.path() / "case").string()), 2, row.says);
    EXPECT_FALSE(std::filesystem::exists(scratch.path() / "case" / "out"));
  }
}

struct BadCommand {
  const char* arguments;
  int code;
  const char* says;
};

TEST(Cli, WrongCommandLinesGiveOneLine) {
  const BadCommand rows[] = {
      {"", 2, "subcommand"},
      {"fly", 2, "fly"},
      {"run", 2, "case_dir"},
      {"run /nonexistent/case", 2, "/nonexistent/case"},
      {"run /dev", 2, "case.json"},
      {"run a b c", 2, "clattn: "},
      {"devices --heads 0", 2, "--heads"},
      {"devices --heads many", 2, "--heads"},
      {"devices --heads 5 --kv-heads 2", 2, "--heads"},
      {"devices --dtype f64", 2, "f64"},
      {"devices --json=maybe", 2, "clattn: "},
      {"check --backend NOPE", 2, "NOPE"},
      {"check --device no-such-device", 2, "no-such-device"},
      {"check --device 99:0", 2, "99:0"},
      {"bench everything", 2, "suite"},
      {"bench metadata --quick --shapes /nonexistent", 2, "/nonexistent"},
      {"bench metadata --quick --backend NOPE", 2, "NOPE"},
      {"bench --unknown", 2, "--unknown"},
      {"replay --requests minus", 2, "--requests"},
      {"replay --trace /nonexistent/trace.csv", 2, "/nonexistent/trace.csv"},
      {"replay --verify 2", 2, "--verify"},
      {"replay --model gpt-9", 2, "gpt-9"},
      {"replay --block-size 0", 2, "--block-size"},
      {"replay --requests 1 --num-blocks 2147483646", 3, "a layer's cache of 2147483646 blocks"},
  };
  for (const BadCommand& row : rows) {
    SCOPED_TRACE(row.arguments);
    expect_refusal(run_program(row.arguments), row.code, row.says);
  }
}

TEST(Cli, MalformedTracesAndShapesGiveOneLine) {
  const ScratchDirectory scratch;
  const std::string path = (scratch.path() / "input").string();
  const std::pair<const char*, std::string> rows[] = {
      {"replay --trace ", ""},
      {"replay --trace ", "not a trace\n"},
      {"replay --trace ", std::string("\0\x01\xff\n\n", 5)},
      {"replay --trace ", "TIMESTAMP,ContextTokens,GeneratedTokens\n"},
      {"replay --trace ",
       "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,12,many\n"},
      {"replay --trace ",
       "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,-12,5\n"},
      {"replay --trace ",
       "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,99999999999999999999,5\n"},
      {"replay --trace ", "{\"timestamp\": 0, \"input_length\": 5\n"},
      {"replay --trace ", "{\"timestamp\": 0, \"input_length\": 5}\n"},
      {"replay --trace ", "{\"timestamp\": 0, \"input_length\": -5, \"output_length\": 1}\n"},
      {"bench --quick --shapes ", "decode quick 1 1\n"},
      {"bench --quick --shapes ", "decode quick 1 9 4\n"},
      {"bench --quick --shapes ", "decode quick 99999999999 1 4\n"},
      {"bench --quick --shapes ", "fly quick 1 1 4\n"},
      {"bench --quick --shapes ", "# nothing\n"},
  };
  for (const auto& [command, content] : rows) {
    SCOPED_TRACE(command + content);
    write_bytes(path, content);
    expect_refusal(run_program(command + path), 2, "");
  }
}

std::ptrdiff_t entries_of(const std::filesystem::path& directory) {
  return std::distance(std::filesystem::directory_iterator(directory), {});
}

TEST(Cli, OutputsThatCannotBeWrittenAreReported) {
  const ScratchDirectory scratch;
  const CaseImage image = {R"({"op": "reorder_batch_to_split_decodes_and_prefills"})",
                           {{"num_scheduled_tokens.npy", npy_i32({5, 1})}}};
  image.write(scratch.path() / "case");
  write_bytes(scratch.path() / "file", "in the way");
  const std::string run = "run " + (scratch.path() / "case").string() + " --out ";
  expect_refusal(run_program(run + (scratch.path() / "file").string()), 2, "file");
  expect_refusal(run_program(run + (scratch.path() / "file" / "below").string()), 2, "file");
  EXPECT_EQ(read_bytes(scratch.path() / "file"), "in the way");
  // One output that cannot be moved in keeps all of them out.
  for (const char* obstacle : {"result.json", "order.npy"}) {
    const std::filesystem::path out = scratch.path() / (std::string("no_") + obstacle);
    std::filesystem::create_directories(out / obstacle);
    expect_refusal(run_program(run + out.string()), 2, obstacle);
    EXPECT_EQ(entries_of(out), 1) << "something was written beside " << obstacle;
  }
  EXPECT_EQ(entries_of(scratch.path()), 4) << "something was left behind";
}

TEST(Cli, LostStandardOutputIsReported) {
  for (const std::string command :
       {"--help", "--version", "run --help", "devices", "devices --json"}) {
    SCOPED_TRACE(command);
    expect_refusal(run_program(command, "/dev/full"), 2, "");
  }
}

TEST(Cli, RefusedReplaysLeaveReportsAsTheyWere) {
  const ScratchDirectory scratch;
  const std::filesystem::path json = scratch.path() / "old.json",
                              html = scratch.path() / "new.html";
  write_bytes(json, "an older report");
  expect_refusal(run_program("replay --device no-such-device --json " + json.string() + " --html " +
                             html.string()),
                 2, "no-such-device");
  EXPECT_EQ(read_bytes(json), "an older report");
  EXPECT_FALSE(std::filesystem::exists(html));
}

TEST(Cli, ReplaysOfNoTimeStillRunAndVerifyAStep) {
  const ProgramResult result = run_program(
      "replay --requests 1 --length-scale 0.01 --layers 1 --heads 2 --kv-heads 1 --head-size 64 "
      "--seconds 1e-9 --verify 1e-9 --no-progress --json -");
  EXPECT_EQ(result.code, 0) << result.standard_error;
  EXPECT_NE(result.standard_output.find("\"steps\": 1,"), std::string::npos)
      << result.standard_output;
  EXPECT_EQ(result.standard_output.find("\"rows\": 0,"), std::string::npos)
      << result.standard_output;
}

TEST(Cli, BenchSaysWhyNoRowFits) {
  const ScratchDirectory scratch;
  write_bytes(scratch.path() / "shapes", "cache quick 65536 1 16777216\n");
  expect_refusal(
      run_program("bench cache --quick --json - --shapes " + (scratch.path() / "shapes").string()),
      3, "no row fits this device: needs ");
}

TEST(Cli, QuickBenchClaimsNoShareOfTheMemoryCeiling) {
  const ProgramResult result = run_program("bench cache --quick --json -");
  EXPECT_EQ(result.code, 0) << result.standard_error;
  EXPECT_NE(result.standard_output.find("\"rate_unit\": \"GB/s\""), std::string::npos);
  EXPECT_EQ(result.standard_output.find("share_of_ceiling"), std::string::npos);
}

TEST(Cli, HelpAndVersionSucceed) {
  for (const char* arguments : {"--help", "--version", "run --help", "bench --help"}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.code, 0) << arguments;
    EXPECT_FALSE(result.standard_output.empty());
    EXPECT_TRUE(result.standard_error.empty()) << result.standard_error;
  }
}

}  // namespace
