// Rows as text, and the user's file of them.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <clattn/tuning.hpp>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/error_text.hpp"
#include "tuning/tuning_table.hpp"

namespace clattn::detail {
namespace {

namespace fs = std::filesystem;

TuningRow full_row() {
  return {.device = "NVIDIA H200 \x40 1",
          .driver = "580.1",
          .role = "decode",
          .head_size = 128,
          .group = 4,
          .dtype = DType::kF16,
          .cache_dtype = DType::kFp8E4M3,
          .pages = "medium",
          .variant = "decode_gpu__r4_ptx",
          .block_rows = 4,
          .block_kv = 2,
          .work_group_size = 64,
          .time_us = 123.5,
          .error = 0.0001,
          .version = "0.1.0",
          .date = "2026-11-21"};
}

CostRow full_costs() {
  return {.device = "NVIDIA H200 \x40 1",
          .driver = "580.1",
          .kernel = "decode_gpu__r4_ptx",
          .head_size = 128,
          .group = 4,
          .dtype = DType::kF16,
          .cache_dtype = DType::kFp8E4M3,
          .costs = {.launch_us = 6,
                    .task_us = 2.25,
                    .split_us = 1.5,
                    .read_gbs = 85,
                    .math_gflops = 700,
                    .groups = 50},
          .version = "0.1.0",
          .date = "2026-11-21"};
}

class TuningFiles : public testing::Test {
 protected:
  void TearDown() override { fs::remove_all(folder_); }
  std::string write(std::string_view text) const {
    fs::create_directories(folder_);
    std::ofstream(path_, std::ios::binary) << text;
    return path_;
  }
  std::string read() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  fs::path folder_ = fs::path(testing::TempDir()) / fmt::format("clattn_tuning_{}", getpid());
  std::string path_ = (folder_ / "nested" / ".." / "tuning.txt").lexically_normal().string();
};

TEST(TuningText, RoundTrip) {
  TuningRow quoted = full_row();
  quoted.device = "-";
  quoted.version = "a #b";
  TuningRow bare;
  bare.device = "gpu";
  TuningRow odd = bare;
  odd.device = "cost";
  const std::vector<TuningRow> rows = {full_row(), quoted, bare, odd};
  CostRow quoted_costs = full_costs();
  quoted_costs.kernel = "*";
  CostRow bare_costs;
  bare_costs.device = "gpu";
  bare_costs.costs.math_gflops = 1;
  const std::vector<CostRow> costs = {full_costs(), quoted_costs, bare_costs};
  const TuningText read = parse_tuning(format_tuning(rows, costs), "file");
  EXPECT_TRUE(read.problems.empty());
  EXPECT_EQ(read.rows, rows);
  EXPECT_EQ(read.costs, costs);
}

TEST(TuningText, CostsStandInTheOrderThatTheDocumentSays) {
  EXPECT_EQ(
      format_cost_row(full_costs()),
      "cost \"NVIDIA H200 @ 1\" 580.1 decode_gpu__r4_ptx 128 4 f16 fp8_e4m3 6 2.25 1.5 85 700 "
      "50 0.1.0 2026-11-21\n");
  CostRow bare;
  bare.device = "gpu";
  bare.costs.read_gbs = 10;
  EXPECT_EQ(format_cost_row(bare), "cost gpu * * * * * * - - - 10 - - - -\n");
}

TEST(TuningText, EveryTruncationAndChangedByteOfCostsGivesRowsOrProblemsAndNoMore) {
  const std::string good = format_tuning({}, std::vector<CostRow>{full_costs()});
  for (std::size_t i = good.find('\n') + 2; i < good.size(); ++i) {
    const TuningText cut = parse_tuning(good.substr(0, i), "file");
    EXPECT_TRUE(cut.costs.empty());
    EXPECT_EQ(cut.problems.size(), 1U);
    for (const char c : {'\0', '\n', '"', '#', ' ', '-', '9', '\xff'}) {
      std::string text = good;
      text[i] = c;
      const TuningText read = parse_tuning(text, "file");
      EXPECT_LE(read.rows.size() + read.costs.size(), 1U);
    }
  }
}

TEST(TuningText, EveryTruncationLosesItsLastRowAlone) {
  const std::string text = format_tuning(std::vector<TuningRow>{full_row(), full_row()});
  const std::size_t first_end = text.find('\n', text.find('\n') + 1) + 1;
  const std::size_t header_end = text.find('\n');
  for (std::size_t size = 0; size < text.size(); ++size) {
    const TuningText read = parse_tuning(text.substr(0, size), "file");
    const bool between = size == header_end || size == header_end + 1 || size == first_end;
    EXPECT_EQ(read.problems.empty(), between) << size;
    EXPECT_EQ(read.rows.size(), size < first_end ? 0U : 1U) << size;
    for (const TuningRow& row : read.rows) EXPECT_EQ(row, full_row());
  }
}

TEST(TuningText, EveryChangedByteGivesRowsOrProblemsAndNoMore) {
  const std::string good = format_tuning(std::vector<TuningRow>{full_row()});
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (const char c : {'\0', '\n', '"', '#', ' ', '-', '9', '\xff'}) {
      std::string text = good;
      text[i] = c;
      const TuningText read = parse_tuning(text, "file");
      EXPECT_LE(read.rows.size(), 1U);
    }
  }
}

TEST(TuningText, ProblemsNameFileLineAndWhatIsWrong) {
  const auto with = [](std::string_view from, std::string_view to) {
    std::string line = format_tuning_row(full_row());
    return "clattn-tuning 2\n\n# comment\n" + line.replace(line.find(from), from.size(), to);
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", "f:1: not a tuning file of this version, which begin with 'clattn-tuning 2'; ignored"},
      {"clattn-tuning 1\n",
       "f:1: not a tuning file of this version, which begin with 'clattn-tuning 2'; ignored"},
      {"clattn-tuning 2\ngpu * decode\n", "f:2: 3 fields, legal: 16; ignored"},
      {with(" 128 ", " 0 "), "f:4: head_size is '0', legal: a number from 1 to 1048576; ignored"},
      {with(" 128 ", " 12x "),
       "f:4: head_size is '12x', legal: a number from 1 to 1048576; ignored"},
      {with(" 64 ", " 99999999999 "),
       "f:4: work_group_size is '99999999999', legal: a number from 1 to 1048576; ignored"},
      {with(" 123.5 ", " nan "),
       "f:4: time_us is 'nan', legal: a positive number up to 1e+12; ignored"},
      {with(" 123.5 ", " 2e12 "),
       "f:4: time_us is '2e12', legal: a positive number up to 1e+12; ignored"},
      {with(" medium ", " huge "),
       "f:4: pages is 'huge', legal: *, none, small, medium, large; ignored"},
      {with(" f16 ", " f61 "),
       "f:4: dtype: expected f32, f16, bf16, fp8_e4m3, fp8_e5m2 or int8, got 'f61'; ignored"},
      {"clattn-tuning 2\ncost gpu * decode*\n", "f:2: 3 fields, legal: 15; ignored"},
      {"clattn-tuning 2\ncost * * * * * * * 1 1 1 1 1 1 - -\n",
       "f:2: device is missing, legal: a name or a class; ignored"},
      {"clattn-tuning 2\ncost gpu * * * * * * 0 1 1 1 1 1 - -\n",
       "f:2: launch_us is '0', legal: a positive number up to 1e+12; ignored"},
      {"clattn-tuning 2\ncost gpu * * * * * * 1 -1 1 1 1 1 - -\n",
       "f:2: task_us is '-1', legal: a positive number up to 1e+12; ignored"},
      {"clattn-tuning 2\ncost gpu * * * * * * 1 1 1 inf 1 1 - -\n",
       "f:2: read_gbs is 'inf', legal: a positive number up to 1e+12; ignored"},
      {"clattn-tuning 2\ncost gpu * * * * * * 1 1 1 1 1 1e13 - -\n",
       "f:2: groups is '1e13', legal: a positive number up to 1e+12; ignored"},
      {"clattn-tuning 2\ncost gpu * * * * * * 1 1 1 - - 1 - -\n",
       "f:2: neither read_gbs nor math_gflops: keys would cost nothing; ignored"},
      {"clattn-tuning 2\ncost gpu * * * * * * 1 1 1 1e-300 - - - -\n",
       "f:2: a rate is 1e-300, legal: 0 or at least 1e-06; ignored"},
      {"clattn-tuning 2\n\"gpu * decode\n", "f:2: a quote without its end; ignored"},
  };
  for (const auto& [text, problem] : cases) {
    const TuningText read = parse_tuning(text, "f");
    EXPECT_TRUE(read.rows.empty() && read.costs.empty()) << text;
    ASSERT_EQ(read.problems.size(), 1U) << text;
    if (problem.find("dtype") != std::string::npos) {
      EXPECT_TRUE(read.problems[0].starts_with("f:4: ")) << read.problems[0];
      EXPECT_NE(read.problems[0].find("f61"), std::string::npos) << read.problems[0];
    } else {
      EXPECT_EQ(read.problems[0], problem);
    }
  }
}

TEST_F(TuningFiles, SavedRowsAreReadBackAndReplaceTheirOwn) {
  TuningRow other = full_row();
  other.group = 8;
  save_tuning(path_, std::vector<TuningRow>{full_row(), other});
  write(read() + "# a comment\nnonsense\n");
  TuningRow better = full_row();
  better.block_kv = 8;
  save_tuning(path_, std::vector<TuningRow>{better});
  const TuningText text = TuningTable::load(path_).user();
  EXPECT_EQ(text.rows, (std::vector<TuningRow>{other, better}));
  EXPECT_EQ(text.problems, std::vector<std::string>{path_ + ":4: 1 fields, legal: 16; ignored"});
  EXPECT_NE(read().find("# a comment\nnonsense\n"), std::string::npos);
}

TEST_F(TuningFiles, SavedCostsReplaceThoseOfTheSameKernelAndNoTiles) {
  CostRow other = full_costs();
  other.kernel = "decode*";
  save_tuning(path_, std::vector<TuningRow>{full_row()}, std::vector<CostRow>{full_costs(), other});
  CostRow better = full_costs();
  better.costs.read_gbs = 99;
  better.date = "later";
  save_tuning(path_, {}, std::vector<CostRow>{better});
  TuningText text = TuningTable::load(path_).user();
  EXPECT_EQ(text.rows, std::vector<TuningRow>{full_row()});
  EXPECT_EQ(text.costs, (std::vector<CostRow>{other, better}));
  save_tuning(path_, std::vector<TuningRow>{full_row()});
  text = TuningTable::load(path_).user();
  EXPECT_EQ(text.rows, std::vector<TuningRow>{full_row()});
  EXPECT_EQ(text.costs, (std::vector<CostRow>{other, better}));
  EXPECT_TRUE(text.problems.empty());
}

TEST_F(TuningFiles, AFileOfAnEarlierVersionIsLeftAsItIs) {
  const std::string old = "clattn-tuning 1\ngpu * * * * * * * - - - - 4 256 - - - -\n";
  write(old);
  const TuningText text = TuningTable::load(path_).user();
  EXPECT_TRUE(text.rows.empty());
  EXPECT_EQ(text.problems,
            std::vector<std::string>{path_ + ":1: not a tuning file of this version, which begin "
                                             "with 'clattn-tuning 2'; ignored"});
  const auto save = [&] { save_tuning(path_, {}, std::vector<CostRow>{full_costs()}); };
  EXPECT_EQ(test::error_text(save, ErrorCode::kIo),
            path_ + ": not a tuning file of this version; left as it is");
  EXPECT_EQ(read(), old);
}

// F9: drivers choose the names of devices.
TEST_F(TuningFiles, F9_NamesThatNoQuotesHoldMakeNoOtherRow) {
  TuningRow row = full_row();
  row.device = "GPU \"X\"\ncost * *";
  const TuningText text = parse_tuning(format_tuning(std::vector<TuningRow>{row}), "t");
  EXPECT_TRUE(text.problems.empty());
  EXPECT_TRUE(text.costs.empty());
  ASSERT_EQ(text.rows.size(), 1U);
  EXPECT_EQ(text.rows[0].device, "GPU  X  cost * *");
}

// F6: a small file is no reason to take much memory.
TEST_F(TuningFiles, F6_ProblemsAndLinesAreBounded) {
  std::string text = format_tuning({});
  for (int i = 0; i < 1000; ++i) text += "x\n";
  EXPECT_EQ(parse_tuning(text, "t").problems.size(), 100U);
  const std::vector<std::string> problems =
      parse_tuning(format_tuning({}) + std::string(100000, 'x') + '\n', "t").problems;
  EXPECT_EQ(problems,
            std::vector<std::string>{"t:2: a line of 100000 bytes, legal: up to 4096; ignored"});
}

TEST_F(TuningFiles, AForeignFileIsNeitherReadNorOverwritten) {
  write("my notes\n");
  const auto save = [&] { save_tuning(path_, std::vector<TuningRow>{full_row()}); };
  EXPECT_EQ(test::error_text(save, ErrorCode::kIo),
            path_ + ": not a tuning file of this version; left as it is");
  EXPECT_EQ(read(), "my notes\n");
  EXPECT_TRUE(TuningTable::load(path_).user().rows.empty());
  EXPECT_EQ(TuningTable::load(path_).user().problems.size(), 1U);
}

TEST_F(TuningFiles, WhatCannotBeReadOrWrittenIsToldOrAbsent) {
  EXPECT_TRUE(TuningTable::load("").user().problems.empty());
  EXPECT_TRUE(TuningTable::load(path_).user().problems.empty());
  fs::create_directories(path_);  // a folder in the file's place
  EXPECT_TRUE(TuningTable::load(path_).user().rows.empty());
  EXPECT_EQ(TuningTable::load(path_).user().problems,
            std::vector<std::string>{path_ + ": a folder; expected a file; ignored"});
  const auto save = [&] { save_tuning(path_, std::vector<TuningRow>{full_row()}); };
  EXPECT_NE(test::error_text(save, ErrorCode::kIo).find(path_), std::string::npos);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}), 1);
}

TEST_F(TuningFiles, RacingWritersLeaveAWholeFile) {
  write(format_tuning({}));
  const auto writer = [&](std::int32_t group) {
    TuningRow row = full_row();
    row.group = group;
    for (int i = 0; i < 100; ++i) save_tuning(path_, std::vector<TuningRow>{row});
  };
  std::thread first(writer, 1), second(writer, 2);
  for (int i = 0; i < 200; ++i) {
    const TuningText text = TuningTable::load(path_).user();
    EXPECT_EQ(text.problems, std::vector<std::string>{});
    EXPECT_LE(text.rows.size(), 2U);
  }
  first.join();
  second.join();
  EXPECT_GE(TuningTable::load(path_).user().rows.size(), 1U);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}), 1);
}

}  // namespace
}  // namespace clattn::detail
