#include <gtest/gtest.h>

#include <clattn/kv_cache.hpp>
#include <thread>
#include <vector>

#include "host/metadata_batch.hpp"
#include "kv_cache/spec.hpp"

namespace clattn {
namespace {

using test::error_text;

// A1.4, A9.6: the override wins whenever it is set, before or after the first question.
TEST(KVCacheLayoutChoice, A1_4_OverrideThenEnvironmentThenNobody) {
  using detail::choose_kv_cache_layout;
  EXPECT_EQ(choose_kv_cache_layout({}, ""), std::nullopt);
  EXPECT_EQ(choose_kv_cache_layout({}, "NHD"), KVCacheLayout::kNHD);
  EXPECT_EQ(choose_kv_cache_layout({}, "HND"), KVCacheLayout::kHND);
  EXPECT_EQ(choose_kv_cache_layout(KVCacheLayout::kNHD, "HND"), KVCacheLayout::kNHD);
  EXPECT_EQ(error_text([] { choose_kv_cache_layout({}, "hnd"); }),
            "CLATTN_KV_CACHE_LAYOUT: layout: 'hnd' is not one of NHD, HND");
  EXPECT_EQ(choose_kv_cache_layout({}, "LBHNC"), KVCacheLayout::kHND);
}

TEST(KVCacheLayoutChoice, A9_6_AnOverrideAfterTheFirstQuestionCounts) {
  const std::optional<KVCacheLayout> before = get_kv_cache_layout();
  set_kv_cache_layout(KVCacheLayout::kHND);
  EXPECT_EQ(get_kv_cache_layout(), KVCacheLayout::kHND);
  set_kv_cache_layout(KVCacheLayout::kNHD);
  EXPECT_EQ(get_kv_cache_layout(), KVCacheLayout::kNHD);
  EXPECT_EQ(error_text([] { set_kv_cache_layout(static_cast<KVCacheLayout>(9)); }),
            "layout: 9 is no legal value");
  EXPECT_EQ(get_kv_cache_layout(), KVCacheLayout::kNHD);
  set_kv_cache_layout(std::nullopt);
  EXPECT_EQ(get_kv_cache_layout(), before);
}

TEST(KVCacheLayoutChoice, ThreadsMaySetAndAsk) {
  std::vector<std::thread> threads;
  for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
    threads.emplace_back([layout] {
      for (int i = 0; i < 1000; ++i) set_kv_cache_layout(layout);
    });
    threads.emplace_back([] {
      for (int i = 0; i < 1000; ++i) (void)get_kv_cache_layout();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(get_kv_cache_layout().has_value());
  set_kv_cache_layout(std::nullopt);
}

}  // namespace
}  // namespace clattn
