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

/// A unit of the contract (kernels_cl/tile/CONTRACT.md), used where its self-test passes.
struct MatrixUnit {
  std::string_view header;
  std::size_t lanes;  ///< of a warp
  std::string_view instructions;
  std::string_view options = {};  ///< of the compiler that has them, after a space
  bool few_rows = false;  ///< of the contract for few rows: maps may depend on the head size

  /// The file of kernels_cl/ that is compiled with the header.
  std::string_view self_test() const {
    return few_rows ? "attention/selftest_decode.cl" : "tile/selftest_unit.cl";
  }
};
inline constexpr std::string_view kIntelRegisters = " -cl-intel-256-GRF-per-thread";
/// Units of tiles first: those for few rows are tested only where these are right.
inline constexpr auto kMatrixUnits = std::to_array<MatrixUnit>({
    {"tile/mfma.clh", 64, "AMD's MFMA"},
    {"tile/wmma.clh", 32, "AMD's WMMA"},
    {"tile/dpas8.clh", 8, "Intel's DPAS in sub-groups of 8", kIntelRegisters},
    {"tile/dpas16.clh", 16, "Intel's DPAS in sub-groups of 16", kIntelRegisters},
    {"tile/mfma_decode.clh", 64, "AMD's MFMA", "", true},
    {"tile/wmma_decode.clh", 32, "AMD's WMMA", "", true},
    {"tile/dpas8_decode.clh", 8, "Intel's DPAS in sub-groups of 8", kIntelRegisters, true},
    {"tile/dpas16_decode.clh", 16, "Intel's DPAS in sub-groups of 16", kIntelRegisters, true},
});

/// The headers of a set: bit i is kMatrixUnits[i].
std::vector<std::string> unit_headers(std::uint32_t set);

/// Whether the result of a self-test is right: products, maxima and sums.
bool is_right_unit_result(std::span<const cl_uint> result, cl_uint seed);

}  // namespace clattn::detail
