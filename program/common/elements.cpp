#include "program/common/elements.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

namespace clattn::cli {

oracle::Element element_of(DType dtype) {
  using oracle::Element;
  constexpr std::pair<DType, Element> kElements[] = {
      {DType::kF32, Element::kF32},         {DType::kF16, Element::kF16},
      {DType::kBF16, Element::kBF16},       {DType::kFp8E4M3, Element::kFp8E4M3},
      {DType::kFp8E5M2, Element::kFp8E5M2}, {DType::kInt8, Element::kInt8},
      {DType::kUInt4x2, Element::kUInt4}};
  return std::ranges::find(kElements, dtype, &std::pair<DType, Element>::first)->second;
}

std::string dtype_name(const std::string& text) {
  const auto dtype = find_dtype(text);
  return dtype ? std::string(to_string(*dtype)) : text;
}

std::vector<std::byte> encode_elements(DType dtype, std::span<const double> values) {
  const std::size_t size = element_size_bytes(dtype);
  const oracle::Element element = element_of(dtype);
  std::vector<std::byte> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t bits = oracle::encode(element, values[i]);
    std::memcpy(&bytes[i * size], &bits, size);
  }
  return bytes;
}

std::vector<double> decode_elements(DType dtype, std::span<const std::byte> bytes) {
  const std::size_t size = element_size_bytes(dtype);
  const oracle::Element element = element_of(dtype);
  std::vector<double> values(bytes.size() / size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &bytes[i * size], size);
    values[i] = oracle::decode(element, bits);
  }
  return values;
}

std::vector<std::byte> random_elements(DType dtype, std::size_t count, std::uint32_t seed,
                                       double size, double mean) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(mean, size);
  std::vector<double> values(count);
  std::ranges::generate(values, [&] { return normal(generator); });
  return encode_elements(dtype, values);
}

std::vector<std::int32_t> shuffled_pages(std::int64_t count, std::uint32_t seed) {
  std::vector<std::int32_t> pages(static_cast<std::size_t>(count));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(seed));
  return pages;
}

std::vector<std::byte> convert_elements(DType from, DType to, std::span<const std::byte> bytes,
                                        double scale) {
  if (from == to && scale == 1) return {bytes.begin(), bytes.end()};
  std::vector<double> values = decode_elements(from, bytes);
  for (double& value : values) value /= scale;
  return encode_elements(to, values);
}

}  // namespace clattn::cli
