#pragma once

#include <clattn/types.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
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
};

/// The header that precedes the data, in format 1.0.
std::string npy_head(const NpyArray& array);
/// Writes the file completely or not at all. Throws kIo naming path and reason.
void write_npy(const std::filesystem::path& path, const NpyArray& array);

/// The .npy type that holds elements of `dtype`: bf16 travels as <u2, fp8 as |u1.
std::string_view descr_of(DType dtype);

/// An array of int32, int64 or float numbers, or of unsigned bytes and what is stored as one; a
/// list, unless `shape` says otherwise.
template <std::ranges::contiguous_range Values>
NpyArray array_of(const Values& values, std::vector<std::int64_t> shape = {}) {
  using T = std::ranges::range_value_t<Values>;
  constexpr bool kIsFloat = std::is_same_v<T, float>;
  static_assert(kIsFloat || std::is_integral_v<T> || sizeof(T) == 1);
  constexpr const char* kDescr = kIsFloat         ? "<f4"
                                 : sizeof(T) == 8 ? "<i8"
                                 : sizeof(T) == 4 ? "<i4"
                                                  : "|u1";
  if (shape.empty()) shape = {std::ssize(values)};
  const auto bytes = std::as_bytes(std::span<const T>(values));
  return {kDescr, std::move(shape), {bytes.begin(), bytes.end()}};
}

}  // namespace clattn::npy
