#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <vector>

#include "device/attention_case.hpp"
#include "device/counting_buffers.hpp"
#include "support/error_text.hpp"

namespace test_kv_cache_allocation {

using attention_test::all_contexts;
using test::error_text;

clattn::KVCacheConfig one_layer(std::size_t size_bytes) {
  clattn::KVCacheConfig config;
  config.tensors = {{size_bytes, {"layer.0"}}};
  config.groups = {{{"layer.0"}, {}}};
  return config;
}

TEST(KVCache, AllocationIsZeroedAndShared) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    clattn::KVCacheConfig config;
    config.tensors = {{4096, {"a", "b"}}, {8192, {"c"}}};
    config.groups = {{{"a", "c"}, {}}, {{"b"}, {}}};
    std::vector<std::byte> bytes(8192);
    const test::DirtyBuffers dirty;
    queue.read(context->allocate(bytes.size()), bytes);
    ASSERT_EQ(bytes, std::vector(bytes.size(), std::byte{0xFF}));
    auto caches = clattn::allocate_kv_cache(*context, queue, config);
    ASSERT_EQ(caches.size(), 3U);
    EXPECT_EQ(caches["a"].handle(), caches["b"].handle());
    EXPECT_NE(caches["a"].handle(), caches["c"].handle());
    queue.read(caches["c"], bytes);
    EXPECT_EQ(bytes, std::vector(bytes.size(), std::byte{0}));
    bytes.assign(4096, std::byte{1});
    queue.read(caches["a"], bytes);
    EXPECT_EQ(bytes, std::vector(bytes.size(), std::byte{0}));
  }
}

TEST(KVCache, WrongConfigurationsAreRefusedWithNames) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const auto refuse = [&](const clattn::KVCacheConfig& config) {
    return error_text([&] { (void)clattn::allocate_kv_cache(context, queue, config); });
  };
  clattn::KVCacheConfig config = one_layer(4096);
  config.tensors.clear();
  EXPECT_EQ(refuse(config),
            "KVCacheConfig: some layers are not correctly initialized: 'layer.0' has no tensor");
  config = one_layer(4096);
  config.tensors.push_back({4096, {"layer.0"}});
  EXPECT_EQ(refuse(config), "KVCacheConfig: layer 'layer.0' is given two tensors");
  config = one_layer(4096);
  config.tensors.push_back({4096, {"ghost"}});
  EXPECT_EQ(refuse(config), "KVCacheConfig: tensor for layer 'ghost', which is in no group");
  EXPECT_EQ(refuse(one_layer(0)), "KVCacheConfig: the tensor of layer 'layer.0' has 0 bytes");
}

TEST(KVCache, TooLargeIsRefusedWithTheNumbers) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const auto& device = context->capabilities();
    const std::size_t size = device.max_alloc_bytes + 4;
    clattn::KVCacheConfig config = one_layer(size);
    config.groups[0].spec = {.block_size = 16, .num_kv_heads = 2, .head_size = 64};
    const std::size_t page_bytes = config.groups[0].spec.page_size_bytes();
    EXPECT_EQ(error_text([&] { (void)clattn::allocate_kv_cache(*context, queue, config); },
                         clattn::ErrorCode::kUnsupported),
              fmt::format(
                  "KV cache: layer 'layer.0' needs {} bytes, but '{}' allows {} bytes in one "
                  "allocation: at most {} blocks fit",
                  size, device.name, device.max_alloc_bytes, device.max_alloc_bytes / page_bytes));
  }
}

}  // namespace test_kv_cache_allocation
