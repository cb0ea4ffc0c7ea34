#pragma once

#include <cstdint>

namespace clattn::detail {

/// Which keys around its own position a query may see: reach in tokens to either side, -1 =
/// unbounded, and the aligned chunk that it must stay in, 0 = none, or this many before it.
struct KeyWindow {
  std::int32_t left = -1;
  std::int32_t right = -1;
  std::int32_t chunk = 0;
  std::int32_t chunk_lookback = 0;
  bool operator==(const KeyWindow&) const = default;
  /// Whether every key that `other` lets a query see is one that this lets it see.
  bool covers(const KeyWindow& other) const {
    const auto reaches = [](std::int32_t a, std::int32_t b) { return a < 0 || (b >= 0 && b <= a); };
    return reaches(left, other.left) && reaches(right, other.right) &&
           (chunk == 0 || (chunk == other.chunk && chunk_lookback >= other.chunk_lookback));
  }
};

}  // namespace clattn::detail
