#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <clattn/clattn.hpp>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// A device of the machine, a folder of kernels and an empty cache folder of the test's own.
class RuntimeFixture : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    std::filesystem::remove_all(folder_);
    write_kernel("probe.cl", kProbe);
    std::filesystem::create_directories(options_.cache_dir);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write_kernel(const std::string& path, std::string_view text) const {
    const auto full = std::filesystem::path(options_.kernel_dir) / path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full, std::ios::binary) << text;
  }

  std::unique_ptr<Runtime> make_runtime() const { return Runtime::create(GetParam(), options_); }

  /// Runs `entry` of probe.cl on 4 groups of 8 into a buffer of stale words.
  static std::vector<cl_int> run_probe(Runtime& runtime, const char* entry = "clattn_probe_add",
                                       const std::string& options = "-DCLA_STEP=3") {
    const auto pool = runtime.kernel({"probe.cl", entry, options});
    const Queue queue = runtime.create_queue(QueueProfiling::kOff);
    const Buffer out = runtime.allocate(kItems * sizeof(cl_int));
    queue.fill(out, 0xdeadbeefU, 0, out.size_bytes());
    pool->acquire().arg(out.handle()).arg(cl_int{100}).enqueue(queue, 4, 8);
    std::vector<cl_int> result(kItems);
    queue.read(out, std::as_writable_bytes(std::span(result)));
    return result;
  }

  static std::vector<cl_int> expected(cl_int start, cl_int step) {
    std::vector<cl_int> result(kItems);
    for (std::size_t i = 0; i < kItems; ++i) result[i] = start + static_cast<cl_int>(i) * step;
    return result;
  }

  std::vector<std::filesystem::path> cache_files() const {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(options_.cache_dir)) {
      files.push_back(entry.path());
    }
    return files;
  }

  static constexpr std::size_t kItems = 32;
  static constexpr std::string_view kProbe =
      "__kernel void clattn_probe_add(__global int* out, int start) {\n"
      "  out[get_global_id(0)] = start + CLA_STEP * (int)get_global_id(0);\n"
      "}\n"
      "__kernel void clattn_probe_subtract(__global int* out, int start) {\n"
      "  out[get_global_id(0)] = start - CLA_STEP * (int)get_global_id(0);\n"
      "}\n";

  std::filesystem::path folder_ =
      std::filesystem::path(testing::TempDir()) / fmt::format("clattn_runtime_{}", getpid());
  RuntimeOptions options_{.kernel_dir = (folder_ / "kernels").string(),
                          .cache_dir = (folder_ / "cache").string(),
                          .tuning_file = {},
                          .keep_all_binaries = true};
};

/// Names a test instance after its device: "p0d1".
inline std::string device_suffix(const testing::TestParamInfo<Device>& info) {
  return fmt::format("p{}d{}", info.param.platform_index, info.param.device_index);
}

}  // namespace clattn::detail
