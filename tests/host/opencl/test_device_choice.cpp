#include <gtest/gtest.h>

#include <clattn/error.hpp>

#include "opencl/device/device_info.hpp"
#include "opencl/device/self_test.hpp"

namespace clattn::detail {
namespace {

const DeviceSummary kDevices[] = {
    {0, 0, "Xeon", "Vendor A OpenCL", DeviceKind::kCpu, 64},
    {0, 1, "UHD Graphics", "Vendor A OpenCL", DeviceKind::kGpu, 24},
    {1, 0, "Big GPU 100", "Vendor B", DeviceKind::kGpu, 132},
    {1, 1, "Big GPU 100", "Vendor B", DeviceKind::kGpu, 132},
    {2, 0, "FPGA", "Vendor C", DeviceKind::kOther, 500},
};

std::vector<BarePlatform> no_platforms() {
  return {};
}

std::string error_of(std::string_view selector, std::span<const DeviceSummary> devices) {
  try {
    choose_device(selector, devices, "device", no_platforms);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown for " << selector;
  return {};
}

TEST(DeviceChoice, Selectors) {
  const struct {
    std::string_view selector;
    std::size_t expected;
  } rows[] = {{"", 2},     {"gpu", 2}, {"GPU", 2},      {"cpu", 0},      {"0:1", 1},
              {"1:1", 3},  {"uhd", 1}, {"big gpu", 2},  {"vendor a", 1}, {"Vendor C", 4},
              {"xeon", 0}, {"2:0", 4}, {"GRAPHICS", 1}, {"100", 2}};
  for (const auto& row : rows) {
    EXPECT_EQ(choose_device(row.selector, kDevices, "device", no_platforms), row.expected)
        << row.selector;
  }
}

TEST(DeviceChoice, WithoutGpuTheCpuAndWithoutCpuTheRest) {
  const DeviceSummary rest[] = {kDevices[4], kDevices[0]};
  EXPECT_EQ(choose_device("", rest, "device", no_platforms), 1U);
  EXPECT_EQ(choose_device("", std::span(rest).first(1), "device", no_platforms), 0U);
}

TEST(DeviceChoice, Q1_NoDeviceAtAllIsOpenCLsFailureAndSaysWhatIsThere) {
  const struct {
    std::vector<BarePlatform> platforms;
    const char* says;
  } rows[] = {
      {{},
       "device: no OpenCL device was found; no driver is installed where the OpenCL loader looks "
       "(/etc/OpenCL/vendors, or what OCL_ICD_VENDORS names); for a CPU, PoCL is one (package "
       "pocl-opencl-icd)"},
      {{{"Vendor B"}, {"Vendor C", CL_OUT_OF_HOST_MEMORY}},
       "device: no OpenCL device was found; platforms without a device: Vendor B, Vendor C "
       "(CL_OUT_OF_HOST_MEMORY)"},
      {{{"Portable Computing Language"}},
       "device: no OpenCL device was found; platforms without a device: Portable Computing "
       "Language; PoCL has none where it cannot write to its cache folder (POCL_CACHE_DIR, else "
       "$XDG_CACHE_HOME/pocl, else $HOME/.cache/pocl)"},
  };
  for (const auto& row : rows) {
    try {
      choose_device("gpu", {}, "device", [&] { return row.platforms; });
      ADD_FAILURE() << "chose one of none";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOpenCL);
      EXPECT_EQ(error.cl_code(), CL_DEVICE_NOT_FOUND);
      EXPECT_STREQ(error.what(), row.says);
    }
  }
}

TEST(DeviceChoice, ErrorsListWhatThereIs) {
  EXPECT_EQ(error_of("3:0", std::span(kDevices).first(2)),
            "device: no device fits '3:0'; there is 0:0 Xeon (cpu, 64 compute units, Vendor A "
            "OpenCL); 0:1 UHD Graphics (gpu, 24 compute units, Vendor A OpenCL)");
  for (const std::string_view selector : {"nothing", "0:2", "0:", ":0", "0:1x", "-1:0"}) {
    EXPECT_NE(error_of(selector, kDevices).find("no device fits"), std::string::npos);
  }
}

// What clattn_selftest_wave writes on a device with `width` lanes.
std::vector<cl_uint> wave_output(cl_uint items, cl_uint width, cl_uint seed) {
  std::vector<cl_uint> result(3 * std::size_t{items});
  for (cl_uint lane = 0; lane < items; ++lane) {
    const cl_uint first = lane / width * width;
    result[lane] = width;
    result[items + lane] = lane / width;
    result[2 * items + lane] = width * seed + width * first + width * (width - 1) / 2;
  }
  return result;
}

TEST(WaveSize, IsBelievedOnlyWhenEverySumIsRight) {
  constexpr cl_uint kSeed = 0x80000001U;
  for (const cl_uint width : {1U, 8U, 32U, 64U}) {
    EXPECT_EQ(proven_wave_size(wave_output(64, width, kSeed), kSeed), static_cast<int>(width));
  }
  EXPECT_EQ(proven_wave_size({}, kSeed), std::nullopt);
  EXPECT_EQ(proven_wave_size(wave_output(64, 32, kSeed), kSeed + 1), std::nullopt);
  EXPECT_EQ(proven_wave_size(std::vector<cl_uint>(192, 0xdeadbeefU), kSeed), std::nullopt);
  for (std::size_t word = 0; word < 192; ++word) {
    std::vector<cl_uint> wrong = wave_output(64, 32, kSeed);
    wrong[word] ^= 1U;
    EXPECT_EQ(proven_wave_size(wrong, kSeed), std::nullopt) << word;
  }
}

// Those versions' compilers abort over it, 5.0 and 6.0 unless groups of one are compiled as
// unasked.
TEST(Assembly, IsKeptFromPoclThatAbortsOverItAndFromUnknownPlatforms) {
  constexpr std::string_view kPocl = "Portable Computing Language";
  for (const bool defaults : {false, true}) {
    for (const std::string_view version :
         {"1.8", "3.1+debian", "7.0", "7.0-RC1", "7.2-rc1", "10.0"}) {
      EXPECT_TRUE(survives_assembly(kPocl, version, defaults)) << version;
    }
    for (const std::string_view version : {"5.0-2.1build3", "5.0+debian", "6.0-6"}) {
      EXPECT_EQ(survives_assembly(kPocl, version, defaults), defaults) << version;
      EXPECT_TRUE(survives_assembly("Intel(R) OpenCL", version, defaults)) << version;
      EXPECT_FALSE(survives_assembly("Oclgrind", version, defaults)) << version;
    }
    for (const std::string_view version : {"3.2-pre", "5.0-pre main-0-gabc", "6.0-pre", "4.0",
                                           "4.0-pre main-0-gabc", "6.1-pre", "", "7", "main"}) {
      EXPECT_FALSE(survives_assembly(kPocl, version, defaults)) << version;
    }
  }
}

TEST(Status, NamesAndMessages) {
  EXPECT_EQ(status_name(CL_SUCCESS), "CL_SUCCESS");
  EXPECT_EQ(status_name(-54), "CL_INVALID_WORK_GROUP_SIZE");
  EXPECT_EQ(status_name(-1001), "CL_PLATFORM_NOT_FOUND_KHR");
  EXPECT_EQ(status_name(12345), "unknown");
  for (cl_int status = 0; status >= -72; --status) {
    if (status < -19 && status > -30) continue;  // OpenCL leaves these out
    EXPECT_NE(status_name(status), "unknown") << status;
  }
  EXPECT_NO_THROW(check(CL_SUCCESS, "nothing"));
  try {
    check(CL_OUT_OF_RESOURCES, "the launch");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOpenCL);
    EXPECT_EQ(error.cl_code(), CL_OUT_OF_RESOURCES);
    EXPECT_STREQ(error.what(), "the launch failed: CL_OUT_OF_RESOURCES (-5)");
  }
}

}  // namespace
}  // namespace clattn::detail
