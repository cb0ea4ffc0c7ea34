#include <clattn/backend_abi.h>
#include <clattn/clattn.h>
#include <gtest/gtest.h>

#include "c_api/handles.hpp"

namespace {

// A host of plug-ins that calls the C API includes both headers.
TEST(CApi, ItsHeaderAndThatOfPluginsCanBeIncludedTogether) {
  const ClattnStatus of_a_plugin{.code = CLATTN_OK, .cl_code = 0, .message = {}};
  const ClattnResult of_a_call = CLATTN_SUCCESS;
  EXPECT_EQ(of_a_plugin.code, static_cast<int>(of_a_call));
}

TEST(CApi, ACacheWithoutScalesHasNonePerHead) {
  ClattnCache cache;
  cache.held.dtype = clattn::DType::kInt8;
  ClattnBuffer scales;
  EXPECT_EQ(clattn_cache_set_scales(&cache, &scales, 1), CLATTN_SUCCESS);
  EXPECT_TRUE(cache.held.scales_per_head);
  EXPECT_EQ(clattn_cache_set_scales(&cache, nullptr, 1), CLATTN_SUCCESS);
  EXPECT_FALSE(cache.held.scales_per_head);
}

TEST(CApi, TheLastCallSaysWhetherScalesHoldOneOfQueries) {
  ClattnCache cache;
  cache.held.dtype = clattn::DType::kInt8;
  ClattnBuffer scales;
  EXPECT_EQ(clattn_cache_set_scales_with_query(&cache, &scales, 1), CLATTN_SUCCESS);
  EXPECT_TRUE(cache.held.scales_query && cache.held.scales_per_head);
  EXPECT_EQ(clattn_cache_set_scales(&cache, &scales, 1), CLATTN_SUCCESS);
  EXPECT_FALSE(cache.held.scales_query);
  EXPECT_EQ(clattn_cache_set_scales_with_query(&cache, &scales, 0), CLATTN_SUCCESS);
  EXPECT_TRUE(cache.held.scales_query && !cache.held.scales_per_head);
  EXPECT_EQ(clattn_cache_set_scales_with_query(&cache, nullptr, 1), CLATTN_SUCCESS);
  EXPECT_FALSE(cache.held.scales_query || cache.held.scales_per_head);
}

}  // namespace
