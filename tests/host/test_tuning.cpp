#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <clattn/tuning.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <thread>
#include <utility>

#include "kernels/tuned.hpp"
#include "kernels/variants.hpp"
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
          .items_per_compute_unit = 8,
          .min_split_keys = 512,
          .time_us = 123.5,
          .error = 0.0001,
          .version = "0.1.0",
          .date = "2026-11-21"};
}

DeviceCapabilities cpu(int width) {
  DeviceCapabilities device;
  device.name = fmt::format("cpu-{}", width);
  device.driver_version = "5.0";
  device.kind = DeviceKind::kCpu;
  device.float_vector_width = width;
  device.max_work_group_size = 4096;
  return device;
}

DeviceCapabilities gpu(const char* name, bool ptx = false, int arch = 0) {
  DeviceCapabilities device;
  device.name = name;
  device.kind = DeviceKind::kGpu;
  device.max_work_group_size = 1024;
  device.inline_ptx = ptx;
  device.ptx_arch = arch;
  return device;
}

/// A device of each class, and those that shipped rows name.
std::vector<DeviceCapabilities> devices() {
  std::vector<DeviceCapabilities> all = {
      cpu(16),
      cpu(8),
      cpu(4),
      cpu(1),
      gpu("some GPU"),
      gpu("NVIDIA T4", true, 75),
      gpu("NVIDIA A100", true, 80),
      gpu("NVIDIA L4", true, 89),
      gpu("NVIDIA H100", true, 90),
      gpu("NVIDIA B200", true, 100),
      gpu("an NVIDIA GPU whose driver is silent", true),
  };
  all.emplace_back().name = "an accelerator";
  std::set<std::pair<std::string, std::string>> named;
  for (const TuningRow& row : shipped_tuning().rows) {
    if (!named.emplace(row.device, row.driver).second) continue;
    all.push_back(gpu(row.device.substr(0, row.device.find('*')).c_str()));
    all.back().driver_version = row.driver;
  }
  return all;
}

TuningQuery query_for(const DeviceCapabilities& device, std::string_view role) {
  return {.device = device.name,
          .driver = device.driver_version,
          .classes = device_classes(device),
          .role = role,
          .head_size = 128,
          .group = 4,
          .dtype = DType::kF16,
          .cache_dtype = DType::kF16,
          .pages = page_class(16)};
}

bool any(const TuningRow& /*row*/) {
  return true;
}

