#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "robustness/program.hpp"

namespace {

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
      {"check --family dance", 2, "--family"},
      {"bench everything", 2, "suite"},
      {"bench metadata --quick --shapes /nonexistent", 2, "/nonexistent"},
      {"bench metadata --quick --backend NOPE", 2, "NOPE"},
      {"bench --unknown", 2, "--unknown"},
      {"tune --model gpt-9 --output /dev/null", 2, "gpt-9"},
      {"tune --roles dance", 2, "--roles"},
      {"tune --budget 0", 2, "--budget"},
      {"tune --budget nan --output /dev/null", 2, "--budget: 'nan' is not legal"},
      {"tune --dtype f61 --output /dev/null", 2, "f61"},
      {"tune --dtype f16,fp8_e4m3 --output /dev/null", 2, "--dtype: fp8_e4m3"},
      {"tune --kv-dtype xx --output /dev/null", 2, "--kv-dtype: xx"},
      {"tune --model llama-3-8b,gpt-9 --output /dev/null", 2, "gpt-9"},
      {"tune --model llama-3-8b --roles mla_decode --output /dev/null", 2, "--roles: mla_decode"},
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

int count_of(std::string_view part, std::string_view text) {
  int count = 0;
  for (auto at = text.find(part); at != text.npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

bool has_cpu_device() {
  return run_program("devices").standard_output.find(" (cpu") != std::string::npos;
}

/// Each variant is reached by some batch of its own family, whatever the processor lacks.
TEST(Cli, EveryVariantOfTheCpuFamilyPassesItsCheck) {
  if (!has_cpu_device()) GTEST_SKIP() << "this machine has no OpenCL device of a CPU";
  const ProgramResult result = run_program("check --device cpu --family cpu --all");
  EXPECT_EQ(result.code, 0) << result.standard_output << result.standard_error;
  EXPECT_EQ(result.standard_output.find("left out"), std::string::npos);
  const ProgramResult quick = run_program("check --device cpu --family cpu");
  EXPECT_EQ(quick.code, 0) << quick.standard_output << quick.standard_error;
  for (const char* part : {"--all", "left out of variants: ", "f32/f32, group of 4"}) {
    EXPECT_NE(quick.standard_output.find(part), std::string::npos) << quick.standard_output;
  }
  EXPECT_LT(count_of(" ok\n", quick.standard_output), count_of(" ok\n", result.standard_output));
  const ProgramResult none = run_program("check --device cpu --family gpu_ptx --backend XFORMERS");
  EXPECT_EQ(none.code, 1) << none.standard_output;
}

TEST(Cli, TheQuickCheckFindsAWrongKernel) {
  if (!has_cpu_device()) GTEST_SKIP() << "this machine has no OpenCL device of a CPU";
  std::string merge =
      read_bytes(std::filesystem::path(CLATTN_SOURCE_DIR) / "kernels_cl/attention/merge.cl");
  const std::string_view right = "count = item->num_splits;",
                         wrong = "count = item->num_splits - 1;";
  ASSERT_EQ(count_of(right, merge), 1);
  merge.replace(merge.find(right), right.size(), wrong);
  const ScratchDirectory kernels;
  std::filesystem::create_directory(kernels.path() / "attention");
  write_bytes(kernels.path() / "attention/merge.cl", merge);
  const ProgramResult result = run_program("check --device cpu --family cpu", {},
                                           "CLATTN_KERNEL_DIR=" + kernels.path().string());
  EXPECT_EQ(result.code, 1);
  for (const char* part : {"merge__vec", "FAILED", "prefill, 3 splits", "differs from the oracle"})
    EXPECT_NE(result.standard_output.find(part), std::string::npos) << result.standard_output;
}

// The start-up probe of structs by value, shown a struct whose members the kernel sees elsewhere.
TEST(Cli, ADriverThatDamagesStructsIsRefusedWithTheReason) {
  if (!has_cpu_device()) GTEST_SKIP() << "this machine has no OpenCL device of a CPU";
  const std::filesystem::path shared =
      std::filesystem::path(CLATTN_SOURCE_DIR) / "kernels_cl/shared";
  std::string call = read_bytes(shared / "call.h");
  const std::string_view right = "int causal;", wrong = "int write_lse, causal;";
  const std::string_view second = "  int write_lse;";
  ASSERT_EQ(count_of(right, call), 1);
  ASSERT_EQ(count_of(second, call), 1);
  call.erase(call.find(second), second.size());
  call.replace(call.find(right), right.size(), wrong);
  const ScratchDirectory kernels;
  std::filesystem::create_directory(kernels.path() / "shared");
  write_bytes(kernels.path() / "shared/call.h", call);
  const std::string folder = "CLATTN_KERNEL_DIR=" + kernels.path().string();
  const ProgramResult result = run_program("devices", {}, folder);
  EXPECT_EQ(result.code, 0) << result.standard_error;
  for (const char* part : {"struct arguments DAMAGED", "needs structs passed by value"})
    EXPECT_NE(result.standard_output.find(part), std::string::npos) << result.standard_output;
}

/// A8: a backend that is forced by the environment, by every command and case that chooses one.
TEST(Cli, A8_TheEnvironmentForcesEverySelection) {
  const ScratchDirectory scratch;
  const CaseImage select = {R"({"op": "select_backend", "head_size": 64, "dtype": "f16"})", {}};
  select.write(scratch.path() / "select");
  const CaseImage copy = {R"({"op": "copy_blocks"})",
                          {{"key_cache.npy", npy_f32(std::vector<float>(32, 1), "(2, 16, 1, 1)")},
                           {"value_cache.npy", npy_f32(std::vector<float>(32, 2), "(2, 16, 1, 1)")},
                           {"block_mapping.npy", npy_i64({0, 1}, "(1, 2)")}}};
  copy.write(scratch.path() / "copy");
  const std::string commands[] = {"devices", "run " + (scratch.path() / "select").string(),
                                  "run " + (scratch.path() / "copy").string()};
  for (const std::string& command : commands) {
    SCOPED_TRACE(command);
    expect_refusal(run_program(command, {}, "CLATTN_BACKEND=BOGUS"), 2,
                   "Invalid attention backend: 'BOGUS'. Valid backends are: auto, FLASHINFER");
  }
  for (const std::string& command : commands) {
    const ProgramResult result = run_program(command, {}, "CLATTN_BACKEND=XFORMERS");
    EXPECT_EQ(result.code, 0) << command << ": " << result.standard_error;
    if (command != "devices") continue;
    EXPECT_NE(result.standard_output.find("XFORMERS chosen"), std::string::npos);
    EXPECT_NE(result.standard_output.find("FLASHINFER possible"), std::string::npos);
  }
  const std::string chosen = read_bytes(scratch.path() / "select" / "out" / "result.json");
  EXPECT_NE(chosen.find("\"backend\": \"XFORMERS\""), std::string::npos) << chosen;
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

constexpr const char* kNoDevices = "OCL_ICD_VENDORS=/nonexistent";

TEST(Cli, WithoutDevicesHostOperationsRunAndOthersExitWithFour) {
  const ScratchDirectory scratch;
  const CaseImage image = {R"({"op": "advance_step", "block_size": 4, "num_queries": 2})",
                           {{"seq_lens.npy", npy_i32({4, 2, 7})},
                            {"block_table.npy", npy_i32({9, 3, 5, -1, 8, 8}, "(3, 2)")},
                            {"sampled_token_ids.npy", npy_i64({70, 71})}}};
  const std::string directory = (scratch.path() / "case").string();
  image.write(directory);
  const ProgramResult host = run_program("run " + directory, {}, kNoDevices);
  EXPECT_EQ(host.code, 0) << host.standard_error;
  const ProgramResult device = run_program("run " + directory + " --out " + directory + "/device");
  EXPECT_EQ(device.code, 0) << device.standard_error;
  for (const char* name : {"input_tokens", "input_positions", "seq_lens", "slot_mapping",
                           "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"}) {
    const std::string file = std::string("/") + name + ".npy";
    const std::string bytes = read_bytes(directory + "/out" + file);
    EXPECT_FALSE(bytes.empty()) << name;
    EXPECT_EQ(bytes, read_bytes(directory + "/device" + file)) << name;
  }
  write_bytes(directory + "/seq_lens.npy", npy_i32({8, 2, 7}));
  const std::string refusal = "row 0 was left out: its new token lies past its block table";
  expect_refusal(run_program("run " + directory, {}, kNoDevices), 2, refusal);
  expect_refusal(run_program("run " + directory), 2, refusal);

  small_attention_case().write(scratch.path() / "attention");
  expect_refusal(run_program("run " + (scratch.path() / "attention").string(), {}, kNoDevices), 4,
                 "no OpenCL device was found");
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

TEST(Cli, LostStandardOutputIsReported) {
  for (const std::string command :
       {"--help", "--version", "run --help", "devices", "devices --json"}) {
    SCOPED_TRACE(command);
    expect_refusal(run_program(command, "/dev/full"), 2, "");
  }
}

TEST(Cli, DevicesNamesTheDefaultAndExplains) {
  const std::string all = run_program("devices").standard_output;
  EXPECT_NE(all.find(", default)\n"), std::string::npos) << all;
  const ProgramResult one = run_program("devices --explain --device 0:0");
  EXPECT_EQ(one.code, 0) << one.standard_error;
  EXPECT_NE(one.standard_output.find("\n0:0  "), std::string::npos);
  for (const char* part : {"\nNames of kernels: r16 = ", "\n    decode       decode_"})
    EXPECT_NE(one.standard_output.find(part), std::string::npos) << one.standard_output;
  expect_refusal(run_program("devices --device nowhere"), 2, "device: no device fits 'nowhere'");
}

TEST(Cli, DevicesGivesReasonsOnce) {
  const std::string text = run_program("devices --device 0:0 --head-size 513").standard_output;
  EXPECT_NE(text.find("FLASHINFER rejected: head_size 513 not supported"), std::string::npos);
  EXPECT_NE(text.find("  error: no backend serves this shape\n"), std::string::npos) << text;
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

TEST(Cli, KernelsThatDoNotBuildAreTold) {
  const ScratchDirectory kernels;
  std::filesystem::create_directories(kernels.path() / "attention/cpu");
  write_bytes(kernels.path() / "attention/cpu/decode_cpu.cl", "broken {");
  const std::string variables =
      "CLATTN_KERNEL_DIR=" + kernels.path().string() + " CLATTN_CACHE_DIR=";
  const ProgramResult devices = run_program("devices", {}, variables);
  EXPECT_EQ(devices.code, 0);
  EXPECT_NE(devices.standard_output.find("  not built: decode_"), std::string::npos)
      << devices.standard_output;
  EXPECT_NE(devices.standard_output.find(".cl:1:"), std::string::npos) << devices.standard_output;
}

TEST(Cli, AProgramCacheThatIsNotUsedIsTold) {
  const ScratchDirectory cache;
  const std::string variables = "CLATTN_CACHE_DIR=" + cache.path().string();
  namespace fs = std::filesystem;
  for (const bool open : {false, true}) {
    if (open) fs::permissions(cache.path(), fs::perms::group_write, fs::perm_options::add);
    const ProgramResult devices = run_program("devices", {}, variables);
    EXPECT_EQ(devices.code, 0);
    const bool told = devices.standard_output.find("  program cache: " + cache.path().string() +
                                                   ": not used: ") != std::string::npos;
    EXPECT_EQ(told, open) << devices.standard_output;
  }
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

TEST(Cli, HelpAndVersionSucceed) {
  for (const char* arguments : {"--help", "--version", "run --help", "bench --help"}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.code, 0) << arguments;
    EXPECT_FALSE(result.standard_output.empty());
    EXPECT_TRUE(result.standard_error.empty()) << result.standard_error;
  }
}

}  // namespace
