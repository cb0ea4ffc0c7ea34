// `clattn replay`.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "robustness/program.hpp"

namespace test_replay {

TEST(Replay, RefusalsLeaveReportsAsTheyWere) {
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

TEST(Replay, OfNoTimeStillRunsAndVerifiesAStep) {
  const ProgramResult result = run_program(
      "replay --requests 1 --length-scale 0.01 --layers 1 --heads 2 --kv-heads 1 --head-size 64 "
      "--seconds 1e-9 --verify 1e-9 --no-progress --json -");
  EXPECT_EQ(result.code, 0) << result.standard_error;
  EXPECT_NE(result.standard_output.find("\"steps\": 1,"), std::string::npos)
      << result.standard_output;
  EXPECT_EQ(result.standard_output.find("\"rows\": 0,"), std::string::npos)
      << result.standard_output;
  for (const char* field : {"\"arithmetic\": \"", "\"arithmetic_gflop_per_s\": ",
                            "\"prefill_steps_share_of_arithmetic\""}) {
    EXPECT_NE(result.standard_output.find(field), std::string::npos) << field;
  }
}

/// What ./dev demo shows: prompts that begin alike, and too few blocks for all.
TEST(Replay, SharesASystemPromptAndPreempts) {
  const ProgramResult result = run_program(
      "replay --requests 12 --length-scale 0.05 --speed 1000 --system-prompt 640 --num-blocks 24 "
      "--layers 1 --heads 2 --kv-heads 1 --head-size 64 --verify 0.1 --no-progress --json -");
  EXPECT_EQ(result.code, 0) << result.standard_error;
  const auto report = nlohmann::json::parse(result.standard_output);
  EXPECT_EQ(report["requests"]["finished"], 12);
  EXPECT_GT(report["requests"]["prefix_hit_tokens"], 0);
  EXPECT_GT(report["requests"]["preemptions"], 0);
  EXPECT_EQ(report["verify"]["failed_rows"], 0);
  const std::string trace = report["trace"], note = report["achieved"]["note"];
  EXPECT_TRUE(trace.ends_with(", 32 tokens shared")) << trace;
  const double of_read = report["achieved"]["decode_steps_share_of_read"];
  const double of_arithmetic = report["achieved"]["prefill_steps_share_of_arithmetic"];
  EXPECT_EQ(std::max(of_read, of_arithmetic) > 1, note.find("Above 100 %") == 0) << note;
}

// Their sinks, windows, caps and latent rows belong to what is verified.
TEST(Replay, Q3_ServesTheModelsOfBench) {
  const std::string traffic =
      "replay --requests 1 --length-scale 0.02 --layers 1 --seconds 1e-9 --no-progress --json - ";
  for (const auto& [model, backend] :
       {std::pair<std::string, std::string>{"gpt-oss-20b --heads 8 --kv-heads 1", "FLASHINFER"},
        {"deepseek-v3 --heads 8", "CLATTN_MLA"}}) {
    const ProgramResult result = run_program(traffic + "--model " + model);
    EXPECT_EQ(result.code, 0) << model << result.standard_error;
    const auto report = nlohmann::json::parse(result.standard_output, nullptr, false);
    ASSERT_FALSE(report.is_discarded()) << result.standard_output;
    EXPECT_EQ(report["backend"], backend);
    EXPECT_EQ(report["model"]["dtype"], "bf16");
    EXPECT_GT(report["verify"]["rows"], 0);
    EXPECT_EQ(report["verify"]["failed_rows"], 0);
  }
  expect_refusal(run_program("replay --model deepseek-v3-projected"), 2,
                 "--model: 'deepseek-v3-projected' has keys and values without pages");
}

/// Layers of gated delta nets beside those of attention: prompts in several steps, preemptions, and
/// rows of some steps verified.
TEST(Replay, ServesHybridModels) {
  const std::string arguments =
      "replay --model qwen3.5-9b --requests 8 --length-scale 0.02 --speed 1000000 --max-num-seqs 6 "
      "--max-batched-tokens 40 --num-blocks 9 --verify 0.2 --no-progress --json - --layers ";
  const ProgramResult result = run_program(arguments + "5");
  ASSERT_EQ(result.code, 0) << result.standard_error;
  const auto report = nlohmann::json::parse(result.standard_output);
  EXPECT_EQ(report["model"]["num_layers"], 1);
  EXPECT_EQ(report["model"]["num_recurrent_layers"], 4);
  EXPECT_EQ(report["requests"]["finished"], 8);
  EXPECT_GT(report["requests"]["preemptions"], 0);
  EXPECT_EQ(report["requests"]["prefix_hit_tokens"], 0);
  EXPECT_GT(report["verify"]["rows"], report["verify"]["steps"]);
  EXPECT_EQ(report["verify"]["failed_rows"], 0);
  EXPECT_EQ(report["step_time_us"]["rest_us"]["title"], "recurrent, rest");
  expect_refusal(run_program(arguments + "3"), 2,
                 "--layers: 3, legal: at least 4, every 4th is attention");
}

// M1, M2, M12: names as vLLM's users type them.
TEST(Replay, M12_TakesVllmsNamesOrSaysWhatToUse) {
  const std::string traffic =
      "replay --requests 1 --length-scale 0.01 --layers 1 --heads 2 --kv-heads 1 --head-size 64 "
      "--seconds 1e-9 --no-progress --json - --dtype half --kv-dtype fp8";
  for (const auto& [name, ours] :
       {std::pair<std::string, std::string>{"FLASHINFER_VLLM_V1", "FLASHINFER"},
        {"XFORMERS_VLLM_V1", "XFORMERS"}}) {
    for (const ProgramResult& result : {run_program(traffic + " --backend " + name),
                                        run_program(traffic, {}, "CLATTN_BACKEND=" + name)}) {
      EXPECT_EQ(result.code, 0) << result.standard_error;
      const std::string& report = result.standard_output;
      EXPECT_NE(report.find("\"backend\": \"" + ours + '"'), std::string::npos) << report;
      EXPECT_NE(report.find("\"kv_cache_dtype\": \"fp8_e4m3\""), std::string::npos) << report;
    }
  }
  for (const std::string name : {"FLASH_ATTN", "TORCH_SDPA"}) {
    expect_refusal(run_program(traffic, {}, "CLATTN_BACKEND=" + name), 2,
                   "FLASHINFER computes what " + name + " does");
  }
}

TEST(Replay, VerifiesRowsOfQuantizedCaches) {
  for (const std::string type : {"fp8_e4m3", "fp8_e5m2", "int8"}) {
    const ProgramResult result = run_program(
        "replay --requests 2 --length-scale 0.01 --layers 1 --heads 2 --kv-heads 1 --head-size 64 "
        "--verify 1 --no-progress --json - --kv-dtype " +
        type);
    EXPECT_EQ(result.code, 0) << type << ": " << result.standard_error;
    const std::string& report = result.standard_output;
    EXPECT_NE(report.find("\"kv_cache_dtype\": \"" + type), std::string::npos) << report;
    EXPECT_EQ(report.find("\"rows\": 0,"), std::string::npos) << report;
  }
}

}  // namespace test_replay