/// Calls f with every query of the test matrix: devices, roles, sizes, types, pages.
template <typename Function>
void each_query(Function&& f) {
  constexpr std::pair<DType, DType> kTypes[] = {
      {DType::kF32, DType::kF32},     {DType::kF16, DType::kF16},      {DType::kBF16, DType::kBF16},
      {DType::kF16, DType::kFp8E4M3}, {DType::kBF16, DType::kFp8E5M2}, {DType::kF16, DType::kInt8}};
  std::set<std::int32_t> head_sizes = {8, 64, 96, 128, 256, 512};
  std::set<std::int32_t> groups = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64, 128};
  for (const TuningRow& row : shipped_tuning().rows) {
    if (row.head_size > 0) head_sizes.insert(row.head_size);
    if (row.group > 0) groups.insert(row.group);
  }
  for (const DeviceCapabilities& device : devices()) {
    for (const Role role : {Role::kDecode, Role::kPrefill, Role::kMerge, Role::kCacheWrite,
                            Role::kCacheWritePacked, Role::kMLADecode, Role::kPackedDecode}) {
      TuningQuery query = query_for(device, to_string(role));
      for (const std::int32_t head_size : head_sizes) {
        for (const std::int32_t group : groups) {
          for (const auto& [dtype, cache_dtype] : kTypes) {
            for (const std::int32_t block_size : {0, 1, 16, 256}) {
              query.head_size = head_size;
              query.group = group;
              query.dtype = dtype;
              query.cache_dtype = cache_dtype;
              query.pages = page_class(block_size);
              f(query);
            }
          }
        }
      }
    }
  }
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
  const std::vector<TuningRow> rows = {full_row(), quoted, bare};
  const TuningText read = parse_tuning(format_tuning(rows), "file");
  EXPECT_TRUE(read.problems.empty());
  EXPECT_EQ(read.rows, rows);
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
    return "clattn-tuning 1\n\n# comment\n" + line.replace(line.find(from), from.size(), to);
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", "f:1: not a tuning file of this version, which begin with 'clattn-tuning 1'; ignored"},
      {"clattn-tuning 2\n",
       "f:1: not a tuning file of this version, which begin with 'clattn-tuning 1'; ignored"},
      {"clattn-tuning 1\ngpu * decode\n", "f:2: 3 fields, legal: 18; ignored"},
      {with(" 128 ", " 0 "), "f:4: head_size is '0', legal: a number from 1 to 1048576; ignored"},
      {with(" 128 ", " 12x "),
       "f:4: head_size is '12x', legal: a number from 1 to 1048576; ignored"},
      {with(" 8 ", " 4096 "),
       "f:4: items_per_compute_unit is '4096', legal: a number from 1 to 1024; ignored"},
      {with(" 64 ", " 99999999999 "),
       "f:4: work_group_size is '99999999999', legal: a number from 1 to 1048576; ignored"},
      {with(" 123.5 ", " nan "), "f:4: time_us is 'nan', legal: a positive number; ignored"},
      {with(" medium ", " huge "),
       "f:4: pages is 'huge', legal: *, none, small, medium, large; ignored"},
      {with(" f16 ", " f61 "),
       "f:4: dtype: expected f32, f16, bf16, fp8_e4m3, fp8_e5m2 or int8, got 'f61'; ignored"},
      {"clattn-tuning 1\n\"gpu * decode\n", "f:2: a quote without its end; ignored"},
  };
  for (const auto& [text, problem] : cases) {
    const TuningText read = parse_tuning(text, "f");
    EXPECT_TRUE(read.rows.empty()) << text;
    ASSERT_EQ(read.problems.size(), 1U) << text;
    if (problem.find("dtype") != std::string::npos) {
      EXPECT_TRUE(read.problems[0].starts_with("f:4: ")) << read.problems[0];
      EXPECT_NE(read.problems[0].find("f61"), std::string::npos) << read.problems[0];
    } else {
      EXPECT_EQ(read.problems[0], problem);
    }
  }
}

TEST(TuningTable, UsersRowsBeatShippedOnes) {
  TuningRow row;
  row.device = "gpu";
  row.items_per_compute_unit = 9;
  row.min_split_keys = 77;
  const TuningTable users(TuningText{.rows = {row}, .problems = {}});
  const TuningTable none(TuningText{});
  const TuningQuery query = query_for(gpu("some GPU"), "decode");
  EXPECT_EQ(users.find(query, any)->min_split_keys, 77);
  EXPECT_EQ(none.find(query, any)->min_split_keys, 256);
  EXPECT_EQ(users.find(query_for(cpu(8), "decode"), any)->min_split_keys, 32);
}

TEST(TuningTable, TheClosestRowWins) {
  const DeviceCapabilities device = gpu("NVIDIA H200", true, 90);
  const TuningQuery query = query_for(device, "decode");
  std::vector<TuningRow> rows;  // each closer than the one before
  for (const char* name : {"gpu", "gpu:ptx", "gpu:sm_90", "NVIDIA*", "NVIDIA H200"}) {
    rows.emplace_back().device = name;
    rows.emplace_back(rows.back()).role = "decode";
    rows.emplace_back(rows.back()).head_size = 128;
  }
  rows.emplace_back(rows.back()).group = 4;
  rows.emplace_back(rows.back()).dtype = DType::kF16;
  rows.emplace_back(rows.back()).cache_dtype = DType::kF16;
  rows.emplace_back(rows.back()).pages = "medium";
  rows.emplace_back(rows.back()).date = "later";
  while (!rows.empty()) {
    const TuningRow best = rows.back();
    EXPECT_EQ(*TuningTable(TuningText{.rows = rows, .problems = {}}).find(query, any), best);
    std::vector<TuningRow> turned(rows.rbegin(), rows.rend());
    if (best.date.empty()) {
      EXPECT_EQ(*TuningTable(TuningText{.rows = turned, .problems = {}}).find(query, any), best);
    }
    rows.pop_back();
  }
}

