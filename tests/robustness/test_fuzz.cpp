#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "robustness/program.hpp"
#include "robustness/run_case.hpp"

namespace test_fuzz {

std::string quoted(const std::filesystem::path& path) {
  return "'" + path.string() + "'";
}

TEST(Fuzz, CasesOfEveryOrderOfCachesPassAndRunAgain) {
  const ScratchDirectory scratch;
  const std::string out = quoted(scratch.path() / "cases");
  struct Call {
    std::string seed, first;
    std::vector<std::string> lists = {};
  };
  const Call calls[] = {{"1", "0"},  // pages, latent rows, x-packed, lists
                        {"1", "24"},
                        {"1", "32"},
                        {"24", "24", {"spans.npy", "first_keys.npy"}},
                        {"33", "24", {"direction.npy", "first_keys.npy", "keep_keys.npy"}},
                        {"44", "8", {"first_keys.npy", "tree_parents.npy"}},
                        {"256", "16", {"first_keys.npy", "tree_parents.npy"}}};  // latent rows
  for (const auto& [seed, first, lists] : calls) {
    const ProgramResult result = run_program("fuzz --most-tokens 20 --count 1 --write-all --seed " +
                                             seed + " --first " + first + " --out " + out);
    EXPECT_EQ(result.code, 0) << result.standard_output << result.standard_error;
    EXPECT_NE(result.standard_output.find("1 passed, 0 refused, 0 failed"), std::string::npos)
        << result.standard_output;
    const std::filesystem::path place = scratch.path() / "cases" / (seed + "-" + first);
    ASSERT_TRUE(std::filesystem::exists(place / "expected" / "out.npy")) << place;
    for (const std::string list :
         {"direction.npy", "spans.npy", "first_keys.npy", "keep_keys.npy", "tree_parents.npy"})
      EXPECT_EQ(std::filesystem::exists(place / list), std::ranges::count(lists, list) == 1)
          << list;
    const ProgramResult again = run_program("run --verify " + quoted(place));
    EXPECT_EQ(again.code, 0) << again.standard_error;
    EXPECT_EQ(again.standard_output.rfind("passed: ", 0), 0U) << again.standard_output;
  }
}

// A run that is stopped has said what came of its calls, up to those of the last layer.
TEST(Fuzz, EachLayerBeginsWithTheCountsSoFar) {
  const ProgramResult result = run_program("fuzz --most-tokens 20 --calls 1 --count 2");
  EXPECT_EQ(result.code, 0) << result.standard_output << result.standard_error;
  EXPECT_NE(result.standard_output.find("so far 1 passed, 0 refused, 0 failed"), std::string::npos)
      << result.standard_output;
}

TEST(Fuzz, WrongOptionsGiveOneLine) {
  expect_refusal(run_program("fuzz --family tpu"), 2, "--family");
  expect_refusal(run_program("fuzz --most-tokens 0"), 2, "--most-tokens");
  expect_refusal(run_program("fuzz --seconds -1"), 2, "--seconds");
}

TEST(Run, VerifyTellsRightFromWrong) {
  const ScratchDirectory scratch;
  CaseImage image = small_attention_case();
  image.write(scratch.path() / "right");
  const ProgramResult right = run_program("run --verify " + quoted(scratch.path() / "right"));
  EXPECT_EQ(right.code, 0) << right.standard_error;
  EXPECT_EQ(right.standard_output.rfind("passed: ", 0), 0U) << right.standard_output;
  const std::string info = read_bytes(scratch.path() / "right" / "out" / "info.json");
  EXPECT_NE(info.find("\"oracle\""), std::string::npos) << info;

  // No implementation gets a number from a query that is none.
  std::string& query = image.files.at("query.npy");
  query.replace(query.size() - 4, 4, "\xff\xff\xff\x7f");
  image.write(scratch.path() / "wrong");
  const ProgramResult wrong = run_program("run --verify " + quoted(scratch.path() / "wrong"));
  EXPECT_EQ(wrong.code, 1) << wrong.standard_error;
  EXPECT_EQ(wrong.standard_output.rfind("FAILED: ", 0), 0U) << wrong.standard_output;
}

TEST(Run, VerifyNeedsAnOracle) {
  const ScratchDirectory scratch;
  CaseImage{R"({"op": "split_decodes_and_prefills"})", {{"query_start_loc.npy", npy_i32({0, 1})}}}
      .write(scratch.path() / "case");
  expect_refusal(
      run_program("run --verify " + quoted(scratch.path() / "case")), 3,
      "--verify for op split_decodes_and_prefills: not supported, legal: attention, mla_decode");
}

}  // namespace test_fuzz
