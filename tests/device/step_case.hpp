#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <clattn/clattn.hpp>
#include <clattn/explain.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "oracle/oracle.hpp"

/// Parts of a made-up call for the kernels that have tests of their own: host tensors in their
/// element type, shuffled pages with poison around them, fenced outputs, and the judgement.
namespace step_test {

using attention_test::Request;

inline std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

inline oracle::Element element(clattn::DType dtype) {
  return static_cast<oracle::Element>(dtype);  // both list the types in the same order
}
static_assert(static_cast<int>(oracle::Element::kInt8) == static_cast<int>(clattn::DType::kInt8));

/// What unused elements hold: a NaN, or int8's largest size, which would show just as well.
inline std::uint32_t poison_bits(clattn::DType dtype) {
  constexpr std::array<std::uint32_t, 6> kBits = {0x7FC00001U, 0x7E01U, 0x7FC1U, 0x7F, 0x7F, 0x80};
  return kBits.at(static_cast<std::size_t>(dtype));
}

/// A host tensor as the device sees it, poisoned where nothing was set.
class Elements {
 public:
  Elements(clattn::DType dtype, std::int64_t count)
      : dtype_(dtype), bytes_(index(count) * clattn::element_size_bytes(dtype)) {
    for (std::int64_t i = 0; i < count; ++i) set_bits(i, poison_bits(dtype));
  }
  /// Stores value / scale, rounded, and returns the real value that this stands for.
  double set(std::int64_t i, double value, double scale = 1.0) {
    const std::uint32_t bits = oracle::encode(element(dtype_), value / scale);
    set_bits(i, bits);
    return oracle::decode(element(dtype_), bits) * scale;
  }
  double get(std::int64_t i) const {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &bytes_[index(i) * width()], width());
    return oracle::decode(element(dtype_), bits);
  }
  std::vector<std::byte>& bytes() { return bytes_; }
  clattn::Buffer upload(const clattn::Context& context, const clattn::Queue& queue) const {
    clattn::Buffer buffer = context.allocate(std::max<std::size_t>(bytes_.size(), 4));
    if (!bytes_.empty()) queue.write(buffer, bytes_);
    return buffer;
  }

 private:
  std::size_t width() const { return clattn::element_size_bytes(dtype_); }
  void set_bits(std::int64_t i, std::uint32_t bits) {
    std::memcpy(&bytes_[index(i) * width()], &bits, width());
  }
  clattn::DType dtype_;
  std::vector<std::byte> bytes_;
};

/// Requests on shuffled pages; entries that no request owns point far outside.
struct Layout {
  std::vector<std::int32_t> query_start_loc{0}, seq_lens, block_table;
  std::int64_t max_blocks = 0, num_blocks = 0;

  Layout(const std::vector<Request>& requests, std::int32_t block_size) {
    std::int64_t widest = 0;
    for (const Request& request : requests) {
      query_start_loc.push_back(query_start_loc.back() + request.query_len);
      seq_lens.push_back(request.query_len + request.context_len);
      const std::int64_t pages = (seq_lens.back() + block_size - 1) / block_size;
      num_blocks += pages;
      widest = std::max(widest, pages);
    }
    num_blocks += 2;
    max_blocks = widest + 1;
    std::vector<std::int32_t> pages(index(num_blocks));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(7));
    block_table.assign(requests.size() * index(max_blocks),
                       std::numeric_limits<std::int32_t>::max());
    auto next = pages.begin();
    for (std::size_t r = 0; r < requests.size(); ++r) {
      const std::int64_t count = (seq_lens[r] + block_size - 1) / block_size;
      std::copy_n(next, count, block_table.begin() + static_cast<std::int64_t>(r) * max_blocks);
      next += count;
    }
  }
  std::int64_t num_tokens() const { return query_start_loc.back(); }
  /// Place of a request's position in a cache of whole pages.
  std::int64_t slot(std::size_t r, std::int64_t position, std::int32_t block_size) const {
    return std::int64_t{block_table[r * index(max_blocks) + index(position / block_size)]} *
               block_size +
           position % block_size;
  }
  clattn::CommonAttentionMetadata batch() const {
    return clattn::CommonAttentionMetadata::of(query_start_loc, seq_lens, block_table);
  }
  clattn::BuilderOptions options(std::int32_t num_splits) const {
    clattn::BuilderOptions options;
    options.limits = {.max_num_reqs = std::max(16, static_cast<std::int32_t>(seq_lens.size())),
                      .max_num_batched_tokens = 256,
                      .max_model_len = 16384};
    options.limits.num_blocks = num_blocks;
    options.num_splits = num_splits;
    return options;
  }
};

