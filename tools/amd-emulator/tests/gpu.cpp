#include "gpu.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace {

std::string chip_of(cl_device_id device) {
  char name[64] = {};
  clGetDeviceInfo(device, CL_DEVICE_NAME, sizeof(name), name, nullptr);
  return std::string(name).substr(0, std::string(name).find(':'));
}

const std::vector<cl_device_id>& devices() {
  static const std::vector<cl_device_id> list = [] {
    cl_platform_id platform = nullptr;
    cl_uint count = 0;
    clGetPlatformIDs(1, &platform, nullptr);
    clGetDeviceIDs(platform, CL_DEVICE_TYPE_GPU, 0, nullptr, &count);
    std::vector<cl_device_id> found(count);
    clGetDeviceIDs(platform, CL_DEVICE_TYPE_GPU, count, found.data(), nullptr);
    return found;
  }();
  return list;
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

std::vector<std::string> all_chips() {
  std::vector<std::string> chips;
  for (cl_device_id device : devices()) chips.push_back(chip_of(device));
  return chips;
}
std::vector<std::string> chips_of(const std::vector<std::string>& wanted) {
  std::vector<std::string> chips = all_chips();
  std::erase_if(chips, [&](const std::string& chip) {
    return std::find(wanted.begin(), wanted.end(), chip) == wanted.end();
  });
  return chips;
}
std::string chip_name(const testing::TestParamInfo<std::string>& info) {
  return info.param;
}

void Gpu::SetUp() {
  for (cl_device_id each : devices()) {
    if (chip_of(each) == chip()) device_ = each;
  }
  ASSERT_NE(device_, nullptr);
  context_ = clCreateContext(nullptr, 1, &device_, nullptr, nullptr, nullptr);
  queue_ = clCreateCommandQueueWithProperties(context_, device_, nullptr, nullptr);
}
void Gpu::TearDown() {
  for (cl_kernel each : kernels_) clReleaseKernel(each);
  for (cl_program each : programs_) clReleaseProgram(each);
  for (cl_mem each : buffers_) clReleaseMemObject(each);
  clReleaseCommandQueue(queue_);
  clReleaseContext(context_);
}

cl_kernel Gpu::kernel(const std::string& file, const std::string& name) {
  const std::string source = text_of(std::string(AMDEMU_KERNELS) + "/" + file);
  const char* text = source.c_str();
  programs_.push_back(clCreateProgramWithSource(context_, 1, &text, nullptr, nullptr));
  const cl_int built = clBuildProgram(programs_.back(), 1, &device_, "", nullptr, nullptr);
  if (built != CL_SUCCESS) {
    std::vector<char> log(8192);
    clGetProgramBuildInfo(programs_.back(), device_, CL_PROGRAM_BUILD_LOG, log.size(), log.data(),
                          nullptr);
    ADD_FAILURE() << file << " on " << chip() << ": " << log.data();
  }
  cl_int status = CL_SUCCESS;
  kernels_.push_back(clCreateKernel(programs_.back(), name.c_str(), &status));
  EXPECT_EQ(status, CL_SUCCESS) << name;
  return kernels_.back();
}

cl_mem Gpu::buffer(void* data, std::size_t size) {
  cl_int status = CL_SUCCESS;
  buffers_.push_back(
      clCreateBuffer(context_, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, size, data, &status));
  EXPECT_EQ(status, CL_SUCCESS);
  return buffers_.back();
}
void Gpu::read(cl_mem memory, void* data, std::size_t size) {
  EXPECT_EQ(clEnqueueReadBuffer(queue_, memory, CL_TRUE, 0, size, data, 0, nullptr, nullptr),
            CL_SUCCESS);
}
