// clattn devices, explain and check.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "robustness/program.hpp"

namespace test_cli_devices {

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
  const ProgramResult result = run_program("devices --device cpu", {}, folder);
  EXPECT_EQ(result.code, 3) << result.standard_error;
  for (const char* part : {"struct arguments DAMAGED", "needs structs passed by value"})
    EXPECT_NE(result.standard_output.find(part), std::string::npos) << result.standard_output;
}

// PoCL has a platform then, and no device.
TEST(Cli, Q1_ACacheFolderThatPoclCannotWriteIsNamed) {
  if (run_program("devices").standard_output.find("Portable Computing Language") ==
      std::string::npos) {
    GTEST_SKIP() << "this machine has no PoCL";
  }
  const ProgramResult result =
      run_program("devices --device portable", {},
                  "OCL_ICD_VENDORS=/etc/OpenCL/vendors/pocl.icd POCL_CACHE_DIR=/proc/none");
  expect_refusal(result, 4, "platforms without a device: Portable Computing Language");
  EXPECT_NE(result.standard_error.find("cannot write to its cache folder"), std::string::npos);
  EXPECT_EQ(result.standard_error.find("./dev"), std::string::npos);
}

TEST(Cli, DevicesNamesTheDefaultAndExplains) {
  const std::string all = run_program("devices").standard_output;
  EXPECT_NE(all.find(", default)\n"), std::string::npos) << all;
  const ProgramResult one = run_program("explain --device 0:0");
  EXPECT_EQ(one.code, 0) << one.standard_error;
  EXPECT_NE(one.standard_output.find("\n0:0  "), std::string::npos);
  for (const char* part : {"\nNames of kernels: r16 = ", "\n    decode       decode_"})
    EXPECT_NE(one.standard_output.find(part), std::string::npos) << one.standard_output;
  expect_refusal(run_program("devices --device nowhere"), 2, "device: no device fits 'nowhere'");
}

// By the same list of models as bench and replay, with their types and options.
TEST(Cli, ExplainTakesAModel) {
  for (const auto& [model, parts] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"gpt-oss-20b", {"Layer of gpt-oss-20b: num_heads=64, ", "dtype=bf16", "sinks=[64]"}},
           {"deepseek-v3", {"Layer of deepseek-v3: num_heads=128, ", "CLATTN_MLA chosen"}},
           {"qwen3-8b --kv-dtype fp8", {"Layer of qwen3-8b: ", "kv_cache_dtype=fp8_e4m3"}},
           {"qwen3-8b --kv-dtype uint4_per_token_head", {"kv_cache_dtype=uint4_per_token_head"}},
           {"qwen3-8b --heads 16", {"Layer of own shape: num_heads=16, num_kv_heads=8"}}}) {
    const ProgramResult result = run_program("explain --device 0:0 --model " + model);
    EXPECT_EQ(result.code, 0) << model << result.standard_error;
    for (const std::string& part : parts)
      EXPECT_NE(result.standard_output.find(part), std::string::npos)
          << part << " in " << result.standard_output;
  }
  const ProgramResult json = run_program("explain --json --device 0:0 --model gemma-2-9b");
  const auto devices = nlohmann::json::parse(json.standard_output, nullptr, false);
  ASSERT_FALSE(devices.is_discarded()) << json.standard_output << json.standard_error;
  EXPECT_TRUE(devices.at(0).contains("backends")) << devices;
}

TEST(Cli, Q3_DevicesGivesReasonsOnceAndFailsWhereNoneServes) {
  for (const std::string command : {"devices", "explain"}) {
    const ProgramResult result = run_program(command + " --device 0:0 --head-size 513");
    const std::string& text = result.standard_output;
    EXPECT_EQ(result.code, 3) << command;
    EXPECT_NE(text.find("FLASHINFER rejected: head_size 513 not supported"), std::string::npos);
    EXPECT_NE(text.find("\n  no backend serves this shape\n"), std::string::npos) << text;
    EXPECT_EQ(text.find("error:"), std::string::npos) << text;
  }
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

}  // namespace test_cli_devices