/// An output filled with a pattern, fenced by guard bands; `guard_front` is 0 where the library
/// writes from the buffer's start.
struct FencedOutput {
  static constexpr std::int64_t kGuard = 64;
  std::int64_t count, front;
  Elements host;
  clattn::Buffer buffer;

  FencedOutput(const clattn::Context& context, const clattn::Queue& queue, clattn::DType dtype,
               std::int64_t size, std::int64_t guard_front)
      : count(size), front(guard_front), host(dtype, size + guard_front + kGuard) {
    std::fill(host.bytes().begin(), host.bytes().end(), std::byte{0xA5});
    buffer = host.upload(context, queue);
  }
  /// The values between the guard bands, which must be untouched.
  std::vector<double> read(const clattn::Queue& queue) {
    const std::vector<std::byte> before = host.bytes();
    queue.read(buffer, host.bytes());
    const std::size_t width = before.size() / index(count + front + kGuard);
    for (std::size_t i = 0; i < before.size(); ++i) {
      const bool inside = i >= index(front) * width && i < index(front + count) * width;
      if (!inside && host.bytes()[i] != before[i]) {
        ADD_FAILURE() << "guard band touched at byte " << i;
        break;
      }
    }
    std::vector<double> values;
    for (std::int64_t i = 0; i < count; ++i) values.push_back(host.get(front + i));
    return values;
  }
};

/// What ran for one call, in order.
struct Launches {
  std::vector<std::string> kernels;
  std::vector<std::int64_t> tasks;

  explicit Launches(const std::vector<clattn::LaunchRecord>& records) {
    for (const clattn::LaunchRecord& record : records) {
      kernels.emplace_back(record.kernel);
      tasks.push_back(record.tasks);
    }
  }
};

/// What `run(context)` returns on each device for which `reasons(capabilities)` is empty.
template <typename Reasons, typename Run>
auto on_able_devices(Reasons reasons, Run run) {
  std::vector<decltype(run(attention_test::all_contexts().front()))> outcomes;
  for (const auto& context : attention_test::all_contexts()) {
    if (reasons(&context->capabilities()).empty()) outcomes.push_back(run(context));
  }
  return outcomes;
}

/// Whether a kernel of the layer may round its weights (KernelInfo).
inline bool rounds_probabilities(const std::vector<clattn::KernelInfo>& kernels) {
  return std::any_of(kernels.begin(), kernels.end(),
                     [](const clattn::KernelInfo& kernel) { return kernel.rounds_probabilities; });
}

/// FlashAttention's rule with the floors of attention_case.cpp.
inline void expect_close(const std::vector<double>& got, const std::vector<double>& want,
                         const std::vector<double>* bound, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double allowed = bound != nullptr ? 2 * (*bound)[i] + 2e-6 : 2e-4;
    const bool right =
        std::isinf(want[i]) ? got[i] == want[i] : std::abs(got[i] - want[i]) <= allowed;
    ASSERT_TRUE(right) << fmt::format("{} {}: got {}, expected {}, allowed {}", what, i, got[i],
                                      want[i], allowed);
  }
}

}  // namespace step_test
