#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>

#include "device/attention_case.hpp"

namespace test_tiny {

using attention_test::CaseSpec;

/// Calls small enough for an interpreter of kernels that watches every access: CI runs them under
/// oclgrind. The kernels for GPUs alone: those for CPUs have groups of one work-item, and where the
/// last of them joins splits, oclgrind 21.10, which does not order groups by atomics, sees a race.
CaseSpec tiny_case(std::int32_t block_size, std::int32_t head_size, clattn::DType dtype) {
  CaseSpec spec;
  spec.config.num_heads = 2;
  spec.config.num_kv_heads = 1;
  spec.config.head_size = head_size;
  spec.config.block_size = block_size;
  spec.config.dtype = dtype;
  spec.config.kernel_family = clattn::KernelFamily::kGpu;
  spec.requests = {{1, 20, 1}, {1, 0, 2}, {3, 9, 3}, {18, 2, 4}};
  spec.num_splits = 2;
  spec.write_cache = true;
  return spec;
}

void expect_right(const CaseSpec& spec) {
  for (const auto& context : attention_test::all_contexts()) {
    const auto result = attention_test::run_case(context, spec);
    EXPECT_EQ(result.fault, "") << describe(spec);
    EXPECT_LE(result.worst_share, 1.0) << describe(spec) << "\n " << result.worst_place;
    for (const char* family : {"decode_gpu", "prefill_gpu", "merge"}) {
      EXPECT_TRUE(std::any_of(result.kernels.begin(), result.kernels.end(),
                              [&](const std::string& name) { return name.starts_with(family); }))
          << "no " << family << " ran: " << fmt::format("{}", fmt::join(result.kernels, " "));
    }
  }
}

TEST(Tiny, HeadThatFillsItsLanes) {
  expect_right(tiny_case(16, 64, clattn::DType::kF16));
}
TEST(Tiny, HeadAndPageThatFillNothing) {
  expect_right(tiny_case(3, 24, clattn::DType::kF32));
}
TEST(Tiny, EveryOption) {
  CaseSpec spec = tiny_case(4, 32, clattn::DType::kBF16);
  spec.config.kv_cache_dtype = clattn::DType::kFp8E4M3;
  spec.config.sliding_window = 7;
  spec.config.logits_soft_cap = 2.0F;
  spec.config.alibi_slopes = {0.5F, 0.25F};
  spec.config.sinks = {0.5F, -1.0F};
  spec.config.custom_mask = true;
  spec.config.output_fp8 = true;
  spec.planned_for = spec.config;
  spec.planned_for->sliding_window = 0;  // else a window's few keys are not split
  expect_right(spec);
}

}  // namespace test_tiny
