#include "program/ceilings/ceilings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <span>
#include <system_error>
#include <vector>

#include "opencl/copy.hpp"
#include "opencl/runtime.hpp"

namespace clattn::cli {
namespace {

constexpr int kLaunches = 7;  // the best counts; the first one warms up
constexpr std::size_t kPageBytes = 4096;

/// How the kernels are shaped for a kind of device.
struct CeilingShape {
  int work_group_size;
  int read_vector, fma_vector;  // floats
  int read_groups_per_unit, fma_groups_per_unit;
  int fma_steps;
  std::uint64_t read_bytes;
};

/// A CPU runs one work-item a group with its own vectors; a buffer must exceed its last cache (up
/// to 400 MB on servers). A GPU wants full occupancy and 16-byte loads.
CeilingShape shape_for(const DeviceCapabilities& capabilities) {
  if (capabilities.kind != DeviceKind::kGpu) {
    const int vector = capabilities.float_vector_width >= 16  ? 16
                       : capabilities.float_vector_width >= 8 ? 8
                                                              : 4;
    return {1, vector, vector, 64, 8, 1 << 18, std::uint64_t{1} << 29};
  }
  const int group = capabilities.max_work_group_size >= 256 ? 256 : 32;
  return {group, 4, 1, 32, 16, 1 << 13, std::uint64_t{1} << 30};
}

double best_seconds(const std::function<void(Event&)>& launch) {
  std::uint64_t best = std::numeric_limits<std::uint64_t>::max();
  for (int i = 0; i < kLaunches; ++i) {
    Event event;
    launch(event);
    event.wait();
    best = std::min(best, event.duration_ns());
  }
  return static_cast<double>(std::max<std::uint64_t>(best, 1)) * 1e-9;
}

/// A kernel of ceilings.cl for vectors of this many floats.
std::shared_ptr<detail::KernelPool> ceiling_kernel(const Context& context,
                                                   const CeilingShape& shape, const char* entry,
                                                   int vector) {
  return context.runtime().kernel(
      {"tile/ceilings.cl", entry,
       fmt::format("-DCLA_WG_SIZE={} -DCLA_VEC={}", shape.work_group_size, vector)});
}

std::size_t compute_units(const Context& context) {
  return static_cast<std::size_t>(context.capabilities().compute_units);
}

/// A buffer of ones that no cache holds, cut into equal shares of the groups.
struct ReadTarget {
  Buffer data, sums;
  std::size_t groups = 0, group_size = 0, group_bytes = 0, vector_bytes = 0;
};

ReadTarget make_read_target(const Context& context, const Queue& queue, const CeilingShape& shape) {
  const DeviceCapabilities& capabilities = context.capabilities();
  ReadTarget target;
  target.group_size = static_cast<std::size_t>(shape.work_group_size);
  target.groups = compute_units(context) * static_cast<std::size_t>(shape.read_groups_per_unit);
  const std::uint64_t budget =
      std::min({shape.read_bytes, capabilities.max_alloc_bytes, capabilities.global_mem_bytes / 4});
  target.vector_bytes = sizeof(float) * static_cast<std::size_t>(shape.read_vector);
  // What one iteration of both kernels' loops reads: four vectors a work-item and four pages.
  const std::size_t step_bytes =
      std::lcm(4 * target.group_size * target.vector_bytes, 4 * kPageBytes);
  target.group_bytes =
      std::max<std::size_t>(static_cast<std::size_t>(budget) / target.groups / step_bytes, 1) *
      step_bytes;
  target.data = context.allocate(target.groups * target.group_bytes);
  target.sums = context.allocate(target.groups * target.group_size * target.vector_bytes);
  queue.fill(target.data, 0x3F800000U, 0, target.data.size_bytes());
  return target;
}

/// Bytes per second of a kernel that adds up a target; every lane's sum is known exactly.
double rate_of(const Queue& queue, const ReadTarget& target,
               const std::function<void(Event&)>& launch) {
  queue.fill(target.sums, 0, 0, target.sums.size_bytes());
  const double seconds = best_seconds(launch);
  std::vector<float> sums(target.sums.size_bytes() / sizeof(float));
  queue.read(target.sums, std::as_writable_bytes(std::span(sums)));
  const std::size_t bytes = target.data.size_bytes();
  const std::size_t floats_a_sum = bytes / sizeof(float) / sums.size();
  const auto expected = static_cast<float>(floats_a_sum);
  if (std::ranges::count(sums, expected) != static_cast<std::ptrdiff_t>(sums.size())) {
    throw Error(ErrorCode::kOpenCL, "a read kernel of the ceilings computed wrong sums");
  }
  return static_cast<double>(bytes) / seconds;
}

double measure_read(const Context& context, const Queue& queue, const CeilingShape& shape,
                    const ReadTarget& target) {
  const auto pool = ceiling_kernel(context, shape, "clattn_ceiling_read", shape.read_vector);
  return rate_of(queue, target, [&](Event& event) {
    pool->acquire()
        .args(target.data, static_cast<cl_int>(target.group_bytes / target.vector_bytes),
              target.sums)
        .enqueue(queue, target.groups, target.group_size, &event);
  });
}

double measure_page_read(const Context& context, const Queue& queue, const CeilingShape& shape,
                         const ReadTarget& target) {
  std::vector<std::int32_t> order(target.data.size_bytes() / kPageBytes);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(7));
  const Buffer pages = context.allocate(order.size() * sizeof(std::int32_t));
  queue.write(pages, std::as_bytes(std::span(order)));
  const auto pool = ceiling_kernel(context, shape, "clattn_ceiling_page_read", shape.read_vector);
  return rate_of(queue, target, [&](Event& event) {
    pool->acquire()
        .args(target.data, pages, static_cast<cl_int>(target.group_bytes / kPageBytes), target.sums)
        .enqueue(queue, target.groups, target.group_size, &event);
  });
}

/// Words that no two places of a copy share.
std::vector<std::uint32_t> words_from(std::size_t first, std::size_t count) {
  std::vector<std::uint32_t> words(count);
  std::iota(words.begin(), words.end(), static_cast<std::uint32_t>(first));
  return words;
}

/// Bytes per second, read and written, of copies of a target's first half to its second.
double copy_rate(const Queue& queue, const ReadTarget& target,
                 const std::function<void(Event&)>& launch) {
  constexpr std::size_t kAtOnce = std::size_t{1} << 22;  // words
  const std::size_t half_bytes = target.data.size_bytes() / 2, words = half_bytes / 4;
  queue.fill(target.data, 0xFFFFFFFFU, half_bytes, half_bytes);
  const double seconds = best_seconds(launch);
  std::vector<std::uint32_t> got;
  for (std::size_t at = 0; at < words; at += kAtOnce) {
    got.resize(std::min(kAtOnce, words - at));
    queue.read(target.data, std::as_writable_bytes(std::span(got)), half_bytes + at * 4);
    if (got != words_from(at, got.size())) {
      throw Error(ErrorCode::kOpenCL, "a copy of the ceilings left wrong words");
    }
  }
  return 2.0 * static_cast<double>(half_bytes) / seconds;
}

/// Seconds from the first to the last moment at which one of `threads` threads copied its share of
/// a buffer of this many bytes, `times` times.
double seconds_to_copy(std::byte* to, const std::byte* from, std::size_t size_bytes,
                       std::size_t threads, int times) {
  using Clock = std::chrono::steady_clock;
  struct Span {
    Clock::time_point begin, end;
  };
  const auto copy = [=](std::size_t thread) {
    const std::size_t first = size_bytes / threads * thread;
    const std::size_t end = thread + 1 == threads ? size_bytes : first + size_bytes / threads;
    Span span{.begin = Clock::now(), .end = {}};
    for (int i = 0; i < times; ++i) std::memcpy(to + first, from + first, end - first);
    span.end = Clock::now();
    return span;
  };
  std::vector<std::future<Span>> copies;
  copies.reserve(threads);
  for (std::size_t thread = 0; thread < threads; ++thread) {
    copies.push_back(std::async(std::launch::async, copy, thread));
  }
  Span all = copies[0].get();
  for (std::size_t thread = 1; thread < threads; ++thread) {
    const Span own = copies[thread].get();
    all = {std::min(all.begin, own.begin), std::max(all.end, own.end)};
  }
  return std::chrono::duration<double>(all.end - all.begin).count();
}

/// memcpy of half a target's bytes by as many threads as the device has compute units; 0 where the
/// machine does not give this many, or not the memory. The threads write the memory first, each on
/// its own node.
double host_copy_rate(std::size_t half_bytes, std::size_t threads) {
  constexpr int kTimes = 4;  // starting the threads is not to count
  double best = std::numeric_limits<double>::infinity();
  try {
    const auto from = std::make_unique_for_overwrite<std::byte[]>(half_bytes);
    const auto to = std::make_unique_for_overwrite<std::byte[]>(half_bytes);
    seconds_to_copy(from.get(), to.get(), half_bytes, threads, 1);
    for (int i = 0; i < kLaunches; ++i) {
      const double seconds = seconds_to_copy(to.get(), from.get(), half_bytes, threads, kTimes);
      best = std::min(best, seconds / kTimes);
    }
  } catch (const std::system_error&) {
    return 0;
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 2.0 * static_cast<double>(half_bytes) / best;
}

/// The best way that there is; destroys the target's ones.
double measure_copy(const Context& context, const Queue& queue, const CeilingShape& shape,
                    const ReadTarget& target) {
  constexpr std::size_t kAtOnce = std::size_t{1} << 22;  // words
  const std::size_t half_bytes = target.data.size_bytes() / 2, words = half_bytes / 4;
  for (std::size_t at = 0; at < words; at += kAtOnce) {
    const auto piece = words_from(at, std::min(kAtOnce, words - at));
    queue.write(target.data, std::as_bytes(std::span(piece)), at * 4);
  }
  const auto pool = ceiling_kernel(context, shape, "clattn_ceiling_copy", shape.read_vector);
  const double by_kernel = copy_rate(queue, target, [&](Event& event) {
    pool->acquire()
        .args(target.data, static_cast<cl_int>(target.group_bytes / target.vector_bytes))
        .enqueue(queue, target.groups / 2, target.group_size, &event);
  });
  const detail::CopyEnd from{.device = target.data.handle()};
  const detail::CopyEnd to{.device = target.data.handle(), .offset_bytes = half_bytes};
  const double by_driver = copy_rate(queue, target, [&](Event& event) {
    detail::enqueue_copy(queue, from, to, half_bytes, &event);
  });
  const bool is_cpu = context.capabilities().kind == DeviceKind::kCpu;
  const double by_host = is_cpu ? host_copy_rate(half_bytes, compute_units(context)) : 0;
  return std::max({by_kernel, by_driver, by_host});
}

double measure_fma(const Context& context, const Queue& queue, const CeilingShape& shape) {
  constexpr double kFlopPerStep = 12 * 2;  // chains * (multiply, add)
  const auto group_size = static_cast<std::size_t>(shape.work_group_size);
  const auto groups = compute_units(context) * static_cast<std::size_t>(shape.fma_groups_per_unit);
  const auto floats = groups * group_size * static_cast<std::size_t>(shape.fma_vector);
  const Buffer results = context.allocate(floats * sizeof(float));
  const auto pool = ceiling_kernel(context, shape, "clattn_ceiling_fma", shape.fma_vector);
  const double seconds = best_seconds([&](Event& event) {
    pool->acquire()
        .args(static_cast<cl_int>(shape.fma_steps), static_cast<cl_float>(0.5F),
              static_cast<cl_float>(1.0F), results)
        .enqueue(queue, groups, group_size, &event);
  });
  return kFlopPerStep * shape.fma_steps * static_cast<double>(floats) / seconds;
}

/// A kernel of instructions that not every driver takes; nothing where its compiler refuses them,
/// which Context::build_failures() then lists.
std::shared_ptr<detail::KernelPool> kernel_unless_refused(const Context& context,
                                                          const detail::KernelSource& source) {
  try {
    return context.runtime().kernel(source);
  } catch (const Error& error) {
    if (!detail::is_build_refusal(error)) throw;
    context.runtime().note_build_failure(source.file, error.what());
    return nullptr;
  }
}

/// 0 where the driver does not build the kernel, as before NVIDIA's Ampere.
double measure_mma(const Context& context, const Queue& queue) {
  constexpr int kSteps = 1 << 13;
  constexpr double kFlopPerStep = 8 * 2 * 16 * 16 * 8;  // chains * products of a warp
  constexpr std::size_t kGroupSize = 256, kWarp = 32;
  constexpr std::uint32_t kOperand = 0x0C000C00U;  // two halves of 2^-12
  constexpr float kSum = 8 * 4 * kSteps * 16 * 0x1p-24F;
  if (!context.capabilities().inline_ptx) return 0;
  const auto pool = kernel_unless_refused(
      context, {"tile/ceiling_sm80.cl", "clattn_ceiling_mma",
                "-DCLA_WG_SIZE=256 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=1 -DCLA_PTX=1"});
  if (!pool) return 0;
  const auto groups = compute_units(context) * 16;
  const std::size_t warps = groups * (kGroupSize / kWarp);
  const Buffer sums = context.allocate(groups * kGroupSize * sizeof(float));
  const double seconds = best_seconds([&](Event& event) {
    pool->acquire()
        .args(static_cast<cl_int>(kSteps), static_cast<cl_uint>(kOperand), sums)
        .enqueue(queue, groups, kGroupSize, &event);
  });
  std::vector<float> got(groups * kGroupSize);
  queue.read(sums, std::as_writable_bytes(std::span(got)));
  if (std::ranges::count(got, kSum) != static_cast<std::ptrdiff_t>(got.size())) {
    throw Error(ErrorCode::kOpenCL, "mma.sync computed wrong sums");
  }
  return kFlopPerStep * kSteps * static_cast<double>(warps) / seconds;
}

/// The operands of ceiling_sm90.cl or ceiling_bf16.cl multiplied, [size][size], after this many
/// iterations of sums of `steps` products.
std::vector<float> matrix_products(int size, int steps, int iterations) {
  std::vector<float> products;
  for (int row = 0; row < size; ++row) {
    for (int column = 0; column < size; ++column) {
      int sum = 0;
      for (int k = 0; k < steps; ++k) {
        sum += ((5 * row + 3 * k) % 7 - 3) * ((3 * column + 5 * k) % 11 - 5);
      }
      products.push_back(static_cast<float>(iterations * sum));
    }
  }
  return products;
}

/// 0 where the processor has neither products of bf16 pairs nor tiles.
double measure_bf16(const Context& context, const Queue& queue) {
  constexpr int kIterations = 1 << 14, kSteps = 256;
  constexpr double kFlopPerIteration = 2.0 * 32 * 32 * kSteps;
  const DeviceCapabilities& capabilities = context.capabilities();
  if (!capabilities.bf16_products && !capabilities.x86_tiles) return 0;
  const auto pool = context.runtime().kernel(
      {"tile/cpu/ceiling_bf16.cl", "clattn_ceiling_bf16", "",
       capabilities.x86_tiles ? "tile/cpu/amx.clh" : "tile/cpu/avx512_bf16.clh"});
  const std::vector<float> expected = matrix_products(32, kSteps, kIterations);
  const auto groups = compute_units(context) * 2;
  const Buffer sums = context.allocate(groups * expected.size() * sizeof(float));
  queue.fill(sums, 0xFFFFFFFFU, 0, sums.size_bytes());
  const double seconds = best_seconds([&](Event& event) {
    pool->acquire().args(static_cast<cl_int>(kIterations), sums).enqueue(queue, groups, 1, &event);
  });
  std::vector<float> got(groups * expected.size());
  queue.read(sums, std::as_writable_bytes(std::span(got)));
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t group = i / expected.size(), at = i % expected.size();
    const std::size_t row = at / 16 % 32, column = at / 512 * 16 + at % 16;
    if (got[i] != expected[row * 32 + column]) {
      throw Error(ErrorCode::kOpenCL,
                  fmt::format("products of bf16 computed wrong sums in group {}", group));
    }
  }
  return kFlopPerIteration * kIterations * static_cast<double>(groups) / seconds;
}

/// 0 where the device has no warpgroup products or the driver does not build the kernel.
double measure_wgmma(const Context& context, const Queue& queue) {
  constexpr int kIterations = 1 << 12;  // of 64 steps of the sum
  constexpr double kFlopPerIteration = 2.0 * 128 * 128 * 64;
  constexpr std::size_t kGroupSize = 256;
  if (!context.capabilities().warpgroup_products) return 0;
  const auto pool = kernel_unless_refused(
      context, {"tile/ceiling_sm90.cl", "clattn_ceiling_wgmma",
                "-DCLA_WG_SIZE=256 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=1 -DCLA_PTX=1"});
  if (!pool) return 0;
  const std::vector<float> expected = matrix_products(128, 64, kIterations);
  const auto groups = compute_units(context) * 8;
  const Buffer products = context.allocate(groups * expected.size() * sizeof(float));
  queue.fill(products, 0xFFFFFFFFU, 0, products.size_bytes());
  const double seconds = best_seconds([&](Event& event) {
    pool->acquire()
        .args(static_cast<cl_int>(kIterations), products)
        .enqueue(queue, groups, kGroupSize, &event);
  });
  std::vector<float> got(expected.size());
  for (std::size_t group = 0; group < groups; ++group) {
    queue.read(products, std::as_writable_bytes(std::span(got)),
               group * got.size() * sizeof(float));
    if (got != expected) throw Error(ErrorCode::kOpenCL, "wgmma computed wrong products");
  }
  return kFlopPerIteration * kIterations * static_cast<double>(groups) / seconds;
}

}  // namespace

Ceilings measure_ceilings(const Context& context) {
  constexpr double kGiga = 1e-9;
  const Queue queue = context.create_queue(QueueProfiling::kOn);
  const CeilingShape shape = shape_for(context.capabilities());
  const ReadTarget target = make_read_target(context, queue, shape);
  return {.read_gb_per_s = measure_read(context, queue, shape, target) * kGiga,
          .page_read_gb_per_s = measure_page_read(context, queue, shape, target) * kGiga,
          .copy_gb_per_s = measure_copy(context, queue, shape, target) * kGiga,
          .fma_gflop_per_s = measure_fma(context, queue, shape) * kGiga,
          .bf16_gflop_per_s = measure_bf16(context, queue) * kGiga,
          .mma_gflop_per_s = measure_mma(context, queue) * kGiga,
          .wgmma_gflop_per_s = measure_wgmma(context, queue) * kGiga};
}

}  // namespace clattn::cli
