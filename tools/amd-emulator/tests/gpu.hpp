// A test's device: each emulated GPU in turn, and what is done with one.
#pragma once
#define CL_TARGET_OPENCL_VERSION 200
#include <CL/cl.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

/// The devices of AMDEMU_GFX, by the names of their chips.
std::vector<std::string> all_chips();
/// Those among them that some test is about.
std::vector<std::string> chips_of(const std::vector<std::string>& wanted);
std::string chip_name(const testing::TestParamInfo<std::string>& info);

class Gpu : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override;
  void TearDown() override;

  const std::string& chip() const { return GetParam(); }
  unsigned wave() const { return chip().starts_with("gfx9") ? 64 : 32; }

  /// A kernel of kernels/FILE.
  cl_kernel kernel(const std::string& file, const std::string& name);

  template <class T>
  cl_mem buffer(std::vector<T> data) {
    return buffer(data.data(), data.size() * sizeof(T));
  }
  template <class T>
  std::vector<T> read(cl_mem memory, std::size_t count) {
    std::vector<T> data(count);
    read(memory, data.data(), count * sizeof(T));
    return data;
  }

  /// An argument of local memory.
  struct Local {
    std::size_t bytes;
  };
  /// The status of a launch of so many work-items, in groups of `local`.
  template <class... Arguments>
  cl_int launch(cl_kernel kernel, std::size_t items, std::size_t local,
                const Arguments&... arguments) {
    cl_uint n = 0;
    (set(kernel, n++, arguments), ...);
    return clEnqueueNDRangeKernel(queue_, kernel, 1, nullptr, &items, &local, 0, nullptr, nullptr);
  }

  cl_context context() const { return context_; }

 private:
  cl_mem buffer(void* data, std::size_t size);
  void read(cl_mem memory, void* data, std::size_t size);
  template <class T>
  void set(cl_kernel kernel, cl_uint n, const T& value) {
    ASSERT_EQ(clSetKernelArg(kernel, n, sizeof(value), &value), CL_SUCCESS) << "argument " << n;
  }
  void set(cl_kernel kernel, cl_uint n, Local local) {
    ASSERT_EQ(clSetKernelArg(kernel, n, local.bytes, nullptr), CL_SUCCESS) << "argument " << n;
  }

  cl_device_id device_ = nullptr;
  cl_context context_ = nullptr;
  cl_command_queue queue_ = nullptr;
  std::vector<cl_program> programs_;
  std::vector<cl_kernel> kernels_;
  std::vector<cl_mem> buffers_;
};
