#include "opencl/device/self_test.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <numeric>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "opencl/device/device_info.hpp"
#include "opencl/device/units.hpp"
#include "opencl/program/program.hpp"
#include "shared/call.h"

namespace clattn::detail {
namespace {

// Sizes that kernels are written for, largest first: the limits of compute capability 9.0, 8.0,
// 8.9 and 7.0, and the powers of two of other devices, each also 1 KiB smaller because a compiler
// may take some bytes for itself.
constexpr std::uint64_t kLocalBytes[] = {
    226U << 10U, 162U << 10U, 128U << 10U, 127U << 10U, 98U << 10U, 95U << 10U, 64U << 10U,
    63U << 10U,  48U << 10U,  47U << 10U,  32U << 10U,  31U << 10U, 16U << 10U, 8U << 10U};
constexpr cl_uint kSeed = 0x51ed270bU;
constexpr int kStructTest = 10;
constexpr cl_uint kSubGroups[] = {8, 16, 32, 64};  // that kernels are written for
constexpr std::size_t kLocalGroups = 4;            // so that groups could disturb one another
constexpr cl_uint kWarpgroup = 128;
constexpr int kZmmFloats = 16;  // of a register of AVX-512
constexpr cl_uint kNvidiaVendorId = 0x10de;
constexpr std::string_view kIntel = "Intel(R) OpenCL";  // platform of its CPU runtime

/// Builds and runs kernels of one text.
struct Prober {
  cl_context context;
  cl_device_id device;
  const std::string& text;
  std::size_t group_size;
  bool& conclusive;  ///< becomes false where a result says nothing of the device

  /// The `count` words that `entry` wrote, nothing when it did not build or run.
  std::optional<std::vector<cl_uint>> run(int test, const char* entry, std::uint64_t local_bytes,
                                          std::size_t groups, std::size_t count,
                                          std::string_view language = kBuildOptions) const {
    const std::string options =
        fmt::format("{} -DCLA_SELFTEST={} -DCLA_WG_SIZE={} -DCLA_LOCAL_BYTES={}", language, test,
                    group_size, local_bytes);
    Compilation built = compile_program(context, device, text, options);
    // Some drivers say this when the device has too little local memory. Then it fails each time;
    // a driver that is short of resources for a moment succeeds on the second try.
    if (built.status == CL_OUT_OF_RESOURCES)
      built = compile_program(context, device, text, options);
    if (built.status != CL_SUCCESS) {
      constexpr std::array kVerdicts = {CL_BUILD_PROGRAM_FAILURE, CL_OUT_OF_RESOURCES,
                                        CL_INVALID_BUILD_OPTIONS};
      if (std::ranges::find(kVerdicts, built.status) == kVerdicts.end()) conclusive = false;
      return std::nullopt;
    }
    try {
      return launch(built.program.get(), entry, groups, count, test == kStructTest);
    } catch (const Error&) {
      conclusive = false;
      return std::nullopt;
    }
  }

