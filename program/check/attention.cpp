#include "program/check/checks.hpp"
#include "program/common/verify.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/config_fields.hpp>
#include <clattn/registry.hpp>
#include <functional>
#include <string>
#include <utility>

namespace clattn::cli {
namespace {

/// A layer, and whether the quick check has it too.
struct Shape {
  AttentionConfig config;
  bool representative;
};
/// Small shapes that reach every path: all element types, a cache in another type than the queries,
/// a large head, a page size that is no power of two.
std::vector<Shape> shapes() {
  return {
      {make_config(8, 2, 64, 16, DType::kF32, DType::kF32), false},
      {make_config(8, 2, 64, 16, DType::kF16, DType::kF16), true},
      {make_config(8, 2, 64, 16, DType::kBF16, DType::kBF16), true},
      {make_config(4, 2, 64, 16, DType::kF32, DType::kF16), false},
      {make_config(6, 1, 128, 48, DType::kF16, DType::kF16), false},
  };
}

/// Sets an option to a value at which it matters to the batches below, up to `most` of its row's.
template <typename Value>
void set_option(AttentionConfig& config, const ConfigField<Value>& row, std::int32_t most) {
  Value& value = config.*row.member;
  if constexpr (std::is_same_v<Value, std::vector<float>>) {
    value = per_head_values(config.num_heads, row.legal.minus_infinity);
  } else if constexpr (std::is_same_v<Value, bool>) {
    value = true;
  } else if constexpr (std::is_same_v<Value, std::int32_t>) {
    value = std::min(row.random.most, most);
  } else if constexpr (std::is_same_v<Value, float>) {
    value = 2.5F;
  } else if constexpr (std::is_same_v<Value, std::optional<float>>) {
    value = 0.25F;
  }
}

/// Calls `use` with the options that every batch may have. fp8_products has a row of its own, with
/// the cache and the head size that it needs.
template <typename Use>
void for_each_option(Use use) {
  for_each_field([&](const auto& row) {
    if (row.random.percent > 0 && row.name != "fp8_products") use(row);
  });
}

using Change = std::function<void(AttentionConfig&)>;

Change cache_of(CacheFormat format) {
  return [format](AttentionConfig& config) { config.kv_cache_dtype = format; };
}
/// All that go together, which is also what a forced family must take.
Change all_options(KernelFamily family) {
  return [family](AttentionConfig& config) {
    for_each_option([&](const auto& row) { set_option(config, row, 100); });
    say_window_once(config);
    config.kv_cache_dtype = DType::kFp8E4M3;
    config.kernel_family = family;
  };
}

/// What batches say of their requests, trees of drafts and kept keys included, under a window that
/// cuts spans on both sides.
Change lists(KernelFamily family) {
  return [family](AttentionConfig& config) {
    config.use_spans = config.use_directions = config.use_first_keys = true;
    config.use_keep_keys = config.use_trees = true;
    config.span_rule = SpanRule::kClipBoth;
    config.sliding_window = 33;
    config.kernel_family = family;
  };
}

struct Option {
  std::string name;
  Change change;
  bool representative = false;
};
std::vector<Option> options() {
  std::vector<Option> all;
  for_each_option([&](const auto& row) {
    all.push_back(
        {std::string(row.name), [row](AttentionConfig& config) { set_option(config, row, 33); }});
  });
  const Option others[] = {
      {"fp8 e4m3 cache", cache_of(DType::kFp8E4M3)},
      {"multiplied in fp8",
       [](AttentionConfig& c) {
         c.kv_cache_dtype = DType::kFp8E4M3;
         c.fp8_products = true;
         c.head_size = 128;
       }},
      {"fp8 e5m2 cache", cache_of(DType::kFp8E5M2)},
      {"int8 cache", cache_of(DType::kInt8)},
      {"int8 per token and head", cache_of(CacheFormat::per_row(DType::kInt8))},
      {"fp8 per token and head", cache_of(CacheFormat::per_row(DType::kFp8E4M3))},
      {"4 bits per token and head", cache_of(CacheFormat::per_row(DType::kUInt4x2))},
      {"cross attention", [](AttentionConfig& c) { c.attn_type = AttentionType::kEncoderDecoder; }},
      {"encoder, no pages",
       [](AttentionConfig& c) {
         c.attn_type = AttentionType::kEncoderOnly;
         c.block_size = 0;
       },
       true},
      {"small values, no pages",
       [](AttentionConfig& c) {
         c.attn_type = AttentionType::kEncoderOnly;
         c.block_size = 0;
         c.head_size_v = c.head_size / 2;
       }},
      {"small values in pages", [](AttentionConfig& c) { c.head_size_v = c.head_size / 2; }},
      {"all options, family cpu", all_options(KernelFamily::kCpu), true},
      {"all options, family gpu", all_options(KernelFamily::kGpu), true},
      {"all options, family ptx", all_options(KernelFamily::kGpuPtx), true},
      {"all options, family matrix", all_options(KernelFamily::kGpuMatrix), true},
      {"lists of a batch, family cpu", lists(KernelFamily::kCpu), true},
      {"lists of a batch, family gpu", lists(KernelFamily::kGpu), true},
      {"lists of a batch, family ptx", lists(KernelFamily::kGpuPtx), true},
      {"lists of a batch, family matrix", lists(KernelFamily::kGpuMatrix), true},
  };
  all.insert(all.end(), std::begin(others), std::end(others));
  return all;
}

/// Every stage in one batch, then again with its keys split, so that the merge has its part, and a
/// scale for each head. What a request says of its keys is for layers that look at it.
std::vector<BatchFamily> option_batches() {
  const std::vector<RequestShape> requests = {
      {1, 1, Direction::kCanvas},
      {1, 130, Direction::kCausal, 17, 40},
      {4, 65, Direction::kCanvas, 0, 5, {{0, 7}, {60, 64}}},
      {35, 205, Direction::kBothWays, 180, 0, {{150, 178}, {190, 900}}},
      {19, 19, Direction::kCausal, 3, 4, {{2, 9}, {9, 15}}},
      {8, 90, Direction::kCausal, 2, 6, {}, {-1, 0, 0, 1, 1, 2, -1, 4}},
      {2, 70, Direction::kCausal, 0, 9, {}, {-1, 0, 0, 1, 2}}};
  return {{"unsplit", requests, 1}, {"3 splits", requests, 3, true, true}};
}

class AttentionCheck {
 public:
  AttentionCheck(std::shared_ptr<Context> context, std::string_view only_backend,
                 CheckReport& report)
      : context_(std::move(context)), only_backend_(only_backend), report_(report) {}

