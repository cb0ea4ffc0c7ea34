#include "cli/tune_target.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/attention_call.hpp"
#include "cli/check_batches.hpp"
#include "cli/check_mla.hpp"
#include "cli/check_report.hpp"
#include "cli/elements.hpp"
#include "cli/verify.hpp"

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
  const auto found = std::find_if(kernels.rbegin(), kernels.rend(),
                                  [&](const KernelInfo& kernel) { return kernel.role == role; });
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

}  // namespace

std::function<std::unique_ptr<Workload>()> timed_batch(const std::shared_ptr<Context>& context,
                                                       const BenchModel& model,
                                                       std::string_view suite,
                                                       std::int32_t num_reqs,
                                                       BenchRequest request) {
  BenchShape shape;
  shape.model = model;
  shape.suite = suite;
  shape.requests.assign(static_cast<std::size_t>(num_reqs), request);
  return [=] {
    return make_attention_workload(
        context, {.device = {}, .backend = {}, .layout = {}, .rotate_bytes = kRotateBytes}, shape);
  };
}

TuneTarget make_attention_target(const std::shared_ptr<Context>& context, const TuneShape& shape) {
  const AttentionConfig& config = shape.config;
  const std::string_view role = shape.role->name;
  TuneTarget target;
  target.key = shape.key(context->capabilities());
  target.name = shape.name();
  target.kernel = [context, config, role] {
    const AttentionBackend& backend = get_attn_backend(config, &context->capabilities());
    return kernel_of(backend.make_impl(context, config)->kernels(), role);
  };
  // Two KV heads show what one alone would not, and spare the oracle the rest.
  AttentionConfig small = config;
  small.num_kv_heads = std::min(config.num_kv_heads, 2);
  small.num_heads = small.num_kv_heads * target.key.group;
  target.check = [context, truths = make_truths(small)] { return check_all(context, truths); };
  for (const Batch& batch : timed_batches(context->capabilities().kind, role)) {
    target.workloads.push_back(
        timed_batch(context, shape.model(), role, batch.batch, {batch.query_len, batch.seq_len}));
  }
  return target;
}

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
  BenchModel model;
  model.name = "tune";
  model.heads = config.num_heads;
  model.kv_heads = config.num_kv_heads;
  model.head_size = config.head_size;
  model.rope_dim = config.use_mla ? config.rope_dim : 0;
  model.block_size = config.block_size;
  model.scale = config.scale.value_or(0);
  model.dtype = config.dtype;
  model.kv_dtype = config.cache_dtype();
  return model;
}

}  // namespace clattn::cli