  std::vector<cl_uint> launch(cl_program program, const char* entry, std::size_t groups,
                              std::size_t count, bool takes_call) const {
    std::vector<cl_uint> result(count, 0xdeadbeefU);  // stale words would pass no check
    const std::size_t size = count * sizeof(cl_uint);
    const std::size_t items = groups * group_size;
    cl_int status = CL_SUCCESS;
    const Queue queue = create_queue(context, device, QueueProfiling::kOff);
    const KernelHandle kernel(clCreateKernel(program, entry, &status));
    check(status, "self-test: clCreateKernel");
    const MemoryHandle memory(clCreateBuffer(context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR,
                                             size, result.data(), &status));
    check(status, "self-test: clCreateBuffer");
    const auto set = [&](cl_uint index, std::size_t bytes, const void* value) {
      check(clSetKernelArg(kernel.get(), index, bytes, value), "self-test: clSetKernelArg");
    };
    cl_mem output = memory.get();
    set(0, sizeof(output), &output);  // NOLINT(bugprone-sizeof-expression): the handle's own size
    set(1, sizeof(kSeed), &kSeed);
    if (takes_call) {
      std::array<cl_uint, sizeof(ClaCall) / sizeof(cl_uint)> words{};
      std::iota(words.begin(), words.end(), kSeed);
      set(2, sizeof(words), words.data());
    }
    check(clEnqueueNDRangeKernel(queue, kernel.get(), 1, nullptr, &items, &group_size, 0, nullptr,
                                 nullptr),
          "self-test: clEnqueueNDRangeKernel");
    check(clEnqueueReadBuffer(queue, output, CL_TRUE, 0, size, result.data(), 0, nullptr, nullptr),
          "self-test: clEnqueueReadBuffer");
    return result;
  }
};

bool local_memory_works(const Prober& prober, std::uint64_t bytes) {
  const std::size_t words = kLocalGroups * prober.group_size;
  const auto right = prober.run(1, "clattn_selftest_local", bytes, kLocalGroups, words);
  const std::uint64_t expected = bytes / sizeof(cl_uint) / prober.group_size;
  return right && std::ranges::all_of(*right, [&](cl_uint count) { return count == expected; });
}

std::optional<int> probe_wave(const Prober& prober, int test, std::string_view language) {
  const std::size_t count = 3 * prober.group_size;
  const auto result = prober.run(test, "clattn_selftest_wave", 0, 1, count, language);
  return result ? proven_wave_size(*result, kSeed) : std::nullopt;
}

/// Some compilers know sub-groups in any language, others in a later one alone.
std::optional<int> probe_sub_groups(const Prober& prober) {
  for (const std::string_view language : {kBuildOptions, std::string_view("-cl-std=CL2.0 -w"),
                                          std::string_view("-cl-std=CL3.0 -w")}) {
    if (const std::optional<int> width = probe_wave(prober, 3, language)) return width;
  }
  return std::nullopt;
}

/// Whether each lane of a group found its result right; nothing when it did not build or run.
std::optional<bool> lanes_right(const Prober& prober, int test, const char* entry,
                                std::string_view language = kBuildOptions) {
  const auto result = prober.run(test, entry, 0, 1, prober.group_size, language);
  if (!result) return std::nullopt;
  for (std::size_t lane = 0; lane < result->size(); ++lane) {
    if ((*result)[lane] != kSeed + static_cast<cl_uint>(lane)) return false;
  }
  return true;
}
bool all_lanes_right(const Prober& prober, int test, const char* entry,
                     std::string_view language = kBuildOptions) {
  return lanes_right(prober, test, entry, language).value_or(false);
}

/// The largest relative error of native_exp2 where weights of a softmax have their arguments; 1
/// where it computes nothing, or something else than 0 of what is far below.
float native_exp2_error(const Prober& prober) {
  constexpr std::size_t kGroups = 256;
  const std::size_t count = kGroups * prober.group_size;
  const auto result = prober.run(7, "clattn_selftest_exp2", 0, kGroups, count);
  if (!result || (*result)[count - 1] != 0) return 1;
  double largest = 0;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    const double exact = std::exp2(-static_cast<double>(i) / 512);
    const double error = std::abs(std::bit_cast<float>((*result)[i]) / exact - 1);
    if (!(error < 1)) return 1;
    largest = std::max(largest, error);
  }
  return static_cast<float>(largest);
}

/// PTX ISA 7.8 brought sm_90 and its conversions of fp8 together. Those of sm_89 came with 8.1,
/// which an older driver's assembler does not know.
bool converts_fp8(const Prober& prober, int ptx_arch) {
  constexpr int kLater = 89;
  return ptx_arch > kLater ||
         (ptx_arch == kLater && all_lanes_right(prober, 5, "clattn_selftest_fp8"));
}

/// Of selftest_amx.cl: A B, of 32 x 64 by 64 x 32, computed and then added three times for each of
/// three widths: C = 10 A B.
bool tile_products_are_right(const Prober& prober) {
  constexpr cl_uint kRows = 32, kDepth = 64;
  const auto result = prober.run(0, "clattn_selftest_amx", 0, 1, std::size_t{kRows} * kRows);
  if (!result) return false;
  const auto element = [](cl_uint row, cl_uint column) {  // CLA_ELEMENT of selftest_amx.cl
    return static_cast<int>(((row * 128U + column + kSeed) * 2654435761U >> 20U) % 16U) - 8;
  };
  for (cl_uint row = 0; row < kRows; ++row) {
    for (cl_uint column = 0; column < kRows; ++column) {
      int sum = 0;
      for (cl_uint i = 0; i < kDepth; ++i) sum += element(row, i) * element(i, 64 + column);
      const auto got = std::bit_cast<float>((*result)[std::size_t{row} * kRows + column]);
      if (got != static_cast<float>(10 * sum)) return false;
    }
  }
  return true;
}

enum class UnitVerdict : std::uint8_t { kAbsent, kRight, kWrong };

/// By the numbers of types of kernels_cl/core/types.clh.
std::string self_test_options(const Unit& unit, int dtype, int cache_dtype) {
  return fmt::format("{} -DCLA_PTX=0 -DCLA_Q_DTYPE={} -DCLA_KV_DTYPE={}{}", kBuildOptions, dtype,
                     cache_dtype, unit.compiler_options());
}

/// Of f16, by a unit that is right.
bool flushes_subnormals(const Prober& prober, const Unit& unit) {
  const auto result =
      prober.run(0, "clattn_selftest_subnormals", 0, 1, 1, self_test_options(unit, 1, 1));
  return result && std::bit_cast<float>(result->front()) == 0;
}

/// What is compiled for a test.
struct UnitCase {
  int dtype, cache_dtype, head_size;
};
constexpr UnitCase kTileCases[] = {{1, 1, 128}, {2, 2, 128}};  // f16, bf16; the size is not used
/// Head sizes whose lanes share units of values by four, by two and not at all; of caches of 8
/// bits, what floats and integers take.
constexpr UnitCase kFewRowsCases[] = {{1, 1, 32},  {1, 1, 64}, {1, 1, 128}, {2, 2, 32}, {2, 2, 64},
                                      {2, 2, 128}, {1, 4, 32}, {1, 4, 64},  {1, 5, 32}, {1, 5, 64}};

/// A unit whose header the compiler refuses in any case is absent.
UnitVerdict judge_unit(const Prober& prober, const Unit& unit) {
  constexpr std::size_t kMostWords = std::size_t{1} << 14U;
  UnitVerdict verdict = UnitVerdict::kRight;
  for (const UnitCase& wanted :
       unit.traits.few_rows ? std::span<const UnitCase>(kFewRowsCases) : kTileCases) {
    const std::string options =
        fmt::format("{} -DCLA_HEAD_DIM={}",
                    self_test_options(unit, wanted.dtype, wanted.cache_dtype), wanted.head_size);
    const auto result = prober.run(0, "clattn_selftest_unit", 0, 1, kMostWords, options);
    if (!result) return UnitVerdict::kAbsent;
    if (!is_right_unit_result(*result, kSeed)) verdict = UnitVerdict::kWrong;
  }
  return verdict;
}

/// The index of the unit of tiles with the same instructions; of such a unit, its own.
std::size_t tile_unit_of(const Unit& unit) {
  const auto& tested = matrix_units();
  const auto tile = std::ranges::find_if(tested, [&](const Unit* other) {
    return other->traits.instructions == unit.traits.instructions;
  });
  return static_cast<std::size_t>(tile - tested.begin());
}

/// Sets the unit's bits of a result in which the units of tiles have theirs.
void test_unit(const Prober& prober, std::size_t index, SelfTestResult& result) {
  const Unit& unit = *matrix_units().at(index);
  const std::uint32_t own = 1U << index, tile = 1U << tile_unit_of(unit);
  if (unit.traits.few_rows && (result.right_matrix_units & tile) == 0) {
    if ((result.wrong_matrix_units & tile) != 0) result.wrong_matrix_units |= own;
    return;
  }
  const UnitVerdict verdict = judge_unit(prober, unit);
  if (verdict == UnitVerdict::kRight) result.right_matrix_units |= own;
  if (verdict == UnitVerdict::kWrong) result.wrong_matrix_units |= own;
  if (verdict == UnitVerdict::kRight && !unit.traits.few_rows && flushes_subnormals(prober, unit))
    result.flushing_matrix_units |= own;
}

void test_sub_groups(const Prober& several, DeviceKind kind, SelfTestResult& result) {
  // As the kernels of lanes are built there (kernels/choose/variants.cpp).
  const char* const plain = kind == DeviceKind::kCpu ? " -cl-opt-disable" : "";
  for (const cl_uint lanes : kSubGroups) {
    const std::string language =
        fmt::format("{} -DCLA_SUB_GROUP={}{}", kBuildOptions, lanes, plain);
    if (all_lanes_right(several, 11, "clattn_selftest_lanes", language))
      result.sub_groups_in_step |= lanes;
  }
}

}  // namespace

