#include <gtest/gtest.h>

#include "cli/common/attention_call.hpp"

namespace clattn::cli {
namespace {

// Keys by dim stay where the kernels of CPUs serve the call, and nowhere else.
TEST(LayoutOn, KeysByDimAreForTheKernelsOfCpus) {
  constexpr KVCacheLayout kHDN = KVCacheLayout::kHDN;
  DeviceCapabilities device;
  device.kind = DeviceKind::kCpu;
  EXPECT_EQ(layout_on(device, kHDN), kHDN);
  EXPECT_EQ(layout_on(device, kHDN, KernelFamily::kCpu), kHDN);
  for (const KernelFamily family :
       {KernelFamily::kGpu, KernelFamily::kGpuPtx, KernelFamily::kGpuMatrix}) {
    EXPECT_EQ(layout_on(device, kHDN, family), std::nullopt);
    EXPECT_EQ(layout_on(device, KVCacheLayout::kNHD, family), KVCacheLayout::kNHD);
  }
  device.long_loops = false;  // such a CPU has the kernels of GPUs
  EXPECT_EQ(layout_on(device, kHDN), std::nullopt);
  device.long_loops = true;
  device.kind = DeviceKind::kGpu;
  EXPECT_EQ(layout_on(device, kHDN), std::nullopt);
  EXPECT_EQ(layout_on(device, KVCacheLayout::kHND), KVCacheLayout::kHND);
  EXPECT_EQ(layout_on(device, std::nullopt), std::nullopt);
}

}  // namespace
}  // namespace clattn::cli
