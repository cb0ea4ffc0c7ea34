#pragma once

#include <clattn/tuning.hpp>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace clattn::detail {

/// The layer that a row is wanted for.
struct TuningQuery {
  std::string device;                ///< name; empty: only classes count
  std::string driver;                ///< driver_version
  std::vector<std::string> classes;  ///< closest first
  std::string_view role;
  std::int32_t head_size = 0;
  std::int32_t group = 0;
  DType dtype = DType::kF16;
  DType cache_dtype = DType::kF16;
  std::string_view pages;
};

/// The user's rows over the shipped ones. Immutable.
class TuningTable {
 public:
  /// `user` as parse_tuning() read it.
  explicit TuningTable(TuningText user);
  /// Of the user's file; one that does not exist, or an empty path, has no rows.
  static TuningTable load(const std::string& path);

  /// The row that fits best of those that `usable` takes: the user's before shipped ones, then by
  /// how closely it names the device, by its driver, by the number of its keys; the last of
  /// equals. Null when none fits.
  const TuningRow* find(const TuningQuery& query,
                        const std::function<bool(const TuningRow&)>& usable) const;

  const TuningText& user() const { return user_; }

 private:
  TuningText user_;
};

/// The rows of shipped.inc.
const TuningText& shipped_tuning();

/// Whether a row is for a layer.
bool covers(const TuningRow& row, const TuningQuery& query);
/// Whether two rows are for the same layers.
bool same_key(const TuningRow& a, const TuningRow& b);

}  // namespace clattn::detail
