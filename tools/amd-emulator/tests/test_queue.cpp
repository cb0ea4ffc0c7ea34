// Commands that wait: user events, wait lists, callbacks; and copies, fills, maps, parts of
// buffers. On the first device: none of it depends on the chip.
#define CL_TARGET_OPENCL_VERSION 200
#include <CL/cl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kWords = 1024, kBytes = kWords * sizeof(cl_uint), kItems = 256;

class Queue : public testing::Test {
 protected:
  void SetUp() override {
    cl_platform_id platform = nullptr;
    cl_device_id device = nullptr;
    clGetPlatformIDs(1, &platform, nullptr);
    ASSERT_EQ(clGetDeviceIDs(platform, CL_DEVICE_TYPE_GPU, 1, &device, nullptr), CL_SUCCESS);
    context_ = clCreateContext(nullptr, 1, &device, nullptr, nullptr, nullptr);
    const cl_queue_properties profiling[] = {CL_QUEUE_PROPERTIES, CL_QUEUE_PROFILING_ENABLE, 0};
    queue_ = clCreateCommandQueueWithProperties(context_, device, profiling, nullptr);
    other_ = clCreateCommandQueueWithProperties(context_, device, nullptr, nullptr);
    const char* source =
        "__kernel void add(__global uint* a, uint n) { a[get_global_id(0)] += n; }";
    program_ = clCreateProgramWithSource(context_, 1, &source, nullptr, nullptr);
    ASSERT_EQ(clBuildProgram(program_, 1, &device, "", nullptr, nullptr), CL_SUCCESS);
    kernel_ = clCreateKernel(program_, "add", nullptr);
    memory_ = create(std::vector<cl_uint>(kWords, 0));
  }
  void TearDown() override {
    for (cl_event each : events_) clReleaseEvent(each);
    clReleaseMemObject(memory_);
    clReleaseKernel(kernel_);
    clReleaseProgram(program_);
    clReleaseCommandQueue(queue_);
    clReleaseCommandQueue(other_);
    EXPECT_EQ(clReleaseContext(context_), CL_SUCCESS);
  }

  cl_mem create(std::vector<cl_uint> words) {
    return clCreateBuffer(context_, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, kBytes, words.data(),
                          nullptr);
  }
  std::vector<cl_uint> read() {
    std::vector<cl_uint> words(kWords);
    EXPECT_EQ(
        clEnqueueReadBuffer(queue_, memory_, CL_TRUE, 0, kBytes, words.data(), 0, nullptr, nullptr),
        CL_SUCCESS);
    return words;
  }
  cl_int fill(cl_mem memory, cl_uint value, const cl_event* wait = nullptr,
              cl_event* event = nullptr) {
    return clEnqueueFillBuffer(queue_, memory, &value, sizeof(value), 0, kBytes,
                               wait == nullptr ? 0 : 1, wait, event);
  }
  cl_int add(cl_mem memory, cl_uint n, const cl_event* wait = nullptr, cl_event* event = nullptr) {
    clSetKernelArg(kernel_, 0, sizeof(memory), &memory);
    clSetKernelArg(kernel_, 1, sizeof(n), &n);
    return clEnqueueNDRangeKernel(queue_, kernel_, 1, nullptr, &kItems, nullptr,
                                  wait == nullptr ? 0 : 1, wait, event);
  }
  /// Released at the end of the test.
  cl_event kept(cl_event event) {
    events_.push_back(event);
    return event;
  }
  cl_event user_event() { return kept(clCreateUserEvent(context_, nullptr)); }
  static cl_int status_of(cl_event event) {
    cl_int status = 99;
    clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status, nullptr);
    return status;
  }
  static bool all(const std::vector<cl_uint>& words, std::size_t from, std::size_t to,
                  cl_uint value) {
    return std::all_of(words.begin() + static_cast<std::ptrdiff_t>(from),
                       words.begin() + static_cast<std::ptrdiff_t>(to),
                       [=](cl_uint word) { return word == value; });
  }

  cl_context context_ = nullptr;
  cl_command_queue queue_ = nullptr, other_ = nullptr;
  cl_program program_ = nullptr;
  cl_kernel kernel_ = nullptr;
  cl_mem memory_ = nullptr;

 private:
  std::vector<cl_event> events_;
};

