#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "opencl/device/units.hpp"

namespace {

using clattn::detail::is_right_unit_result;

constexpr std::uint32_t kSeed = 77;
constexpr std::uint32_t kUnitRows = 4, kUnitKeys = 8, kUnitDepth = 2, kUnitDims = 3;

std::uint32_t element(std::uint32_t warp, std::uint32_t matrix, std::uint32_t row,
                      std::uint32_t column, std::uint32_t size) {
  return ((warp * 64 + matrix * 16384 + row * 128 + column + kSeed) * 2654435761U >> 20U) % size;
}

/// What a self-test of kernels_cl/ writes for a unit of these sizes.
std::vector<std::uint32_t> right_result(std::uint32_t warps = 2) {
  std::vector<float> words = {kUnitRows, kUnitKeys, kUnitDepth, kUnitDims,
                              static_cast<float>(warps)};
  for (std::uint32_t warp = 0; warp < warps; ++warp) {
    std::vector<float> scores, outputs, maxima, sums;
    for (std::uint32_t row = 0; row < kUnitRows; ++row) {
      float largest = 0, sum = 0;
      std::vector<float> output(kUnitDims);
      for (std::uint32_t key = 0; key < kUnitKeys; ++key) {
        float score = 0;
        for (std::uint32_t i = 0; i < kUnitDepth; ++i)
          score += static_cast<float>(element(warp, 0, row, i, 2) * element(warp, 1, key, i, 2));
        for (std::uint32_t dim = 0; dim < kUnitDims; ++dim)
          output[dim] += score * static_cast<float>(element(warp, 2, key, dim, 4));
        scores.push_back(score);
        largest = std::max(largest, score);
        sum += score;
      }
      outputs.insert(outputs.end(), output.begin(), output.end());
      maxima.push_back(largest);
      sums.push_back(sum);
    }
    for (const auto& part : {scores, outputs, maxima, sums})
      words.insert(words.end(), part.begin(), part.end());
  }
  std::vector<std::uint32_t> bits(words.size() + 5, 0xdeadbeef);
  for (std::size_t i = 0; i < words.size(); ++i) bits[i] = std::bit_cast<std::uint32_t>(words[i]);
  return bits;
}

TEST(MatrixUnits, EveryElementOfTheirSelfTestCounts) {
  const std::vector<std::uint32_t> right = right_result();
  EXPECT_TRUE(is_right_unit_result(right, kSeed));
  EXPECT_FALSE(is_right_unit_result(right, kSeed + 1));
  for (std::size_t i = 0; i + 5 < right.size(); ++i) {
    std::vector<std::uint32_t> wrong = right;
    wrong[i] = std::bit_cast<std::uint32_t>(std::bit_cast<float>(wrong[i]) + 1);
    EXPECT_FALSE(is_right_unit_result(wrong, kSeed)) << i;
  }
}

TEST(MatrixUnits, WarpsMayShareMatricesButAreTwoAtMost) {
  EXPECT_TRUE(is_right_unit_result(right_result(1), kSeed));
  EXPECT_FALSE(is_right_unit_result(right_result(0), kSeed));
  EXPECT_FALSE(is_right_unit_result(right_result(3), kSeed));
}

TEST(MatrixUnits, AResultWithoutSizesIsWrong) {
  const std::vector<std::uint32_t> untouched(1000, 0xdeadbeef);
  EXPECT_FALSE(is_right_unit_result(untouched, kSeed));
  EXPECT_FALSE(is_right_unit_result({}, kSeed));
  std::vector<std::uint32_t> cut = right_result();
  cut.resize(cut.size() - 6);
  EXPECT_FALSE(is_right_unit_result(cut, kSeed));
}

}  // namespace
