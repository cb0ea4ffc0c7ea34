#pragma once

#include <array>
#include <clattn/recurrent.hpp>
#include <cstddef>
#include <cstdint>

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

/// Work-items that make a chunk's matrices (kernels_cl/recurrent/delta_rule_pairs.cl).
inline constexpr std::int32_t kPairItems = 128;

/// A list of them that needs no memory of its own.
struct RuleTiles {
  std::array<RuleTile, 16> tiles;
  std::size_t count = 0;

  const RuleTile* begin() const { return tiles.data(); }
  const RuleTile* end() const { return tiles.data() + count; }
};

/// The tiles that fit the device and the rule, best first for as many prompts of about the same
/// length.
RuleTiles rule_tiles(const DeviceCapabilities& device, const DeltaRuleCall& rule,
                     std::int64_t num_prompts);

/// Bytes that the matrices of a chunk and a value head take between the kernels.
std::int64_t made_bytes(const RuleTile& tile);
/// Chunks that requests of at least `min_tokens` among `num_reqs` have room for, wherever they lie
/// in the step: cla_first_chunk() of kernels_cl/recurrent/chunk_operands.clh.
std::int64_t made_chunks(const RuleTile& tile, const RecurrentMetadata& metadata,
                         std::int32_t min_tokens);

}  // namespace clattn::detail
