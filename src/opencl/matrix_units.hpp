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

/// A unit of the contract (kernels_cl/tile/CONTRACT.md) that a device has where its own self-test,
/// kernels_cl/tile/selftest_unit.cl over its header, says so.
struct MatrixUnit {
  std::string_view header;
  std::size_t lanes;  ///< of a warp
  std::string_view instructions;
};
inline constexpr auto kMatrixUnits = std::to_array<MatrixUnit>({
    {"tile/mfma.clh", 64, "AMD's MFMA"},
    {"tile/wmma.clh", 32, "AMD's WMMA"},
    {"tile/dpas8.clh", 8, "Intel's DPAS in sub-groups of 8"},
    {"tile/dpas16.clh", 16, "Intel's DPAS in sub-groups of 16"},
});

/// The headers of a set: bit i is kMatrixUnits[i].
std::vector<std::string> unit_headers(std::uint32_t set);

/// Whether the result of selftest_unit.cl is what the products of its matrices are.
bool is_right_unit_result(std::span<const cl_uint> result, cl_uint seed);

}  // namespace clattn::detail
