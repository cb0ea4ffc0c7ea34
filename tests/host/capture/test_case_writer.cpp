#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <clattn/error.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "capture/case.hpp"
#include "support/scratch_directory.hpp"

namespace clattn::detail {
namespace {

namespace fs = std::filesystem;

class CaseWriterTest : public testing::Test {
 protected:
  std::ptrdiff_t entries() const { return scratch_.entries(); }

  const test::ScratchDirectory scratch_;
  const fs::path root_ = scratch_.path();
};

const npy::NpyArray kArray{"|u1", {3}, std::vector<std::byte>(3)};

TEST_F(CaseWriterTest, ACaseAppearsWholeOrNotAtAll) {
  {
    CaseWriter writer(root_ / "below", "copy");
    writer.add("x", kArray);
  }
  EXPECT_TRUE(fs::is_empty(root_ / "below"));
  CaseWriter writer(root_, "copy");
  writer.add("x", kArray);
  writer.commit("{}\n");
  for (const auto& entry : fs::directory_iterator(root_)) {
    if (entry.path().filename() == "below") continue;
    EXPECT_EQ(entry.path().filename().string().substr(4), "-copy");
    EXPECT_TRUE(fs::exists(entry.path() / "x.npy"));
    EXPECT_TRUE(fs::exists(entry.path() / "case.json"));
  }
  EXPECT_EQ(entries(), 2);
}

TEST_F(CaseWriterTest, FailuresNamePathAndReasonAndLeaveNothing) {
  try {
    const CaseWriter writer(root_, "copy");
    writer.add("no/such/folder", kArray);
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    const std::string what = error.what();
    EXPECT_NE(what.find(root_.string()), std::string::npos) << what;
    EXPECT_NE(what.find("folder.npy: cannot be written: No such file"), std::string::npos) << what;
  }
  EXPECT_EQ(entries(), 0);
}

TEST_F(CaseWriterTest, ThreadsNeverShareANumber) {
  constexpr int kThreads = 8, kCases = 20;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kCases; ++i) {
        CaseWriter writer(root_, "op");
        writer.add("x", kArray);
        writer.commit("{}\n");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(entries(), kThreads * kCases);
  for (const auto& entry : fs::directory_iterator(root_)) {
    EXPECT_TRUE(fs::exists(entry.path() / "case.json")) << entry.path();
  }
}

TEST_F(CaseWriterTest, F9_NumbersThatNothingCanFollowAreNobodys) {
  fs::create_directories(root_ / "9223372036854775807-op");
  CaseWriter writer(root_, "op");
  writer.commit("{}\n");
  for (const auto& entry : fs::directory_iterator(root_)) {
    EXPECT_NE(entry.path().filename().string()[0], '-');
  }
  EXPECT_EQ(entries(), 2);
}

TEST_F(CaseWriterTest, TakenNumbersAreSkipped) {
  CaseWriter first(root_, "op");
  first.commit("{}\n");
  const std::string name = fs::directory_iterator(root_)->path().filename().string();
  // As if another process had been faster with the next ten.
  for (int i = 1; i <= 10; ++i) {
    std::string number = std::to_string(std::stoi(name) + i);
    number.insert(0, 4 - std::min<std::size_t>(number.size(), 4), '0');
    fs::create_directories(root_ / (number + "-op"));
    std::ofstream(root_ / (number + "-op") / "case.json") << "theirs\n";
  }
  CaseWriter second(root_, "op");
  second.commit("{}\n");
  EXPECT_EQ(entries(), 12);
}

}  // namespace
}  // namespace clattn::detail
