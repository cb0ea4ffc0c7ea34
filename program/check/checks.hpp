#pragma once

#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <clattn/explain.hpp>
#include <clattn/mla.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "program/check/batches.hpp"
#include "program/check/plan.hpp"
#include "program/check/report.hpp"

// The parts of `clattn check`. Each plan_…() adds what it would run to a plan.

namespace clattn::cli {

/// The backends that take a configuration on a device, of all or (unless empty) of one name.
std::vector<const AttentionBackend*> usable_backends(const DeviceCapabilities& capabilities,
                                                     const AttentionConfig& config,
                                                     std::string_view only_backend);

/// Why none of them takes it: the reasons of the first, for what they share is the same in all.
std::string refusal_of(const DeviceCapabilities& capabilities, const AttentionConfig& config,
                       std::string_view only_backend);

/// Has the kernels made that these backends run a configuration with.
void compile_attention(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                       std::string_view only_backend);

/// Attention over paged caches, through every backend and layout: each kind of batch with each pair
/// of types, then each option that a layer may add.
void plan_attention(const std::shared_ptr<Context>& context, std::string_view only_backend,
                    CheckReport& report, CheckPlan& plan);

/// A cache of another form than K and V pages, and how layers over it are checked.
struct CacheForm {
  std::string_view name;
  std::vector<BatchFamily> batches;  ///< that reach every stage of its kernels, and the merge
  std::vector<std::string> (*refusals)(const AttentionConfig&, const DeviceCapabilities*);
  std::vector<KernelInfo> (*kernels)(const std::shared_ptr<Context>& context,
                                     const AttentionConfig& config);
  /// Has the kernels of a configuration made.
  void (*compile)(const std::shared_ptr<Context>& context, const AttentionConfig& config);
  /// Attention over a batch against the oracle.
  Verdict (*compare)(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                     const BatchFamily& family, std::uint32_t seed);
};
const CacheForm& latent_form();
const CacheForm& packed_form();
/// A small DeepSeek-like layer with these types.
AttentionConfig latent_layer(DType dtype, DType cache_dtype,
                             KernelFamily family = KernelFamily::kAuto);

/// Writes rows to an x-packed cache (reshape_and_cache) full of poison and compares all its bytes,
/// and those after it, with what must be there.
Verdict compare_packed_write(const Context& context, const AttentionConfig& config);

/// Lines for each pair of types: attention over latent rows; writes to x-packed caches and decodes
/// over them.
void plan_forms(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan);

/// A line for each operation on caches and attention states: copying and swapping blocks, latent
/// rows in and out, appending by page lists, merging states, advancing a step.
void plan_cache_ops(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan);

/// Lines for recurrent layers: convolution, gated delta rule by token and in chunks, gated norm, of
/// activations and states in different types.
void plan_recurrent(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan);

/// Families of kernels that variants belong to.
inline constexpr auto kVariantFamilies = std::span(kKernelFamilies).subspan<1>();  // all but kAuto
/// Whether a device's choice of kernels (kAuto) may fall on a family. On CPUs those of GPUs only
/// run for who names them, and take long to compile.
bool is_chosen(KernelFamily family, const DeviceCapabilities& capabilities);
/// What to run; empty: all.
struct VariantFilter {
  std::string_view backend, family;
};
/// Runs kernel variants that the device takes and prints a line of error and latency for each. One
/// that was built but never ran fails.
void plan_variants(const std::shared_ptr<Context>& context, VariantFilter only, CheckPlan& plan);

}  // namespace clattn::cli
