#pragma once

#include <clattn/metadata.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "program/common/npy_reader.hpp"

namespace clattn::cli {

using npy::descr_of;

/// The shape of an array.
using Extents = std::vector<std::int64_t>;

/// An inclusive range of legal integers.
struct Range {
  std::int64_t low, high;
};
inline constexpr Range kCount{0, INT32_MAX};

/// The keys of a builder's limits; a case has all or none.
inline constexpr std::pair<const char*, std::int32_t BatchLimits::*> kLimitKeys[] = {
    {"max_num_reqs", &BatchLimits::max_num_reqs},
    {"max_num_batched_tokens", &BatchLimits::max_num_batched_tokens},
    {"max_model_len", &BatchLimits::max_model_len}};

/// Maps every spelling of a name to one; returns other text unchanged.
using Spelling = std::string(const std::string& text);

/// A case directory: case.json and its arrays. Every reader throws kInvalidArgument naming field,
/// value and what was expected.
class CaseFile {
 public:
  explicit CaseFile(std::filesystem::path directory);

  /// Keys are known once they were asked for; call this after the last one. Throws for any other.
  void refuse_unknown_keys() const;
  /// The same of the folder's .npy files.
  void refuse_unknown_arrays() const;

  bool has(const std::string& key);  ///< present and not null
  /// Required where there is no fallback; so are texts.
  std::int64_t integer(const std::string& key, Range range,
                       std::optional<std::int64_t> fallback = {});
  /// The same of ranges within 32 bits.
  std::int32_t int32(const std::string& key, Range range,
                     std::optional<std::int64_t> fallback = {}) {
    return static_cast<std::int32_t>(integer(key, range, fallback));
  }
  double number(const std::string& key);  ///< finite as f32
  bool boolean(const std::string& key, bool fallback);
  std::string text(const std::string& key, const std::optional<std::string>& fallback = {});
  /// One of `names`, after `spelt` has normalized the text; throws listing them for any other.
  std::string choice(const std::string& key, std::span<const std::string_view> names,
                     const std::optional<std::string>& fallback, Spelling* spelt = nullptr);
  /// A number, or a list of `count` numbers.
  std::vector<double> numbers(const std::string& key, std::int64_t count, double fallback);

  bool has_array(std::string_view name) const;
  /// An array of element type `descr` whose shape fits: -1 stands for any extent.
  NpyArray array(std::string_view name, std::string_view descr, const Extents& shape) const;
  /// Indices of type <i4 or <i8 with `shape`; values outside int32 become INT32_MIN or INT32_MAX.
  std::vector<std::int32_t> indices32(std::string_view name, const Extents& shape,
                                      Extents* actual_shape = nullptr) const;
  std::vector<std::int64_t> indices64(std::string_view name, const Extents& shape) const;

 private:
  const nlohmann::json* find(const std::string& key);
  const nlohmann::json& require(const std::string& key, std::string_view expected);

  std::filesystem::path directory_;
  nlohmann::json object_;
  std::set<std::string> known_;
  mutable std::set<std::string> known_arrays_;  ///< noted by those who only read
};

/// The files of a successful call, kept in memory until all of them can be written.
class CaseOutputs {
 public:
  void add(const std::string& name, NpyArray array) { arrays_[name + ".npy"] = std::move(array); }
  /// Numbers in their own type; without `shape` a list.
  template <typename Values>
  void add_values(const std::string& name, const Values& values, Extents shape = {}) {
    add(name, npy::array_of(values, std::move(shape)));
  }
  /// Elements as `dtype` stores them.
  void add_elements(const std::string& name, DType dtype, Extents shape,
                    std::vector<std::byte> elements) {
    add(name, NpyArray{std::string(descr_of(dtype)), std::move(shape), std::move(elements)});
  }
  /// Numbers in single precision.
  void add_floats(const std::string& name, const std::vector<double>& values, Extents shape) {
    add_values(name, std::vector<float>(values.begin(), values.end()), std::move(shape));
  }
  void add(const std::string& name, const nlohmann::json& object) {
    objects_[name + ".json"] = object;
  }
  /// The array of a name, or null.
  const NpyArray* find(const std::string& name) const;
  /// Adds a key to info.json.
  void add_info(const std::string& key, const nlohmann::json& value) {
    objects_["info.json"][key] = value;
  }
  /// What add_info() was given.
  const nlohmann::json& info(const std::string& key) const {
    return objects_.at("info.json").at(key);
  }
  /// Renames the files into place once all are written, so a failure leaves none in `directory`.
  void write(const std::filesystem::path& directory) const;

 private:
  /// Throws for what a file could not be moved over, before anything has been moved.
  void refuse_obstacles(const std::filesystem::path& target) const;

  std::map<std::string, NpyArray> arrays_;
  std::map<std::string, nlohmann::json> objects_;
};

}  // namespace clattn::cli
