#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/choose/tuned.hpp"
#include "kernels/choose/variants.hpp"
#include "opencl/device/device_info.hpp"

namespace clattn::detail {
namespace {

/// Options of the first variant with `name`.
std::string options_of(std::string_view name, const DeviceCapabilities& device) {
  const auto rows = variants();
  const auto row = std::find_if(rows.begin(), rows.end(),
                                [&](const Variant& each) { return each.name == name; });
  KernelShape shape;
  shape.num_heads = 8;
  shape.num_kv_heads = 2;
  shape.head_size = 128;
  shape.block_size = 16;
  shape.cache_dtype = DType::kFp8E4M3;
  return kernel_source(*row, shape, device).options;
}
/// The same on a GPU that converts fp8 by an instruction or not.
std::string options_of(std::string_view name, bool fp8_conversions) {
  DeviceCapabilities device;
  device.kind = DeviceKind::kGpu;
  device.inline_ptx = true;
  device.ptx_arch = 89;
  device.fp8_conversions = fp8_conversions;
  return options_of(name, device);
}

// PTX for compute capability 8.9 converts fp8 on newer drivers alone: what was seen to work counts,
// not the architecture.
TEST(Variants, Fp8IsConvertedAsTheDeviceWasSeenToDo) {
  const auto converts = [](std::string_view name, bool seen) {
    return options_of(name, seen).find(" -DCLA_FP8_CVT=1") != std::string::npos;
  };
  EXPECT_TRUE(converts("decode_mma__r16", true));
  EXPECT_TRUE(converts("decode_ring__r16", true));
  EXPECT_TRUE(converts("decode_gpu__r8_ptx", true));
  EXPECT_TRUE(converts("cache_write__wg128_ptx", true));
  EXPECT_FALSE(converts("decode_mma__r16", false));
  EXPECT_FALSE(converts("decode_gpu__r8_local", true));  // no PTX in these
  for (const char* name : {"decode_mma__r16", "decode_gpu__r8_local"}) {
    EXPECT_NE(options_of(name, false).find(" -DCLA_FP8_CVT=0"), std::string::npos) << name;
  }
}

// Those for prompts take values of fewer elements than keys, on Hopper's products one pair of
// sizes.
TEST(Variants, TakeSmallValuesAsTheirTraitsSay) {
  KernelShape shape;
  shape.num_heads = shape.num_kv_heads = 8;
  shape.head_size = 192;
  shape.dtype = shape.cache_dtype = DType::kBF16;
  const auto reason = [&](std::string_view name) {
    return why_not_types(*std::ranges::find(variants(), name, &Variant::name), shape);
  };
  shape.head_size_v = 128;
  for (const char* name :
       {"prefill_wgmma__r128_kv128", "prefill_wgmma__r128_kv64", "prefill_mma__r128_wg128",
        "prefill_gpu__r64_kv32", "prefill_mfma__r128_kv32", "prefill_dpas16__r128_d256",
        "prefill_amx__r256_kv64", "prefill_cpu__r256_kv64", "merge__wg128"})
    EXPECT_EQ(reason(name), "") << name;
  for (const char* name :
       {"decode_mma__r16_tokens", "decode_ring__r16_tokens", "decode_gpu__r4_local",
        "decode_cpu__r24_bf16", "prefill_wgmma__r192_kv64"})
    EXPECT_EQ(reason(name), "does not take heads of 192 with values of 128") << name;
  const auto& scalar = *std::ranges::find(variants(), "prefill_gpu__r64_kv32", &Variant::name);
  const std::string options = kernel_source(scalar, shape, {}).options;
  EXPECT_NE(options.find("-DCLA_HEAD_DIM=192 "), std::string::npos) << options;
  EXPECT_NE(options.find(" -DCLA_VALUE_DIM=128"), std::string::npos) << options;
  shape.block_size = 16;
  for (const char* name : {"decode_gpu__r4_local", "decode_cpu__r24", "prefill_gpu__r64_kv32",
                           "prefill_mma__r128_wg128", "prefill_mfma__r128_kv32",
                           "prefill_cpu__r256_kv64", "merge__wg128", "cache_write__vec"})
    EXPECT_EQ(reason(name), "") << name;
  for (const char* name :
       {"decode_mma__r16_tokens", "decode_ring__r16_tokens", "decode_cpu__r24_bf16",
        "prefill_amx__r256_kv64", "prefill_wgmma__r128_kv64", "prefill_wgmma__r192_kv64"})
    EXPECT_EQ(reason(name), "does not take heads of 192 with values of 128 in pages") << name;
  shape.block_size = 0;
  shape.head_size_v = 120;
  EXPECT_EQ(reason("prefill_amx__r256_kv64"), "does not take heads of 192 with values of 120");
  EXPECT_EQ(reason("prefill_wgmma__r128_kv64"), "does not take heads of 192 with values of 120");
  shape.head_size_v = 192;
  EXPECT_EQ(kernel_source(scalar, shape, {}).options.find("CLA_VALUE_DIM"), std::string::npos);
}

TEST(Variants, HeadsAbove256AreForThoseThatSaySo) {
  KernelShape shape;
  shape.num_heads = shape.num_kv_heads = 2;
  shape.head_size = 512;
  shape.block_size = 16;
  shape.dtype = shape.cache_dtype = DType::kBF16;
  for (const Variant& variant : variants()) {
    if (variant.role == Role::kMLADecode || variant.unit().fp8_products) continue;
    const bool taken = takes_types(variant, shape);
    EXPECT_EQ(taken, variant.kernel().most_head == 512) << variant.name;
    const std::string reason = taken ? "" : "does not take heads of 512";
    EXPECT_EQ(why_not_types(variant, shape), reason) << variant.name;
  }
}

// Assemblers before CUDA 12.5's read strides of tensor maps in other units.
TEST(Variants, KeysComeByTensorMapsWhereTheDriverAssemblesThem) {
  const auto row = std::find_if(variants().begin(), variants().end(), [](const Variant& each) {
    return each.name == "prefill_wgmma__r128_kv128";
  });
  ASSERT_NE(row, variants().end());
  const auto comes_in_boxes = [&](const char* driver, std::int32_t block_size) {
    DeviceCapabilities device;
    device.kind = DeviceKind::kGpu;
    device.driver_version = driver;
    KernelShape shape;
    shape.num_heads = 8;
    shape.num_kv_heads = 2;
    shape.head_size = 128;
    shape.block_size = block_size;
    return kernel_source(*row, shape, device).options.find(" -DCLA_BOXES=1") != std::string::npos;
  };
  EXPECT_TRUE(comes_in_boxes("580.159.04", 16));
  EXPECT_TRUE(comes_in_boxes("555.42.02", 48));
  EXPECT_FALSE(comes_in_boxes("580.159.04", 8));
  EXPECT_FALSE(comes_in_boxes("580.159.04", 0));
  EXPECT_FALSE(comes_in_boxes("550.163.01", 16));
  EXPECT_FALSE(comes_in_boxes("", 16));
}

// Three warpgroups have 160 registers a work-item, which is enough for heads of 64.
TEST(Variants, ThreeWarpgroupsTakeHeadsOf64BehindTwo) {
  const auto row_of = [](std::string_view name) {
    return std::ranges::find(variants(), name, &Variant::name);
  };
  const auto three = row_of("prefill_wgmma__r192_kv64");
  const auto two = row_of("prefill_wgmma__r128_kv128");
  ASSERT_NE(three, variants().end());
  ASSERT_NE(two, variants().end());
  EXPECT_LT(two, three);
  KernelShape shape;
  shape.num_heads = 8;
  shape.num_kv_heads = 2;
  shape.block_size = 16;
  for (const std::int32_t head_size : {64, 128, 256}) {
    shape.head_size = head_size;
    EXPECT_EQ(takes_shape(*three, shape), head_size == 64) << head_size;
    EXPECT_EQ(takes_shape(*two, shape), head_size != 256) << head_size;
  }
}

// Few cores read long runs faster; on many, tasks of eight KV heads are too coarse.
TEST(Variants, ManyComputeUnitsTakeFewerKVHeadsATask) {
  const auto decode = std::ranges::find(variants(), "decode_cpu__r24", &Variant::name);
  ASSERT_NE(decode, variants().end());
  KernelShape shape;
  shape.num_heads = 40;
  shape.num_kv_heads = 10;
  shape.head_size = 128;
  shape.block_size = 16;
  struct Case {
    std::int32_t cores, kv_heads, tasks;
  };
  for (const Case& is : {Case{2, 8, 2}, Case{8, 8, 2}, Case{9, 2, 5}, Case{64, 2, 5}}) {
    DeviceCapabilities device;
    device.kind = DeviceKind::kCpu;
    device.compute_units = is.cores;
    const HeadTiling tiling = head_tiling(*decode, shape, device);
    EXPECT_EQ(tiling.kv_heads, is.kv_heads) << is.cores;
    EXPECT_EQ(tiling.groups_per_item, is.tasks) << is.cores;
    const std::string macro = fmt::format(" -DCLA_KV_HEADS={} ", is.kv_heads);
    EXPECT_NE(kernel_source(*decode, shape, device).options.find(macro), std::string::npos);
  }
}

// Faster, but less accurate: never taken unasked.
TEST(Variants, Fp8ProductsAreForLayersThatAskForThem) {
  const auto row_of = [](std::string_view name) {
    return std::ranges::find(variants(), name, &Variant::name);
  };
  const auto fp8 = row_of("prefill_wgmma__r128_kv128_fp8");
  const auto other = row_of("prefill_wgmma__r128_kv128");
  ASSERT_NE(fp8, variants().end());
  ASSERT_NE(other, variants().end());
  EXPECT_LT(fp8, other);
  AttentionConfig config{.num_heads = 8, .num_kv_heads = 2, .head_size = 128};
  config.kv_cache_dtype = DType::kFp8E4M3;
  EXPECT_EQ(why_not_types(*fp8, kernel_shape(config)), "taken only where fp8_products asks for it");
  config.fp8_products = true;
  EXPECT_TRUE(takes_shape(*fp8, kernel_shape(config)));
  EXPECT_TRUE(takes_shape(*other, kernel_shape(config)));
  DeviceCapabilities device;
  device.kind = DeviceKind::kGpu;
  device.driver_version = "580.159.04";
  const auto source_of = [&](const Variant& variant) {
    return kernel_source(variant, kernel_shape(config), device);
  };
  EXPECT_EQ(source_of(*fp8).unit, "tile/sm90_fp8.clh");
  EXPECT_EQ(source_of(*other).unit, "tile/sm90.clh");
  EXPECT_NE(source_of(*fp8).options.find(" -DCLA_BOXES=1"), std::string::npos);
  EXPECT_EQ(source_of(*other).options.find("CLA_BOXES"), std::string::npos);
  for (const DType cache : {DType::kF16, DType::kFp8E5M2, DType::kInt8}) {
    config.kv_cache_dtype = cache;
    EXPECT_FALSE(kernel_shape(config).fp8_products);
    EXPECT_FALSE(takes_shape(*fp8, kernel_shape(config)));
  }
  config.kv_cache_dtype = DType::kFp8E4M3;
  config.custom_mask = true;
  EXPECT_FALSE(takes_shape(*fp8, kernel_shape(config)));
  config.custom_mask = false;
  config.alibi_slopes.assign(8, 0.5F);
  EXPECT_FALSE(takes_shape(*fp8, kernel_shape(config)));
  config.alibi_slopes.clear();
  config.num_heads = 34;  // decodes of 17 heads a KV head have no kernel of their own
  EXPECT_FALSE(takes_shape(*fp8, kernel_shape(config)));
  config.num_heads = 8;
  config.head_size = 64;
  EXPECT_FALSE(takes_shape(*fp8, kernel_shape(config)));
}

// Kernels that give a work-item all of a tile have more steps than some drivers let it make.
TEST(Variants, ACPUWhoseDriverCutsLoopsShortTakesTheOtherFamily) {
  DeviceCapabilities device;
  device.kind = DeviceKind::kCpu;
  device.max_work_group_size = 256;
  EXPECT_TRUE(serves_family(KernelFamily::kAuto, KernelFamily::kCpu, device));
  device.long_loops = false;
  EXPECT_TRUE(serves_family(KernelFamily::kAuto, KernelFamily::kGpu, device));
  EXPECT_FALSE(serves_family(KernelFamily::kAuto, KernelFamily::kCpu, device));
  for (const Variant& variant : variants()) {
    const std::vector<std::string> reasons = why_not(variant, device);
    if (variant.family() == KernelFamily::kGpu && variant.unit().lanes == 0) {
      EXPECT_TRUE(reasons.empty()) << variant.name;
    }
    if (variant.family() == KernelFamily::kCpu) {
      ASSERT_FALSE(reasons.empty()) << variant.name;
      EXPECT_NE(fmt::format("{}", fmt::join(reasons, ", ")).find("cut short"), std::string::npos);
    }
  }
}

// OpenCL promises groups of one work-item only; GPUs of phones allow 64 or more.
TEST(Variants, EveryRoleRunsInGroupsOf32) {
  DeviceCapabilities device;
  device.kind = DeviceKind::kGpu;
  device.max_work_group_size = 32;
  for (const Role role : {Role::kDecode, Role::kPrefill, Role::kMerge, Role::kMLADecode,
                          Role::kPackedDecode, Role::kCacheWrite, Role::kCacheWritePacked}) {
    EXPECT_EQ(why_none_runs(role, KernelFamily::kGpu, device), "") << to_string(role);
  }
}

// What the planner takes for the work-groups that run at once.
TEST(Variants, ScalarKernelsFillNvidiasMultiprocessors) {
  DeviceCapabilities device;
  device.kind = DeviceKind::kGpu;
  device.compute_units = 132;
  const auto groups_of = [&](std::string_view name, DType cache = DType::kF16) {
    const auto variant = std::ranges::find(variants(), name, &Variant::name);
    return concurrent_groups(*variant, cache, device) / device.compute_units;
  };
  const auto expect = [&](int prefill) {
    EXPECT_EQ(groups_of("decode_gpu__r4_local"), 3);
    EXPECT_EQ(groups_of("decode_gpu__r4_local", DType::kFp8E5M2), 8);
    EXPECT_EQ(groups_of("prefill_gpu__r16_kv32"), prefill);
    EXPECT_EQ(groups_of("prefill_gpu__r64_kv32"), 4);  // of 256 work-items
    EXPECT_EQ(groups_of("mla_decode_gpu__r16_wg128"), 2);
    EXPECT_EQ(groups_of("merge__wg128"), 8);
    EXPECT_EQ(groups_of("decode_mma__r8"), 2);
    EXPECT_EQ(groups_of("decode_mma__r8", DType::kInt8), 3);
  };
  expect(4);
  device.inline_ptx = true;
  expect(16);
}

// Every launch takes its scalars in a struct (kernels_cl/shared/call.h, write_call.h).
TEST(Variants, ADriverThatDamagesStructsIsRefused) {
  DeviceCapabilities device;
  device.kind = DeviceKind::kCpu;
  device.max_work_group_size = 1024;
  device.struct_arguments = false;
  for (const Role role : {Role::kDecode, Role::kPrefill, Role::kMerge, Role::kMLADecode,
                          Role::kCacheWrite, Role::kCacheWritePacked}) {
    for (const KernelFamily family : {KernelFamily::kCpu, KernelFamily::kGpu}) {
      EXPECT_EQ(why_none_runs(role, family, device),
                "needs structs passed by value, which this driver was seen to damage")
          << to_string(role);
    }
  }
}

// Kernels for NVIDIA's GPUs run on sub-groups of 32, too, where somebody asks for them.
TEST(Variants, WarpsAreExecutedBySubGroupsIfAsked) {
  DeviceCapabilities device;
  device.kind = DeviceKind::kCpu;
  device.max_work_group_size = 1024;
  EXPECT_EQ(
      unmet_need(unit_of(UnitId::sm80), device),
      "needs inline PTX, or sub-groups of 32 that run in lockstep, independently of each other");
  device.sub_groups_in_step = 8 | 32;
  EXPECT_EQ(unmet_need(unit_of(UnitId::sm80), device), std::nullopt);
  EXPECT_TRUE(unmet_need(unit_of(UnitId::sm90), device));
  EXPECT_EQ(why_none_runs(Role::kDecode, KernelFamily::kGpuPtx, device), "");
  EXPECT_TRUE(serves_family(KernelFamily::kGpuPtx, KernelFamily::kGpuPtx, device));
  for (const DeviceKind kind : {DeviceKind::kCpu, DeviceKind::kGpu}) {
    device.kind = kind;
    EXPECT_FALSE(serves_family(KernelFamily::kAuto, KernelFamily::kGpuPtx, device));
    EXPECT_NE(options_of("decode_mma__r16", device).find(" -DCLA_PTX=2 "), std::string::npos);
    EXPECT_EQ(options_of("decode_mma__r16", device).find("opt-disable") != std::string::npos,
              kind == DeviceKind::kCpu);
  }
}

// What OpenCL leaves to drivers is measured: 7e-5 was seen of one, up to 2.4e-7 of others.
TEST(Variants, ProgramsLearnWhatTheDeviceWasSeenToDo) {
  DeviceCapabilities device;
  EXPECT_EQ(device_macros(device), " -DCLA_NATIVE_EXP2=0 -DCLA_NATIVE=0");
  device.native_exp2_error = 7.5e-5F;
  EXPECT_EQ(device_macros(device), " -DCLA_NATIVE_EXP2=0 -DCLA_NATIVE=0");
  device.native_exp2_error = 2.4e-7F;
  device.native_builtins = true;
  EXPECT_EQ(device_macros(device), " -DCLA_NATIVE_EXP2=1 -DCLA_NATIVE=1");
  device.native_builtins = false;
  device.x86_prefetch = true;
  EXPECT_EQ(device_macros(device), " -DCLA_NATIVE_EXP2=1 -DCLA_NATIVE=0 -DCLA_X86_PREFETCH=1");
}

/// The first row that a CPU with or without products of bf16 pairs, or tiles, takes for a shape.
std::string_view first_row(Role role, bool bf16_products, bool tiles, DType dtype,
                           DType cache_dtype, int head_size) {
  DeviceCapabilities device;
  device.kind = DeviceKind::kCpu;
  device.max_work_group_size = 1;
  device.bf16_products = bf16_products;
  device.x86_tiles = tiles;
  KernelShape shape;
  shape.num_heads = 8;
  shape.num_kv_heads = 2;
  shape.head_size = head_size;
  shape.dtype = dtype;
  shape.cache_dtype = cache_dtype;
  for (const Variant& variant : variants()) {
    if (variant.role == role && variant.family() == KernelFamily::kCpu &&
        why_not(variant, device).empty() && takes_shape(variant, shape))
      return variant.name;
  }
  return "none";
}

std::string_view decode_row(bool bf16_products, DType dtype, DType cache_dtype, int head_size,
                            bool tiles = false) {
  return first_row(Role::kDecode, bf16_products, tiles, dtype, cache_dtype, head_size);
}

TEST(Variants, PromptsInBF16TakeTilesBeforePairsBeforeMultiplyAdds) {
  const auto row = [](bool products, bool tiles, DType dtype, DType cache, int head_size) {
    return first_row(Role::kPrefill, products, tiles, dtype, cache, head_size);
  };
  constexpr std::string_view kPlain = "prefill_cpu__r256_kv64";
  for (const DType cache : {DType::kBF16, DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8}) {
    EXPECT_EQ(row(true, true, DType::kBF16, cache, 96), "prefill_amx__r256_kv64");
    EXPECT_EQ(row(true, false, DType::kBF16, cache, 96), "prefill_bf16__r256_kv64");
    EXPECT_EQ(row(false, false, DType::kBF16, cache, 96), kPlain);
    EXPECT_EQ(row(true, false, DType::kBF16, cache, 80), kPlain);
  }
  EXPECT_EQ(row(true, true, DType::kBF16, DType::kF16, 128), kPlain);
  EXPECT_EQ(row(true, true, DType::kF16, DType::kF16, 128), kPlain);
}

TEST(Variants, TilesDecodeBF16QueriesWhereRowsAreWholeLines) {
  constexpr std::string_view kTiles = "decode_cpu__r24_amx", kPlain = "decode_cpu__r24";
  const auto row = [](DType dtype, DType cache, int head_size) {
    return decode_row(false, dtype, cache, head_size, true);
  };
  for (const int head_size : {32, 96, 256}) {
    EXPECT_EQ(row(DType::kBF16, DType::kBF16, head_size), kTiles);
    EXPECT_EQ(row(DType::kBF16, DType::kInt8, head_size), head_size == 256 ? kTiles : kPlain);
  }
  EXPECT_EQ(row(DType::kBF16, DType::kBF16, 80), kPlain);
  EXPECT_EQ(row(DType::kBF16, DType::kF16, 128), kPlain);
  EXPECT_EQ(row(DType::kF16, DType::kF16, 128), kPlain);
}

TEST(Variants, NoSpillIsCheapOnAMatrixUnitAndAFewRegistersAreElsewhere) {
  DeviceCapabilities gpu, cpu;
  gpu.kind = DeviceKind::kGpu;
  cpu.kind = DeviceKind::kCpu;
  for (const Variant& variant : variants()) {
    EXPECT_FALSE(spills(variant, 0, gpu));
    EXPECT_EQ(spills(variant, 256, gpu), variant.family() == KernelFamily::kGpuMatrix);
    EXPECT_TRUE(spills(variant, 257, gpu));
    EXPECT_FALSE(spills(variant, 4096, cpu));
  }
}

// They take what they are made for, on devices that were seen to have them, and say so: they round
// weights. Everything else stays with f32 multiply-adds, which do not.
TEST(Variants, ProductsOfBF16PairsAreForBF16Queries) {
  constexpr std::string_view kPairs = "decode_cpu__r24_bf16", kPlain = "decode_cpu__r24";
  for (const DType cache : {DType::kBF16, DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8}) {
    EXPECT_EQ(decode_row(true, DType::kBF16, cache, 128), kPairs);
    EXPECT_EQ(decode_row(false, DType::kBF16, cache, 128), kPlain);
    EXPECT_EQ(decode_row(true, DType::kF16, cache, 128), kPlain);
    const bool whole_lines = cache == DType::kBF16;  // of 64 bytes
    EXPECT_EQ(decode_row(true, DType::kBF16, cache, 96), whole_lines ? kPairs : kPlain);
  }
  EXPECT_EQ(decode_row(true, DType::kBF16, DType::kF16, 128), kPlain);
  EXPECT_EQ(decode_row(true, DType::kF32, DType::kF32, 128), kPlain);
  for (const Variant& variant : variants()) {
    if (variant.name == kPairs || variant.name == kPlain) {
      EXPECT_EQ(variant.unit().rounds_probabilities, variant.name == kPairs);
    }
  }
}

}  // namespace
}  // namespace clattn::detail
