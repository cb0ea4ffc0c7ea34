#pragma once

#include <clattn/cache_ops.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/registry.hpp>
#include <stdexcept>

#include "device/cache_ops_support.hpp"

/// What the tests of copy_blocks and swap_blocks share: random bytes seen as caches of every order.
namespace block_test {

using cache_ops_test::random_bytes;
using cache_ops_test::upload;
using clattn::BlockPair;
using clattn::DType;
using clattn::KVCache;
using clattn::KVCacheLayout;
using Bytes = std::vector<std::uint8_t>;

struct Order {
  std::string backend;  // FLASHINFER: (NB, 2, …); XFORMERS: (2, NB, …)
  KVCacheLayout layout;
};
inline const std::vector<Order> kOrders = {{"FLASHINFER", KVCacheLayout::kNHD},
                                           {"FLASHINFER", KVCacheLayout::kHND},
                                           {"XFORMERS", KVCacheLayout::kNHD}};

inline const clattn::AttentionBackend& backend_named(const std::string& name) {
  for (const auto& backend : clattn::list_attn_backends()) {
    if (backend->name() == name) return *backend;
  }
  throw std::runtime_error(name);
}

struct Shape {
  std::int64_t num_blocks = 7;
  std::int32_t block_size = 16, num_kv_heads = 3, head_size = 8;
  DType dtype = DType::kF16;
  std::size_t padding = 0;  // bytes behind each page
  clattn::KVCacheSpec spec() const {
    clattn::KVCacheSpec spec;
    spec.block_size = block_size;
    spec.num_kv_heads = num_kv_heads;
    spec.head_size = head_size;
    spec.dtype = dtype;
    if (padding > 0) spec.page_size_padded = spec.page_size_bytes() + padding;
    return spec;
  }
  std::size_t bytes() const {
    return static_cast<std::size_t>(num_blocks) * spec().page_size_bytes();
  }
};

/// A layer: its memory as the device got it, and the cache over it.
struct Layer {
  Bytes image;
  KVCache cache;
  Layer(const clattn::Context& context, const clattn::Queue& queue, const Shape& shape,
        const Order& order, std::uint32_t seed)
      : image(random_bytes(shape.bytes(), seed)),
        cache(clattn::reshape_kv_cache(upload(context, queue, image), shape.spec(),
                                       backend_named(order.backend), order.layout)) {}
};

/// Calls visit(byte of element in `a`, of the same element in `b`) for K and V of one block.
template <typename Visit>
void for_each_element(const KVCache& a, std::int64_t block_a, const KVCache& b,
                      std::int64_t block_b, const Visit& visit) {
  const auto at = [](const KVCache& c, bool value, std::int64_t block, std::int64_t t,
                     std::int64_t h, std::int64_t d) {
    const std::int64_t index = (value ? c.v_offset : c.k_offset) + block * c.block_stride +
                               h * c.head_stride + t * c.token_stride + d;
    return static_cast<std::size_t>(index) * clattn::element_size_bytes(c.dtype);
  };
  for (const bool value : {false, true}) {
    for (std::int64_t t = 0; t < a.block_size; ++t) {
      for (std::int64_t h = 0; h < a.num_kv_heads; ++h) {
        for (std::int64_t d = 0; d < a.head_size; ++d) {
          for (std::size_t i = 0; i < clattn::element_size_bytes(a.dtype); ++i) {
            visit(at(a, value, block_a, t, h, d) + i, at(b, value, block_b, t, h, d) + i);
          }
        }
      }
    }
  }
}

inline void apply(const KVCache& from, const Bytes& source, const KVCache& to, Bytes& destination,
                  const std::vector<BlockPair>& mapping) {
  for (const BlockPair& pair : mapping) {
    for_each_element(from, pair.source, to, pair.destination,
                     [&](std::size_t a, std::size_t b) { destination[b] = source[a]; });
  }
}

}  // namespace block_test
