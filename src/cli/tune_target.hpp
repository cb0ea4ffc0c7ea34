#pragma once

#include <clattn/clattn.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_workload.hpp"

namespace clattn::cli {

/// One role of one layer shape: how it is checked and timed under the rows that its context has.
struct TuneTarget {
  std::string name;  ///< "decode, 4 heads a KV head of 128, f16/f16"
  TuningRow key;     ///< device, role, shape
  /// What the role launches; nothing where it has no kernel for the shape.
  std::function<std::optional<KernelInfo>()> kernel;
  /// Against the double oracle, on batches with all kinds of borders.
  std::function<Deviation()> check;
  /// What is timed: a few batches, the largest last. Kernels are those of the rows of this moment.
  std::vector<std::function<std::unique_ptr<Workload>()>> workloads;
};

/// A timed batch of equal requests.
std::function<std::unique_ptr<Workload>()> timed_batch(const std::shared_ptr<Context>& context,
                                                       const BenchModel& model,
                                                       std::string_view suite,
                                                       std::int32_t num_reqs, BenchRequest request);

/// The shape of a model as roles see it.
struct TuneShape {
  AttentionConfig config;
  std::string_view role;  ///< decode or prefill
};
TuneTarget make_attention_target(const std::shared_ptr<Context>& context, const TuneShape& shape);

/// A DeepSeek-like layer with `num_heads` heads.
TuneTarget make_mla_target(const std::shared_ptr<Context>& context, const MLAConfig& config);

}  // namespace clattn::cli
