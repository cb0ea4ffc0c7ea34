#pragma once

#include <clattn/clattn.hpp>
#include <clattn/tuning.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/workload.hpp"

namespace clattn::cli {

/// One role of one layer shape: how it is checked and timed under the rows that its context has.
struct TuneTarget {
  std::string name;  ///< "decode, 4 heads a KV head of 128, f16/f16"
  TuningRow key;     ///< device, role, shape
  /// Costs to plan with during the search; they come before the shipped rows.
  std::vector<CostRow> costs{};
  /// What the role launches; nothing where it has no kernel for the shape.
  std::function<std::optional<KernelInfo>()> kernel;
  /// Against the double oracle, on batches with all kinds of borders.
  std::function<Deviation()> check;
  /// What is timed: a few batches, the largest last. Kernels are those of the rows of this moment.
  std::vector<std::function<std::unique_ptr<Workload>()>> workloads;
};

struct TuneRole;

/// The shape of a model's layer in one role.
struct TuneShape {
  AttentionConfig config;
  const TuneRole* role = nullptr;

  /// "decode, 4 heads a KV head of 128, f16/f16": all that a tuning row knows of it.
  std::string name() const;
  /// The same without the role: "4 heads a KV head of 128, f16/f16".
  std::string layer() const;
  TuningRow key(const DeviceCapabilities& device) const;
  /// As the workloads of benchmarks take it.
  BenchModel model() const;
};

using MakeTuneTarget = TuneTarget(const std::shared_ptr<Context>& context, const TuneShape& shape);
struct TuneRole {
  std::string_view name;
  bool latent;  ///< of layers with latent attention, or of all others
  MakeTuneTarget* make;
};
/// The roles whose kernels have something to search.
std::span<const TuneRole> tune_roles();

}  // namespace clattn::cli
