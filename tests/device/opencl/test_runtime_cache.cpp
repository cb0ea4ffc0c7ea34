#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <iterator>

#include "device/runtime_fixture.hpp"
#include "opencl/device/self_test.hpp"
#include "opencl/program/program_cache.hpp"

namespace clattn::detail {
namespace test_runtime_cache {

/// Every test starts with a folder that holds the self-test's and one program's entry.
class RuntimeCache : public RuntimeFixture {
 protected:
  void SetUp() override {
    RuntimeFixture::SetUp();
    const auto runtime = make_runtime();
    self_test_file_ = only_new_file({});
    EXPECT_EQ(run_probe(*runtime), expected(100, 3));
    EXPECT_EQ(runtime->build_counts().from_source, 1U);
    program_file_ = only_new_file(self_test_file_);
  }

  std::filesystem::path only_new_file(const std::filesystem::path& known) const {
    std::vector<std::filesystem::path> files = cache_files();
    std::erase(files, known);
    EXPECT_EQ(files.size(), 1U);
    return files.empty() ? std::filesystem::path{} : files.front();
  }

  /// A fresh Runtime computes right, having built this many programs from each source.
  void expect_builds(std::uint64_t from_source, std::uint64_t from_cache) const {
    const auto runtime = make_runtime();
    EXPECT_EQ(run_probe(*runtime), expected(100, 3));
    EXPECT_EQ(runtime->build_counts().from_source, from_source);
    EXPECT_EQ(runtime->build_counts().from_cache, from_cache);
  }

  static std::string read(const std::filesystem::path& path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  static void write(const std::filesystem::path& path, std::string_view text) {
    std::ofstream(path, std::ios::binary) << text;
  }
  /// Replaces the payload of an entry, leaving an entry without fault.
  static void replace_payload(const std::filesystem::path& path, std::string_view payload) {
    const CacheKey key = read(path).substr(12, 16);  // after magic and version
    write(path, encode_cache_entry(key, payload));
  }

  std::filesystem::path self_test_file_;
  std::filesystem::path program_file_;
};
INSTANTIATE_TEST_SUITE_P(All, RuntimeCache, testing::ValuesIn(list_devices()), device_suffix);

TEST_P(RuntimeCache, TheSecondRuntimeBuildsNothing) {
  expect_builds(0, 1);
  EXPECT_EQ(cache_files().size(), 2U);
}

TEST_P(RuntimeCache, DamagedEntriesAreReplaced) {
  const std::string good = read(program_file_);
  std::string flipped = good;
  flipped.back() = static_cast<char>(flipped.back() ^ 1);
  for (const std::string& damage : {std::string{}, good.substr(0, good.size() / 2), flipped,
                                    std::string(good.size(), 'x'), good + "x"}) {
    write(program_file_, damage);
    expect_builds(1, 0);
    expect_builds(0, 1);
  }
}

TEST_P(RuntimeCache, ABinaryThatTheDriverRefusesIsReplaced) {
  const std::string garbage(1000, '\x5a');
  replace_payload(program_file_, garbage);
  expect_builds(1, 0);
  expect_builds(0, 1);
}

TEST_P(RuntimeCache, ChangedSourceIsAnotherEntry) {
  write_kernel("probe.cl", fmt::format("{}// changed\n", kProbe));
  expect_builds(1, 0);
  EXPECT_EQ(cache_files().size(), 3U);
}

TEST_P(RuntimeCache, SelfTestsAreRemembered) {
  const DeviceCapabilities tested = make_runtime()->capabilities();
  const SelfTestResult planted{.static_local_mem_bytes = 12345, .inline_ptx = 0, .wave_size = 77};
  replace_payload(self_test_file_, {reinterpret_cast<const char*>(&planted), sizeof(planted)});
  EXPECT_EQ(make_runtime()->capabilities().static_local_mem_bytes, 12345U);
  EXPECT_EQ(make_runtime()->capabilities().wave_size, 77);
  write(self_test_file_, "damaged");
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(make_runtime()->capabilities().static_local_mem_bytes, tested.static_local_mem_bytes);
    EXPECT_EQ(make_runtime()->capabilities().wave_size, tested.wave_size);
  }
}

TEST_P(RuntimeCache, WithoutAUsableFolderEverythingWorks) {
  options_.cache_dir = program_file_.string();  // a file, not a folder
  expect_builds(1, 0);
  options_.cache_dir.clear();
  expect_builds(1, 0);
}

TEST_P(RuntimeCache, ProgramsAreLeftToADriverThatCachesBetter) {
  std::filesystem::remove(program_file_);
  options_.keep_all_binaries = false;
  const auto runtime = make_runtime();
  EXPECT_EQ(run_probe(*runtime), expected(100, 3));
  const bool pocl = runtime->capabilities().platform_name == "Portable Computing Language";
  EXPECT_EQ(std::filesystem::exists(program_file_), !pocl);
}

}  // namespace test_runtime_cache
}  // namespace clattn::detail
