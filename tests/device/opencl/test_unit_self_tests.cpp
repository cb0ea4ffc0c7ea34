// Self-tests of matrix units on the devices of this machine: on GPUs as contexts run them, on CPUs
// whose sub-groups run in step by the units' second bodies (CLA_PTX 2).
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "device/runtime_fixture.hpp"
#include "opencl/device/units.hpp"

namespace clattn::detail {
namespace test_unit_self_tests {

namespace fs = std::filesystem;

constexpr cl_uint kSeed = 12345;

/// Types by their numbers in kernels_cl/core/types.clh.
struct Case {
  int dtype, cache_dtype, head_size;
};
constexpr Case kTiles[] = {{1, 1, 128}, {2, 2, 128}};
constexpr Case kFewRows[] = {{1, 1, 32},  {1, 1, 64}, {2, 2, 96},
                             {2, 2, 128}, {1, 5, 64}, {1, 4, 32}};

/// Text of a unit's header, and a replacement that makes a map or an exchange wrong.
struct Fault {
  std::string_view unit;
  std::string_view file;  ///< that holds the text
  std::string_view right, wrong;
};
constexpr Fault kFaults[] = {
    {"mfma_decode", "tile/wave_decode.clh", "CLA_V_KEY_STEP(i) CLA_C_COLUMN_STEP(i)",
     "CLA_V_KEY_STEP(i) ((i) ^ 1)"},
    {"mfma_decode", "tile/mfma_decode.clh", "((lane) / 16 * CLA_O_TILE_UNITS)",
     "((lane) / 16 % 2 * CLA_O_TILE_UNITS)"},
    {"mfma_decode", "tile/wave_decode.clh", "CLA_ROW_LANES (CLA_LANES - 16u)", "CLA_ROW_LANES 32u"},
    {"mfma_decode", "tile/wave_decode.clh",
     "cla_v_share, lane, CLA_O_REGISTER(lane) / CLA_O_TILE_UNITS", "cla_v_share, lane, 0u"},
    {"wmma_decode", "tile/warps.clh", "value += as_float(cla_shuffle_word(as_uint(value), mask))",
     "value += value"},
    {"wmma_decode", "attention/decode_tiles.clh", "cla_own_key, lane, lane % CLA_TILE_KEYS",
     "cla_own_key, lane, (lane + 1) % CLA_TILE_KEYS"},
    {"dpas8_decode", "tile/dpas_decode.clh", "cla_o_unit, lane, lane",
     "cla_o_unit, lane, lane ^ 1u"},
    {"dpas16_decode", "attention/decode_tiles.clh", "cla_own_key, lane, lane % CLA_TILE_KEYS",
     "cla_own_key, lane, lane ^ 2u"},
};

std::string text_of(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class UnitSelfTests : public RuntimeFixture {
 protected:
  void SetUp() override {
    RuntimeFixture::SetUp();
    fs::remove_all(options_.kernel_dir);
    fs::copy(fs::path(CLATTN_SOURCE_DIR) / "kernels_cl", options_.kernel_dir,
             fs::copy_options::recursive);
    options_.cache_dir.clear();
  }

  /// Whether the unit computes right; empty if the device has none.
  static std::optional<bool> is_right(Runtime& runtime, const Unit& unit) {
    const DeviceCapabilities& device = runtime.capabilities();
    const auto names = [&](const std::vector<std::string>& units) {
      return std::ranges::find(units, unit.name) != units.end();
    };
    if (names(device.matrix_units)) return true;
    if (names(device.wrong_matrix_units)) return false;
    const auto lanes = static_cast<std::uint32_t>(unit.traits.lanes);
    const bool by_sub_groups = unit.traits.by_sub_groups && device.kind == DeviceKind::kCpu &&
                               (device.sub_groups_in_step & lanes) != 0;
    return by_sub_groups ? std::optional(is_right_in(runtime, unit, {1, 1, 64})) : std::nullopt;
  }

  void put(const Fault& fault) const {
    std::string text = text_of(fs::path(options_.kernel_dir) / fault.file);
    const std::size_t at = text.find(fault.right);
    ASSERT_NE(at, std::string::npos) << fault.right;
    text.replace(at, fault.right.size(), fault.wrong);
    write_kernel(std::string(fault.file), text);
  }

  /// By a launch of the self-test.
  static bool is_right_in(Runtime& runtime, const Unit& unit, const Case& wanted) {
    const auto group = 2 * static_cast<std::size_t>(unit.traits.lanes);
    const bool cpu = runtime.capabilities().kind == DeviceKind::kCpu;
    const auto pool = runtime.kernel(
        {std::string(unit.self_test()), "clattn_selftest_unit",
         fmt::format("-DCLA_WG_SIZE={} -DCLA_Q_DTYPE={} -DCLA_KV_DTYPE={} -DCLA_HEAD_DIM={}{}",
                     group, wanted.dtype, wanted.cache_dtype, wanted.head_size,
                     cpu ? fmt::format(" -DCLA_PTX=2 -DCLA_SUB_GROUP={}", unit.traits.lanes)
                         : fmt::format(" -DCLA_PTX=0{}", unit.compiler_options())),
         std::string(unit.header)});
    std::vector<cl_uint> result(std::size_t{1} << 14U);
    const Queue queue = runtime.create_queue(QueueProfiling::kOff);
    const Buffer out = runtime.allocate(result.size() * sizeof(cl_uint));
    queue.fill(out, 0xdeadbeefU, 0, out.size_bytes());
    pool->acquire().arg(out.handle()).arg(kSeed).enqueue(queue, 1, group);
    queue.read(out, std::as_writable_bytes(std::span(result)));
    return is_right_unit_result(result, kSeed);
  }
};

TEST_P(UnitSelfTests, FindEveryUnitRight) {
  const auto runtime = make_runtime();
  bool any = false;
  for (const Unit* unit : matrix_units()) {
    const std::optional<bool> right = is_right(*runtime, *unit);
    EXPECT_TRUE(right.value_or(true)) << unit->name;
    for (const Unit* other : matrix_units()) {
      if (other->traits.instructions != unit->traits.instructions) continue;
      EXPECT_EQ(is_right(*runtime, *other).has_value(), right.has_value()) << other->name;
    }
    if (!right) continue;
    any = true;
    for (const Case& wanted : unit->traits.few_rows ? std::span<const Case>(kFewRows) : kTiles)
      EXPECT_TRUE(is_right_in(*runtime, *unit, wanted))
          << unit->name << ": " << wanted.dtype << " " << wanted.cache_dtype << " "
          << wanted.head_size;
  }
  if (!any) GTEST_SKIP() << "no matrix unit here";
}

TEST_P(UnitSelfTests, SeeAWrongMap) {
  const auto sound = make_runtime();
  bool any = false;
  for (const Fault& fault : kFaults) {
    const auto unit = std::ranges::find(kUnits, fault.unit, &Unit::name);
    if (is_right(*sound, *unit) != std::optional(true)) continue;
    any = true;
    const std::string text = text_of(fs::path(options_.kernel_dir) / fault.file);
    put(fault);
    EXPECT_EQ(is_right(*make_runtime(), *unit), std::optional(false)) << fault.wrong;
    write_kernel(std::string(fault.file), text);
  }
  if (!any) GTEST_SKIP() << "no matrix unit here";
}

INSTANTIATE_TEST_SUITE_P(All, UnitSelfTests, testing::ValuesIn(list_devices()), device_suffix);

}  // namespace test_unit_self_tests
}  // namespace clattn::detail
