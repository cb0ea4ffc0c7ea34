#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): setenv is POSIX's

#include <algorithm>
#include <clattn/clattn.hpp>
#include <clattn/registry.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "robustness/program.hpp"
#include "robustness/run_case.hpp"

using Names = std::vector<std::string>;

/// Programs started in its lifetime capture into `directory`.
class CapturingInto {
 public:
  explicit CapturingInto(const std::filesystem::path& directory) {
    ::setenv("CLATTN_CAPTURE_DIR", directory.c_str(), 1);
  }
  ~CapturingInto() { ::unsetenv("CLATTN_CAPTURE_DIR"); }
  CapturingInto(const CapturingInto&) = delete;
  CapturingInto& operator=(const CapturingInto&) = delete;
};

inline Names names_in(const std::filesystem::path& directory) {
  Names names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Where and how a case ran: the info without device, times and comparisons.
inline std::string circumstances(const RunCase& run) {
  nlohmann::json info = nlohmann::json::parse(run.bytes("info.json"));
  for (const char* key : {"captured", "device", "driver", "kernels", "times_us"}) info.erase(key);
  return info.dump();
}

/// Runs a case, then the case that the library made of it: the outputs must be the same bytes.
/// Requests stand decodes first, because that is the order in which the library sees them.
class RoundTrip {
 public:
  explicit RoundTrip(const CaseImage& image, const std::string& options = {}) {
    {
      const CapturingInto capture(calls());
      first_.emplace(image, options);
    }
    const Names names = names_in(calls());
    again_.emplace(RunCase::InPlace{}, calls() / names.back());
    EXPECT_EQ(names.back().substr(4), "-attention");
    EXPECT_EQ(circumstances(*first_), circumstances(*again_));
    expect_equal("out");
    expect_equal("lse");
  }
  void expect_equal(const std::string& name) const {
    ASSERT_FALSE(npy_data(first_->bytes(name + ".npy")).empty()) << name;
    EXPECT_EQ(first_->bytes(name + ".npy"), again_->bytes(name + ".npy")) << name;
  }
  std::filesystem::path calls() const { return scratch_.path() / "calls"; }

 private:
  ScratchDirectory scratch_;
  std::optional<RunCase> first_, again_;
};

/// Uses of the library inside this process, which reads its environment once: they capture into
/// one directory.
class CaptureInProcess : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (scratch_ != nullptr) return;  // another suite's, which the library has read
    scratch_ = std::make_unique<ScratchDirectory>();
    const CapturingInto capture(scratch_->path());
    static_cast<void>(clattn::list_attn_backends());  // reads the environment
  }
  /// Makes device memory of elements.
  template <typename T>
  static clattn::Buffer upload(const clattn::Context& context, const clattn::Queue& queue,
                               const std::vector<T>& values) {
    const clattn::Buffer buffer = context.allocate(values.size() * sizeof(T));
    queue.write(buffer, std::as_bytes(std::span(values)));
    return buffer;
  }
  /// Fills device memory with random f32.
  static void fill(const clattn::Queue& queue, const clattn::Buffer& buffer, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(buffer.size_bytes() / sizeof(float));
    for (float& value : values) value = normal(random);
    queue.write(buffer, std::as_bytes(std::span(values)));
  }
  static std::vector<float> floats_in(const clattn::Queue& queue, const clattn::Buffer& buffer) {
    std::vector<float> values(buffer.size_bytes() / sizeof(float));
    queue.read(buffer, std::as_writable_bytes(std::span(values)));
    return values;
  }
  /// The cases of this test.
  std::vector<std::filesystem::path> cases() const {
    std::vector<std::filesystem::path> found;
    const Names names = names_in(scratch_->path());
    for (std::size_t i = before_.size(); i < names.size(); ++i) {
      found.push_back(scratch_->path() / names[i]);
    }
    return found;
  }
  std::filesystem::path newest() const {
    const std::vector<std::filesystem::path> made = cases();
    return made.empty() ? scratch_->path() / "none" : made.back();
  }

 private:
  static inline std::unique_ptr<ScratchDirectory> scratch_;
  Names before_ = names_in(scratch_->path());
};
