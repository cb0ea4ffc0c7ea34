#include <gtest/gtest.h>

#include <limits>

#include "base/checked.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {
namespace {

constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kValues[] = {0,  1,  2,    3,       15,        16,        17,   23,
                                    24, 25, 4095, 1 << 20, (1 << 30), kMost - 1, kMost};
constexpr std::int32_t kDivisors[] = {1, 2, 3, 16, 24, 48, 64, 1 << 30, kMost};

TEST(Checked, QuotientEqualsDivision) {
  for (const std::int32_t divisor : kDivisors) {
    for (const std::int32_t value : kValues)
      EXPECT_EQ(quotient(value, divisor), value / divisor) << value << " / " << divisor;
  }
}

TEST(Checked, PageCountIsTheLeastThatHoldsEveryToken) {
  for (const std::int32_t size : kDivisors) {
    for (const std::int32_t tokens : kValues) {
      const std::int64_t pages = page_count(tokens, size);
      EXPECT_GE(pages * size, tokens) << tokens << " in pages of " << size;
      EXPECT_LT((pages - 1) * size, tokens) << tokens << " in pages of " << size;
    }
  }
}

}  // namespace
}  // namespace clattn::detail
