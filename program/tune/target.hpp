#pragma once

#include <clattn/clattn.hpp>
#include <clattn/tuning.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "program/bench/workload.hpp"

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

/// The roles whose kernels have something to search: of layers with latent attention kLatentRole,
/// of others the rest.
inline constexpr std::string_view kTuneRoles[] = {"decode", "prefill", "mla_decode",
                                                  "packed_decode"};
inline constexpr std::string_view kLatentRole = "mla_decode";

/// The shape of a model's layer in one role.
struct TuneShape {
  AttentionConfig config;
  std::string_view role;

  /// "decode, 4 heads a KV head of 128, f16/f16": all that a tuning row knows of it.
  std::string name() const;
  /// The same without the role: "4 heads a KV head of 128, f16/f16".
  std::string layer() const;
  TuningRow key(const DeviceCapabilities& device) const;
};

TuneTarget make_target(const std::shared_ptr<Context>& context, const TuneShape& shape);

}  // namespace clattn::cli
