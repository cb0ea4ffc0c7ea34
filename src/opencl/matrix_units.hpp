#pragma once

#include <clattn/opencl.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace clattn::detail {

/// A unit of the contract (kernels_cl/tile/CONTRACT.md) that a device has where its own self-test
/// says so.
struct MatrixUnit {
  std::string_view header;
  std::size_t lanes;  ///< of a warp
  std::string_view instructions;
  bool few_rows = false;  ///< of the contract for few rows, whose maps depend on the head size

  /// The file of kernels_cl/ that is compiled over the header.
  std::string_view self_test() const {
    return few_rows ? "attention/selftest_decode.cl" : "tile/selftest_unit.cl";
  }
};
inline constexpr auto kMatrixUnits = std::to_array<MatrixUnit>({
    {"tile/mfma.clh", 64, "AMD's MFMA"},
    {"tile/wmma.clh", 32, "AMD's WMMA"},
    {"tile/dpas8.clh", 8, "Intel's DPAS in sub-groups of 8"},
    {"tile/dpas16.clh", 16, "Intel's DPAS in sub-groups of 16"},
    {"tile/mfma_decode.clh", 64, "AMD's MFMA", true},
    {"tile/wmma_decode.clh", 32, "AMD's WMMA", true},
    {"tile/dpas8_decode.clh", 8, "Intel's DPAS in sub-groups of 8", true},
    {"tile/dpas16_decode.clh", 16, "Intel's DPAS in sub-groups of 16", true},
});

/// The headers of a set: bit i is kMatrixUnits[i].
std::vector<std::string> unit_headers(std::uint32_t set);

/// Whether the result of a self-test is what the products of its matrices are.
bool is_right_unit_result(std::span<const cl_uint> result, cl_uint seed);

}  // namespace clattn::detail
