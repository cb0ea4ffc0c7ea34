#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <vector>

namespace test {

/// Unoptimised code, as under sanitizers, takes many times as long for a run: it makes fewer.
#ifdef NDEBUG
inline constexpr int kRunsDivisor = 1;
#else
inline constexpr int kRunsDivisor = 10;
#endif

/// Runs `property` on random inputs of a fixed seed. A failure prints the smallest input that
/// RapidCheck finds.
template <typename Property>
void expect_property(const Property& property, int runs = 10000) {
  rc::detail::TestParams params;
  params.seed = 20240611;
  params.maxSuccess = runs / kRunsDivisor;
  const rc::detail::TestResult result =
      rc::detail::checkTestable(property, rc::detail::TestMetadata(), params);
  if (result.is<rc::detail::SuccessResult>()) return;
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  ADD_FAILURE() << text.str();
}

/// A random number of low … high.
inline std::int32_t between(std::int32_t low, std::int32_t high) {
  return *rc::gen::inRange(low, high + 1);
}

template <typename T>
T one_of(std::initializer_list<T> values) {
  return *rc::gen::elementOf(std::vector<T>(values));
}

}  // namespace test
