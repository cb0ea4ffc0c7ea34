#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <functional>
#include <string>

namespace {

using clattn::KVCacheKind;
using clattn::KVCacheSpec;

KVCacheSpec spec(KVCacheKind kind) {
  KVCacheSpec s;
  s.kind = kind;
  s.block_size = 16;
  s.num_kv_heads = 8;
  s.head_size = 128;
  s.dtype = clattn::DType::kBF16;
  return s;
}

constexpr std::size_t kPage =
    65536;  // 2 * 16 * 8 * 128 * 2: the worked example of vLLM's documentation

TEST(KVCacheSpec, PageSizeOfTheWorkedExample) {
  EXPECT_EQ(spec(KVCacheKind::kFull).page_size_bytes(), kPage);
  KVCacheSpec f32 = spec(KVCacheKind::kFull);
  f32.dtype = clattn::DType::kF32;
  EXPECT_EQ(f32.page_size_bytes(), 2 * kPage);
}

TEST(KVCacheSpec, MostMemoryOfARequestByKind) {
  EXPECT_EQ(spec(KVCacheKind::kFull).max_memory_usage_bytes(100, 8192), 7 * kPage);
  KVCacheSpec window = spec(KVCacheKind::kSlidingWindow);
  window.sliding_window = 64;
  // cdiv(min(63 + 32, 1000), 16) + 1
  EXPECT_EQ(window.max_memory_usage_bytes(1000, 32), 7 * kPage);
  EXPECT_EQ(window.max_memory_usage_bytes(20, 32), 3 * kPage);
  KVCacheSpec chunked = spec(KVCacheKind::kChunkedLocal);
  chunked.attention_chunk_size = 64;
  EXPECT_EQ(chunked.max_memory_usage_bytes(1000, 32), 6 * kPage);
  EXPECT_EQ(spec(KVCacheKind::kEncoderOnly).max_memory_usage_bytes(1000, 32), 0U);
  EXPECT_EQ(spec(KVCacheKind::kCross).max_memory_usage_bytes(1000, 32, 17), 2 * kPage);
}

void expect_error(const std::function<void()>& call, const std::string& text) {
  try {
    call();
    FAIL() << "no error; expected: " << text;
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), clattn::ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(KVCacheSpec, BadFieldsAreNamed) {
  KVCacheSpec bad = spec(KVCacheKind::kFull);
  bad.block_size = 0;
  expect_error([&] { (void)bad.page_size_bytes(); }, "block_size is 0, legal: >= 1");
  bad = spec(KVCacheKind::kFull);
  bad.num_kv_heads = bad.head_size = bad.block_size = INT32_MAX;
  expect_error([&] { (void)bad.page_size_bytes(); }, "overflows");
  expect_error([&] { (void)spec(KVCacheKind::kSlidingWindow).max_memory_usage_bytes(10, 10); },
               "sliding_window is 0");
  expect_error([&] { (void)spec(KVCacheKind::kFull).max_memory_usage_bytes(-1, 10); },
               "max_model_len -1");
}

}  // namespace
