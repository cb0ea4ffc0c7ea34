#include <gtest/gtest.h>

#include <clattn/device.hpp>
#include <cstdio>

#include "device/captured_tests.hpp"
#include "opencl/runtime.hpp"

// A device suite proves something only when kernels ran: it fails without a device, and when
// nothing was dispatched, a filter that matches no test included.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (clattn::list_devices().empty()) {
    std::fputs("no OpenCL device was found: nothing can be tested\n", stderr);
    return 1;
  }
  // NOLINTNEXTLINE(concurrency-mt-unsafe): no other thread yet
  if (const char* folder = std::getenv("CLATTN_CAPTURE_DIR"); folder != nullptr && *folder != '\0')
    testing::UnitTest::GetInstance()->listeners().Append(new CapturedTests(folder));
  const int failed = RUN_ALL_TESTS();
  const auto dispatched = clattn::detail::dispatch_count();
  std::printf("%llu kernels dispatched\n", static_cast<unsigned long long>(dispatched));
  if (dispatched == 0 && !testing::GTEST_FLAG(list_tests)) {
    std::fputs("the tests dispatched no kernel: they proved nothing\n", stderr);
    return 1;
  }
  return failed;
}