  void check_batches(const AttentionConfig& config) {
    CheckLine writes = line_of("cache write", config);
    for (const BatchFamily& family : batch_families()) {
      CheckLine line = line_of(family.name, config);
      check(family, config, line, writes);
      if (line.kernels.empty() && line.failures.empty()) {
        report_.skip(line.what, line.types, "the backend cuts its work itself");
      } else {
        report_.add(line);
      }
    }
    report_.add(writes);
  }

  void check_option(std::string_view option, const AttentionConfig& config) {
    CheckLine line = line_of(option, config);
    if (backends_of(config).empty()) {
      return report_.skip(line.what, line.types,
                          refusal_of(context_->capabilities(), config, only_backend_));
    }
    for (const BatchFamily& family : option_batches()) {
      check(family, config, line, line);
    }
    report_.add(line);
  }

 private:
  static CheckLine line_of(std::string_view what, const AttentionConfig& config) {
    return {.what = std::string(what), .types = types_of(config.dtype, config.cache_dtype())};
  }

  std::vector<const AttentionBackend*> backends_of(const AttentionConfig& config) const {
    return usable_backends(context_->capabilities(), config, only_backend_);
  }

  /// One batch through every backend and layout; what it stored goes to `writes`.
  void check(const BatchFamily& family, const AttentionConfig& config, CheckLine& line,
             CheckLine& writes) {
    AttentionCall call = make_call(family, config, seed_ += 10);
    const oracle::AttentionResult truth = oracle_result(call);
    const bool stores = !call.key.empty() && !call.config.contiguous_kv();
    const LogicalCache cache = stores ? expected_cache(call) : LogicalCache{};
    for (const AttentionBackend* backend : backends_of(call.config)) {
      const bool cuts_itself =
          !backend->why_not(&AttentionConfig::use_batch_invariant, true).empty();
      if (family.num_splits > 1 && cuts_itself) continue;
      for (const KVCacheLayout layout : backend->supported_layouts()) {
        call.backend = backend->name();
        call.layout = layout;
        const std::string where =
            fmt::format("{}, {} {}", family.name, call.backend, to_string(layout));
        line.run(where, [&] {
          AttentionOutcome outcome = execute(context_, call, kCheckRepeats);
          if (stores) add_write(call, outcome, cache, where, writes);
          return Verdict{stores && call.config.cache_format().scales_per_row()
                             ? judge_read(call, outcome)
                             : judge_output(call, outcome, truth),
                         outcome.launches};
        });
      }
    }
  }