bool survives_assembly(std::string_view platform_name, std::string_view driver_version,
                       bool defaults) {
  if (platform_name == kIntel) return true;
  if (platform_name != "Portable Computing Language") return false;
  const char* const end = driver_version.data() + driver_version.size();
  int major = 0, minor = 0;
  const auto [point, failed] = std::from_chars(driver_version.data(), end, major);
  if (failed != std::errc() || point == end || *point != '.') return false;
  if (std::from_chars(point + 1, end, minor).ec != std::errc()) return false;
  const bool snapshot = driver_version.find("-pre") != std::string_view::npos;
  const bool releases = (major == 5 || major == 6) && minor == 0 && !snapshot;
  return major < 3 || (major == 3 && minor < 2) || major > 6 || (releases && defaults);
}

std::optional<int> proven_wave_size(std::span<const cl_uint> result, cl_uint seed) {
  const std::size_t items = result.size() / 3;
  const auto width = result.subspan(0, items);
  const auto wave = result.subspan(items, items);
  const auto sum = result.subspan(2 * items, items);
  for (std::size_t i = 0; i < items; ++i) {
    cl_uint lanes = 0;
    cl_uint expected = 0;
    for (cl_uint lane = 0; lane < items; ++lane) {
      if (wave[lane] != wave[i]) continue;
      ++lanes;
      expected += seed + lane;
    }
    if (width[i] != width[0] || lanes != width[0] || sum[i] != expected) return std::nullopt;
  }
  return items == 0 ? std::nullopt : std::optional(static_cast<int>(width[0]));
}

