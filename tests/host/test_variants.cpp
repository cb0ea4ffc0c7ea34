#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernels/variants.hpp"

namespace clattn::detail {
namespace {

/// Options of the first variant with `name` on a device that converts fp8 by an instruction or not.
std::string options_of(std::string_view name, bool fp8_conversions) {
  const auto rows = variants();
  const auto row = std::find_if(rows.begin(), rows.end(),
                                [&](const Variant& each) { return each.name == name; });
  DeviceCapabilities device;
  device.kind = DeviceKind::kGpu;
  device.inline_ptx = true;
  device.ptx_arch = 89;
  device.fp8_conversions = fp8_conversions;
  KernelShape shape;
  shape.num_heads = 8;
  shape.num_kv_heads = 2;
  shape.head_size = 128;
  shape.block_size = 16;
  shape.cache_dtype = DType::kFp8E4M3;
  return kernel_source(*row, shape, device).options;
}

// PTX for compute capability 8.9 converts fp8 on newer drivers alone: what was seen to work counts,
// not the architecture.
TEST(Variants, Fp8IsConvertedAsTheDeviceWasSeenToDo) {
  const auto converts = [](std::string_view name, bool seen) {
    return options_of(name, seen).find(" -DCLA_FP8_CVT=1") != std::string::npos;
  };
  EXPECT_TRUE(converts("decode_mma__r16", true));
  EXPECT_TRUE(converts("decode_gpu__r8_ptx", true));
  EXPECT_FALSE(converts("decode_mma__r16", false));
  EXPECT_FALSE(converts("decode_gpu__r8_local", true));  // no PTX in these
  for (const char* name : {"decode_mma__r16", "decode_gpu__r8_local"}) {
    EXPECT_NE(options_of(name, false).find(" -DCLA_FP8_CVT=0"), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace clattn::detail