TEST(TuningTable, RowsForOthersAreNotFound) {
  const TuningQuery query = query_for(gpu("NVIDIA H200", true, 90), "decode");
  TuningRow fits;
  fits.device = "NVIDIA H200";
  EXPECT_TRUE(covers(fits, query));
  const auto refused = [&](auto&& change) {
    TuningRow row = fits;
    change(row);
    return !covers(row, query);
  };
  EXPECT_TRUE(refused([](TuningRow& row) { row.device = "NVIDIA H2000"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.device = "NVIDIA"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.device = "*"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.device = "cpu"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.driver = "another"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.role = "prefill"; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.head_size = 64; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.group = 8; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.dtype = DType::kF32; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.cache_dtype = DType::kInt8; }));
  EXPECT_TRUE(refused([](TuningRow& row) { row.pages = "large"; }));
}

TEST(ShippedTuning, IsReadWithoutProblemsAndCanBeFollowed) {
  EXPECT_EQ(shipped_tuning().problems, std::vector<std::string>{});
  EXPECT_FALSE(shipped_tuning().rows.empty());
  for (const TuningRow& row : shipped_tuning().rows) {
    if (row.variant.empty()) continue;
    bool found = false;
    for (const Variant& variant : variants()) {
      found |= to_string(variant.role) == row.role && variant_of(row, variant.role).has_value();
    }
    EXPECT_TRUE(found) << format_tuning_row(row);
  }
}

TEST(ShippedTuning, EveryConfigurationFindsAPlanAndNoRowIsUnreachable) {
  const TuningTable table(TuningText{});
  std::vector<bool> reached(shipped_tuning().rows.size());
  const auto reach = [&](const TuningRow* row) {
    if (row != nullptr)
      reached[static_cast<std::size_t>(row - shipped_tuning().rows.data())] = true;
  };
  std::size_t without_plan = 0;
  each_query([&](const TuningQuery& query) {
    const TuningRow* plan = table.find(query, [](const TuningRow& row) {
      return row.items_per_compute_unit > 0 && row.min_split_keys > 0;
    });
    without_plan += plan == nullptr ? 1 : 0;
    reach(plan);
    reach(table.find(query, [](const TuningRow& row) { return !row.variant.empty(); }));
  });
  EXPECT_EQ(without_plan, 0U);
  for (std::size_t i = 0; i < reached.size(); ++i) {
    EXPECT_TRUE(reached[i]) << format_tuning_row(shipped_tuning().rows[i]);
  }
}

TEST(TunedVariants, ConstantsOutsideTheKernelsRangeAreRefused) {
  TuningRow row;
  row.role = "decode";
  row.variant = "decode_gpu__r4_local";
  EXPECT_EQ(variant_of(row, Role::kDecode)->block_kv, 4);
  row.block_kv = 8;
  row.work_group_size = 64;
  EXPECT_EQ(variant_of(row, Role::kDecode)->block_kv, 8);
  EXPECT_EQ(variant_of(row, Role::kDecode)->work_group_size, 64);
  EXPECT_EQ(variant_of(row, Role::kDecode)->block_rows, 4);
  EXPECT_FALSE(variant_of(row, Role::kPrefill));
  for (const std::int32_t wrong : {3, 5, 16, 48, 512, 1 << 20}) {
    TuningRow bad = row;
    bad.block_rows = wrong;
    EXPECT_FALSE(variant_of(bad, Role::kDecode)) << wrong;
    bad = row;
    bad.work_group_size = wrong;
    EXPECT_FALSE(variant_of(bad, Role::kDecode)) << wrong;
  }
  row.variant = "gone";
  EXPECT_FALSE(variant_of(row, Role::kDecode));
}

TEST(TunedVariants, RowsThemselvesAreLegal) {
  for (const Variant& variant : variants()) EXPECT_TRUE(is_legal_tile(variant)) << variant.name;
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
  EXPECT_EQ(text.problems, std::vector<std::string>{path_ + ":4: 1 fields, legal: 18; ignored"});
  EXPECT_NE(read().find("# a comment\nnonsense\n"), std::string::npos);
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
            std::vector<std::string>{path_ + ": not a readable file of at most 16 MiB; ignored"});
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
