#include <gtest/gtest.h>

#include <string>

#include "opencl/program/program.hpp"

namespace clattn::detail {
namespace {

TEST(Ptx, MarkedInstructionsComeIntoForceForTheirTarget) {
  EXPECT_EQ(enable_marked_instructions(".version 8.5\n"
                                       ".target sm_90, texmode_independent\n"
                                       "\t//@sm_90a wgmma.fence.sync.aligned;\n"
                                       "\tadd.s32 %r1, %r2, %r3;\n"),
            ".version 8.5\n"
            ".target sm_90a, texmode_independent\n"
            "\twgmma.fence.sync.aligned;\n"
            "\tadd.s32 %r1, %r2, %r3;\n");
}

TEST(Ptx, AGroupThatMovesRegistersSaysWithHowManyItStarts) {
  const std::string program =
      ".target sm_90\n.reqntid 384, 1, 1\n{\n//@sm_90a setmaxnreg.dec.sync.aligned.u32 40;\n}\n";
  EXPECT_EQ(enable_marked_instructions(program),
            ".target sm_90a\n.reqntid 384, 1, 1\n.maxnreg 168\n{\n"
            "setmaxnreg.dec.sync.aligned.u32 40;\n}\n");
}

TEST(Ptx, EverythingElseStays) {
  for (const std::string text : {"", "\n", ".target sm_90a\n", ".target sm_80\n.reqntid 384, 1, 1",
                                 "// a comment about .target sm_90\n", "no newline"}) {
    EXPECT_EQ(enable_marked_instructions(text), text);
  }
}

}  // namespace
}  // namespace clattn::detail
