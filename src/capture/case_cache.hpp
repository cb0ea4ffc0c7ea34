#pragma once

#include <fmt/format.h>

#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/mla.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/checked.hpp"
#include "base/environment.hpp"
#include "capture/capture.hpp"
#include "capture/case_writer.hpp"

// Device memory as a case keeps it: all of it waits for what the queue was given before. A cache is
// arrays in logical order, and keys that say how it is stored.

namespace clattn::detail {

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

/// Receives the arrays of a cache, one after the other, because caches are large.
using TakeArray = std::function<void(std::string_view name, const npy::NpyArray& array)>;

/// Reads the arrays of a cache: `pages` as they are, zeros elsewhere. Throws kInvalidArgument for a
/// page that the cache does not have.
void read_cache(const Queue& queue, const KVCache& cache, const std::vector<std::int32_t>& pages,
                const TakeArray& take);
void read_cache(const Queue& queue, const PackedKVCache& cache,
                const std::vector<std::int32_t>& pages, const TakeArray& take);
void read_cache(const Queue& queue, const MLACache& cache, const std::vector<std::int32_t>& pages,
                const TakeArray& take);

/// Adds them to a case.
template <typename Cache>
void add_cache(const NewCase& made, const Cache& cache, const std::vector<std::int32_t>& pages) {
  read_cache(made.queue, cache, pages,
             [&](std::string_view name, const npy::NpyArray& array) { made.add(name, array); });
}

/// commit() of a call that changed these pages of a cache, which must still be there.
template <typename Cache>
AddResults commit_cache(NewCase& made, const Cache& cache, std::vector<std::int32_t> pages) {
  return made.commit(
      [&cache, pages = std::move(pages)](const CaseResults& results, const Queue& queue) {
        read_cache(queue, cache, pages, [&](std::string_view name, const npy::NpyArray& array) {
          results.add(fmt::format("{}_out", name), array);
        });
      });
}

/// Adds a cache's element type and, where there are several, its order in memory.
template <typename Cache>
void add_storage_keys(CaseKeys& keys, const Cache& cache);
/// The same and the scales.
template <typename Cache>
void add_cache_keys(CaseKeys& keys, const Queue& queue, const Cache& cache);
void add_cache_keys(CaseKeys& keys, const Queue& queue, const MLACache& cache);

}  // namespace clattn::detail
