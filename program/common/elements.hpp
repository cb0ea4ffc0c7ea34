#pragma once

#include <array>
#include <clattn/types.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oracle/oracle.hpp"

namespace clattn::cli {

/// The oracle's name of an element type.
oracle::Element element_of(DType dtype);

/// The library's own name of an element type, from any spelling of it; other text unchanged.
std::string dtype_name(const std::string& text);

/// What the type of a cache is called.
inline constexpr std::array<std::string_view, 7> kCacheTypeNames = {
    "auto", "f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"};
/// And its format, with a scale for each token and head.
inline constexpr std::array<std::string_view, 10> kCacheFormatNames = {"auto",
                                                                       "f32",
                                                                       "f16",
                                                                       "bf16",
                                                                       "fp8_e4m3",
                                                                       "fp8_e5m2",
                                                                       "int8",
                                                                       "int8_per_token_head",
                                                                       "fp8_per_token_head",
                                                                       "uint4_per_token_head"};

/// Rounds values to `dtype` and stores their bits, little endian; and widens them again.
std::vector<std::byte> encode_elements(DType dtype, std::span<const double> values);
std::vector<double> decode_elements(DType dtype, std::span<const std::byte> bytes);

/// `count` normally distributed values of this mean and standard deviation, stored as `dtype`.
std::vector<std::byte> random_elements(DType dtype, std::size_t count, std::uint32_t seed,
                                       double size = 1, double mean = 0);

/// The numbers below `count` in any order.
std::vector<std::int32_t> shuffled_pages(std::int64_t count, std::uint32_t seed);

/// Host elements over `scale`, as a cache write stores them: rounded to nearest even.
std::vector<std::byte> convert_elements(DType from, DType to, std::span<const std::byte> bytes,
                                        double scale = 1);

}  // namespace clattn::cli
