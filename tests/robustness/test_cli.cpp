// Command lines: what is refused, help, exit codes, the environment.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "robustness/program.hpp"

namespace test_cli {

struct BadCommand {
  const char* arguments;
  int code;
  const char* says;
};

TEST(Cli, WrongCommandLinesGiveOneLine) {
  const BadCommand rows[] = {
      {"fly", 2, "fly: unknown command; legal: devices, explain, "},
      {"devces", 2, "devces: unknown command, is it devices?"},
      {"help fly", 2, "fly: unknown command"},
      {"hepl", 2, "hepl: unknown command, is it help?"},
      {"run", 2, "case_dir"},
      {"run /nonexistent/case", 2, "/nonexistent/case"},
      {"run /dev", 2, "case.json"},
      {"run a b c", 2, "clattn: "},
      {"devices --heads 0", 2, "--heads"},
      {"devices --heads many", 2, "--heads"},
      {"devices --heads 5 --kv-heads 2", 2, "--heads"},
      {"devices --dtype f64", 2, "--dtype: 'f64' is not legal: one of f32, f16, bf16"},
      {"explain --model gpt-9", 2, "--model: 'gpt-9' is unknown; one of aims, deepseek-v3, "},
      {"bench --quick --model qwen3-8b", 2, "--model: 'qwen3-8b' has no rows but those that a "},
      {"devices --json=maybe", 2, "clattn: "},
      {"check --backend NOPE", 2, "NOPE"},
      {"check --device no-such-device", 2, "no-such-device"},
      {"check --device 99:0", 2, "99:0"},
      {"check --family dance", 2, "--family"},
      {"bench everything", 2, "suite"},
      {"bench metadata --quick --shapes /nonexistent", 2, "/nonexistent"},
      {"bench metadata --quick --backend NOPE", 2, "NOPE"},
      {"bench --unknown", 2, "--unknown"},
      {"tune --model gpt-9 --output /dev/null", 2, "--model: 'gpt-9' is unknown; one of aims, "},
      {"tune --roles dance", 2, "--roles"},
      {"tune --budget 0", 2, "--budget"},
      {"tune --budget nan --output /dev/null", 2, "--budget: 'nan' is not legal"},
      {"tune --dtype f61 --output /dev/null", 2, "f61"},
      {"tune --dtype f16,fp8_e4m3 --output /dev/null", 2,
       "--dtype: 'fp8_e4m3' is not legal: one of f32"},
      {"tune --kv-dtype xx --output /dev/null", 2, "--kv-dtype: 'xx' is not legal: one of auto"},
      {"tune --model llama-3-8b,gpt-9 --output /dev/null", 2, "gpt-9"},
      {"tune --model llama-3-8b --roles mla_decode --output /dev/null", 2, "--roles: mla_decode"},
      {"replay --requests minus", 2, "--requests"},
      {"replay --trace /nonexistent/trace.csv", 2, "/nonexistent/trace.csv"},
      {"replay --verify 2", 2, "--verify"},
      {"replay --model gpt-9", 2, "--model: 'gpt-9' is unknown; one of aims, "},
      {"replay --block-size 0", 2, "--block-size"},
      {"replay --requests 1 --num-blocks 2147483646", 3, "a layer's cache of 2147483646 blocks"},
  };
  for (const BadCommand& row : rows) {
    SCOPED_TRACE(row.arguments);
    expect_refusal(run_program(row.arguments), row.code, row.says);
  }
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
  expect_refusal(
      run_program("run " + (scratch.path() / "attention").string(), {}, kNoDevices), 4,
      "no OpenCL device was found; no driver is installed where the OpenCL loader looks");
}

TEST(Cli, LostStandardOutputIsReported) {
  for (const std::string command :
       {"--help", "--version", "run --help", "devices", "devices --json"}) {
    SCOPED_TRACE(command);
    expect_refusal(run_program(command, "/dev/full"), 2, "");
  }
}

std::string told_by(const std::string& arguments) {
  const ProgramResult result = run_program(arguments);
  EXPECT_EQ(result.code, 0) << arguments;
  EXPECT_FALSE(result.standard_output.empty());
  EXPECT_TRUE(result.standard_error.empty()) << result.standard_error;
  return result.standard_output;
}

/// Who installs the program has no source tree.
void expect_no_source_folder(const std::string& text) {
  for (const char* folder : {"bench/", "docs/", "src/", "tools/", "build/", "./dev"})
    EXPECT_EQ(text.find(folder), std::string::npos) << folder << " in " << text;
}

TEST(Cli, Q3_HelpListsCommandsAndExitCodes) {
  EXPECT_FALSE(told_by("--version").empty());
  const std::string all = told_by("--help");
  EXPECT_EQ(told_by(""), all);
  EXPECT_EQ(told_by("help"), all);
  for (const char* code : {"\nExit codes:\n  0  done", "\n  1  ", "\n  2  ", "\n  3  ", "\n  4  "})
    EXPECT_NE(all.find(code), std::string::npos) << code << " in " << all;
  const std::string codes = all.substr(all.find("\nExit codes:\n"));
  for (const std::string command : {"devices", "explain", "options", "check", "fuzz", "run",
                                    "replay", "bench", "tune", "help"}) {
    EXPECT_NE(all.find("\n  " + command + "  "), std::string::npos) << command << " in " << all;
    const std::string help = told_by(command + " --help");
    EXPECT_EQ(told_by("help " + command), help);
    EXPECT_TRUE(help.ends_with(codes)) << help;
    expect_no_source_folder(help);
  }
  expect_no_source_folder(told_by("options"));
  expect_no_source_folder(told_by("bench decode --predict mi300x"));
}

}  // namespace test_cli
