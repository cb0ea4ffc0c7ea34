#pragma once

#include <fmt/format.h>

#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/mla.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/checked.hpp"
#include "base/environment.hpp"
#include "capture/capture.hpp"
#include "files/npy.hpp"

// A case in the making: its folder, its keys, and device memory as it keeps it. Reading that waits
// for all that the queue was given before.

namespace clattn::detail {

/// A case directory: ROOT/NNNN-OP once committed, nothing if not. Numbers
/// continue after the largest in ROOT; other processes may write there too.
/// Every failure throws kIo naming path and reason.
class CaseWriter {
 public:
  CaseWriter(std::filesystem::path root, std::string_view op);
  ~CaseWriter();
  CaseWriter(const CaseWriter&) = delete;
  CaseWriter& operator=(const CaseWriter&) = delete;

  /// Writes `name`.npy.
  void add(std::string_view name, const npy::NpyArray& array) const;
  /// Writes case.json and moves everything to its place, which it returns.
  std::filesystem::path commit(std::string_view case_json);

 private:
  std::filesystem::path root_, staging_;
  std::string op_;
  std::int64_t number_ = 0;
};

/// What the call of a case gave, under the names of `clattn run`: CASE/captured/NAME.npy. The case
/// is written before its call, so that it outlives a call that ends the process; this comes after.
class CaseResults {
 public:
  explicit CaseResults(const std::filesystem::path& place);
  void add(std::string_view name, const npy::NpyArray& array) const;

 private:
  std::filesystem::path folder_;
};

/// A part of any cl_mem; throws for bytes that it does not have.
std::vector<std::byte> read(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                            std::size_t size_bytes);

template <typename T>
std::vector<T> read_as(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                       std::int64_t count) {
  const std::vector<std::byte> bytes =
      read(queue, memory, offset_bytes, to_size(count) * sizeof(T));
  std::vector<T> values(to_size(count));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// `count` rows of `row_bytes` each, `stride_bytes` apart, packed.
std::vector<std::byte> read_rows(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                                 std::int64_t count, std::size_t row_bytes,
                                 std::size_t stride_bytes);

/// The rows of a tensor, shape[0] of them; zeros from row `num_rows` on, if given, which may lie
/// past its end.
npy::NpyArray read_tensor(const Queue& queue, const TensorRef& tensor, DType dtype,
                          std::vector<std::int64_t> shape,
                          std::optional<std::int64_t> num_rows = std::nullopt);

/// The keys of a case.json in their order.
class CaseKeys {
 public:
  explicit CaseKeys(std::string_view op) { text("op", op); }
  template <typename Value>
  CaseKeys& add(std::string_view key, const Value& value) {
    lines_ += fmt::format("{}\n  \"{}\": {}", lines_.empty() ? "" : ",", key, value);
    return *this;
  }
  CaseKeys& text(std::string_view key, std::string_view value) {
    return add(key, fmt::format("\"{}\"", value));
  }
  CaseKeys& number(std::string_view key, float value) { return add(key, number(value)); }
  /// JSON knows no infinity and no NaN: what is neither legal nor a number becomes a string, which
  /// `clattn run` refuses by name.
  static std::string number(float value) {
    return std::isfinite(value) ? fmt::format("{}", value) : fmt::format("\"{}\"", value);
  }
  std::string json() const { return fmt::format("{{{}\n}}\n", lines_); }

 private:
  std::string lines_;
};

/// A case of a call in the making: its arrays, read through the call's queue, and its keys.
class NewCase : public CaseWriter {
 public:
  NewCase(cl_command_queue handle, std::string_view op)
      : CaseWriter(environment().capture_dir, op), queue(Queue::adopt(handle)), keys(op) {}

  void add_values(std::string_view name, const auto& values,
                  std::vector<std::int64_t> shape = {}) const {
    add(name, npy::array_of(values, std::move(shape)));
  }
  /// Rows of a tensor, shape[0] of them.
  void add_tensor(std::string_view name, const TensorRef& tensor, DType dtype,
                  std::vector<std::int64_t> shape) const {
    add(name, read_tensor(queue, tensor, dtype, std::move(shape)));
  }
  /// Moves it to its place; then `add(results, queue)` adds what the call gave.
  template <typename Add>
  AddResults commit(Add add) {
    return [place = commit(), queue = queue, add = std::move(add)] {
      queue.finish();
      add(CaseResults(place), queue);
    };
  }
  std::filesystem::path commit() { return CaseWriter::commit(keys.json()); }

  const Queue queue;
  CaseKeys keys;
};

/// A cache of any form as a case keeps it: arrays in logical order, and keys that say how it is
/// stored. Refers to the cache that it was made of.
struct CaseCache {
  /// Keys, values or latent rows.
  struct Plane {
    std::string_view name, scale_key;
    cl_mem memory;
    std::function<std::int64_t(std::int64_t block, std::int64_t token, std::int64_t head,
                               std::int64_t dim)>
        element_at;
    std::int64_t width;  ///< elements of a row
  };

  DType dtype;
  std::string_view layout;          ///< its order in memory; empty: there is only one
  std::vector<std::int64_t> shape;  ///< of planes: blocks, tokens, heads (or none)
  std::vector<Plane> planes;
  cl_mem scales = nullptr;  ///< of one plane after the other; null: 1
  bool per_head = false;    ///< each plane has a scale for each head, not one
  std::optional<std::size_t> query_scale_at = {};  ///< among the scales
};
CaseCache case_cache(const AnyCache& cache);

/// Adds the arrays of a cache: `pages` as they are, zeros elsewhere. Throws kInvalidArgument for a
/// page that the cache does not have.
void add_cache(const NewCase& made, const CaseCache& cache, const std::vector<std::int32_t>& pages);
/// commit() of a call that changed these pages of a cache, which must still be there.
AddResults commit_cache(NewCase& made, CaseCache cache, std::vector<std::int32_t> pages);

/// Adds a cache's element type and, where there are several, its order in memory.
void add_storage_keys(CaseKeys& keys, const CaseCache& cache);
/// The same and the scales.
void add_cache_keys(NewCase& made, const CaseCache& cache);

/// Elements of this shape, all 0.
npy::NpyArray zeros(DType dtype, std::vector<std::int64_t> shape);

}  // namespace clattn::detail
