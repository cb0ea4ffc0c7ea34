// Latent decode whose lengths only the device knows (BuilderOptions::device_seq_lens).
#include "device/mla_case.hpp"

namespace test_mla_lengths {

using clattn::SplitPolicy;
using mla_test::Case;
using mla_test::Outcome;
using mla_test::small_case;

using MLALengths = mla_test::MLATest;
INSTANTIATE_TEST_SUITE_P(Families, MLALengths, mla_test::kAllKernels, mla_test::kernels_name);

/// The bits of a step that the host planned by the lengths themselves.
void expect_same_bits(const std::vector<Outcome>& bounded, const std::vector<Outcome>& host,
                      const Case& c) {
  ASSERT_EQ(bounded.size(), host.size());
  for (std::size_t i = 0; i < host.size(); ++i) {
    EXPECT_EQ(bounded[i].out, host[i].out) << describe(c) << " bounds " << c.bounds_above;
    EXPECT_EQ(bounded[i].lse, host[i].lse) << describe(c) << " bounds " << c.bounds_above;
  }
}

TEST_P(MLALengths, HaveTheBitsOfAHostsPlan) {
  struct Cuts {
    std::int32_t num_splits;
    SplitPolicy policy;
    bool fast;
    std::vector<std::int32_t> bounds_above;
  };
  const Cuts all[] = {{0, SplitPolicy::kDeterministic, false, {1, 800}},
                      {1, SplitPolicy::kBalanced, false, {1, 800}},
                      {3, SplitPolicy::kBalanced, false, {1, 800}},
                      {0, SplitPolicy::kBalanced, true, {1, 800}},
                      {0, SplitPolicy::kBalanced, false, {0}}};
  Case c = small_case();
  c.requests = {{1, 0}, {1, 1299}, {3, 0}, {4, 700}, {0, 40}, {1, 511}, {16, 9}};
  for (const Cuts& cuts : all) {
    c.num_splits = cuts.num_splits;
    c.split_policy = cuts.policy;
    c.fast_build = cuts.fast;
    c.bounds_above = -1;
    const std::vector<Outcome> host = check(c);
    for (const std::int32_t above : cuts.bounds_above) {
      c.bounds_above = above;
      expect_same_bits(check(c), host, c);
    }
  }
}

TEST_P(MLALengths, AreRightInABalancedPlanOfHigherBounds) {
  Case c = small_case();
  for (const std::int32_t above : {3, 3000}) {
    c.bounds_above = above;
    check(c);
  }
}

}  // namespace test_mla_lengths
