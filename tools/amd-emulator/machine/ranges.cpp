#include "machine/ranges.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "machine/settings.hpp"

namespace amdemu {
namespace {

struct Range {
  std::uint64_t begin = 0, end = 0;
  bool holds(std::uint64_t address, std::uint64_t size) const {
    return size <= end - begin && address >= begin && address - begin <= end - begin - size;
  }
};
std::shared_mutex lock;
std::vector<Range> ranges;            // sorted by begin
std::atomic<std::uint64_t> epoch{1};  // raised when a range goes

/// Ranges that a thread met of late.
struct Recent {
  std::uint64_t epoch = 0;
  Range list[8] = {};
  unsigned next = 0;
};
thread_local Recent recent;

}  // namespace

void register_range(const void* begin, std::size_t size) {
  const auto at = reinterpret_cast<std::uint64_t>(begin);
  const std::unique_lock guard(lock);
  const auto behind =
      std::upper_bound(ranges.begin(), ranges.end(), at,
                       [](std::uint64_t address, const Range& r) { return address < r.begin; });
  ranges.insert(behind, Range{at, at + size});
}

void forget_range(const void* begin) {
  const auto at = reinterpret_cast<std::uint64_t>(begin);
  const std::unique_lock guard(lock);
  const auto found =
      std::find_if(ranges.begin(), ranges.end(), [at](const Range& r) { return r.begin == at; });
  if (found != ranges.end()) ranges.erase(found);
  epoch.fetch_add(1);
}

bool may_access(std::uint64_t address, std::uint64_t size) {
  const std::uint64_t now = epoch.load(std::memory_order_relaxed);
  if (recent.epoch != now) recent = Recent{now, {}, 0};
  for (const Range& r : recent.list) {
    if (r.holds(address, size)) return true;
  }
  if (!settings().check) return true;
  const std::shared_lock guard(lock);
  const auto behind = std::upper_bound(ranges.begin(), ranges.end(), address,
                                       [](std::uint64_t a, const Range& r) { return a < r.begin; });
  if (behind == ranges.begin() || !(behind - 1)->holds(address, size)) return false;
  recent.list[recent.next++ % 8] = *(behind - 1);
  return true;
}

}  // namespace amdemu
