#include <fmt/format.h>

#include <clattn/compat/packed_cache.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/registry.hpp>
#include <numeric>

#include "compat/packed_cache.hpp"
#include "device/cache_ops_support.hpp"
#include "kernels/choose/variants.hpp"
#include "kernels/launch/cache_write.hpp"

// Cache writes of runs of tokens whose rows are aligned, by every kernel that the device has.
namespace test_cache_runs {

using cache_ops_test::all_contexts;
using cache_ops_test::download;
using cache_ops_test::element;
using cache_ops_test::encode;
using cache_ops_test::upload;
using clattn::DType;
using clattn::detail::BuiltKernel;
using clattn::detail::Role;

constexpr std::int32_t kHeads = 3;
constexpr std::int64_t kBlocks = 6;
constexpr std::byte kOld{0x5A};

struct Form {
  DType dtype, cache_dtype;
  std::int32_t block_size, head_size;

  clattn::detail::KernelShape shape() const {
    return {kHeads, kHeads, head_size, block_size, dtype, cache_dtype, {}};
  }
  std::size_t plane() const {  // elements
    return static_cast<std::size_t>(kBlocks * block_size * kHeads * head_size);
  }
};

/// A run that begins inside a block and crosses two of its ends, one backwards, single tokens far
/// apart, and padding among them.
std::vector<std::int64_t> make_slots(std::int64_t block_size) {
  std::vector<std::int64_t> slots(static_cast<std::size_t>(2 * block_size));
  std::iota(slots.begin(), slots.end(), block_size + 3);
  slots[5] = -1;
  slots[17 % slots.size()] = kBlocks * block_size;  // past the cache
  for (std::int64_t i = 0; i < block_size; ++i) slots.push_back(5 * block_size - 1 - i);
  for (const std::int64_t slot : {std::int64_t{1}, -1L, 6 * block_size - 2, std::int64_t{2}}) {
    slots.push_back(slot);
  }
  return slots;
}

struct Rows {
  std::vector<double> values;  // as the input's type holds them
  Rows(std::size_t count, DType dtype, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0.0, 3.0);
    for (std::size_t i = 0; i < count; ++i) {
      values.push_back(oracle::round_to(element(dtype), normal(random)));
    }
  }
};

void store(const Form& form, std::vector<std::byte>& image, std::int64_t at, double value) {
  const std::size_t size = clattn::element_size_bytes(form.cache_dtype);
  const std::uint32_t bits = oracle::encode(element(form.cache_dtype), value);
  std::memcpy(&image.at(static_cast<std::size_t>(at) * size), &bits, size);
}

/// `write(input, slots)` stores; `place(slot, head, dim, key, value)` says where a cache has them.
template <typename Write, typename Place>
void expect_stored(const clattn::Context& context, const Form& form, const clattn::Buffer& cache,
                   const Write& write, const Place& place) {
  const clattn::Queue queue = context.create_queue();
  const std::vector<std::int64_t> slots = make_slots(form.block_size);
  const auto row = static_cast<std::size_t>(kHeads * form.head_size);
  const Rows key(slots.size() * row, form.dtype, 1), value(slots.size() * row, form.dtype, 2);
  const clattn::Buffer k = upload(context, queue, encode(form.dtype, key.values));
  const clattn::Buffer v = upload(context, queue, encode(form.dtype, value.values));
  const clattn::Buffer mapping = upload(context, queue, slots);
  std::vector<std::byte> want(cache.size_bytes(), kOld);
  queue.write(cache, want);
  write(queue, clattn::TensorRef{.buffer = k.handle()}, clattn::TensorRef{.buffer = v.handle()},
        clattn::detail::SlotSource{mapping.handle(), 0, static_cast<std::int64_t>(slots.size())});
  const std::vector<std::byte> got = download<std::byte>(queue, cache);
  for (std::size_t token = 0; token < slots.size(); ++token) {
    if (slots[token] < 0 || slots[token] >= kBlocks * form.block_size) continue;
    for (std::int32_t head = 0; head < kHeads; ++head) {
      for (std::int32_t dim = 0; dim < form.head_size; ++dim) {
        const std::size_t from =
            token * row + static_cast<std::size_t>(head * form.head_size + dim);
        const auto [key_at, value_at] = place(slots[token], head, dim);
        store(form, want, key_at, key.values[from]);
        store(form, want, value_at, value.values[from]);
      }
    }
  }
  EXPECT_TRUE(got == want);
}

