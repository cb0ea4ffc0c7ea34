#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "opencl/program/program_cache.hpp"

namespace clattn::detail {
namespace {

namespace fs = std::filesystem;

const CacheKey kKey = make_cache_key({"source", "options", "device"});

class ProgramCacheFiles : public testing::Test {
 protected:
  void TearDown() override { fs::remove_all(folder_.parent_path()); }

  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}));
  }
  void overwrite(std::string_view text) const {
    std::ofstream(cache_.path_of(kKey), std::ios::binary) << text;
  }

  fs::path folder_ =
      fs::path(testing::TempDir()) / fmt::format("clattn_cache_{}", getpid()) / "nested";
  ProgramCache cache_{folder_};
};

TEST(ProgramCacheKey, EveryPartAndEveryBorderCounts) {
  EXPECT_EQ(kKey, make_cache_key({"source", "options", "device"}));
  EXPECT_NE(kKey, make_cache_key({"source", "options", "devicf"}));
  EXPECT_NE(kKey, make_cache_key({"options", "source", "device"}));
  EXPECT_NE(make_cache_key({"ab", "c"}), make_cache_key({"a", "bc"}));
  EXPECT_NE(make_cache_key({"a"}), make_cache_key({"a", ""}));
}

TEST(ProgramCacheEntry, RoundTrip) {
  for (const std::string_view text : {"", "x", "a longer payload"}) {
    EXPECT_EQ(decode_cache_entry(kKey, encode_cache_entry(kKey, text)), text);
  }
}

TEST(ProgramCacheEntry, EveryTruncationIsRefused) {
  const std::string file = encode_cache_entry(kKey, "payload");
  for (std::size_t size = 0; size < file.size(); ++size) {
    EXPECT_FALSE(decode_cache_entry(kKey, std::string_view(file).substr(0, size))) << size;
  }
}

TEST(ProgramCacheEntry, EveryFlippedBitIsRefused) {
  const std::string file = encode_cache_entry(kKey, "payload");
  for (std::size_t bit = 0; bit < 8 * file.size(); ++bit) {
    std::string flipped = file;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_FALSE(decode_cache_entry(kKey, flipped)) << bit;
  }
  EXPECT_TRUE(decode_cache_entry(kKey, file));
}

TEST(ProgramCacheEntry, ForeignEntriesAreRefused) {
  std::string file = encode_cache_entry(kKey, "payload");
  EXPECT_FALSE(decode_cache_entry(make_cache_key({"other"}), file));
  file.push_back('\0');
  EXPECT_FALSE(decode_cache_entry(kKey, file));
  EXPECT_FALSE(decode_cache_entry(kKey, std::string(4096, 'x')));
}

TEST_F(ProgramCacheFiles, StoresAndLeavesNoTemporaryFile) {
  EXPECT_FALSE(cache_.load(kKey));
  cache_.store(kKey, "first");
  EXPECT_EQ(cache_.load(kKey), "first");
  cache_.store(kKey, "second");
  EXPECT_EQ(cache_.load(kKey), "second");
  EXPECT_FALSE(cache_.load(make_cache_key({"other"})));
  EXPECT_EQ(files(), 1U);
}

TEST_F(ProgramCacheFiles, DamagedFilesAreAbsentAndReplaced) {
  cache_.store(kKey, "payload");
  for (const std::string_view damage : {"", "CLAttn", "something else entirely"}) {
    overwrite(damage);
    EXPECT_FALSE(cache_.load(kKey));
    cache_.store(kKey, "payload");
    EXPECT_EQ(cache_.load(kKey), "payload");
  }
}

TEST_F(ProgramCacheFiles, AnUnusableFolderMeansNoCache) {
  const ProgramCache none{fs::path{}};
  none.store(kKey, "x");
  EXPECT_FALSE(none.load(kKey));
  fs::create_directories(folder_);
  std::ofstream(folder_ / "file") << "a file, not a folder";
  const ProgramCache blocked{folder_ / "file"};
  blocked.store(kKey, "x");
  EXPECT_FALSE(blocked.load(kKey));
  // The entry's own path is taken by a folder: the rename fails and nothing is left behind.
  fs::create_directories(cache_.path_of(kKey) / "inside");
  cache_.store(kKey, "x");
  EXPECT_FALSE(cache_.load(kKey));
  EXPECT_EQ(files(), 2U);
}

// Entries are executed: nobody else may have put them there.
TEST_F(ProgramCacheFiles, F8_TheFolderIsPrivateAndRefusedWhereOthersCanWrite) {
  cache_.store(kKey, "payload");
  EXPECT_EQ(fs::status(folder_).permissions(), fs::perms::owner_all);
  fs::permissions(folder_, fs::perms::others_write, fs::perm_options::add);
  EXPECT_FALSE(cache_.load(kKey));
  fs::remove(cache_.path_of(kKey));
  cache_.store(kKey, "payload");
  EXPECT_EQ(files(), 0U);
  fs::permissions(folder_, fs::perms::others_write, fs::perm_options::remove);
  cache_.store(kKey, "payload");
  EXPECT_EQ(cache_.load(kKey), "payload");
}

TEST_F(ProgramCacheFiles, F8_AnEntryThatIsTooLargeIsNotRead) {
  cache_.store(kKey, "payload");
  fs::resize_file(cache_.path_of(kKey), std::uintmax_t{1} << 42);  // without blocks on the disk
  EXPECT_FALSE(cache_.load(kKey));
}

TEST_F(ProgramCacheFiles, RacingWritersNeverShowATornEntry) {
  const std::string payloads[] = {std::string(100000, '\1'), std::string(50000, '\2')};
  cache_.store(kKey, payloads[0]);
  std::vector<std::thread> writers;
  for (const std::string& payload : payloads) {
    writers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) cache_.store(kKey, payload);
    });
  }
  for (int i = 0; i < 200; ++i) {
    const auto seen = cache_.load(kKey);
    EXPECT_TRUE(seen == payloads[0] || seen == payloads[1]);
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(files(), 1U);
}

}  // namespace
}  // namespace clattn::detail