  /// By the codes that rows have: near ties the device's division decides which.
  static Deviation judge_read(AttentionCall call, const AttentionOutcome& outcome) {
    call.cache = outcome.cache;
    call.key.clear();
    call.value.clear();
    return judge_output(call, outcome, oracle_result(call));
  }

  static void add_write(const AttentionCall& call, const AttentionOutcome& outcome,
                        const LogicalCache& cache, const std::string& where, CheckLine& writes) {
    const Deviation stored = judge_cache(call, outcome, cache);
    if (!stored.passed()) writes.failures.push_back(where + ": the cache holds other bytes");
    writes.deviation.merge(stored);
    writes.latency_us = std::max(writes.latency_us, outcome.cache_write_us);
    writes.kernels.insert("cache write");
  }

  std::shared_ptr<Context> context_;
  std::string_view only_backend_;
  CheckReport& report_;
  std::uint32_t seed_ = 1;
};

}  // namespace

std::vector<const AttentionBackend*> usable_backends(const DeviceCapabilities& capabilities,
                                                     const AttentionConfig& config,
                                                     std::string_view only_backend) {
  std::vector<const AttentionBackend*> usable;
  for (const auto& backend : list_attn_backends()) {
    const bool wanted = only_backend.empty() || backend->name() == only_backend;
    if (wanted && backend->validate_configuration(config, &capabilities).empty()) {
      usable.push_back(backend.get());
    }
  }
  return usable;
}

std::string refusal_of(const DeviceCapabilities& capabilities, const AttentionConfig& config,
                       std::string_view only_backend) {
  for (const auto& backend : list_attn_backends()) {
    if (!only_backend.empty() && backend->name() != only_backend) continue;
    return fmt::format("{}",
                       fmt::join(backend->validate_configuration(config, &capabilities), "; "));
  }
  return "there is no backend";
}

void compile_attention(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                       std::string_view only_backend) {
  const Queue queue = context->create_queue();
  for (const AttentionBackend* backend :
       usable_backends(context->capabilities(), config, only_backend)) {
    backend->make_impl(context, config)->warm_up(queue);
  }
}

void plan_attention(const std::shared_ptr<Context>& context, std::string_view only_backend,
                    CheckReport& report, CheckPlan& plan) {
  const auto check = std::make_shared<AttentionCheck>(context, only_backend, report);
  const auto add = [&](const std::string& name, const AttentionConfig& config, auto run) {
    plan.add({name, [=] { compile_attention(context, config, only_backend); }, std::move(run)});
  };
  for (const auto& [config, representative] : shapes()) {
    if (usable_backends(context->capabilities(), config, only_backend).empty()) continue;
    const std::string name = fmt::format(
        "{}, heads of {}", types_of(config.dtype, config.cache_dtype()), config.head_size);
    if (!plan.takes("batches", name, representative)) continue;
    add("batches, " + name, config, [check, config = config] { check->check_batches(config); });
  }
  for (const Option& option : options()) {
    const std::string name(option.name);
    AttentionConfig config = make_config(8, 2, 64, 16, DType::kF16, DType::kF16);
    option.change(config);
    const bool chosen = is_chosen(config.kernel_family, context->capabilities());
    if (!plan.takes("options", name, option.representative && chosen)) continue;
    add(name, config, [=] { check->check_option(name, config); });
  }
}

}  // namespace clattn::cli