/// Runs `run(context, built kernel, form)` for every variant of a role that the device has.
template <typename Run>
void for_each_form(Role role, const Run& run) {
  constexpr Form kForms[] = {{DType::kF16, DType::kF16, 16, 24},
                             {DType::kBF16, DType::kFp8E4M3, 8, 32},
                             {DType::kF16, DType::kInt8, 32, 16},
                             {DType::kF32, DType::kF32, 8, 8}};
  for (const auto& context : all_contexts()) {
    for (const auto& variant : clattn::detail::variants()) {
      if (variant.role != role || !why_not(variant, context->capabilities()).empty()) continue;
      for (const Form& form : kForms) {
        SCOPED_TRACE(fmt::format("{} {} to {}, blocks of {}", variant.name,
                                 clattn::to_string(form.dtype), clattn::to_string(form.cache_dtype),
                                 form.block_size));
        run(*context,
            BuiltKernel{variant,
                        context->runtime().kernel(
                            kernel_source(variant, form.shape(), context->capabilities())),
                        {}},
            form);
      }
    }
  }
}

// A6.1, A6.2
TEST(CacheRuns, PagesHoldEveryTokenInItsPlace) {
  for_each_form(Role::kCacheWrite, [](const clattn::Context& context, const BuiltKernel& kernel,
                                      const Form& form) {
    const clattn::KVCacheSpec spec{.block_size = form.block_size,
                                   .num_kv_heads = kHeads,
                                   .head_size = form.head_size,
                                   .dtype = form.cache_dtype};
    const clattn::KVCache cache = clattn::reshape_kv_cache(
        context.allocate(static_cast<std::size_t>(kBlocks) * spec.page_size_bytes()), spec,
        *clattn::list_attn_backends()[0], clattn::KVCacheLayout::kHND);
    expect_stored(
        context, form, cache.buffer,
        [&](const clattn::Queue& queue, const auto& key, const auto& value, const auto& slots) {
          enqueue_cache_write(kernel, form.shape(), queue, key, value, cache, slots, nullptr);
        },
        [&](std::int64_t slot, std::int32_t head, std::int32_t dim) {
          const std::int64_t block = slot / form.block_size, token = slot % form.block_size;
          return std::pair(cache.key_at(block, token, head, dim),
                           cache.value_at(block, token, head, dim));
        });
  });
}

// A6.3: keys [block, head, dim / x, token, x], values [block, head, dim, token].
TEST(CacheRuns, XPackedPagesHoldEveryTokenInItsPlace) {
  for_each_form(Role::kCacheWritePacked, [](const clattn::Context& context,
                                            const BuiltKernel& kernel, const Form& form) {
    const std::size_t size = clattn::element_size_bytes(form.cache_dtype);
    const clattn::Buffer memory = context.allocate(2 * form.plane() * size);
    const auto values = static_cast<std::int64_t>(form.plane());
    clattn::PackedKVCache cache;
    cache.key = cache.value = memory.handle();
    cache.value_offset = values;
    cache.dtype = form.cache_dtype;
    cache.num_blocks = kBlocks;
    cache.block_size = form.block_size;
    cache.num_kv_heads = kHeads;
    cache.head_size = form.head_size;
    const auto pages = clattn::detail::pages_of(cache);
    const auto x = static_cast<std::int64_t>(16 / size);
    expect_stored(
        context, form, memory,
        [&](const clattn::Queue& queue, const auto& key, const auto& value, const auto& slots) {
          enqueue_cache_write(kernel, form.shape(), queue, key, value, pages, slots, nullptr);
        },
        [&](std::int64_t slot, std::int32_t head, std::int32_t dim) {
          const std::int64_t row = slot / form.block_size * kHeads + head;
          const std::int64_t token = slot % form.block_size;
          return std::pair(
              ((row * (form.head_size / x) + dim / x) * form.block_size + token) * x + dim % x,
              values + (row * form.head_size + dim) * form.block_size + token);
        });
  });
}

}  // namespace test_cache_runs
