#pragma once

#include <clattn/context.hpp>
#include <clattn/mla.hpp>
#include <cstdint>
#include <memory>
#include <vector>

#include "cli/check_batches.hpp"
#include "cli/check_plan.hpp"
#include "cli/check_report.hpp"

namespace clattn::cli {

/// Attention over latent rows, on a batch like those of attention, against the oracle.
Verdict compare_mla(const std::shared_ptr<Context>& context, const MLAConfig& config,
                    const BatchFamily& family, std::uint32_t seed);

/// A small DeepSeek-like layer with these types.
MLAConfig mla_config(DType dtype, DType cache_dtype, KernelFamily family = KernelFamily::kAuto);
/// Batches that reach every stage of its kernels, and the merge.
const std::vector<BatchFamily>& mla_batches();

/// Has the kernels of a configuration made.
void compile_mla(const std::shared_ptr<Context>& context, const MLAConfig& config);

/// A line for each pair of types.
void plan_mla(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan);

}  // namespace clattn::cli