/// Leaves 100 + the status that it was called with.
void CL_CALLBACK note(cl_event, cl_int status, void* to) {
  *static_cast<std::atomic<int>*>(to) = 100 + status;
}

}  // namespace

TEST_F(Queue, FillsWithAPattern) {
  const cl_uint pattern[2] = {7, 9};
  EXPECT_EQ(clEnqueueFillBuffer(queue_, memory_, pattern, 8, 0, kBytes, 0, nullptr, nullptr),
            CL_SUCCESS);
  const auto words = read();
  for (std::size_t n = 0; n < kWords; ++n) EXPECT_EQ(words[n], pattern[n % 2]) << n;
  EXPECT_EQ(clEnqueueFillBuffer(queue_, memory_, pattern, 8, 0, 12, 0, nullptr, nullptr),
            CL_INVALID_VALUE);
}

TEST_F(Queue, RunsKernelsBehindAUserEventWithTheArgumentsOfTheirCall) {
  const cl_event gate = user_event();
  cl_event ran = nullptr, behind = nullptr, copied = nullptr;
  ASSERT_EQ(add(memory_, 5, &gate, &ran), CL_SUCCESS);
  ASSERT_EQ(add(memory_, 6, nullptr, &behind), CL_SUCCESS);
  std::vector<cl_uint> late(kWords, 1);
  ASSERT_EQ(
      clEnqueueReadBuffer(other_, memory_, CL_FALSE, 0, kBytes, late.data(), 1, &behind, &copied),
      CL_SUCCESS);
  kept(ran), kept(behind), kept(copied);
  std::atomic<int> called{0}, called_gate{0}, called_at_once{0};
  EXPECT_EQ(clSetEventCallback(behind, CL_COMPLETE, note, &called), CL_SUCCESS);
  EXPECT_EQ(clSetEventCallback(gate, CL_COMPLETE, note, &called_gate), CL_SUCCESS);
  for (const cl_event event : {ran, behind, copied}) EXPECT_GT(status_of(event), CL_COMPLETE);
  EXPECT_EQ(late[0], 1U) << "nothing ran";
  EXPECT_EQ(called, 0);

  std::thread setter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    clSetUserEventStatus(gate, CL_COMPLETE);
  });
  EXPECT_EQ(clWaitForEvents(1, &copied), CL_SUCCESS);
  setter.join();
  EXPECT_EQ(clFinish(queue_), CL_SUCCESS);
  EXPECT_TRUE(all(late, 0, kItems, 11) && all(late, kItems, kWords, 0));
  EXPECT_EQ(status_of(behind), CL_COMPLETE);
  EXPECT_EQ(called, 100);
  EXPECT_EQ(called_gate, 100);
  EXPECT_EQ(clSetUserEventStatus(gate, CL_COMPLETE), CL_INVALID_OPERATION) << "a second time";
  clSetEventCallback(ran, CL_COMPLETE, note, &called_at_once);
  EXPECT_EQ(called_at_once, 100) << "of a command that has ended";
  cl_ulong begin = 0, end = 0;
  clGetEventProfilingInfo(ran, CL_PROFILING_COMMAND_START, sizeof(begin), &begin, nullptr);
  clGetEventProfilingInfo(ran, CL_PROFILING_COMMAND_END, sizeof(end), &end, nullptr);
  EXPECT_GT(begin, 0U);
  EXPECT_GT(end, begin);
}

