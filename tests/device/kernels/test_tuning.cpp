// Tuning rows reach the kernels and the plan, and what cannot be followed changes nothing. Each
// test opens contexts of its own, since rows stay with them.
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <clattn/tuning.hpp>
#include <cmath>
#include <span>

#include "device/attention_case.hpp"
#include "device/runtime_fixture.hpp"
#include "kernels/choose/attention_kernels.hpp"
#include "kernels/choose/tuned.hpp"
#include "support/error_text.hpp"

namespace test_tuning {

using attention_test::CaseSpec;
using clattn::DType;
using clattn::KernelFamily;
using clattn::TuningRow;

std::vector<std::shared_ptr<clattn::Context>> own_contexts() {
  std::vector<std::shared_ptr<clattn::Context>> contexts;
  for (const clattn::Device& device : clattn::list_devices()) {
    contexts.push_back(clattn::Context::create(device));
  }
  return contexts;
}

CaseSpec mixed_case(KernelFamily family) {
  CaseSpec spec;
  spec.config.num_heads = 8;
  spec.config.num_kv_heads = 2;
  spec.config.head_size = 64;
  spec.config.block_size = 16;
  spec.config.kernel_family = family;
  spec.requests = {{1, 120, 1}, {1, 0, 2}, {2, 35, 3}, {70, 9, 4}};
  spec.write_cache = true;
  return spec;
}

TuningRow row_for(const char* kind, const char* role, const char* variant) {
  TuningRow row;
  row.device = kind;
  row.role = role;
  row.variant = variant;
  return row;
}

const clattn::KernelInfo& kernel_of(const std::vector<clattn::KernelInfo>& kernels,
                                    std::string_view role) {
  return *std::find_if(kernels.rbegin(), kernels.rend(),
                       [&](const clattn::KernelInfo& kernel) { return kernel.role == role; });
}

std::vector<clattn::KernelInfo> kernels_of(const std::shared_ptr<clattn::Context>& context,
                                           const clattn::AttentionConfig& config) {
  return clattn::get_attn_backend(config, &context->capabilities())
      ->make_impl(context, config)
      ->kernels();
}

struct Tile {
  const char* kind;
  const char* role;
  const char* variant;
  std::int32_t rows, keys, wg;
};

/// Tiles at the ends of the ranges that rows may ask for.
constexpr Tile kTiles[] = {
    {"cpu", "decode", "decode_cpu__r24", 4, 64, 1},
    {"cpu", "decode", "decode_cpu__r24", 32, 32, 1},
    {"cpu", "prefill", "prefill_cpu__r256_kv64", 64, 128, 1},
    {"cpu", "prefill", "prefill_cpu__r256_kv64", 512, 32, 1},
    {"gpu", "decode", "decode_gpu__r4_local", 4, 8, 32},
    {"gpu", "decode", "decode_gpu__r8_local", 8, 1, 256},
    {"gpu", "prefill", "prefill_gpu__r64_kv32", 128, 64, 256},
    {"gpu", "prefill", "prefill_gpu__r16_kv32", 16, 64, 128},
};

TEST(Tuning, EveryTileThatARowAsksForComputesTheSame) {
  for (const auto& context : own_contexts()) {
    for (const Tile& tile : kTiles) {
      const bool cpu = std::string_view(tile.kind) == "cpu";
      if (cpu && context->capabilities().kind != clattn::DeviceKind::kCpu) continue;
      const CaseSpec spec = mixed_case(cpu ? KernelFamily::kCpu : KernelFamily::kGpu);
      TuningRow row = row_for(tile.kind, tile.role, tile.variant);
      row.block_rows = tile.rows;
      row.block_kv = tile.keys;
      row.work_group_size = tile.wg;
      clattn::set_tuning(*context, std::span(&row, 1));
      const auto kernels = kernels_of(context, spec.config);
      const clattn::KernelInfo& kernel = kernel_of(kernels, tile.role);
      EXPECT_EQ(kernel.name, tile.variant);
      EXPECT_EQ(kernel.block_rows, tile.rows) << tile.variant;
      EXPECT_EQ(kernel.block_kv, tile.keys) << tile.variant;
      EXPECT_EQ(kernel.work_group_size, tile.wg) << tile.variant;
      const auto result = attention_test::run_case(context, spec);
      EXPECT_EQ(result.fault, "") << tile.variant;
      EXPECT_LE(result.worst_share, 1.0)
          << tile.variant << " " << tile.rows << "x" << tile.keys << "\n " << result.worst_place;
      EXPECT_NE(std::find(result.kernels.begin(), result.kernels.end(), tile.variant),
                result.kernels.end());
    }
  }
}

// What CPUs without products of bf16 pairs run, and those with them where a row asks for it.
TEST(Tuning, CpusDecodeBF16QueriesByMultiplyAddsToo) {
  for (const auto& context : own_contexts()) {
    if (context->capabilities().kind != clattn::DeviceKind::kCpu) continue;
    TuningRow row = row_for("cpu", "decode", "decode_cpu__r24");
    clattn::set_tuning(*context, std::span(&row, 1));
    for (const DType cache : {DType::kBF16, DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8}) {
      CaseSpec spec = mixed_case(KernelFamily::kCpu);
      spec.config.dtype = DType::kBF16;
      spec.config.kv_cache_dtype = cache;
      spec.config.head_size = 64;
      const auto result = attention_test::run_case(context, spec);
      EXPECT_EQ(result.fault, "") << to_string(cache);
      EXPECT_LE(result.worst_share, 1.0) << to_string(cache) << "\n " << result.worst_place;
      EXPECT_NE(std::find(result.kernels.begin(), result.kernels.end(), "decode_cpu__r24"),
                result.kernels.end());
    }
  }
}

TEST(Tuning, RowsComeAndGoWithTheContext) {
  for (const auto& context : own_contexts()) {
    const bool cpu = context->capabilities().kind == clattn::DeviceKind::kCpu;
    const CaseSpec spec = mixed_case(KernelFamily::kGpu);
    const auto info = [&] { return kernel_of(kernels_of(context, spec.config), "prefill"); };
    const clattn::KernelInfo before = info();
    TuningRow row = row_for("gpu", "prefill", "prefill_gpu__r16_kv32");
    clattn::set_tuning(*context, std::span(&row, 1));
    EXPECT_EQ(info().name, "prefill_gpu__r16_kv32");
    // Rows for CPUs do not choose among the kernels for GPUs, nor do rows of other sizes.
    row.head_size = 128;
    clattn::set_tuning(*context, std::span(&row, 1));
    EXPECT_EQ(info().name, before.name);
    if (cpu) {
      row = row_for("cpu", "prefill", "prefill_gpu__r16_kv32");
      clattn::set_tuning(*context, std::span(&row, 1));
      EXPECT_EQ(info().name, before.name);
    }
    clattn::set_tuning(*context, {});
    EXPECT_EQ(info().name, before.name);
  }
}

TEST(Tuning, RowsThatNoKernelFollowsAreRefusedByName) {
  for (const auto& context : own_contexts()) {
    const auto refuse = [&](const TuningRow& row) {
      return test::error_text([&] { clattn::set_tuning(*context, std::span(&row, 1)); });
    };
    EXPECT_EQ(refuse(row_for("gpu", "decode", "gone")),
              "tuning row for gpu: no decode kernel 'gone' takes rows 0, keys 0, work-group 0");
    EXPECT_EQ(refuse(row_for("gpu", "dance", "decode_cpu__r24")),
              "tuning row for gpu: role is 'dance', which no kernel has");
    TuningRow odd = row_for("cpu", "decode", "decode_cpu__r24");
    odd.block_kv = 24;
    EXPECT_EQ(refuse(odd),
              "tuning row for cpu: no decode kernel 'decode_cpu__r24' takes rows 0, keys 24, "
              "work-group 0");
  }
}

TEST(Tuning, CostsThatNothingCanBePlannedByAreRefusedByName) {
  const auto context = own_contexts().front();
  const auto refuse = [&](const char* kernel, const clattn::KernelCosts& costs) {
    clattn::CostRow row;
    row.device = "cpu";
    row.kernel = kernel;
    row.costs = costs;
    return test::error_text([&] { clattn::set_tuning(*context, {}, std::span(&row, 1)); });
  };
  EXPECT_EQ(refuse("gone", {.read_gbs = 1}), "tuning row for cpu: there is no kernel 'gone'");
  EXPECT_EQ(refuse("gone*", {.read_gbs = 1}), "tuning row for cpu: there is no kernel 'gone*'");
  EXPECT_EQ(refuse("few:decode*", {.read_gbs = 1}),
            "tuning row for cpu: there is no kernel 'few:decode*'");
  EXPECT_EQ(refuse("few:prefill_wgmma*", {.launch_us = 1}),
            "tuning row for cpu: neither read_gbs nor math_gflops: keys would cost nothing");
  EXPECT_EQ(refuse("decode*", {.launch_us = 1}),
            "tuning row for cpu: neither read_gbs nor math_gflops: keys would cost nothing");
  EXPECT_EQ(refuse("decode*", {.launch_us = -1, .read_gbs = 1}),
            "tuning row for cpu: a cost is -1, legal: 0 to 1e+12");
  EXPECT_EQ(refuse("", {.read_gbs = std::nan("")}),
            "tuning row for cpu: a cost is nan, legal: 0 to 1e+12");
  EXPECT_EQ(refuse("", {.read_gbs = 1, .math_gflops = 1e-300}),
            "tuning row for cpu: a rate is 1e-300, legal: 0 or at least 1e-06");
  clattn::CostRow good;
  good.device = "cpu";
  good.costs.read_gbs = 1;
  clattn::set_tuning(*context, {}, std::span(&good, 1));
}

TEST(Tuning, ACandidateForEveryRowThatTheDeviceRuns) {
  for (const auto& context : own_contexts()) {
    const auto& device = context->capabilities();
    TuningRow key;
    key.device = device.name;
    key.head_size = 128;
    key.group = 4;
    key.dtype = clattn::DType::kF16;
    for (const char* role : {"decode", "prefill", "mla_decode", "packed_decode"}) {
      key.role = role;
      const auto rows = clattn::tuning_candidates(*context, key);
      EXPECT_FALSE(rows.empty()) << role;
      clattn::set_tuning(*context, rows);  // each can be followed
      for (std::size_t i = 0; i < rows.size(); ++i) {
        EXPECT_EQ(std::count(rows.begin(), rows.end(), rows[i]), 1) << format_tuning_row(rows[i]);
        const bool decodes = std::string_view(role) == "decode";
        EXPECT_TRUE(!decodes || rows[i].block_rows >= key.group);
      }
    }
  }
}

using clattn::KernelCosts;
using clattn::detail::AttentionKernels;
using clattn::detail::KernelShape;
using clattn::detail::Runtime;

class TuningFile : public clattn::detail::RuntimeFixture {
 protected:
  /// The kernels of a small layer under a user's file.
  std::shared_ptr<const AttentionKernels> kernels_under(std::string_view text) {
    std::filesystem::create_directories(folder_);
    options_.tuning_file = (folder_ / "tuning.txt").string();
    options_.kernel_dir.clear();
    std::ofstream(options_.tuning_file, std::ios::binary) << text;
    runtime_ = make_runtime();
    return attention_kernels(*runtime_, shape(), KernelFamily::kGpu);
  }
  static KernelShape shape() {
    KernelShape shape;
    shape.num_heads = 4;
    shape.num_kv_heads = 1;
    shape.head_size = 64;
    shape.block_size = 16;
    return shape;
  }
  KernelCosts costs_of(const AttentionKernels& kernels) const {
    return costs_of(*kernels.stages.front().variant);
  }
  KernelCosts costs_of(const clattn::detail::Variant& variant) const {
    const clattn::detail::RuntimeTuning tuning = runtime_->tuning();
    return kernel_costs({runtime_->capabilities(), *tuning.table}, shape(), variant);
  }
  std::unique_ptr<Runtime> runtime_;
};

TEST_P(TuningFile, ChoosesKernelAndCosts) {
  const auto shipped = kernels_under("");
  const KernelCosts before = costs_of(*shipped);
  EXPECT_GT(before.launch_us, 0);
  EXPECT_GT(before.read_gbs, 0);
  const auto tuned = kernels_under(
      "clattn-tuning 2\n"
      "gpu * decode 64 4 f16 f16 medium decode_gpu__r8_local - 1 64 - - - -\n"
      "cost gpu * decode* 64 4 f16 f16 1 2 3 4 5 6 - -\n"
      "cost gpu * merge* 64 4 f16 f16 7 - - 8 - - - -\n"
      "cost gpu * decode* 128 4 f16 f16 9 9 9 9 9 9 - -\n");
  EXPECT_EQ(tuned->stages.front().variant->name, "decode_gpu__r8_local");
  EXPECT_EQ(tuned->stages.front().variant->block_kv, 1);
  EXPECT_EQ(tuned->stages.front().variant->work_group_size, 64);
  EXPECT_EQ(tuned->stages.front().tiling.item_tokens, 2);
  EXPECT_EQ(costs_of(*tuned), (KernelCosts{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(costs_of(*tuned->merge.variant), (KernelCosts{.launch_us = 7, .read_gbs = 8}));
}

TEST_P(TuningFile, StaleForeignAndBrokenFilesChangeNothing) {
  const auto shipped = kernels_under("");
  const std::string_view name = shipped->stages.front().variant->name;
  const KernelCosts costs = costs_of(*shipped);
  for (const char* text :
       {"clattn-tuning 2\ngpu * decode * * * * * decode_gpu__of_old - - - - - - -\n",
        "clattn-tuning 2\ngpu * decode * * * * * decode_gpu__r8_local 8 7 64 - - - -\n",
        "clattn-tuning 2\ngpu * prefill * * * * * decode_gpu__r8_local - - - - - - -\n",
        "clattn-tuning 2\ngpu old decode * * * * * decode_gpu__r8_local - - - - - - -\n",
        "clattn-tuning 2\ngpu * decode * * * * * decode_gpu__r8_local - - - - - - -",
        "clattn-tuning 9\ngpu * decode * * * * * decode_gpu__r8_local - - - - - - -\n",
        "clattn-tuning 1\ngpu * decode * * * * * decode_gpu__r8_local - - - 9 9 - - - -\n",
        "clattn-tuning 2\ncost gpu * decode_of_old* * * * * 1 1 1 1 1 1 - -\n",
        "clattn-tuning 2\ncost gpu old decode* * * * * 1 1 1 1 1 1 - -\n",
        "clattn-tuning 2\ncost gpu * decode* * * * * 1 1 1 - - 1 - -\n",
        "clattn-tuning 2\ncost gpu * decode* * * * * 1 1 1 1 1 1 - -",
        "\x7f"
        "ELF"}) {
    const auto kernels = kernels_under(text);
    EXPECT_EQ(kernels->stages.front().variant->name, name) << text;
    EXPECT_EQ(kernels->planner, shipped->planner) << text;
    EXPECT_EQ(costs_of(*kernels), costs) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, TuningFile, testing::ValuesIn(clattn::list_devices()),
                         clattn::detail::device_suffix);

}  // namespace test_tuning
