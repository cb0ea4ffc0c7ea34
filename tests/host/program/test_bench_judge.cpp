#include <gtest/gtest.h>

#include "program/bench/report.hpp"

namespace {

using clattn::DType;
using clattn::cli::BenchRow;
using clattn::cli::CacheOp;
using clattn::cli::Ceilings;

constexpr Ceilings kDevice{.read_gb_per_s = 100,
                           .page_read_gb_per_s = 100,
                           .copy_gb_per_s = 50,
                           .fma_gflop_per_s = 1000,
                           .mma_gflop_per_s = 8000};

/// A row whose median is 100 us.
BenchRow row_of(double bytes, double flops, const char* kernel) {
  BenchRow row;
  row.median_us = 100;
  row.p10_us = 95;
  row.p90_us = 105;
  row.work = {.bytes = bytes, .flops = flops};
  row.shape.model.config.dtype = DType::kF16;
  row.kernels = {{.name = kernel}};
  return row;
}

TEST(BenchJudge, TheLongerOfTheLeastTimesNamesTheCeiling) {
  BenchRow row = row_of(5e6, 1e6, "decode_gpu__r4_local");
  judge(row, kDevice);
  EXPECT_EQ(row.ceiling, "read");
  EXPECT_DOUBLE_EQ(row.rate, 50);
  EXPECT_DOUBLE_EQ(row.share.value_or(0), 0.5);
  row = row_of(1e6, 4e8, "prefill_mma__r128_wg128");
  judge(row, kDevice);
  EXPECT_EQ(row.ceiling, "mma");
  EXPECT_DOUBLE_EQ(row.share.value_or(0), 0.5);
  row.shape.model.config.dtype = DType::kF32;
  judge(row, kDevice);
  EXPECT_EQ(row.ceiling, "fma");
}

/// What mma.sync reaches does not bound warpgroup products.
TEST(BenchJudge, WarpgroupProductsHaveNoShareOfAnotherInstructionsCeiling) {
  BenchRow row = row_of(1e6, 4e8, "prefill_wgmma__r128_kv128");
  judge(row, kDevice);
  EXPECT_EQ(row.ceiling, "mma");
  EXPECT_DOUBLE_EQ(row.rate, 4000);
  EXPECT_FALSE(row.share.has_value());
  row = row_of(5e6, 1e6, "prefill_wgmma__r128_kv128");  // bound by memory: that ceiling holds
  judge(row, kDevice);
  EXPECT_DOUBLE_EQ(row.share.value_or(0), 0.5);
}

/// Once their own ceiling is measured, all rows of 16-bit queries are held against it.
TEST(BenchJudge, TheFastestProductsAreTheCeiling) {
  Ceilings device = kDevice;
  device.wgmma_gflop_per_s = 16000;
  for (const char* kernel : {"prefill_wgmma__r128_kv128", "prefill_mma__r128_wg128"}) {
    BenchRow row = row_of(1e6, 4e8, kernel);
    judge(row, device);
    EXPECT_EQ(row.ceiling, "wgmma");
    EXPECT_DOUBLE_EQ(row.share.value_or(0), 0.25);
    EXPECT_STREQ(row.rate_unit(), "GFLOP/s");
  }
  BenchRow row = row_of(1e6, 4e8, "prefill_gpu__r64_wg64");
  row.shape.model.config.dtype = DType::kF32;
  judge(row, device);
  EXPECT_EQ(row.ceiling, "fma");
}

/// They are the ceiling of bf16 queries alone: other types go by multiply-adds.
TEST(BenchJudge, ProductsOfBF16BoundBF16Queries) {
  Ceilings device = kDevice;
  device.mma_gflop_per_s = 0;
  device.bf16_gflop_per_s = 2000;
  BenchRow row = row_of(1e6, 1e8, "prefill_bf16__r256_kv64");
  row.shape.model.config.dtype = DType::kBF16;
  judge(row, device);
  EXPECT_EQ(row.ceiling, "bf16");
  EXPECT_DOUBLE_EQ(row.share.value_or(0), 0.5);
  row.shape.model.config.dtype = DType::kF16;
  judge(row, device);
  EXPECT_EQ(row.ceiling, "fma");
  EXPECT_DOUBLE_EQ(row.share.value_or(0), 1);
}

TEST(BenchJudge, WhatMovesBytesIsHeldAgainstACopy) {
  for (const char* suite : {"cache", "merge", "gdn_decode", "gdn_prefill", "conv"}) {
    BenchRow row = row_of(3e6, 0, "merge_attn_states");
    row.shape.suite = suite;
    judge(row, kDevice);
    EXPECT_EQ(row.ceiling, "copy");
    EXPECT_STREQ(row.rate_unit(), "GB/s");
    EXPECT_DOUBLE_EQ(row.rate, 30);
    EXPECT_DOUBLE_EQ(row.share.value_or(0), 0.6);
    row.resident = true;
    row.share.reset();
    judge(row, kDevice);
    EXPECT_FALSE(row.share.has_value());
  }
}

/// A copy on the device does not bound what crosses the bus.
TEST(BenchJudge, SwapsHaveARateAndNoShare) {
  for (const CacheOp op : {CacheOp::kSwapOut, CacheOp::kSwapIn}) {
    BenchRow row = row_of(3e6, 0, "swap_blocks");
    row.shape.suite = "cache";
    row.shape.model.op = op;
    judge(row, kDevice);
    EXPECT_DOUBLE_EQ(row.rate, 30);
    EXPECT_STREQ(row.rate_unit(), "GB/s");
    EXPECT_FALSE(row.share.has_value());
  }
}

TEST(BenchJudge, BytesInACacheHaveNoShare) {
  BenchRow row = row_of(5e6, 1e6, "decode_gpu__r4_local");
  row.resident = true;
  judge(row, kDevice);
  EXPECT_FALSE(row.share.has_value());
}

TEST(BenchJudge, DoubtfulRowsAreKnown) {
  BenchRow row = row_of(5e6, 1e6, "decode_gpu__r4_local");
  judge(row, kDevice);
  EXPECT_FALSE(row.unsteady());
  EXPECT_FALSE(row.above_ceiling());
  row.p90_us = 116;
  EXPECT_TRUE(row.unsteady());
  row.work.bytes = 10.4e6;
  judge(row, kDevice);
  EXPECT_FALSE(row.above_ceiling());
  row.work.bytes = 10.6e6;
  judge(row, kDevice);
  EXPECT_TRUE(row.above_ceiling());
}

TEST(BenchJudge, RowsOfSeveralBackendsHaveNamesOfTheirOwn) {
  BenchRow row = row_of(1, 1, "decode_gpu__r4_local");
  row.shape.model.name = "m";
  row.shape.suite = "decode";
  row.shape.batch = "q1";
  EXPECT_EQ(row.name(), "m/decode/q1");
  row.asked_backend = "XFORMERS";
  EXPECT_EQ(row.name(), "m/decode/q1/XFORMERS");
}

}  // namespace
