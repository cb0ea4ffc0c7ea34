#include <gtest/gtest.h>

#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "opencl/program/source.hpp"

namespace clattn::detail {
namespace {

TEST(Bundle, EveryPartHasNamesOfItsOwn) {
  const std::vector<BundlePart> parts = {
      {"#ifndef CLATTN_LIB_A_CLH\n#define CLATTN_LIB_A_CLH\n#endif\n"
       "typedef struct ClaRow { int n; } ClaRow;\n"
       "int cla_twice(int x) { return 2 * x + CLA_STEP; } // clamp, my_cla_twice, Clang\n"
       "__kernel void clattn_a(__global int* out) { *out = cla_twice(0xc1a); }\n",
       "-DCLA_STEP=3 -DCLA_NAME=cla_twice"},
      {"CLA_STEP", "-DCLA_STEP=4"},
  };
  EXPECT_EQ(bundle_sources(parts),
            "#define CLA0_STEP 3\n#define CLA0_NAME cla0_twice\n"
            "#ifndef CLA0TTN_LIB_A_CLH\n#define CLA0TTN_LIB_A_CLH\n#endif\n"
            "typedef struct Cla0Row { int n; } Cla0Row;\n"
            "int cla0_twice(int x) { return 2 * x + CLA0_STEP; } // clamp, my_cla_twice, Clang\n"
            "__kernel void clattn_a_0(__global int* out) { *out = cla0_twice(0xc1a); }\n"
            "#define CLA1_STEP 4\nCLA1_STEP");
  EXPECT_EQ(bundle_sources({}), "");
}

TEST(Bundle, OptionsThatAreNoMacrosStandInTheWay) {
  for (const char* options : {"-cl-opt-disable", "-DCLA_STEP=3 -cl-opt-disable", "-DCLA_STEP"}) {
    const std::vector<BundlePart> parts = {{"int x;\n", options}};
    EXPECT_EQ(bundle_sources(parts), std::nullopt) << options;
  }
}

// A macro without our prefix would reach from one part of a bundle into the next.
TEST(Bundle, EveryMacroOfTheKernelsHasOurPrefix) {
  for (const EmbeddedFile& file : embedded_kernels()) {
    std::istringstream text(std::string(file.bytes, file.bytes + file.size));
    for (std::string line; std::getline(text, line);) {
      const std::size_t at = line.find_first_not_of(" \t");
      if (at == std::string::npos || line.compare(at, 8, "#define ") != 0) continue;
      const std::string name = line.substr(at + 8);
      EXPECT_TRUE(name.starts_with("CLA_") || name.starts_with("cla_") ||
                  name.starts_with("CLATTN_"))
          << file.path << ": " << line;
    }
  }
}

}  // namespace
}  // namespace clattn::detail
