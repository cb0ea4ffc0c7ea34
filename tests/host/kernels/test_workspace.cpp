#include <gtest/gtest.h>

#include "kernels/launch/workspace.hpp"
#include "kernels/step/paged_step.hpp"

namespace clattn::detail {
namespace {

// Builders of other heads share a workspace: one has many small rows, the other few large ones.
TEST(Workspace, GrowsForBothUnlessTheDeviceHasNoBufferForBoth) {
  constexpr std::size_t kKiB = 1024;
  const WorkspaceBytes small_rows{
      .counters = 64 * kKiB, .partial_lse2 = 64 * kKiB, .partial_out = 512 * kKiB};
  const WorkspaceBytes large_rows{.counters = 0, .partial_lse2 = kKiB, .partial_out = 800 * kKiB};
  const WorkspaceBytes both = grown_room(small_rows, large_rows, 1024 * kKiB);
  EXPECT_EQ(both.counters, small_rows.counters);
  EXPECT_EQ(both.partial_lse2, small_rows.partial_lse2);
  EXPECT_EQ(both.partial_out, large_rows.partial_out);
  const WorkspaceBytes one = grown_room(small_rows, large_rows, 900 * kKiB);
  EXPECT_EQ(one.counters, large_rows.counters);
  EXPECT_EQ(one.partial_lse2, large_rows.partial_lse2);
  EXPECT_EQ(one.partial_out, large_rows.partial_out);
}

// vLLM's FLASHINFER_WORKSPACE_BUFFER_SIZE, as a bound.
TEST(Workspace, A4_PartialResultsAreBounded) {
  EXPECT_EQ(kMaxWorkspaceBytes, 256U * 1024 * 1024);
  KernelShape shape;
  shape.num_heads = 32;
  shape.head_size = 127;
  DeviceCapabilities device;
  device.max_alloc_bytes = std::size_t{1} << 40;
  EXPECT_EQ(most_partial_rows(shape, device), (256 << 20) / (32 * 128 * 4));
}

}  // namespace
}  // namespace clattn::detail
