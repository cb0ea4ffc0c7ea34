#include "cli/tune/target.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/check/checks.hpp"
#include "cli/common/attention_call.hpp"
#include "cli/common/elements.hpp"
#include "cli/common/verify.hpp"

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
  if (role == "mla_decode") return {{1, 1, cpu ? 256 : 2048}, {cpu ? 4 : 32, 1, cpu ? 256 : 2048}};
  if (role == "packed_decode")
    return {{1, 1, cpu ? 1024 : 2048}, {cpu ? 8 : 32, 1, cpu ? 1024 : 2048}};
  if (cpu) return {{1, 1, 2048}, {8, 1, 1024}};
  return {{1, 1, 8192}, {32, 1, 2048}};
}

/// More than the last cache of most devices, so that decode reads memory.
constexpr std::size_t kRotateBytes = std::size_t{320} << 20;

/// Lengths around the borders of pages and tiles, split and not.
const std::vector<BatchFamily>& checked_batches() {
  static const std::vector<BatchFamily> batches = {
      {"decode", {{1, 1}, {1, 17}, {1, 130}, {1, 300}}},
      {"decode, 4 splits", {{1, 300}, {1, 64}, {1, 130}}, 4},
      {"short and empty", {{2, 61}, {0, 20}, {3, 3}, {9, 40}}},
      {"prefill", {{65, 65}, {70, 150}}, 1},
  };
  return batches;
}

std::optional<KernelInfo> kernel_of(const std::vector<KernelInfo>& kernels, std::string_view role) {
  // Of several tiles the largest, which stands last, is what a row chooses.
  const auto found = std::ranges::find(kernels.rbegin(), kernels.rend(), role, &KernelInfo::role);
  return found == kernels.rend() ? std::nullopt : std::optional(*found);
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
    oracle::AttentionResult result = oracle::attention(oracle_case(call), element_of(config.dtype));
    truths.push_back({std::move(call), std::move(result)});
  }
  return truths;
}

Deviation check_all(const std::shared_ptr<Context>& context, const std::vector<Truth>& truths) {
  Deviation deviation;
  for (const Truth& truth : truths) {
    const AttentionOutcome outcome = execute(context, truth.call);
    deviation.merge(compare(truth.call.config.dtype, outcome.out, outcome.lse, truth.result,
                            outcome.rounds_weights));
  }
  return deviation;
}

/// A timed batch of equal requests.
std::function<std::unique_ptr<Workload>()> timed_batch(MakeWorkload* make,
                                                       const std::shared_ptr<Context>& context,
                                                       const TuneShape& shape,
                                                       std::string_view suite, const Batch& batch) {
  BenchShape timed;
  timed.model = shape.model();
  timed.suite = suite;
  timed.requests.assign(static_cast<std::size_t>(batch.batch), {batch.query_len, batch.seq_len});
  const BenchOptions options{
      .device = {}, .backend = {}, .layout = {}, .rotate_bytes = kRotateBytes};
  return [=] { return make({context, options, timed}); };
}

/// What the targets of all roles have in common. `kernels`: those of the layer under the rows of
/// the moment.
TuneTarget make_target(const std::shared_ptr<Context>& context, const TuneShape& shape,
                       const std::function<std::vector<KernelInfo>()>& kernels,
                       std::function<Deviation()> check, MakeWorkload* make) {
  const DeviceCapabilities& device = context->capabilities();
  const std::string_view role = shape.role->name;
  TuneTarget target{.name = shape.name(),
                    .key = shape.key(device),
                    .kernel = [kernels, role] { return kernel_of(kernels(), role); },
                    .check = std::move(check),
                    .workloads = {}};
  const std::string_view suite = role == "prefill" ? role : "decode";
  for (const Batch& batch : timed_batches(device.kind, role))
    target.workloads.push_back(timed_batch(make, context, shape, suite, batch));
  return target;
}

/// Two KV heads show what one alone would not, and spare the oracle the rest.
AttentionConfig with_two_kv_heads(AttentionConfig config) {
  const std::int32_t group = config.num_queries_per_kv();
  config.num_kv_heads = std::min(config.num_kv_heads, 2);
  config.num_heads = config.num_kv_heads * group;
  return config;
}

TuneTarget make_attention_target(const std::shared_ptr<Context>& context, const TuneShape& shape) {
  const auto kernels = [context, config = shape.config] {
    return get_attn_backend(config, &context->capabilities()).make_impl(context, config)->kernels();
  };
  const auto check = [context, truths = make_truths(with_two_kv_heads(shape.config))] {
    return check_all(context, truths);
  };
  return make_target(context, shape, kernels, check, make_attention_workload);
}

TuneTarget make_form_target(const CacheForm& form, const std::shared_ptr<Context>& context,
                            const TuneShape& shape, const AttentionConfig& checked,
                            std::uint32_t seed, MakeWorkload* make) {
  const auto kernels = [&form, context, config = shape.config] {
    return form.kernels(context, config);
  };
  const auto check = [&form, context, checked, seed] {
    Deviation deviation;
    for (const BatchFamily& batch : form.batches)
      deviation.merge(form.compare(context, checked, batch, seed).deviation);
    return deviation;
  };
  return make_target(context, shape, kernels, check, make);
}

TuneTarget make_mla_target(const std::shared_ptr<Context>& context, const TuneShape& shape) {
  return make_form_target(latent_form(), context, shape, shape.config, 7700,
                          make_attention_workload);
}

/// No suite of `clattn bench` reads x-packed caches.
TuneTarget make_packed_target(const std::shared_ptr<Context>& context, const TuneShape& shape) {
  return make_form_target(packed_form(), context, shape, with_two_kv_heads(shape.config), 8800,
                          make_packed_workload);
}

}  // namespace

std::span<const TuneRole> tune_roles() {
  static constexpr TuneRole kRoles[] = {
      {"decode", false, make_attention_target},
      {"prefill", false, make_attention_target},
      {"mla_decode", true, make_mla_target},
      {"packed_decode", false, make_packed_target},
  };
  return kRoles;
}

std::string TuneShape::name() const {
  return fmt::format("{}, {}", role->name, layer());
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
  key.role = role->name;
  key.head_size = config.output_head_size();
  key.group = config.num_queries_per_kv();
  key.dtype = config.dtype;
  key.cache_dtype = config.cache_dtype();
  key.pages = page_class(config.block_size);
  return key;
}

BenchModel TuneShape::model() const {
  return {.name = "tune", .config = config};
}

}  // namespace clattn::cli
