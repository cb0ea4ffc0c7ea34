#pragma once

#include <cstdint>
#include <span>

#include "metadata/plan_model.hpp"
#include "shared/work_item.h"

namespace clattn::detail {

/// Which items come first in a list: GPUs, and CPUs that take them from a queue, start the longest
/// first; without a queue PoCL hands the front of the list to one thread. kAsCut leaves the batch's
/// order.
enum class ItemOrder : std::uint8_t { kHeavyFirst, kLightFirst, kAsCut };

/// Items whose predicted times differ by less than this count as equally heavy. Nanoseconds; 0 for
/// a list without keys.
double equal_costs_ns(const TileClass& tile, std::span<const ClaWorkItem> items);

/// Orders the items of a class, which come in the batch's order. Equally heavy ones of a request
/// follow each other. Allocates nothing.
void sort_items(ItemOrder order, const TileClass& tile, std::span<ClaWorkItem> items);

}  // namespace clattn::detail
