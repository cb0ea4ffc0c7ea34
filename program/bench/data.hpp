#pragma once

#include <chrono>
#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <clattn/explain.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "oracle/row_scales.hpp"
#include "program/bench/shapes.hpp"
#include "program/bench/workload.hpp"
#include "program/common/statistics.hpp"

namespace clattn::cli {

/// Random elements that tile device memory of any size: element i of a buffer is at(i). The period
/// is a prime, so that no two rows of a cache are alike; no host copy of the buffer is needed.
/// Elements of one type, seed and size (their standard deviation) are made once.
class TiledRandom {
 public:
  TiledRandom(DType dtype, std::uint32_t seed, double size = 1, double mean = 0);
  /// Makes at(i) of every element i of a buffer.
  void fill(const Queue& queue, const Buffer& buffer) const;
  /// The same for a cache; element i of its scales becomes row_scale_at(i). Both codes of a byte
  /// are at(i).
  void fill(const Queue& queue, const KVCache& cache) const;
  double at(std::size_t index) const { return elements_->values[index % kPeriod]; }
  /// `count` of them from `first` on, as `dtype` stores them.
  std::vector<std::byte> stored(DType dtype, std::size_t first, std::size_t count) const;
  /// What a cache of another type makes of them by this factor.
  TiledRandom stored_as(DType cache, double scale) const;

 private:
  static constexpr std::size_t kPeriod = 1000003;
  struct Elements {
    std::vector<std::byte> bytes;
    std::vector<double> values;
  };
  explicit TiledRandom(Elements elements);
  std::shared_ptr<const Elements> elements_;
};

/// Element `place` of the scales that benchmarks give to a cache with a scale for each token and
/// head, and of codes of 4 bits its zero.
oracle::ScaleAndZero row_scale_at(DType code, std::int64_t place);

/// A cache large enough for several independent page sets, so that a launch does not find its pages
/// in a cache of the device.
struct RotatingCache {
  const AttentionBackend* backend = nullptr;
  KVCache cache;
  std::int32_t num_sets = 1;
  std::int64_t pages_per_set = 0;
  std::vector<std::int32_t> pages;  ///< all pages, shuffled; set s owns a consecutive run

  /// The pages of a set: those of the first request, then those of the next.
  std::vector<std::int32_t> pages_of_set(std::size_t set) const;
};

/// Throws kUnsupported with the numbers when even one set does not fit.
RotatingCache make_rotating_cache(const BenchTask& task);

/// One set whose pages overlap, each a few elements after the one before, so that they take next
/// to no memory and yet differ: for steps that are to be proven, not timed. Pages are in the
/// order of a long-lived allocator, none next to its neighbour. Latent pages cannot overlap.
RotatingCache make_overlapping_cache(const BenchTask& task);

/// A step over a set of pages.
struct BenchBatch : BatchArrays {
  /// `pages`: one after the other, request by request.
  BenchBatch(const BenchShape& shape, const std::vector<std::int32_t>& pages);
  /// The slot of a token by the definition.
  std::int64_t slot(std::size_t request, std::int32_t token) const;

  std::int32_t block_size;
};

/// The keys that the query of a new token sees, in ascending ranges of positions. Of layers without
/// chunks, and of trees without windows.
struct KeyRange {
  std::int32_t begin = 0, end = 0;
};
std::vector<KeyRange> seen_keys(const AttentionConfig& config, const RequestShape& request,
                                std::int32_t token);

/// Bytes: each visible key and value read once. Flops: the multiply-adds of each query with each
/// key that it sees. A latent row is key and value at once and is counted once.
Work attention_work(const AttentionConfig& config, const std::vector<RequestShape>& requests);

std::int64_t count_pages(const BenchShape& shape);
/// Bytes that a buffer may take of a device that gives away one part in `parts` of its memory.
std::size_t room_of(const DeviceCapabilities& device, std::uint64_t parts);

/// Seconds per launch of `launches` calls in a row, which are waited for once.
template <typename Launch>
double seconds_each(const Queue& queue, int launches, const Launch& launch) {
  queue.finish();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < launches; ++i) launch();
  queue.finish();
  return seconds_since(start) / launches;
}

/// The kernels of a call's launches, each once; `known`: those of its impl.
std::vector<BenchKernel> kernels_of(const std::vector<LaunchRecord>& launches,
                                    const std::vector<KernelInfo>& known);

BuilderOptions builder_options(const BenchShape& shape, std::int64_t num_blocks);

/// One step of one layer that is run in two ways, each into an output of its own.
class TwoWays : public Workload {
 public:
  explicit TwoWays(const BenchTask& task);
  /// Both outputs must have every word written over the poison, and the same bits.
  Deviation verify() override;

 protected:
  void poison_outputs() const;
  void attend(const AttentionMetadata& metadata, const Buffer& out,
              std::vector<LaunchRecord>* launches = nullptr) const;

  AttentionConfig config_;
  RotatingCache cache_;
  BenchBatch batch_;
  Queue queue_;
  BuilderOptions options_;
  std::shared_ptr<const AttentionImpl> impl_;
  Buffer query_, one_out_, other_out_;
};

}  // namespace clattn::cli
