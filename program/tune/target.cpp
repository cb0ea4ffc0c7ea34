#include "program/tune/target.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "program/check/checks.hpp"
#include "program/common/attention_call.hpp"
#include "program/common/verify.hpp"
#include "program/tune/costs.hpp"

namespace clattn::cli {
namespace {

struct Batch {
  std::int32_t batch, query_len, seq_len;
};

/// The batches that a role is timed with: one that underfills the device and one that fills it.
std::vector<Batch> timed_batches(DeviceKind kind, std::string_view role) {
  const bool cpu = kind == DeviceKind::kCpu;
  if (role == "prefill") {
    if (cpu) return {{1, 128, 1024}, {1, 512, 512}};
    return {{1, 512, 4096}, {1, 2048, 2048}};
  }
  if (role == kLatentRole) return {{1, 1, cpu ? 256 : 2048}, {cpu ? 4 : 32, 1, cpu ? 256 : 2048}};
  if (role == "packed_decode")
    return {{1, 1, cpu ? 1024 : 2048}, {cpu ? 8 : 32, 1, cpu ? 1024 : 2048}};
  if (cpu) return {{1, 1, 2048}, {8, 1, 1024}};
  return {{1, 1, 8192}, {32, 1, 2048}};
}

/// More than the last cache of most devices, so that decode reads memory.
constexpr std::size_t kRotateBytes = std::size_t{320} << 20;

/// Lengths around the borders of pages and tiles, split and not.
std::vector<BatchFamily> checked_batches() {
  return {
      {"decode", {{1, 1}, {1, 17}, {1, 130}, {1, 300}}},
      {"decode, 4 splits", {{1, 300}, {1, 64}, {1, 130}}, 4},
      {"short and empty", {{2, 61}, {0, 20}, {3, 3}, {9, 40}}},
      {"prefill", {{65, 65}, {70, 150}}, 1},
  };
}

/// A checked batch and its exact result, worked out once.
struct Truth {
  AttentionCall call;
  oracle::AttentionResult result;
};

std::vector<Truth> make_truths(const AttentionConfig& config) {
  std::vector<Truth> truths;
  std::uint32_t seed = 400;
  for (const BatchFamily& batch : checked_batches()) {
    AttentionCall call = make_call(batch, config, seed += 10);
    oracle::AttentionResult result = oracle_result(call);
    truths.push_back({std::move(call), std::move(result)});
  }
  return truths;
}

Deviation check_all(const std::shared_ptr<Context>& context, const std::vector<Truth>& truths) {
  Deviation deviation;
  for (const Truth& truth : truths) {
    const AttentionOutcome outcome = execute(context, truth.call);
    deviation.merge(compare(truth.call.config.dtype, outcome.out, outcome.lse, truth.result,
                            outcome.rounds_probabilities));
  }
  return deviation;
}

/// A timed batch of equal requests.
std::function<std::unique_ptr<Workload>()> timed_batch(MakeWorkload* make,
                                                       const std::shared_ptr<Context>& context,
                                                       const TuneShape& shape,
                                                       std::string_view suite, const Batch& batch) {
  BenchShape timed;
  timed.model = {.name = "tune", .config = shape.config};
  timed.suite = suite;
  timed.requests.assign(static_cast<std::size_t>(batch.batch), {batch.query_len, batch.seq_len});
  const BenchOptions options{
      .device = {}, .backend = {}, .layout = {}, .rotate_bytes = kRotateBytes};
  return [=] { return make({context, options, timed}); };
}

/// Two KV heads show what one alone would not, and spare the oracle the rest.
AttentionConfig with_two_kv_heads(const AttentionConfig& config) {
  return with_kv_heads(config, std::min(config.num_kv_heads, 2));
}

std::vector<KernelInfo> kernels_of(const CacheForm* form, const std::shared_ptr<Context>& context,
                                   const AttentionConfig& config) {
  if (form != nullptr) return form->kernels(context, config);
  return get_attn_backend(config, &context->capabilities())->make_impl(context, config)->kernels();
}

/// Layers against the oracle; `seed` is of those over a cache of another form.
std::function<Deviation()> make_check(const CacheForm* form,
                                      const std::shared_ptr<Context>& context,
                                      const AttentionConfig& config, std::uint32_t seed) {
  if (form == nullptr) {
    return [context, truths = make_truths(config)] { return check_all(context, truths); };
  }
  return [=] {
    Deviation deviation;
    for (const BatchFamily& batch : form->batches)
      deviation.merge(form->compare(context, config, batch, seed).deviation);
    return deviation;
  };
}

}  // namespace

std::string TuneShape::name() const {
  return fmt::format("{}, {}", role, layer());
}

std::string TuneShape::layer() const {
  const std::string types = types_of(config.dtype, config.cache_dtype());
  if (config.use_mla) {
    return fmt::format("{} heads, {} + {}, {}", config.num_heads, config.output_head_size(),
                       config.rope_dim, types);
  }
  return fmt::format("{} heads a KV head of {}, {}", config.num_queries_per_kv(), config.head_size,
                     types);
}

TuningRow TuneShape::key(const DeviceCapabilities& device) const {
  TuningRow key;
  key.device = device.name;
  key.driver = device.driver_version;
  key.role = role;
  key.head_size = config.output_head_size();
  key.group = config.num_queries_per_kv();
  key.dtype = config.dtype;
  key.cache_dtype = config.cache_dtype();
  key.pages = page_class(config.block_size);
  return key;
}

TuneTarget make_target(const std::shared_ptr<Context>& context, const TuneShape& shape) {
  const DeviceCapabilities& device = context->capabilities();
  const std::string_view role = shape.role;
  const bool latent = role == kLatentRole, packed = role == "packed_decode";
  const CacheForm* const form = latent ? &latent_form() : packed ? &packed_form() : nullptr;
  TuneTarget target{
      .name = shape.name(),
      .key = shape.key(device),
      .kernel =
          [=, config = shape.config] { return kernel_of(kernels_of(form, context, config), role); },
      .check = make_check(form, context, with_two_kv_heads(shape.config), latent ? 7700 : 8800),
      .workloads = {}};
  const std::string_view suite = role == "prefill" ? role : "decode";
  // No suite of `clattn bench` reads x-packed caches.
  MakeWorkload* const make = packed ? make_packed_workload : make_attention_workload;
  for (const Batch& batch : timed_batches(device.kind, role))
    target.workloads.push_back(timed_batch(make, context, shape, suite, batch));
  return target;
}

}  // namespace clattn::cli
