// Sources that a driver does not build: refusals of its compiler are remembered, and give way to
// the next kernel; that it has no memory or no device is an error of its own.
#include <CL/cl_ext.h>
#include <gmock/gmock.h>

#include <array>
#include <clattn/layer.hpp>
#include <set>

#include "device/attention_case.hpp"
#include "device/failing_builds.hpp"
#include "device/layer_model.hpp"
#include "device/runtime_fixture.hpp"
#include "kernels/choose/attention_kernels.hpp"
#include "opencl/program/program.hpp"
#include "support/error_text.hpp"

namespace clattn::detail {
namespace test_build_failures {

using test::error_text;
using test::FailingBuilds;
using test::num_builds;
using testing::HasSubstr;
using testing::Not;

class BuildFailures : public RuntimeFixture {
 protected:
  /// The prefill kernel of a small layer; its largest tile is the one with this option.
  static constexpr const char* kLargestTile = "-DCLA_BLOCK_ROWS=64 ";
  static std::string prefill_kernel(Runtime& runtime, KernelFamily family = KernelFamily::kGpu) {
    KernelShape shape;
    shape.num_heads = 4;
    shape.num_kv_heads = 1;
    shape.head_size = 64;
    shape.block_size = 16;
    return std::string(build_first_fitting(runtime, shape, family, Role::kPrefill).variant->name);
  }
};
INSTANTIATE_TEST_SUITE_P(All, BuildFailures, testing::ValuesIn(list_devices()), device_suffix);

TEST_P(BuildFailures, ARefusedSourceIsNotCompiledAgain) {
  write_kernel("bad.cl", "__kernel void clattn_bad(void) { undeclared_name; }\n");
  const auto runtime = make_runtime();
  const auto refusal = [&](const std::string& options, const char* entry = "clattn_bad") {
    return error_text([&] { runtime->kernel({"bad.cl", entry, options}); }, ErrorCode::kOpenCL);
  };
  const std::size_t before = num_builds();
  const std::string first = refusal("-DCLA_X=1");
  EXPECT_THAT(first, HasSubstr("undeclared_name"));
  EXPECT_EQ(num_builds() - before, 1U);
  EXPECT_EQ(refusal("-DCLA_X=1"), first);
  EXPECT_EQ(refusal("-DCLA_X=1", "clattn_other"), first);
  EXPECT_EQ(num_builds() - before, 1U);
  refusal("-DCLA_X=2");
  EXPECT_EQ(num_builds() - before, 2U);
}

TEST_P(BuildFailures, WhatIsNotTheCompilersIsTriedAgain) {
  const auto runtime = make_runtime();
  for (const cl_int status : {CL_OUT_OF_HOST_MEMORY, CL_OUT_OF_RESOURCES}) {
    const FailingBuilds failing(status, "-DCLA_STEP=3");
    EXPECT_THAT(error_text([&] { run_probe(*runtime); }, ErrorCode::kOpenCL),
                HasSubstr(fmt::format("({})", status)));
  }
  EXPECT_EQ(run_probe(*runtime), expected(100, 3));
}

// Programs with marks are given back to the driver once they are built, under the same options.
TEST_P(BuildFailures, WhatIsNotTheCompilersIsTriedAgainBehindMarksToo) {
  write_kernel("probe.cl", std::string(kProbe) + std::string(kPtxMark) + "none\n");
  const auto runtime = make_runtime();
  const test::SpillingKernels gpus("", 0, 0);  // marks count on GPUs alone
  const auto failure = [&](cl_int status, const std::string& step) {
    const FailingBuilds failing(status, step, 1);
    return error_text([&] { run_probe(*runtime, "clattn_probe_add", step); }, ErrorCode::kOpenCL);
  };
  for (const cl_int status : {CL_OUT_OF_HOST_MEMORY, CL_OUT_OF_RESOURCES})
    EXPECT_THAT(failure(status, "-DCLA_STEP=3"), HasSubstr(fmt::format("({})", status)));
  EXPECT_EQ(run_probe(*runtime), expected(100, 3));
  const std::string refusal = failure(CL_INVALID_BINARY, "-DCLA_STEP=4");
  EXPECT_THAT(refusal, HasSubstr(fmt::format("({})", CL_INVALID_BINARY)));
  const std::size_t before = num_builds();
  EXPECT_EQ(failure(CL_SUCCESS, "-DCLA_STEP=4"), refusal);
  EXPECT_EQ(num_builds(), before);
}

TEST_P(BuildFailures, ATileThatDoesNotBuildOrFitGivesWayToTheNext) {
  options_.kernel_dir.clear();
  // Drivers find a tile too large when they build it or when they make its kernel.
  for (const cl_int status : {CL_BUILD_PROGRAM_FAILURE, CL_INVALID_BINARY, CL_OUT_OF_RESOURCES,
                              CL_INVALID_KERNEL_DEFINITION, CL_INVALID_PROGRAM_EXECUTABLE}) {
    SCOPED_TRACE(status);
    const auto runtime = make_runtime();
    const FailingBuilds failing(status, kLargestTile);
    EXPECT_EQ(prefill_kernel(*runtime), "prefill_gpu__r16_kv32");
    EXPECT_EQ(prefill_kernel(*runtime), "prefill_gpu__r16_kv32");
    // A tile that is too large for the device is none that failed to build.
    const bool told = status == CL_BUILD_PROGRAM_FAILURE || status == CL_INVALID_BINARY;
    const std::vector<std::string> failures = runtime->build_failures();
    ASSERT_EQ(failures.size(), told ? 1U : 0U);
    if (!told) continue;
    EXPECT_THAT(failures[0], HasSubstr("prefill_gpu__r64_kv32: building attention/prefill_gpu.cl"));
  }
}

// Compilers of some GPUs spill with either tile where heads are of an uncommon size.
TEST_P(BuildFailures, SpillingDecidesBetweenTilesAndNeverRefuses) {
  options_.kernel_dir.clear();
  const auto chosen = [&](cl_ulong largest_tile, cl_ulong others) {
    const test::SpillingKernels spilling(kLargestTile, largest_tile, others);
    return prefill_kernel(*make_runtime());
  };
  EXPECT_EQ(chosen(0, 0), "prefill_gpu__r64_kv32");
  EXPECT_EQ(chosen(300, 0), "prefill_gpu__r16_kv32");
  EXPECT_EQ(chosen(0, 300), "prefill_gpu__r64_kv32");
  EXPECT_EQ(chosen(300, 260), "prefill_gpu__r16_kv32");
  EXPECT_EQ(chosen(260, 300), "prefill_gpu__r64_kv32");
  EXPECT_EQ(chosen(300, 300), "prefill_gpu__r64_kv32");
}

// Where all tiles of a matrix unit spill, one that spills little is better than no matrix unit.
TEST_P(BuildFailures, AMatrixUnitIsKeptDespiteALittleSpilling) {
  options_.kernel_dir.clear();
  if (make_runtime()->capabilities().matrix_units.empty()) GTEST_SKIP() << "no matrix unit";
  const auto chosen = [&](cl_ulong scalar_tile, cl_ulong others) {
    const test::SpillingKernels spilling(kLargestTile, scalar_tile, others);
    return prefill_kernel(*make_runtime(), KernelFamily::kAuto);
  };
  const std::string without = chosen(0, 0);
  EXPECT_THAT(without, Not(HasSubstr("_gpu_")));
  EXPECT_EQ(chosen(0, kCheapSpillBytes), without);
  EXPECT_EQ(chosen(0, kCheapSpillBytes + 1), "prefill_gpu__r64_kv32");
  EXPECT_EQ(chosen(300, kCheapSpillBytes + 1), without);
}

TEST_P(BuildFailures, WhatIntelsDriverCallsSpilledDecidesAsWell) {
  options_.kernel_dir.clear();
  const test::SpillingKernels spilling(kLargestTile, 300, 0, CL_KERNEL_SPILL_MEM_SIZE_INTEL);
  EXPECT_EQ(prefill_kernel(*make_runtime()), "prefill_gpu__r16_kv32");
}

TEST_P(BuildFailures, WhatIsNotTheTilesIsNoReasonForASmallerOne) {
  options_.kernel_dir.clear();
  for (const cl_int status :
       {CL_OUT_OF_HOST_MEMORY, CL_MEM_OBJECT_ALLOCATION_FAILURE, CL_DEVICE_NOT_AVAILABLE}) {
    SCOPED_TRACE(status);
    const auto runtime = make_runtime();
    const FailingBuilds failing(status, kLargestTile);
    EXPECT_THAT(error_text([&] { prefill_kernel(*runtime); }, ErrorCode::kOpenCL),
                HasSubstr(fmt::format("({})", status)));
    EXPECT_TRUE(runtime->build_failures().empty());
  }
}

// F10: what failed once is no verdict on a tile, whether the driver said so when it built the
// program or when it made the kernel.
TEST_P(BuildFailures, F10_ATileThatADriverWasShortOfResourcesForIsTriedAgain) {
  options_.kernel_dir.clear();
  for (const std::size_t kernels : {0U, 1U}) {
    const auto runtime = make_runtime();
    const FailingBuilds failing(CL_OUT_OF_RESOURCES, kLargestTile, 0, 1 - kernels);
    const test::ShortDriver shortage(kernels);
    EXPECT_EQ(prefill_kernel(*runtime), "prefill_gpu__r64_kv32");
  }
}

TEST_P(BuildFailures, F10_SelfTestsAreRunAgainWhereTheDriverWasShortOfResources) {
  const auto local_bytes = [&] { return make_runtime()->capabilities().static_local_mem_bytes; };
  const auto with_shortage = [&] {
    const FailingBuilds failing(CL_OUT_OF_RESOURCES, "-DCLA_SELFTEST=1 ", 0, 1);
    return local_bytes();
  };
  const std::uint64_t bytes = with_shortage();
  EXPECT_EQ(local_bytes(), bytes);  // what was remembered
  options_.cache_dir.clear();
  EXPECT_EQ(local_bytes(), bytes);
}

// F10: an object that was not retained must not be released.
TEST(ShortDrivers, F10_ACopyThatCannotBeRetainedThrows) {
  const auto& context = attention_test::all_contexts().at(0);
  const Queue queue = context->create_queue();
  const Buffer buffer = context->allocate(64);
  Event event;
  const std::array<std::byte, 8> bytes{};
  queue.write_async(buffer, bytes, 0, &event);
  {
    const test::ShortDriver shortage(0, true);
    const auto refusal = [](const auto& object) {
      return error_text([&] { const auto copy = object; }, ErrorCode::kOpenCL);
    };
    EXPECT_EQ(refusal(buffer), "clRetainMemObject failed: CL_OUT_OF_RESOURCES (-5)");
    EXPECT_EQ(refusal(queue), "clRetainCommandQueue failed: CL_OUT_OF_RESOURCES (-5)");
    EXPECT_EQ(refusal(event), "clRetainEvent failed: CL_OUT_OF_RESOURCES (-5)");
  }
  event.wait();
  queue.finish();
}

// What a self-test answers is remembered beyond the process, if the driver could answer it.
TEST_P(BuildFailures, ASelfTestWithoutHostMemoryIsRunAgain) {
  const auto local_bytes = [&] { return make_runtime()->capabilities().static_local_mem_bytes; };
  {
    const FailingBuilds failing(CL_OUT_OF_HOST_MEMORY, "-DCLA_SELFTEST=1");
    EXPECT_EQ(local_bytes(), 0U);
  }
  EXPECT_GT(local_bytes(), 0U);
}

// F10: once the compiler is installed properly, nobody must have to empty the cache.
TEST_P(BuildFailures, F10_SelfTestsAreRunAgainWhereTheCompilerBuiltNothing) {
  const auto local_bytes = [&] { return make_runtime()->capabilities().static_local_mem_bytes; };
  {
    const FailingBuilds failing(CL_BUILD_PROGRAM_FAILURE, "");
    EXPECT_EQ(local_bytes(), 0U);
  }
  EXPECT_GT(local_bytes(), 0U);
}

// Not as a device that lacks what the self-tests look for.
TEST_P(BuildFailures, ACompilerThatBuildsNothingIsTheReason) {
  options_.kernel_dir.clear();
  const FailingBuilds failing(CL_BUILD_PROGRAM_FAILURE, "");
  const auto runtime = make_runtime();
  EXPECT_THAT(error_text([&] { prefill_kernel(*runtime); }, ErrorCode::kUnsupported),
              HasSubstr("CL_BUILD_PROGRAM_FAILURE"));
}

// A8: layers that share a context share its refusals.
TEST(BuildFailuresOfLayers, TheNextLayerBuildsNothing) {
  const auto& shared = attention_test::all_contexts().at(0);
  const auto context = Context::adopt(shared->handle(), shared->device());
  const FailingBuilds failing(CL_BUILD_PROGRAM_FAILURE, "");
  LayerRegistry layers;
  const auto refusal = [&](const char* name) {
    return error_text([&] { Attention(context, layers, layer_test::layer_options(name)); },
                      ErrorCode::kUnsupported);
  };
  const std::size_t before = num_builds();
  const std::string first = refusal("layers.0");
  EXPECT_THAT(first, HasSubstr("no prefill kernel fits this device"));
  const std::size_t built = num_builds();
  EXPECT_GT(built, before);
  const std::vector<std::string> failures = context->build_failures();
  EXPECT_FALSE(failures.empty());
  EXPECT_EQ(std::set<std::string>(failures.begin(), failures.end()).size(), failures.size());
  EXPECT_EQ(refusal("layers.1"), first);
  EXPECT_EQ(num_builds(), built);
  EXPECT_EQ(context->build_failures(), failures);
}

}  // namespace test_build_failures
}  // namespace clattn::detail
