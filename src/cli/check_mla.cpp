#include "cli/check_mla.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "cli/elements.hpp"
#include "cli/mla_call.hpp"

namespace clattn::cli {
namespace {

/// Latent attention is attention of one KV head whose keys and values are the same rows.
AttentionCall as_attention(const MLAConfig& config, const BatchFamily& family, std::uint32_t seed) {
  AttentionConfig plain;
  plain.num_heads = config.num_heads;
  plain.num_kv_heads = 1;
  plain.head_size = config.kv_lora_rank + config.rope_dim;
  plain.block_size = config.block_size;
  plain.dtype = config.dtype;
  plain.kv_cache_dtype = config.kv_cache_dtype;
  plain.scale = config.scale;
  AttentionCall call = make_call(family, plain, seed);
  call.value = call.key;
  call.cache.value = call.cache.key;
  if (!call.scales.empty()) call.scales[1] = call.scales[0];
  return call;
}

}  // namespace

MLAConfig mla_config(DType dtype, DType cache_dtype, KernelFamily family) {
  MLAConfig config;
  config.num_heads = 16;
  config.block_size = 16;
  config.dtype = dtype;
  config.kv_cache_dtype = cache_dtype;
  config.scale = 0.0721687836F;  // 1 / sqrt(128 + 64)
  config.kernel_family = family;
  return config;
}

const std::vector<BatchFamily>& mla_batches() {
  static const std::vector<BatchFamily> batches = {
      {"MLA decode", {{1, 1}, {1, 17}, {1, 150}}, 1},
      {"MLA, 2-9 tokens", {{2, 40}, {0, 20}, {9, 33}}, 1},
      {"MLA decode, 3 splits", {{1, 130}, {1, 64}}, 3},
  };
  return batches;
}

Verdict compare_mla(const std::shared_ptr<Context>& context, const MLAConfig& config,
                    const BatchFamily& family, std::uint32_t seed) {
  const AttentionCall attention = as_attention(config, family, seed);
  MLACall call;
  call.config = config;
  call.num_splits = attention.num_splits;
  if (!attention.scales.empty()) call.kv_scale = attention.scales[0];
  call.batch = attention.batch();
  call.query = attention.query;
  call.cache = expected_cache(attention).key;
  call.num_blocks = attention.num_blocks;
  MLAOutcome outcome = execute(context, call, kCheckRepeats);
  const oracle::AttentionResult truth =
      front_of_rows(oracle::attention(oracle_case(attention), element_of(config.dtype)),
                    config.kv_lora_rank + config.rope_dim, config.kv_lora_rank);
  return {compare(config.dtype, outcome.out, outcome.lse, truth, outcome.rounds_weights),
          std::move(outcome.launches)};
}

void compile_mla(const std::shared_ptr<Context>& context, const MLAConfig& config) {
  make_mla_impl(*context, config)->warm_up(context->create_queue());
}

namespace {

void check_types(const std::shared_ptr<Context>& context, const MLAConfig& config,
                 std::uint32_t seed, CheckReport& report) {
  CheckLine line{.what = "MLA", .types = types_of(config.dtype, config.cache_dtype())};
  const auto reasons = validate_mla_configuration(config, &context->capabilities());
  if (!reasons.empty()) {
    return report.skip(line.what, line.types, fmt::format("{}", fmt::join(reasons, "; ")));
  }
  for (const BatchFamily& family : mla_batches()) {
    line.run(std::string(family.name),
             [&] { return compare_mla(context, config, family, seed += 10); });
  }
  report.add(line);
}

}  // namespace

void plan_mla(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan) {
  std::uint32_t seed = 5000;
  for (const auto& [dtype, cache_dtype] : kCacheTypes) {
    seed += 100;
    const std::string types = types_of(dtype, cache_dtype);
    if (!plan.takes("MLA", types, is_representative(dtype, cache_dtype))) continue;
    const MLAConfig config = mla_config(dtype, cache_dtype);
    plan.add({"MLA, " + types, [=] { compile_mla(context, config); },
              [=, &report] { check_types(context, config, seed, report); }});
  }
}

}  // namespace clattn::cli
