#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "opencl/program_cache.hpp"

namespace clattn::detail {
namespace {

namespace fs = std::filesystem;

Bytes bytes_of(std::string_view text) {
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

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
    const Bytes payload = bytes_of(text);
    EXPECT_EQ(decode_cache_entry(kKey, encode_cache_entry(kKey, payload)), payload);
  }
}

TEST(ProgramCacheEntry, EveryTruncationIsRefused) {
  const Bytes file = encode_cache_entry(kKey, bytes_of("payload"));
  for (std::size_t size = 0; size < file.size(); ++size) {
    EXPECT_FALSE(decode_cache_entry(kKey, std::span(file).first(size))) << size;
  }
}

TEST(ProgramCacheEntry, EveryFlippedBitIsRefused) {
  Bytes file = encode_cache_entry(kKey, bytes_of("payload"));
  for (std::size_t bit = 0; bit < 8 * file.size(); ++bit) {
    const std::byte mask{static_cast<unsigned char>(1U << (bit % 8))};
    file[bit / 8] ^= mask;
    EXPECT_FALSE(decode_cache_entry(kKey, file)) << bit;
    file[bit / 8] ^= mask;
  }
  EXPECT_TRUE(decode_cache_entry(kKey, file));
}

TEST(ProgramCacheEntry, ForeignEntriesAreRefused) {
  Bytes file = encode_cache_entry(kKey, bytes_of("payload"));
  EXPECT_FALSE(decode_cache_entry(make_cache_key({"other"}), file));
  file.push_back(std::byte{0});
  EXPECT_FALSE(decode_cache_entry(kKey, file));
  EXPECT_FALSE(decode_cache_entry(kKey, bytes_of(std::string(4096, 'x'))));
}

TEST_F(ProgramCacheFiles, StoresAndLeavesNoTemporaryFile) {
  EXPECT_FALSE(cache_.load(kKey));
  cache_.store(kKey, bytes_of("first"));
  EXPECT_EQ(cache_.load(kKey), bytes_of("first"));
  cache_.store(kKey, bytes_of("second"));
  EXPECT_EQ(cache_.load(kKey), bytes_of("second"));
  EXPECT_FALSE(cache_.load(make_cache_key({"other"})));
  EXPECT_EQ(files(), 1U);
}

TEST_F(ProgramCacheFiles, DamagedFilesAreAbsentAndReplaced) {
  cache_.store(kKey, bytes_of("payload"));
  for (const std::string_view damage : {"", "CLAttn", "something else entirely"}) {
    overwrite(damage);
    EXPECT_FALSE(cache_.load(kKey));
    cache_.store(kKey, bytes_of("payload"));
    EXPECT_EQ(cache_.load(kKey), bytes_of("payload"));
  }
}

TEST_F(ProgramCacheFiles, AnUnusableFolderMeansNoCache) {
  const ProgramCache none{fs::path{}};
  none.store(kKey, bytes_of("x"));
  EXPECT_FALSE(none.load(kKey));
  fs::create_directories(folder_);
  std::ofstream(folder_ / "file") << "a file, not a folder";
  const ProgramCache blocked{folder_ / "file"};
  blocked.store(kKey, bytes_of("x"));
  EXPECT_FALSE(blocked.load(kKey));
  // The entry's own path is taken by a folder: the rename fails and nothing is left behind.
  fs::create_directories(cache_.path_of(kKey) / "inside");
  cache_.store(kKey, bytes_of("x"));
  EXPECT_FALSE(cache_.load(kKey));
  EXPECT_EQ(files(), 2U);
}

// Entries are executed: nobody else may have put them there.
TEST_F(ProgramCacheFiles, F8_TheFolderIsPrivateAndRefusedWhereOthersCanWrite) {
  cache_.store(kKey, bytes_of("payload"));
  EXPECT_EQ(fs::status(folder_).permissions(), fs::perms::owner_all);
  fs::permissions(folder_, fs::perms::others_write, fs::perm_options::add);
  EXPECT_FALSE(cache_.load(kKey));
  fs::remove(cache_.path_of(kKey));
  cache_.store(kKey, bytes_of("payload"));
  EXPECT_EQ(files(), 0U);
  fs::permissions(folder_, fs::perms::others_write, fs::perm_options::remove);
  cache_.store(kKey, bytes_of("payload"));
  EXPECT_EQ(cache_.load(kKey), bytes_of("payload"));
}

TEST_F(ProgramCacheFiles, F8_AnEntryThatIsTooLargeIsNotRead) {
  cache_.store(kKey, bytes_of("payload"));
  fs::resize_file(cache_.path_of(kKey), std::uintmax_t{1} << 42);  // without blocks on the disk
  EXPECT_FALSE(cache_.load(kKey));
}

TEST_F(ProgramCacheFiles, RacingWritersNeverShowATornEntry) {
  const Bytes payloads[] = {Bytes(100000, std::byte{1}), Bytes(50000, std::byte{2})};
  cache_.store(kKey, payloads[0]);
  std::vector<std::thread> writers;
  for (const Bytes& payload : payloads) {
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
