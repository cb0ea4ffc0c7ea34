#pragma once

#include <clattn/mla.hpp>
#include <memory>
#include <string>
#include <vector>

#include "device/step_case.hpp"

/// Latent decode against the oracle: MLA is attention whose keys and values are the same rows, of
/// which the output keeps the latent part.
namespace mla_test {

using step_test::Request;

struct Case {
  clattn::MLAConfig config;
  std::vector<Request> requests;
  std::int32_t num_splits = 0;
  std::int64_t query_padding = 0;
  clattn::SplitPolicy split_policy = clattn::SplitPolicy::kBalanced;
  bool fast_build = false;
  /// The lengths come from the device, the plan is made of bounds so many tokens above them.
  std::int32_t bounds_above = -1;
  std::int32_t graph_batch_size = 0;  ///< of recorded steps, whose plans are padded
  double cache_scale = 1.0;           ///< quantized caches: real = stored * cache_scale
  bool last_token_overflows = false;  ///< each request's newest row is inf, seen by its last query
  /// An element of each request's last row but one is inf, and every query's there is below 0: the
  /// logit is -inf, the weight 0, and 0 times inf is NaN.
  bool infinity_has_no_weight = false;
};
struct Outcome : step_test::Launches {
  std::vector<double> out, lse;
  bool rounds_probabilities = false;
  bool rebalanced = false;  ///< clattn::detail::PlanCounts
};

std::string describe(const Case& c);

/// Runs the case and compares it with the oracle.
Outcome run(const std::shared_ptr<clattn::Context>& context, const Case& c);

/// The latent row of cases that say nothing of it.
struct LatentRow {
  std::int32_t rank, rope;
};
inline constexpr LatentRow kSmallRow{64, 16};
inline constexpr LatentRow kTiledRow{256, 64};  ///< one that matrix units take, where there are any

/// Decodes of 16 heads of the small row, of one token and several, alone with their keys, idle.
Case small_case(clattn::DType dtype = clattn::DType::kF16);

struct Kernels {
  clattn::KernelFamily family;
  LatentRow row;
};

/// Tests of a family of kernels, on rows that it takes.
class MLATest : public testing::TestWithParam<Kernels> {
 protected:
  std::vector<Outcome> check(Case c) {
    c.config.kernel_family = GetParam().family;
    if (c.config.kv_lora_rank == kSmallRow.rank) {
      c.config.kv_lora_rank = GetParam().row.rank;
      c.config.rope_dim = GetParam().row.rope;
    }
    return step_test::on_able_devices(
        [&](const auto* device) { return clattn::validate_mla_configuration(c.config, device); },
        [&](const auto& context) { return run(context, c); });
  }
};

inline std::string kernels_name(const testing::TestParamInfo<Kernels>& tested) {
  return fmt::format("{}_{}", to_string(tested.param.family), tested.param.row.rank);
}

inline const auto kAllKernels = testing::Values(Kernels{clattn::KernelFamily::kAuto, kSmallRow},
                                                Kernels{clattn::KernelFamily::kAuto, kTiledRow},
                                                Kernels{clattn::KernelFamily::kGpu, kSmallRow});

}  // namespace mla_test
