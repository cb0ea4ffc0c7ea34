// What ends a launch with CL_OUT_OF_RESOURCES and a line on stderr (kernels/faults.cl).
#include "gpu.hpp"

class Faults : public Gpu {
 protected:
  /// `at`: what the kernel does wrong.
  template <class... More>
  void expect_fault(const std::string& name, cl_long at, const std::string& message,
                    const More&... more) {
    const cl_mem a = buffer(std::vector<cl_int>(64));
    testing::internal::CaptureStderr();
    const cl_int status = launch(kernel("faults.cl", name), 1, 1, a, at, more...);
    const std::string text = testing::internal::GetCapturedStderr();
    EXPECT_EQ(status, CL_OUT_OF_RESOURCES) << name;
    EXPECT_NE(text.find("amdemu: FAULT in " + name + " on " + chip()), text.npos) << text;
    EXPECT_NE(text.find(message), text.npos) << text;
  }
  template <class... More>
  void expect_success(const std::string& name, cl_long at, const More&... more) {
    const cl_mem a = buffer(std::vector<cl_int>(64));
    EXPECT_EQ(launch(kernel("faults.cl", name), 1, 1, a, at, more...), CL_SUCCESS) << name;
  }
};
INSTANTIATE_TEST_SUITE_P(Chips, Faults, testing::ValuesIn(all_chips()), chip_name);

TEST_P(Faults, AccessesOutside) {
  expect_success("global_memory", 63);
  expect_fault("global_memory", 64, "outside every buffer");
  expect_fault("global_memory", -1, "outside every buffer");
  expect_success("local_memory", 3, Local{16});
  expect_fault("local_memory", 4, "outside local memory (16 of 16 bytes)", Local{16});
  expect_success("private_memory", 15);
  expect_fault("private_memory", 1 << 20, "outside private memory");
}

TEST_P(Faults, TheLastBytesOfTheAddressSpace) {
  const cl_mem a = buffer(std::vector<cl_int>(64));
  cl_kernel kernel = this->kernel("faults.cl", "global_memory");
  const cl_mem none = nullptr;
  const cl_long last = -1;  // a null pointer's element before the first
  testing::internal::CaptureStderr();
  EXPECT_EQ(launch(kernel, 1, 1, none, last), CL_OUT_OF_RESOURCES);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("fffffffffffffffc"), std::string::npos);
  EXPECT_EQ(launch(kernel, 1, 1, a, cl_long{0}), CL_SUCCESS) << "the next launch";
}

TEST_P(Faults, WhatIsNotEmulated) {
  expect_success("unaligned_atomic", 4);
  expect_fault("unaligned_atomic", 2, "unaligned");
  expect_fault("unknown", 1, "instruction `v_sad_u8` is not emulated");
  expect_fault("rounding", 1, "rounding");
  expect_fault("clamped", 1, "clamp");
}

TEST_P(Faults, MoreLocalMemoryThanThereIs) {
  const std::size_t all = chip() == "gfx950" ? 163840 : 65536;
  const cl_mem a = buffer(std::vector<cl_int>(64));
  cl_kernel kernel = this->kernel("faults.cl", "local_memory");
  EXPECT_EQ(launch(kernel, 1, 1, a, cl_long{0}, Local{all}), CL_SUCCESS);
  EXPECT_EQ(launch(kernel, 1, 1, a, cl_long{0}, Local{all + 16}), CL_OUT_OF_RESOURCES);
}

TEST_P(Faults, ObjectsThatAreNotOffered) {
  const cl_image_format format{CL_R, CL_FLOAT};
  cl_image_desc shape{};
  shape.image_type = CL_MEM_OBJECT_IMAGE2D, shape.image_width = shape.image_height = 4;
  cl_int status = CL_SUCCESS;
  EXPECT_EQ(clCreateImage(context(), CL_MEM_READ_WRITE, &format, &shape, nullptr, &status),
            nullptr);
  EXPECT_EQ(status, CL_INVALID_OPERATION);
  EXPECT_EQ(clSVMAlloc(context(), CL_MEM_READ_WRITE, 64, 0), nullptr);
}

class Wmma11 : public Gpu {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Wmma11);
INSTANTIATE_TEST_SUITE_P(Chips, Wmma11, testing::ValuesIn(chips_of({"gfx1100"})), chip_name);

TEST_P(Wmma11, OperandsAreRepeated) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(launch(kernel("wmma.cl", "unrepeated"), 32, 32, buffer(std::vector<float>(32))),
            CL_OUT_OF_RESOURCES);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("is not repeated"), std::string::npos);
}
