// `clattn tune`.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <clattn/tuning.hpp>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "robustness/program.hpp"

namespace test_tune {

/// How often `text` holds `part`.
std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) {
    ++count;
  }
  return count;
}

TEST(Tune, WritesWhatItReadsAndTellsWhatItDoesNot) {
  const ScratchDirectory scratch;
  const std::filesystem::path file = scratch.path() / "new" / "tuning.txt";
  const std::string command =
      "tune --model llama-3.2-1b --roles prefill --budget 40 --submit --output " + file.string();
  const ProgramResult result = run_program(command);
  EXPECT_EQ(result.code, 0) << result.standard_error;
  const std::string& said = result.standard_output;
  EXPECT_NE(said.find("prefill, 4 heads a KV head of 64, f16/f16: "), std::string::npos) << said;
  EXPECT_NE(said.find("1 of 1 targets tuned"), std::string::npos) << said;
  EXPECT_EQ(said.find("NOT USED"), std::string::npos) << said;
  EXPECT_EQ(said.find("f16/f16: 0 of "), std::string::npos) << said;
  const bool won = said.find("winner: ") != std::string::npos;
  EXPECT_NE(said.find("rows for the shipped database"), std::string::npos) << said;
  EXPECT_EQ(result.standard_error,
            "target 1 of 1: prefill, 4 heads a KV head of 64, f16/f16\n"
            "costs: 4 heads a KV head of 64, f16/f16\n");
  EXPECT_TRUE(std::filesystem::exists(file)) << said;
  EXPECT_EQ(won, said.find(" tuned, 0 rows and 2 of costs written") == std::string::npos) << said;
  write_bytes(scratch.path() / "mine", "my notes");
  const ProgramResult told = run_program(
      "devices", {}, "CLATTN_TUNING=1 CLATTN_TUNING_FILE=" + (scratch.path() / "mine").string());
  EXPECT_EQ(told.code, 0) << told.standard_error;
  EXPECT_NE(told.standard_output.find("mine:1: not a tuning file"), std::string::npos)
      << told.standard_output;
}

/// The kernels of x-packed caches, whose steps are split by the original's rule: tiles alone.
TEST(Tune, SearchesThePackedRole) {
  const ScratchDirectory scratch;
  const ProgramResult result =
      run_program("tune --model llama-3.2-1b --roles packed_decode --budget 120 --output " +
                  (scratch.path() / "tuning.txt").string());
  EXPECT_EQ(result.code, 0) << result.standard_error;
  const std::string& said = result.standard_output;
  EXPECT_NE(said.find("packed_decode, 4 heads a KV head of 64, f16/f16: "), std::string::npos)
      << said;
  EXPECT_NE(said.find("1 of 1 targets tuned"), std::string::npos) << said;
  EXPECT_EQ(said.find("NOT USED"), std::string::npos) << said;
  EXPECT_EQ(said.find("costs of"), std::string::npos) << said;
}

/// Costs alone, of the model that is named; who opens a context with the file plans by them.
TEST(Tune, MeasuresCostsThatANewContextReads) {
  const ScratchDirectory scratch;
  const std::filesystem::path file = scratch.path() / "tuning.txt";
  const ProgramResult result = run_program(
      "tune --costs --model llama-3.2-1b,deepseek-v3 --submit --output " + file.string());
  EXPECT_EQ(result.code, 0) << result.standard_error;
  const std::string& said = result.standard_output;
  for (const char* part : {"launch us", "read GB/s", "\n4 heads a KV head of 64, f16/f16\n",
                           "\n128 heads, 512 + 64, f16/f16\n", " rows of costs written to "}) {
    EXPECT_NE(said.find(part), std::string::npos) << part << "\n" << said;
  }
  EXPECT_EQ(said.find("not measured"), std::string::npos) << said;
  const std::string text = read_bytes(file);
  const clattn::TuningText read = clattn::parse_tuning(text, "file");
  EXPECT_EQ(read.problems, std::vector<std::string>{});
  EXPECT_GE(read.costs.size(), 4U) << text;  // decode, prefill, mla_decode and a merge
  for (const clattn::CostRow& row : read.costs) {
    EXPECT_FALSE(row.version.empty());
    EXPECT_EQ(row.date.size(), 10U);
    EXPECT_NE(said.find(row.kernel), std::string::npos) << said;
  }
  const ProgramResult told =
      run_program("devices", {}, "CLATTN_TUNING=1 CLATTN_TUNING_FILE=" + file.string());
  EXPECT_EQ(told.code, 0) << told.standard_error;
  EXPECT_EQ(told.standard_output.find("ignored"), std::string::npos) << told.standard_output;
}

/// Far too little time for all shapes in two types: what was not tuned has a line, nothing counts
/// as tuned for being reached, and the program ends when its time does, but for a step begun.
TEST(Tune, NamesWhatItsBudgetLeavesUntried) {
  const ScratchDirectory scratch;
  const auto start = std::chrono::steady_clock::now();
  const ProgramResult result = run_program("tune --dtype f16,f32 --budget 1 --submit --output " +
                                           (scratch.path() / "tuning.txt").string());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const std::string& said = result.standard_output;
  EXPECT_TRUE(result.code == 1 || result.code == 3) << result.code << "\n" << said;
  EXPECT_LT(took.count(), 60) << "the budget is one second";
  const std::size_t at = said.find(" targets, 1 s\n");
  ASSERT_NE(at, std::string::npos) << said;
  const std::size_t targets = std::stoul(said.substr(said.rfind(' ', at - 1)));
  EXPECT_GE(targets, 40U);
  const std::size_t untried = occurrences(said, ": not tuned: ");
  const std::string tuned = std::to_string(targets - untried) + " of " + std::to_string(targets);
  EXPECT_GT(untried, targets / 2);
  EXPECT_NE(said.find("\n" + tuned + " targets tuned"), std::string::npos) << said;
  EXPECT_NE(said.find("mla_decode, 128 heads, 512 + 64, f32/f32: not tuned: "), std::string::npos)
      << said;
}

/// The models of both lists: of the table that replay has, and of the files that bench measures.
TEST(Tune, KnowsEveryModelThatBenchKnows) {
  const ScratchDirectory scratch;
  const ProgramResult bench = run_program("bench --quick --model gpt-9");
  const std::size_t list = bench.standard_error.find("one of all, ");
  ASSERT_NE(list, std::string::npos) << bench.standard_error;
  std::string models = bench.standard_error.substr(list + 12);
  models.erase(models.find('\n'));
  models.erase(std::remove(models.begin(), models.end(), ' '), models.end());
  const ProgramResult tune =
      run_program("tune --model mistral-7b," + models + " --budget 1 --output " +
                  (scratch.path() / "tuning.txt").string());
  EXPECT_TRUE(tune.code == 1 || tune.code == 3) << tune.code << "\n" << tune.standard_error;
  for (const char* name :
       {"decode, 2 heads a KV head of 256, f16/f16: ", "mla_decode, 128 heads, 512 + 64, f16/f16: ",
        "mla_decode, 16 heads, 512 + 64, f16/f16: "}) {
    EXPECT_NE(tune.standard_output.find(name), std::string::npos) << tune.standard_output;
  }
}

}  // namespace test_tune
