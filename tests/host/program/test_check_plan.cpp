#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "program/check/plan.hpp"

namespace {

using clattn::cli::CheckExtent;
using clattn::cli::CheckPlan;

TEST(CheckPlan, TakesAllOrRepresentativesAndNamesTheOthersOnce) {
  CheckPlan all(CheckExtent::kAll), quick(CheckExtent::kRepresentatives);
  for (CheckPlan* plan : {&all, &quick}) EXPECT_TRUE(plan->takes("types", "f16", true));
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(all.takes("types", "f32", false));
    EXPECT_FALSE(quick.takes("types", "f32", false));
  }
  EXPECT_FALSE(quick.takes("types", "int8", false));
  EXPECT_TRUE(all.left_out().empty());
  ASSERT_EQ(quick.left_out().size(), 1);
  EXPECT_EQ(quick.left_out().at("types"), (std::vector<std::string>{"f32", "int8"}));
}

TEST(CheckPlan, CompilesAllBesideEachOtherThenRunsInOrder) {
  constexpr int kSteps = 20;
  for (const std::size_t num_threads : std::initializer_list<std::size_t>{0, 1, 3, 50}) {
    CheckPlan plan(CheckExtent::kAll);
    std::atomic<int> compiled = 0;
    std::vector<int> order;
    for (int i = 0; i < kSteps; ++i) {
      plan.add({"step", [&] { ++compiled; },
                [&, i] {
                  EXPECT_EQ(compiled, kSteps);
                  order.push_back(i);
                }});
    }
    plan.add({"nothing to compile", {}, [&] { order.push_back(kSteps); }});
    EXPECT_TRUE(plan.run(num_threads));
    ASSERT_EQ(order.size(), kSteps + 1);
    for (int i = 0; i <= kSteps; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
  }
}

/// What does not compile is for the step itself to report.
TEST(CheckPlan, ACompilationThatThrowsStopsNothingAndFailsNothing) {
  CheckPlan plan(CheckExtent::kAll);
  int ran = 0;
  plan.add({"broken", [] { throw std::runtime_error("no"); }, [&] { ++ran; }});
  plan.add({"whole", [] {}, [&] { ++ran; }});
  EXPECT_TRUE(plan.run(2));
  EXPECT_EQ(ran, 2);
}

TEST(CheckPlan, FailsIfAStepSaysSo) {
  CheckPlan plan(CheckExtent::kAll);
  bool ran = false;
  plan.add({"wrong", {}, [&] { plan.fail(); }});
  plan.add({"next", {}, [&] { ran = true; }});
  EXPECT_FALSE(plan.run(1));
  EXPECT_TRUE(ran);
}

TEST(CheckPlan, WithoutStepsThereIsNothingWrong) {
  EXPECT_TRUE(CheckPlan(CheckExtent::kAll).run(4));
}

}  // namespace
