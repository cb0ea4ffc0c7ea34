#pragma once

#include <clattn/tuning.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace clattn::detail {

/// The layer that a row is wanted for: `role` and `pages` for rows that choose a kernel, `kernel`
/// for costs.
struct TuningQuery {
  std::string device;                ///< name; empty: only classes count
  std::string driver;                ///< driver_version
  std::vector<std::string> classes;  ///< closest first
  std::string_view role{};
  std::string_view kernel{};
  std::int32_t head_size = 0;
  std::int32_t group = 0;
  DType dtype = DType::kF16;
  DType cache_dtype = DType::kF16;
  std::string_view pages{};
};

/// The user's rows over the shipped ones. Immutable.
class TuningTable {
 public:
  /// `user` as parse_tuning() read it.
  explicit TuningTable(TuningText user) : user_(std::move(user)) {}
  /// Of the user's file; one that does not exist, or an empty path, has no rows.
  static TuningTable load(const std::string& path);

  /// The row that fits best of those that `usable` takes: the user's before shipped ones, then by
  /// how closely it names the device, by its driver, by the number of its keys; the last of
  /// equals. Null when none fits.
  const TuningRow* find(const TuningQuery& query,
                        const std::function<bool(const TuningRow&)>& usable) const;

  /// The costs that fit a kernel best, by the same order; of rows alike in device and driver those
  /// that name the kernel in full, then by the longest beginning. Null when none fits.
  const CostRow* find_costs(const TuningQuery& query) const;

  const TuningText& user() const { return user_; }

 private:
  TuningText user_;
};

/// The largest number of what was measured.
inline constexpr double kMostMeasured = 1e12;
/// Why nothing can be planned by these costs; empty if it can.
std::string cost_fault(const KernelCosts& costs);

/// The rows of shipped.inc.
const TuningText& shipped_tuning();

/// Whether a row is for a layer.
bool covers(const TuningRow& row, const TuningQuery& query);
/// Whether a row of costs is for a kernel: by its name, the beginning of it, or for any.
bool names_kernel(const CostRow& row, std::string_view kernel);

}  // namespace clattn::detail
