#include "opencl/device/units.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

namespace clattn::detail {
namespace {

constexpr std::size_t kSizes = 5;

/// Sizes of the products, and how many warps have matrices of their own, as the self-test wrote
/// them.
struct UnitSizes {
  cl_uint rows, keys, depth, dims, warps;

  bool are_sound() const {
    constexpr cl_uint kMost = 128;  // dims; tiles are smaller
    return std::min({rows, keys, depth, dims, warps}) >= 1 &&
           std::max({rows, keys, depth, dims}) <= kMost && warps <= 2;
  }
  /// Of a warp's matrices.
  std::size_t words() const { return std::size_t{rows} * (keys + dims + 2); }
};

float number(cl_uint bits) {
  return std::bit_cast<float>(bits);
}

cl_uint size_of(cl_uint bits) {
  const float size = number(bits);
  return size >= 0 && size < 1024 ? static_cast<cl_uint>(size) : 0;
}

/// What one warp computed, row by row.
bool is_right_warp(const UnitSizes& sizes, std::span<const cl_uint> words, cl_uint warp,
                   cl_uint seed) {
  const auto element = [&](cl_uint matrix, cl_uint row, cl_uint column, cl_uint size) {
    // CLA_ELEMENT of kernels_cl/tile/selftest_element.clh
    return ((warp * 64U + matrix * 16384U + row * 128U + column + seed) * 2654435761U >> 20U) %
           size;
  };
  const auto is = [&](std::size_t at, cl_uint value) {
    return number(words[at]) == static_cast<float>(value);
  };
  const std::size_t outputs = std::size_t{sizes.rows} * sizes.keys;
  const std::size_t maxima = outputs + std::size_t{sizes.rows} * sizes.dims;
  std::vector<cl_uint> scores(sizes.keys);
  for (cl_uint row = 0; row < sizes.rows; ++row) {
    for (cl_uint key = 0; key < sizes.keys; ++key) {
      scores[key] = 0;
      for (cl_uint i = 0; i < sizes.depth; ++i)
        scores[key] += element(0, row, i, 2) * element(1, key, i, 2);
      if (!is(std::size_t{row} * sizes.keys + key, scores[key])) return false;
    }
    for (cl_uint dim = 0; dim < sizes.dims; ++dim) {
      cl_uint sum = 0;
      for (cl_uint key = 0; key < sizes.keys; ++key) sum += scores[key] * element(2, key, dim, 4);
      if (!is(outputs + std::size_t{row} * sizes.dims + dim, sum)) return false;
    }
    if (!is(maxima + row, *std::ranges::max_element(scores))) return false;
    if (!is(maxima + sizes.rows + row, std::accumulate(scores.begin(), scores.end(), cl_uint{0})))
      return false;
  }
  return true;
}

}  // namespace

std::string Unit::compiler_options() const {
  std::string text(traits.options);
  if (traits.by_sub_groups) text += fmt::format(" -DCLA_SUB_GROUP={}", traits.lanes);
  return text;
}

const std::vector<const Unit*>& matrix_units() {
  static const std::vector<const Unit*> all = [] {
    std::vector<const Unit*> tested;
    for (const bool few_rows : {false, true}) {
      for (const Unit& unit : kUnits) {
        if (unit.needs == Needs::kMatrixUnit && unit.traits.few_rows == few_rows)
          tested.push_back(&unit);
      }
    }
    return tested;
  }();
  return all;
}

std::vector<std::string> unit_names(std::uint32_t set) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < matrix_units().size(); ++i) {
    if ((set >> i & 1U) != 0) names.emplace_back(matrix_units()[i]->name);
  }
  return names;
}

bool is_right_unit_result(std::span<const cl_uint> result, cl_uint seed) {
  if (result.size() < kSizes) return false;
  const UnitSizes sizes{size_of(result[0]), size_of(result[1]), size_of(result[2]),
                        size_of(result[3]), size_of(result[4])};
  if (!sizes.are_sound() || kSizes + sizes.warps * sizes.words() > result.size()) return false;
  for (cl_uint warp = 0; warp < sizes.warps; ++warp) {
    const auto own = result.subspan(kSizes + warp * sizes.words(), sizes.words());
    if (!is_right_warp(sizes, own, warp, seed)) return false;
  }
  return true;
}

}  // namespace clattn::detail
