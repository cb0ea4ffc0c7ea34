#include <fmt/format.h>

#include <algorithm>
#include <clattn/ceilings.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "base/error.hpp"
#include "opencl/runtime.hpp"

namespace clattn {
namespace {

constexpr int kLaunches = 7;  // the best counts; the first one warms up

/// How the two kernels are shaped for a kind of device.
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

std::uint64_t best_ns(const std::function<void(Event&)>& launch) {
  std::uint64_t best = std::numeric_limits<std::uint64_t>::max();
  for (int i = 0; i < kLaunches; ++i) {
    Event event;
    launch(event);
    event.wait();
    best = std::min(best, event.duration_ns());
  }
  return std::max<std::uint64_t>(best, 1);
}

std::string options_of(const CeilingShape& shape, int vector) {
  return fmt::format("-DCLA_WG_SIZE={} -DCLA_VEC={}", shape.work_group_size, vector);
}

double measure_read(const Context& context, const Queue& queue, const CeilingShape& shape) {
  const DeviceCapabilities& capabilities = context.capabilities();
  const auto group_size = static_cast<std::size_t>(shape.work_group_size);
  const auto groups = static_cast<std::size_t>(capabilities.compute_units) *
                      static_cast<std::size_t>(shape.read_groups_per_unit);
  const std::size_t vector_bytes = sizeof(float) * static_cast<std::size_t>(shape.read_vector);
  const std::uint64_t budget =
      std::min({shape.read_bytes, capabilities.max_alloc_bytes, capabilities.global_mem_bytes / 4});
  const std::size_t unroll = 4 * group_size;
  const std::size_t vectors = std::max<std::size_t>(
      static_cast<std::size_t>(budget) / vector_bytes / groups / unroll * unroll, unroll);
  const std::size_t bytes = groups * vectors * vector_bytes;

  const Buffer data = context.allocate(bytes);
  const Buffer sums = context.allocate(groups * group_size * vector_bytes);
  queue.fill(data, 0x3F800000U, 0, bytes);  // 1.0f: every lane's sum is known exactly
  const auto pool = context.runtime().kernel(
      {"ceilings.cl", "clattn_ceiling_read", options_of(shape, shape.read_vector)});
  const std::uint64_t nanoseconds = best_ns([&](Event& event) {
    pool->acquire()
        .arg(data.handle())
        .arg(static_cast<cl_int>(vectors))
        .arg(sums.handle())
        .enqueue(queue, groups, group_size, &event);
  });
  std::vector<float> lane_sums(sums.size_bytes() / sizeof(float));
  queue.read(sums, std::as_writable_bytes(std::span(lane_sums)));
  const std::size_t vectors_per_lane = vectors / group_size;
  const auto expected = static_cast<float>(vectors_per_lane);
  if (std::count(lane_sums.begin(), lane_sums.end(), expected) !=
      static_cast<std::ptrdiff_t>(lane_sums.size())) {
    throw Error(ErrorCode::kOpenCL, "the streaming read kernel computed wrong sums");
  }
  return static_cast<double>(bytes) * 1e9 / static_cast<double>(nanoseconds);
}

double measure_fma(const Context& context, const Queue& queue, const CeilingShape& shape) {
  constexpr double kFlopPerStep = 12 * 2;  // chains * (multiply, add)
  const auto group_size = static_cast<std::size_t>(shape.work_group_size);
  const auto groups = static_cast<std::size_t>(context.capabilities().compute_units) *
                      static_cast<std::size_t>(shape.fma_groups_per_unit);
  const auto floats = groups * group_size * static_cast<std::size_t>(shape.fma_vector);
  const Buffer results = context.allocate(floats * sizeof(float));
  const auto pool = context.runtime().kernel(
      {"ceilings.cl", "clattn_ceiling_fma", options_of(shape, shape.fma_vector)});
  const std::uint64_t nanoseconds = best_ns([&](Event& event) {
    pool->acquire()
        .arg(static_cast<cl_int>(shape.fma_steps))
        .arg(static_cast<cl_float>(0.5F))
        .arg(static_cast<cl_float>(1.0F))
        .arg(results.handle())
        .enqueue(queue, groups, group_size, &event);
  });
  return kFlopPerStep * shape.fma_steps * static_cast<double>(floats) * 1e9 /
         static_cast<double>(nanoseconds);
}

}  // namespace

DeviceCeilings measure_ceilings(const Context& context) {
  const Queue queue = context.create_queue(QueueProfiling::kOn);
  const CeilingShape shape = shape_for(context.capabilities());
  return {measure_read(context, queue, shape), measure_fma(context, queue, shape)};
}

}  // namespace clattn
