#include <clattn/backend_abi.h>
#include <clattn/clattn.h>
#include <gtest/gtest.h>

namespace {

// A host of plug-ins that calls the C API includes both headers.
TEST(CApi, ItsHeaderAndThatOfPluginsCanBeIncludedTogether) {
  const ClattnStatus of_a_plugin{.code = CLATTN_OK, .cl_code = 0, .message = {}};
  const ClattnResult of_a_call = CLATTN_SUCCESS;
  EXPECT_EQ(of_a_plugin.code, static_cast<int>(of_a_call));
}

}  // namespace
