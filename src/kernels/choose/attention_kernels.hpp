#pragma once

#include <clattn/attention.hpp>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/choose/tuned.hpp"
#include "metadata/plan/planner.hpp"
#include "opencl/runtime.hpp"

namespace clattn::detail {

/// A built variant.
struct BuiltKernel {
  std::optional<Variant> variant;  ///< a row with the constants that it was built with
  std::shared_ptr<KernelPool> pool;
  HeadTiling tiling;
};

/// The kernels of one (device, shape, family), compiled once and shared by impls and builders.
/// Immutable.
struct AttentionKernels {
  Runtime* runtime = nullptr;  ///< whose memory and queues they work on
  KernelShape shape;
  std::vector<BuiltKernel> stages;  ///< in step with planner.tiles: short queries first, wide last
  BuiltKernel merge;
  BuiltKernel cache_write;            ///< none where keys and values are contiguous
  std::vector<Candidate> candidates;  ///< for every role, in the order of the table
  PlannerConfig planner;              ///< device and tile facts; the builder adds its own options

  /// Whether items that were cut for `other` fit these kernels: same tensors, a tile that holds
  /// the largest, and splits that are joined where the plan leaves that to the kernels.
  bool runs_plan_of(const AttentionKernels& other) const { return why_not_plan_of(other).empty(); }
  /// Why they do not: the field that differs, its value in `other` and the legal one. Empty = fits.
  std::string why_not_plan_of(const AttentionKernels& other) const;
  /// The stage that runs the items of a plan's tile class, if its plan can be run: the class's own
  /// number where the tiles match, else the first whose tile holds them.
  std::size_t stage_for(const AttentionKernels& planned, std::size_t tile_class) const;
};

/// The keys around its own position that a query of a layer may see, causality aside. All code
/// that depends on a layer's window calls this, because configurations have two ways to give it.
KeyWindow window_of(const AttentionConfig& config);
/// What of a batch's lists a layer looks at.
ListRules lists_of(const AttentionConfig& config);
/// Adds why a window that is given in both ways is refused.
void append_window_reasons(const AttentionConfig& config, std::vector<std::string>& reasons);

/// Compiles (or finds) the kernels. Throws kUnsupported with reasons when a role has no variant for
/// the device.
std::shared_ptr<const AttentionKernels> attention_kernels(Runtime& runtime,
                                                          const KernelShape& shape,
                                                          KernelFamily family);

/// The kernels that attention_kernels() would choose for `device` if every variant that its
/// capabilities allow compiled. Nothing is built, and their `runtime` is null.
std::shared_ptr<const AttentionKernels> imagined_kernels(const TunedDevice& device,
                                                         const KernelShape& shape,
                                                         KernelFamily family);

/// What a planner needs to know of the kernels: its tiles, their costs, the device.
PlannerConfig planner_config(const AttentionKernels& kernels, const TunedDevice& device);

/// The first variant of `role` on the ladder that fits shape and device, built. Throws
/// kUnsupported.
BuiltKernel build_first_fitting(Runtime& runtime, const KernelShape& shape, KernelFamily family,
                                Role role);

}  // namespace clattn::detail
