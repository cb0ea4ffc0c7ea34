#include <gtest/gtest.h>
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): setenv is POSIX's

/// Every test runs under CLATTN_DEBUG, which the library reads once.
int main(int argc, char** argv) {
  ::setenv("CLATTN_DEBUG", "1", 1);  // NOLINT(concurrency-mt-unsafe): before any thread
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
