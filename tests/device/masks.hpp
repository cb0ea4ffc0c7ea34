#pragma once

#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"

namespace attention_test {

/// The first and the last key that a row sees, all between them included; {-1, -1}: none.
using Ends = std::pair<std::int32_t, std::int32_t>;
using Rows = std::vector<Ends>;
/// All keys that a row sees.
using Keys = std::vector<std::int32_t>;

/// Runs cases with one kernel family, on the devices that have it.
class Masks : public testing::TestWithParam<clattn::KernelFamily> {
 protected:
  static std::vector<std::shared_ptr<clattn::Context>> devices();
  static CaseResult run(const std::shared_ptr<clattn::Context>& context, CaseSpec spec);
  static void expect_right(const CaseSpec& spec);

  /// One request's rows, with its keys in pages of 1 and of 16 tokens and without pages. Keys of
  /// zeros and values that are unit vectors show them: an output's element j is the weight of key
  /// j.
  ///@{
  static void expect_rows(const CaseSpec& spec, const Request& request, const Rows& wanted);
  static void expect_keys(CaseSpec spec, const Request& request, const std::vector<Keys>& wanted);
  ///@}
};

}  // namespace attention_test

/// Tests of such a class, once for each kernel family.
#define FOR_ALL_FAMILIES(suite)                                                         \
  INSTANTIATE_TEST_SUITE_P(                                                             \
      Families, suite,                                                                  \
      testing::Values(clattn::KernelFamily::kCpu, clattn::KernelFamily::kGpu,           \
                      clattn::KernelFamily::kGpuPtx, clattn::KernelFamily::kGpuMatrix), \
      attention_test::family_name<testing::TestParamInfo<clattn::KernelFamily>>)