SelfTestReport run_self_tests(cl_context context, cl_device_id device,
                              const DeviceCapabilities& reported, const SelfTestTexts& texts) {
  const std::string& text = texts.device;
  const auto largest = std::min<std::uint64_t>(64, reported.max_work_group_size);
  SelfTestReport report;
  SelfTestResult& result = report.result;
  const auto prober_of = [&](const std::string& source, std::size_t group_size) {
    return Prober{context, device, source, group_size, report.conclusive};
  };
  const Prober prober = prober_of(text, static_cast<std::size_t>(std::bit_floor(largest)));
  const Prober alone = prober_of(text, 1);
  // PTX exists on that vendor's chips only, and another compiler may die of foreign assembly
  // instead of refusing it. Whether it is usable is the test's to say.
  if (reported.kind == DeviceKind::kGpu &&
      device_value<cl_uint>(device, CL_DEVICE_VENDOR_ID) == kNvidiaVendorId) {
    const std::optional<int> warp = probe_wave(prober, 2, kBuildOptions);
    result.inline_ptx = warp ? 1 : 0;
    result.wave_size = warp.value_or(0);
  }
  if (result.inline_ptx != 0 && reported.max_work_group_size >= kWarpgroup) {
    result.warpgroup_products =
        all_lanes_right(prober_of(text, kWarpgroup), 4, "clattn_selftest_products") ? 1 : 0;
  }
  if (result.inline_ptx != 0) {
    result.fp8_conversions = converts_fp8(prober, reported.ptx_arch) ? 1 : 0;
  }
  if (reported.kind == DeviceKind::kCpu && reported.float_vector_width >= kZmmFloats &&
      survives_assembly(reported.platform_name, reported.driver_version,
                        environment().pocl_defaults)) {
    result.bf16_products = all_lanes_right(alone, 6, "clattn_selftest_bf16") ? 1 : 0;
    if (!texts.x86_tiles.empty())
      result.x86_tiles = tile_products_are_right(prober_of(texts.x86_tiles, 1)) ? 1 : 0;
  }
  // Where the test does not build, kernels do not either, and their builds' errors say why.
  const std::optional<bool> arrives = lanes_right(prober, kStructTest, "clattn_selftest_struct");
  result.struct_arguments = arrives.value_or(true) ? 1 : 0;
  result.native_exp2_error = native_exp2_error(prober);
  if (reported.kind != DeviceKind::kGpu) {
    result.native_builtins = all_lanes_right(alone, 8, "clattn_selftest_builtins") ? 1 : 0;
    result.long_loops = all_lanes_right(alone, 9, "clattn_selftest_loops") ? 1 : 0;
    // Intel's compiler targets SPIR and has no built-in for it.
    if (reported.kind == DeviceKind::kCpu && reported.platform_name == kIntel)
      result.x86_prefetch = all_lanes_right(alone, 12, "clattn_selftest_prefetch") ? 1 : 0;
  }
  if (result.wave_size == 0 && reported.reports_subgroups) {
    result.wave_size = probe_sub_groups(prober).value_or(0);
  }
  if (result.inline_ptx == 0 && reported.reports_subgroups &&
      reported.max_work_group_size >= kWarpgroup) {
    // Sub-groups at the same time.
    test_sub_groups(prober_of(text, kWarpgroup), reported.kind, result);
  }
  for (std::size_t i = 0; i < matrix_units().size(); ++i) {
    const auto group = 2 * static_cast<std::size_t>(matrix_units()[i]->traits.lanes);
    if (reported.kind != DeviceKind::kGpu || reported.max_work_group_size < group) continue;
    test_unit(prober_of(texts.units.at(i), group), i, result);
  }
  for (const std::uint64_t bytes : kLocalBytes) {
    // The driver that assembles PTX reports 48 KiB and takes static arrays far beyond; elsewhere
    // the reported size is the limit.
    if (bytes > reported.local_mem_bytes && result.inline_ptx == 0) continue;
    if (!local_memory_works(prober, bytes)) continue;
    result.static_local_mem_bytes = bytes;
    break;
  }
  // A compiler that builds no kernel at all is badly installed, which says nothing of the device.
  if (result.static_local_mem_bytes == 0) report.conclusive = false;
  return report;
}

}  // namespace clattn::detail
