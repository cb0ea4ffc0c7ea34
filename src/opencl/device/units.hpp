#pragma once

#include <clattn/attention.hpp>
#include <clattn/opencl.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace clattn::detail {

/// What a unit needs of a device.
enum class Needs : std::uint8_t {
  kNothing,
  kCpu,
  kLanes,  ///< UnitTraits::lanes in step: a warp of inline PTX, or sub-groups
  kWarpgroups,
  kBF16Products,
  kX86Tiles,
  kMatrixUnit,  ///< its self-test saw the unit compute right
};

/// A set of element types.
using TypeSet = std::uint8_t;
constexpr TypeSet type_set(DType dtype) {
  return static_cast<TypeSet>(1U << static_cast<unsigned>(dtype));
}
inline constexpr TypeSet kBF16 = type_set(DType::kBF16);
inline constexpr TypeSet k16Bit = kBF16 | type_set(DType::kF16);
inline constexpr TypeSet kE4M3 = type_set(DType::kFp8E4M3);
inline constexpr TypeSet kFp8 = type_set(DType::kFp8E4M3) | type_set(DType::kFp8E5M2);
inline constexpr TypeSet k8Bit = kFp8 | type_set(DType::kInt8);
inline constexpr TypeSet kAnyType = k16Bit | k8Bit | type_set(DType::kF32);
/// Codes of 4 bits, too.
inline constexpr TypeSet k8Or4Bit = k8Bit | type_set(DType::kUInt4x2);
inline constexpr TypeSet kAnyCode = kAnyType | k8Or4Bit;
inline constexpr TypeSet kSameType = 1U << 7U;  ///< of a cache: the queries' type

inline constexpr std::string_view kIntelRegisters = " -cl-intel-256-GRF-per-thread";

struct UnitTraits {
  std::string_view instructions = {};  ///< of a matrix unit, for messages
  std::string_view options = {};       ///< of the compiler that has them, after a space
  /// What a group wrote before a fence is seen by a group that knows of it from an atomic, so
  /// kernels can merge their own splits. OpenCL C 1.2 does not promise that.
  bool fence = false;
  std::int32_t lanes = 0;      ///< that run in step; 0 = it knows of none
  std::int32_t tile_rows = 0;  ///< of a product, of a unit of the contract
  bool few_rows = false;       ///< of the contract for few rows: maps may depend on the head size
  bool asked_only = false;     ///< used only where a tuning row names the kernel
  bool ptx = false;            ///< by inline PTX where there is any, else by sub-groups
  /// Its header is for sub-groups of `lanes` (CLA_SUB_GROUP), and has a second body for CPUs, so
  /// that kernels can be checked there.
  bool by_sub_groups = false;
  std::int32_t dot = 0;               ///< CLA_DOT of kernels_cl/core/vec.clh
  bool rounds_probabilities = false;  ///< to the queries' type, before they meet V
  /// Queries and probabilities are rounded to e4m3, caches used as stored. Only where asked for.
  bool fp8_products = false;
  bool row_scales = true;              ///< in kernels that take a scale for each token and head
  std::int32_t head_step = 1;          ///< heads, and rotary parts, are a multiple of it
  std::int32_t most_key_elements = 0;  ///< block_kv * mean size of a key and a value; 0 = any
  /// Most accumulators of a warp, rows * value size, if warps divide them among themselves; 0 =
  /// any.
  std::int32_t most_sums = 0;
  /// In kernels whose warps have keys of their own (kPerWarp), several warps share the same keys,
  /// so that each has tile_rows rows and this many of their dims (CLA_WARP_DIMS of
  /// kernels_cl/tile/decode_sizes.clh); 0 = each has all rows and dims.
  std::int32_t warp_dims = 0;
};

/// A row UNIT of units.inc.
struct Unit {
  std::string_view name;
  std::string_view header;  ///< of kernels_cl, that kernels include as tile/unit.clh; empty = none
  KernelFamily family{};
  Needs needs{};
  TypeSet queries = 0, cache = 0;
  UnitTraits traits;

  /// Of the matrix unit: the file of kernels_cl/ that is compiled with the header.
  std::string_view self_test() const {
    return traits.few_rows ? "attention/selftest_decode.cl" : "tile/selftest_unit.cl";
  }
  /// Options of a program on the unit where its compiler has the instructions.
  std::string compiler_options() const;
};

enum class UnitId : std::uint8_t {
#define UNIT(name, ...) name,
#include "opencl/device/units.inc"
};
inline constexpr auto kUnits = std::to_array<Unit>({
#define UNIT(name, header, family, needs, queries, cache, ...) \
  {#name, header, KernelFamily::k##family, Needs::k##needs, queries, cache, {__VA_ARGS__}},
#include "opencl/device/units.inc"
});
constexpr const Unit& unit_of(UnitId id) {
  return kUnits[static_cast<std::size_t>(id)];
}

/// The units that a self-test judges (Needs::kMatrixUnit): those of tiles, then those for few rows.
const std::vector<const Unit*>& matrix_units();
/// Names of a set of them: bit i is matrix_units()[i].
std::vector<std::string> unit_names(std::uint32_t set);

/// Whether the result of a self-test is right: products, maxima and sums.
bool is_right_unit_result(std::span<const cl_uint> result, cl_uint seed);

}  // namespace clattn::detail
