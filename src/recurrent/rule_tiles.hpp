#pragma once

#include <clattn/recurrent.hpp>
#include <cstdint>
#include <vector>

#include "opencl/device/units.hpp"
#include "recurrent/delta_rule.hpp"

namespace clattn::detail {

/// A tile of the chunked rule on a matrix unit (kernels_cl/recurrent/delta_rule_mma.cl).
struct RuleTile {
  UnitId unit{};
  std::int32_t chunk = 0;       ///< tokens
  std::int32_t group_size = 0;  ///< work-items
  std::int32_t most_k = 0;      ///< elements of a key: registers hold no wider state

  /// Rows of a state that a group has.
  std::int32_t rows() const;
};

/// The tiles that fit the device and the rule, best first.
std::vector<RuleTile> rule_tiles(const DeviceCapabilities& device, const DeltaRuleCall& rule);

}  // namespace clattn::detail
