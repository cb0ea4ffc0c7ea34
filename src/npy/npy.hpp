#pragma once

#include <clattn/types.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace clattn::npy {

/// An array as a NumPy .npy file holds it: little endian, C order.
struct NpyArray {
  std::string descr;  ///< "<f4", "<f2", "<u2", "<i4", "<i8", "|u1" or "|i1"
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;

  std::int64_t num_elements() const;
};

/// Reads a .npy file of format 1.0-3.0. Throws kInvalidArgument (what is wrong with the content) or
/// kIo, naming the file. The header is read first and must agree with the file's size; `accept`, if
/// given, then sees type and shape and throws for those that it does not want. Only then memory is
/// taken for the data.
NpyArray read_npy(const std::filesystem::path& path,
                  const std::function<void(const NpyArray&)>& accept = {});

/// Parses a whole .npy image; `name` is what errors call it.
NpyArray parse_npy(std::span<const std::byte> image, std::string_view name);

/// The header that precedes the data, in format 1.0.
std::string npy_head(const NpyArray& array);
/// Writes the file completely or not at all. Throws kIo naming path and reason.
void write_npy(const std::filesystem::path& path, const NpyArray& array);

/// "[3, 4]", for messages.
std::string shape_text(std::span<const std::int64_t> shape);

/// The .npy type that holds elements of `dtype`: bf16 travels as <u2, fp8 as |u1.
std::string_view descr_of(DType dtype);

/// An array of int32, int64 or float numbers; a list, unless `shape` says otherwise.
template <std::ranges::contiguous_range Values>
NpyArray array_of(const Values& values, std::vector<std::int64_t> shape = {}) {
  using T = std::ranges::range_value_t<Values>;
  constexpr const char* kDescr = std::is_same_v<T, float> ? "<f4" : sizeof(T) == 8 ? "<i8" : "<i4";
  if (shape.empty()) shape = {std::ssize(values)};
  const auto bytes = std::as_bytes(std::span<const T>(values));
  return {kDescr, std::move(shape), {bytes.begin(), bytes.end()}};
}

}  // namespace clattn::npy