TEST_F(Queue, PassesErrorsThroughWaitLists) {
  const cl_event bad = user_event();
  cl_event ended = nullptr;
  ASSERT_EQ(fill(memory_, 7, &bad, &ended), CL_SUCCESS);
  kept(ended);
  clSetUserEventStatus(bad, -5);
  EXPECT_EQ(clWaitForEvents(1, &ended), CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
  EXPECT_LT(status_of(ended), 0);
  EXPECT_TRUE(all(read(), 0, kWords, 0)) << "the command did not run";
}

TEST_F(Queue, KeepsABufferUntilItsCommandsEnd) {
  const cl_event hold = user_event();
  cl_mem short_lived = create(std::vector<cl_uint>(kWords, 0));
  fill(short_lived, 7, &hold);
  clEnqueueCopyBuffer(queue_, short_lived, memory_, 0, 0, kBytes, 0, nullptr, nullptr);
  clReleaseMemObject(short_lived);
  clSetUserEventStatus(hold, CL_COMPLETE);
  EXPECT_TRUE(all(read(), 0, kWords, 7));
}

TEST_F(Queue, MovesBoxes) {
  std::vector<cl_uint> numbers(kWords);
  for (std::size_t n = 0; n < kWords; ++n) numbers[n] = static_cast<cl_uint>(n);
  cl_mem from = create(numbers);
  fill(memory_, 7);
  const std::size_t a[3] = {8, 2, 0}, b[3] = {4, 1, 1}, region[3] = {16, 3, 2};
  EXPECT_EQ(clEnqueueCopyBufferRect(queue_, from, memory_, a, b, region, 128, 1024, 64, 512, 0,
                                    nullptr, nullptr),
            CL_SUCCESS);
  const auto words = read();
  for (std::size_t z = 0; z < 2; ++z)
    for (std::size_t y = 0; y < 3; ++y)
      for (std::size_t x = 0; x < 4; ++x)
        EXPECT_EQ(words[(4 + (1 + y) * 64 + (1 + z) * 512) / 4 + x],
                  (8 + (2 + y) * 128 + z * 1024) / 4 + x);
  EXPECT_EQ(std::count(words.begin(), words.end(), 7U), kWords - 24) << "and nothing else";
  const std::size_t far[3] = {0, 30, 3};
  EXPECT_EQ(clEnqueueCopyBufferRect(queue_, from, memory_, far, b, region, 128, 1024, 64, 512, 0,
                                    nullptr, nullptr),
            CL_INVALID_VALUE);
  std::vector<cl_uint> rows(64, 1);
  const std::size_t none[3] = {0, 0, 0};
  EXPECT_EQ(clEnqueueReadBufferRect(queue_, from, CL_TRUE, a, none, region, 128, 1024, 16, 48,
                                    rows.data(), 0, nullptr, nullptr),
            CL_SUCCESS);
  EXPECT_EQ((std::vector<cl_uint>{rows[0], rows[4], rows[12], rows[24]}),
            (std::vector<cl_uint>{66, 98, 322, 1}));
  clReleaseMemObject(from);
}

TEST_F(Queue, MapsAndParts) {
  auto* mapped =
      static_cast<cl_uint*>(clEnqueueMapBuffer(queue_, memory_, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE,
                                               256, 256, 0, nullptr, nullptr, nullptr));
  ASSERT_NE(mapped, nullptr);
  mapped[3] = 4242;
  EXPECT_EQ(clEnqueueUnmapMemObject(queue_, memory_, mapped, 0, nullptr, nullptr), CL_SUCCESS);
  EXPECT_EQ(read()[64 + 3], 4242U);

  fill(memory_, 0);
  const cl_buffer_region region{1024, 1024};
  cl_mem part = clCreateSubBuffer(memory_, 0, CL_BUFFER_CREATE_TYPE_REGION, &region, nullptr);
  add(part, 5);
  const auto words = read();
  EXPECT_TRUE(all(words, 0, 256, 0) && all(words, 256, 512, 5) && all(words, 512, kWords, 0));
  clReleaseMemObject(part);

  std::vector<cl_uint> own(kWords, 30);
  cl_mem used = clCreateBuffer(context_, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, kBytes,
                               own.data(), nullptr);
  add(used, 5);
  void* at = clEnqueueMapBuffer(queue_, used, CL_TRUE, CL_MAP_READ, 0, kBytes, 0, nullptr, nullptr,
                                nullptr);
  EXPECT_EQ(at, own.data()) << "memory of the caller";
  EXPECT_TRUE(all(own, 0, 256, 35) && all(own, 256, kWords, 30));
  clEnqueueUnmapMemObject(queue_, used, at, 0, nullptr, nullptr);
  clReleaseMemObject(used);
}
