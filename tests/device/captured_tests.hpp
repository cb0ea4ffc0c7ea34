#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <system_error>
#include <utility>

#include "support/plugin.hpp"

/// Where CLATTN_CAPTURE_DIR is set, every call of every test is captured. After each test `clattn
/// run` executes the last case, which must give what the call gave, and all are deleted: of the
/// whole suite they would fill a disk.
class CapturedTests : public testing::EmptyTestEventListener {
 public:
  explicit CapturedTests(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void OnTestEnd(const testing::TestInfo& test) override {
    namespace fs = std::filesystem;
    std::error_code failure;
    fs::path last;
    for (const auto& entry : fs::directory_iterator(folder_, failure))
      last = std::max(last, entry.path());
    if (!last.empty() && test.result()->Passed()) replay(last);
    for (const auto& entry : fs::directory_iterator(folder_, failure))
      fs::remove_all(entry.path(), failure);
  }

 private:
  static std::string text_of(const std::filesystem::path& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void replay(const std::filesystem::path& directory) {
    const std::string log = (directory / "log").string();
    const std::string command = "env -u CLATTN_CAPTURE_DIR CLATTN_PLUGINS='" +
                                test::plugin_path("none") + "' '" CLATTN_PROGRAM "' run '" +
                                directory.string() + "' > '" + log + "' 2>&1";
    // NOLINTNEXTLINE(concurrency-mt-unsafe,cert-env33-c): between tests; the program under test
    const int status = std::system(command.c_str());
    const std::string said = text_of(log);
    // Nonsense that the test left in device memory: the call told it, or `clattn run` refuses it.
    const bool told = said.find("was left out") != std::string::npos ||
                      said.find("direction.npy: entry 0 is 3") != std::string::npos ||
                      said.find("scale: expected numbers > 0") != std::string::npos ||
                      said.find("scale.npy: entry 0 is ") != std::string::npos;
    EXPECT_TRUE(status == 0 || told) << said << text_of(directory / "case.json");
    const std::regex different("[1-9][0-9]* of [0-9]+ elements differ");
    EXPECT_FALSE(std::regex_search(said, different)) << said << text_of(directory / "case.json");
  }

  std::filesystem::path folder_;
};
