#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "files/files.hpp"
#include "support/error_text.hpp"
#include "support/scratch_directory.hpp"

namespace clattn::files {
namespace {

namespace fs = std::filesystem;

class Files : public testing::Test {
 protected:
  std::ptrdiff_t entries() const { return scratch_.entries(); }

  const test::ScratchDirectory scratch_;
  const fs::path folder_ = scratch_.path();
};

TEST_F(Files, F7_AFileHasNoNameUntilItIsWholeAndThenReplacesTheOld) {
  const fs::path path = folder_ / "report.json";
  replace_file(path, "old");
  {
    PendingFile abandoned(path);
    abandoned.write("half");
  }
  EXPECT_EQ(read_file(path, 100), "old");
  PendingFile file(path);
  file.write("new");
  EXPECT_EQ(read_file(path, 100), "old");
  file.commit();
  EXPECT_EQ(read_file(path, 100), "new");
  EXPECT_EQ(entries(), 1);
}

// Where the system knows files without names, which Linux does on every disk of its own.
TEST_F(Files, F7_AProcessThatIsEndedLeavesNothing) {
  const pid_t child = ::fork();
  if (child == 0) {
    PendingFile file(folder_ / "report.json");
    file.write("half");
    ::_exit(0);  // as by a signal: no destructor runs
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(entries(), 0);
}

// What stands under a name that somebody could guess is neither used nor followed.
TEST_F(Files, F7_LinksAreNotFollowed) {
  const fs::path path = folder_ / "report.json", victim = folder_ / "victim";
  std::ofstream(victim) << "mine";
  fs::create_symlink(victim, folder_ / "report.json.tmp");
  fs::create_symlink(victim, path);
  replace_file(path, "new");
  EXPECT_EQ(read_file(victim, 100), "mine");
  EXPECT_EQ(read_file(path, 100), "new");
  EXPECT_FALSE(fs::is_symlink(path));
  EXPECT_NE(unpredictable(path), unpredictable(path));
}

TEST_F(Files, FailuresNamePathAndReason) {
  const fs::path path = folder_ / "none" / "report.json";
  EXPECT_EQ(test::error_text([&] { replace_file(path, "x"); }, ErrorCode::kIo),
            path.string() + ": cannot be written: No such file or directory");
  EXPECT_EQ(test::error_text([&] { read_file(path, 1); }, ErrorCode::kIo),
            path.string() + ": no such file");
  std::ofstream(folder_ / "large") << "12345";
  EXPECT_EQ(test::error_text([&] { read_file(folder_ / "large", 4); }, ErrorCode::kIo),
            (folder_ / "large").string() + ": larger than the 4 bytes accepted here");
  EXPECT_EQ(test::error_text([&] { read_file(folder_, 4); }, ErrorCode::kIo),
            folder_.string() + ": a folder; expected a file");
}

TEST_F(Files, F8_APrivateFolderIsItsOwnersAlone) {
  const fs::path folder = folder_ / "below" / "cache";
  EXPECT_TRUE(is_private_folder(folder));
  EXPECT_EQ(fs::status(folder).permissions(), fs::perms::owner_all);
  EXPECT_TRUE(is_private_folder(folder / ""));
  EXPECT_TRUE(is_private_folder(folder_ / "other" / ""));
  EXPECT_EQ(fs::status(folder_ / "other").permissions(), fs::perms::owner_all);
  for (const mode_t open : {0770U, 0707U, 01777U}) {
    ASSERT_EQ(::chmod(folder.c_str(), open), 0);
    EXPECT_FALSE(is_private_folder(folder)) << open;
  }
  ASSERT_EQ(::chmod(folder.c_str(), 0755), 0);  // others may read
  EXPECT_TRUE(is_private_folder(folder));
  std::ofstream(folder_ / "file") << "no folder";
  EXPECT_FALSE(is_private_folder(folder_ / "file"));
}

}  // namespace
}  // namespace clattn::files
