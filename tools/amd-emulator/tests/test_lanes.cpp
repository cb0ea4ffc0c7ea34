// Work across lanes, local memory, private memory, atomics, division (kernels/lanes.cl).
#include <array>
#include <bit>
#include <cmath>

#include "gpu.hpp"

class Lanes : public Gpu {};
INSTANTIATE_TEST_SUITE_P(Chips, Lanes, testing::ValuesIn(all_chips()), chip_name);

TEST_P(Lanes, ReadOneAnother) {
  constexpr unsigned kGroups = 3, kItems = 128;
  const cl_mem out = buffer(std::vector<cl_uint>(kGroups * kItems * 8));
  const cl_mem counter = buffer(std::vector<cl_uint>(1));
  ASSERT_EQ(launch(kernel("lanes.cl", "lanes"), kGroups * kItems, kItems, out, counter,
                   Local{kItems * sizeof(cl_uint)}),
            CL_SUCCESS);
  const auto got = read<cl_uint>(out, kGroups * kItems * 8);
  for (unsigned n = 0; n < kGroups * kItems; ++n) {
    const unsigned id = n % kItems, group = n / kItems, first = id / wave() * wave();
    const cl_uint* word = &got[n * 8];
    SCOPED_TRACE(testing::Message() << "group " << group << ", item " << id);
    EXPECT_EQ(word[0], (first + ((id ^ 5) % wave())) * 3) << "bpermute";
    EXPECT_EQ(word[1], id ^ 1) << "swizzle";
    EXPECT_EQ(word[2], id % 16 == 0 ? 7777 : id - 1) << "DPP";
    EXPECT_EQ(word[3], first) << "readfirstlane";
    EXPECT_EQ(word[4], (127 - id) * (127 - id)) << "local memory";
    EXPECT_EQ(word[5], (id * 7 + group) % 24 * 10 + id) << "private memory";
    const float seventh = static_cast<float>(id) / 7.0F;
    EXPECT_NEAR(std::bit_cast<float>(word[6]), seventh, seventh * 0x1p-22F) << "division";
    const float power = std::exp2(static_cast<float>(id) * 0.125F);
    EXPECT_NEAR(std::bit_cast<float>(word[7]) / power, 1.0F, 0x1p-22F) << "exp2";
  }
  EXPECT_EQ(read<cl_uint>(counter, 1)[0], kGroups * kItems * (kItems - 1) / 2) << "atomic";
}

class Waves64 : public Gpu {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Waves64);
INSTANTIATE_TEST_SUITE_P(Chips, Waves64,
                         testing::ValuesIn(chips_of({"gfx906", "gfx90a", "gfx942", "gfx950"})),
                         chip_name);

TEST_P(Waves64, WriteNothingWithoutExec) {
  constexpr unsigned kItems = 64 * 16;
  const cl_mem out = buffer(std::vector<cl_uint>(kItems));
  ASSERT_EQ(launch(kernel("lanes.cl", "empty_exec"), kItems, 64, out), CL_SUCCESS);
  const auto got = read<cl_uint>(out, kItems);
  for (unsigned n = 0; n < kItems; ++n) {
    const bool enabled = n % 64 < 5 && n % 2 == 0;  // 21 = 10101b
    EXPECT_EQ(got[n], enabled ? 709U : 708U) << n;
  }
}
