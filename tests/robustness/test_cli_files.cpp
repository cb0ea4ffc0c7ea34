// Files that commands read and write.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "robustness/program.hpp"

namespace test_cli_files {

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
       "Invalid attention backend: 'X'. Valid backends are: auto, FLASHINFER"},
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
      {"latent scale of zero",
       {R"({"op": "mla_decode", "kv_lora_rank": 2, "kv_cache_dtype": "fp8_e4m3", "k_scale": 0})",
        {{"query.npy", npy_f32({1, 1, 1}, "(1, 1, 3)")}}},
       "k_scale: expected numbers > 0, got 0"},
      {"latent scale below zero",
       {R"({"op": "concat_and_cache_mla", "kv_cache_dtype": "fp8_e4m3", "k_scale": -2})",
        {{"kv_c.npy", npy_f32({1}, "(1, 1)")},
         {"k_pe.npy", npy_f32({1}, "(1, 1)")},
         {"kv_cache.npy", npy_image("|u1", "(1, 1, 2)", "ab")}}},
       "k_scale: expected numbers > 0, got -2"},
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

TEST(Cli, WhatIsNoFileIsCalledWhatItIs) {
  const ScratchDirectory scratch;
  const std::filesystem::path directory = scratch.path() / "case";
  const CaseImage image = {R"({"op": "reorder_batch_to_split_decodes_and_prefills"})", {}};
  image.write(directory);
  const std::filesystem::path input = directory / "num_scheduled_tokens.npy";
  const auto refused = [&](const char* says) {
    expect_refusal(run_program("run " + directory.string()), 2, says);
    std::filesystem::remove(input);
  };
  refused("num_scheduled_tokens.npy: no such file");
  std::filesystem::create_directory(input);
  refused("num_scheduled_tokens.npy: a folder; expected a file");
  ASSERT_EQ(::mkfifo(input.c_str(), 0600), 0);
  refused("num_scheduled_tokens.npy: neither a file nor a link to one");
}

TEST(Cli, ACasesOwnFolderIsNoPlaceForOutputs) {
  const ScratchDirectory scratch;
  const std::filesystem::path directory = scratch.path() / "case";
  const CaseImage image = {R"({"op": "make_local_attention_virtual_batches", "attn_chunk_size": 4,
                               "block_size": 4})",
                           {{"seq_lens.npy", npy_i32({5})},
                            {"query_start_loc.npy", npy_i32({0, 5})},
                            {"block_table.npy", npy_i32({0, 1}, "(1, 2)")}}};
  image.write(directory);
  std::filesystem::create_directory_symlink(directory, scratch.path() / "link");
  const std::string path = directory.string();
  for (const std::string& out : {path, path + "/", path + "/.", path + "/new/..", path + "/../case",
                                 (scratch.path() / "link").string()}) {
    SCOPED_TRACE(out);
    expect_refusal(run_program("run " + path + " --out " + out), 2, "the case's own folder");
    EXPECT_EQ(read_bytes(directory / "seq_lens.npy"), npy_i32({5}));
    EXPECT_FALSE(std::filesystem::exists(directory / "new"));
  }
  std::filesystem::create_directory_symlink(directory, directory / "out");
  expect_refusal(run_program("run " + path), 2, "the case's own folder");
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
      {"bench --quick --shapes ", "model m\n"},
      {"bench --quick --shapes ", "model m heads=1 kv_heads=1 head_size=64\n"},
      {"bench --quick --shapes ", std::string("\0\x01\xff\n\n", 5)},
      {"bench --quick --shapes ", "fly quick q1\n"},
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

TEST(Cli, AFolderOfCasesIsNamedAsOne) {
  const ScratchDirectory scratch;
  small_attention_case().write(scratch.path() / "0000-attention");
  small_attention_case().write(scratch.path() / "0001-attention");
  expect_refusal(run_program("run " + scratch.path().string()), 2,
                 "holds 2 cases, expected one of them: 0000-attention, 0001-attention");
  const ProgramResult one =
      run_program("run --verify " + (scratch.path() / "0001-attention").string());
  EXPECT_EQ(one.code, 0) << one.standard_error;
  EXPECT_NE(one.standard_output.find(" elements (output"), std::string::npos)
      << one.standard_output;
}

TEST(Cli, F6_ErrorsQuoteLittleOfWhatTheyWereGiven) {
  const ScratchDirectory scratch;
  const std::string place = (scratch.path() / "case").string(), much(4 << 20, 'x');
  for (const std::string& json : {"{\"op\": \"" + much, "{\"" + much + "\": 1 2}",
                                  "{\"op\": \"attention\", \"dtype\": \"" + much + "\"}"}) {
    CaseImage{json, {}}.write(place);
    const ProgramResult result = run_program("run " + place);
    expect_refusal(result, 2, "case.json");
    EXPECT_LT(result.standard_error.size(), 1000U);
  }
  write_bytes(scratch.path() / "shapes", much);
  EXPECT_LT(run_program("bench --quick --shapes " + (scratch.path() / "shapes").string())
                .standard_error.size(),
            20000U);
}

}  // namespace test_cli_files
