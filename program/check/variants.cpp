#include <clattn/cache_ops.hpp>

#include "program/check/checks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace clattn::cli {
namespace {

/// Query heads of a KV head, and the types.
struct Group {
  std::int32_t heads;
  DType dtype;
  bool fp8_products = false;  ///< over e4m3 caches
};
/// The decode tiles of GPUs hold 1, 2, 4 and 8 heads, beyond that their prefill tiles decode too.
/// One shape in f32, one in bf16, the rest in f16: each is its own program to compile.
constexpr Group kGroups[] = {{1, DType::kF16}, {2, DType::kF16}, {4, DType::kF16}, {8, DType::kF16},
                             {9, DType::kF16}, {4, DType::kF32}, {8, DType::kBF16}};
/// And for the family of the kernels that multiply in fp8, where they run.
constexpr Group kFp8Groups[] = {{4, DType::kF16, true}, {8, DType::kBF16, true}};

std::vector<Group> groups_of(KernelFamily family, const DeviceCapabilities& device) {
  std::vector<Group> groups(std::begin(kGroups), std::end(kGroups));
  if (family == KernelFamily::kGpuPtx && device.warpgroup_products)
    groups.insert(groups.end(), std::begin(kFp8Groups), std::end(kFp8Groups));
  return groups;
}

/// What represents them, and the form that x-packed caches are checked in.
constexpr std::int32_t kGroup = 4;

/// Each batch reaches one kernel of every family: two tokens, of four heads a KV head four, are too
/// many for a GPU's decode tile and fit its small prefill tile, eight where tiles have more rows;
/// 65 are too many for all but the largest. Split ones also reach what joins: decode itself or the
/// merge, prefill the merge alone.
std::vector<BatchFamily> single_kernel_batches() {
  return {
      {"decode", {{1, 1}, {1, 17}, {1, 130}, {1, 300}}, 1},
      {"decode, 4 splits", {{1, 300}, {1, 64}, {1, 130}}, 4},
      {"2 tokens", {{2, 61}, {2, 2}}, 1},
      {"4 tokens", {{4, 61}, {4, 4}}, 1},
      {"8 tokens", {{8, 61}, {8, 8}}, 1},
      {"prefill", {{65, 65}, {70, 150}}, 1},
      {"prefill, 3 splits", {{65, 400}}, 3},
  };
}

AttentionConfig group_config(std::int32_t group, DType dtype, KernelFamily family) {
  AttentionConfig config = make_config(2 * group, 2, 128, 16, dtype, dtype);
  config.kernel_family = family;
  return config;
}

/// Types of queries and cache, and the family that was asked for.
struct Kind {
  std::string types;
  KernelFamily family;
};
Kind kind_of(const AttentionConfig& config) {
  return {types_of(config.dtype, config.cache_dtype()), config.kernel_family};
}

/// Whether groups of one work-item do a core's work.
bool runs_single_items(const DeviceCapabilities& capabilities) {
  return cache_op_work_group_size(capabilities) == 1;
}

/// What is known about one variant with one pair of types.
struct Row {
  std::set<std::string_view> families{};  ///< that were asked for when it ran
  Deviation deviation{};                  ///< of the batches that it had a part in
  double latency_us = 0;                  ///< of its slowest batch, the best of that batch's runs
};

/// The best time of every kernel that a batch launched, over backends, layouts and repeats.
using Times = std::map<std::string, double>;
void keep_best(Times& times, const std::string& kernel, double time_us) {
  const auto [entry, is_new] = times.emplace(kernel, time_us);
  if (!is_new) entry->second = std::min(entry->second, time_us);
}

class VariantCheck : public std::enable_shared_from_this<VariantCheck> {
 public:
  VariantCheck(std::shared_ptr<Context> context, VariantFilter only)
      : context_(std::move(context)), only_backend_(only.backend), only_family_(only.family) {}

  void add_to(CheckPlan& plan) {
    const DeviceCapabilities& device = context_->capabilities();
    for (const KernelFamily family : kVariantFamilies) {
      // Kernels of a foreign family are never chosen, but those who ask can execute some.
      const bool by_ptx = family == KernelFamily::kGpuPtx;
      const bool by_units = family == KernelFamily::kGpuMatrix;
      const bool foreign =
          (by_ptx && !device.inline_ptx) || (by_units && device.matrix_units.empty());
      if (!runs(family) || (foreign && only_family_.empty())) continue;
      plan_attention(family, plan);
      const std::uint32_t lanes = by_ptx ? 32U : 8U | 16U;  // of families that sub-groups execute
      const bool executed = !foreign || (device.sub_groups_in_step & lanes) != 0;
      if (!executed || !only_backend_.empty()) continue;  // the rest belongs to no backend
      plan_forms(family, plan);
    }
    if (only_backend_.empty() && runs(own_family())) {
      plan.add({"variants: x-packed writes", {}, [this] { check_packed_writes(); }});
    }
    plan.add({"", {}, [self = shared_from_this(), &plan] {
                if (!self->print()) plan.fail();
              }});
  }

 private:
  bool runs(KernelFamily family) const {
    return only_family_.empty() || to_string(family) == only_family_;
  }
  /// Of the device's x-packed writes.
  KernelFamily own_family() const {
    return runs_single_items(context_->capabilities()) ? KernelFamily::kCpu : KernelFamily::kGpu;
  }

  /// Whether the quick check has more of a family than one row.
  bool is_usual(KernelFamily family) const {
    return !only_family_.empty() || is_chosen(family, context_->capabilities());
  }

  static constexpr const char* kWhat = "variants";
  bool takes(CheckPlan& plan, KernelFamily family, const std::string& name,
             bool representative) const {
    const std::string row =
        is_usual(family) ? name : fmt::format("family {}, {}", to_string(family), name);
    return plan.takes(kWhat, row, representative);
  }
  static std::string step_name(KernelFamily family, const std::string& name) {
    return fmt::format("{}: family {}, {}", kWhat, to_string(family), name);
  }

  void plan_attention(KernelFamily family, CheckPlan& plan) {
    std::uint32_t seed = 1000;
    for (const Group& group : groups_of(family, context_->capabilities())) {
      seed += 100;
      AttentionConfig config = group_config(group.heads, group.dtype, family);
      config.fp8_products = group.fp8_products;
      if (group.fp8_products) config.kv_cache_dtype = DType::kFp8E4M3;
      const std::string name = fmt::format("{}, group of {}{}", kind_of(config).types, group.heads,
                                           group.fp8_products ? ", multiplied in fp8" : "");
      const bool usual = group.dtype == DType::kF16 && !group.fp8_products;
      if (!takes(plan, family, name, usual && group.heads == kGroup)) continue;
      plan.add({step_name(family, name),
                [=, this] { compile_attention(context_, config, only_backend_); },
                [=, this] { check_attention(config, seed); }});
    }
  }

  void check_attention(const AttentionConfig& config, std::uint32_t seed) {
    const auto backends = usable_backends(context_->capabilities(), config, only_backend_);
    if (backends.empty()) {
      return note_refusal(kind_of(config),
                          refusal_of(context_->capabilities(), config, only_backend_));
    }
    try {
      const auto impl = backends.front()->make_impl(context_, config);
      // A row for each, so that one that no batch reaches shows up, and fails.
      for (const KernelInfo& kernel : impl->kernels()) row_of(kernel.name, kind_of(config));
      const auto writer = kernel_of(impl->kernels(), "cache");
      for (const BatchFamily& batch : single_kernel_batches()) {
        check_batch(batch, config, backends, writer ? writer->name : "cache write", seed += 10);
      }
    } catch (const Error& error) {
      note_failure(config, error.what());
    }
  }

  /// In two types each; 40 heads of latent attention fill more than one of a GPU's tiles.
  void plan_forms(KernelFamily family, CheckPlan& plan) {
    for (const DType dtype : {DType::kF16, DType::kF32}) {
      const std::string types = types_of(dtype, dtype);
      const bool usual = dtype == DType::kF16;
      for (const std::int32_t heads : {16, 40}) {
        AttentionConfig config = latent_layer(dtype, dtype, family);
        config.num_heads = heads;
        plan_form(latent_form(), fmt::format("MLA {}, {} heads", types, heads), config,
                  usual && heads == 16 && is_usual(family), plan);
      }
      plan_form(packed_form(), "x-packed " + types, group_config(kGroup, dtype, family),
                usual && is_usual(family), plan);
    }
  }

  void plan_form(const CacheForm& form, const std::string& name, const AttentionConfig& config,
                 bool representative, CheckPlan& plan) {
    if (!takes(plan, config.kernel_family, name, representative)) return;
    plan.add({step_name(config.kernel_family, name),
              [=, this, &form] { form.compile(context_, config); },
              [=, this, &form] { check_form(form, name, config); }});
  }

  /// Rows for all kernels of a layer, then batches that shall reach them.
  void check_form(const CacheForm& form, const std::string& name, const AttentionConfig& config) {
    const Kind kind = kind_of(config);
    const auto reasons = form.refusals(config, &context_->capabilities());
    if (!reasons.empty()) return note_refusal(kind, fmt::format("{}", fmt::join(reasons, "; ")));
    try {
      for (const KernelInfo& kernel : form.kernels(context_, config)) row_of(kernel.name, kind);
      for (const BatchFamily& batch : form.batches) {
        note(kind, fmt::format("{}, {}", name, batch.name),
             form.compare(context_, config, batch, seed_ += 10));
      }
    } catch (const Error& error) {
      note_failure(kind, fmt::format("{}: {}", name, error.what()));
    }
  }

  void note(const Kind& kind, const std::string& what, const Verdict& verdict) {
    if (!verdict.deviation.passed()) note_failure(kind, what + ": differs from the oracle");
    for (const LaunchReport& launch : verdict.launches) {
      Row& row = row_of(launch.name, kind);
      row.deviation.merge(verdict.deviation);
      row.latency_us = std::max(row.latency_us, launch.time_us);
    }
  }

  void note_refusal(const Kind& kind, const std::string& why) {
    refusals_[{to_string(kind.family), why}].insert(kind.types);
  }

  void note_failure(const Kind& kind, const std::string& what) {
    failures_.push_back(fmt::format("family {}, {}: {}", to_string(kind.family), kind.types, what));
  }
  void note_failure(const AttentionConfig& config, const std::string& what) {
    note_failure(kind_of(config), fmt::format("{} heads a KV head: {}",
                                              config.num_heads / config.num_kv_heads, what));
  }

  void check_batch(const BatchFamily& batch, const AttentionConfig& config,
                   const std::vector<const AttentionBackend*>& backends,
                   const std::string& cache_writer, std::uint32_t seed) {
    AttentionCall call = make_call(batch, config, seed);
    const oracle::AttentionResult truth = oracle_result(call);
    const LogicalCache cache = expected_cache(call);
    Times times;
    for (const AttentionBackend* backend : backends) {
      for (const KVCacheLayout layout : backend->supported_layouts()) {
        call.backend = backend->name();
        call.layout = layout;
        const std::string where =
            fmt::format("{}, {} {}", batch.name, backend->name(), to_string(layout));
        try {
          check_call(call, truth, cache, cache_writer, where, times);
        } catch (const Error& error) {
          note_failure(config, fmt::format("{}: {}", where, error.what()));
        }
      }
    }
    for (const auto& [kernel, time_us] : times) {
      double& slowest = row_of(kernel, kind_of(config)).latency_us;
      slowest = std::max(slowest, time_us);
    }
  }

  void check_call(const AttentionCall& call, const oracle::AttentionResult& truth,
                  const LogicalCache& cache, const std::string& cache_writer,
                  const std::string& where, Times& times) {
    const AttentionOutcome outcome = execute(context_, call, kCheckRepeats);
    const Deviation attention = judge_output(call, outcome, truth);
    if (!attention.passed()) note_failure(call.config, where + ": differs from the oracle");
    if (outcome.launches.empty()) note_failure(call.config, where + ": launched no kernel");
    for (const LaunchReport& launch : outcome.launches) {
      row_of(launch.name, kind_of(call.config)).deviation.merge(attention);
      keep_best(times, launch.name, launch.time_us);
    }
    const Deviation stored = judge_cache(call, outcome, cache);
    if (!stored.passed()) note_failure(call.config, where + ": the cache holds other bytes");
    row_of(cache_writer, kind_of(call.config)).deviation.merge(stored);
    keep_best(times, cache_writer, outcome.cache_write_us);
  }

  /// The x-packed write takes no family: the device's own runs.
  void check_packed_writes() {
    for (const DType dtype : {DType::kF16, DType::kF32}) {
      const AttentionConfig config = group_config(kGroup, dtype, KernelFamily::kAuto);
      try {
        for (const char* const time : {"first", "second"}) {
          note(kind_of(config), fmt::format("cache write, x-packed, {}", time),
               compare_packed_write(*context_, config));
        }
      } catch (const Error& error) {
        note_failure(kind_of(config), fmt::format("cache write, x-packed: {}", error.what()));
      }
    }
  }

  Row& row_of(const std::string& kernel, const Kind& kind) {
    Row& row = rows_[{kernel, kind.types}];
    row.families.insert(to_string(kind.family));
    return row;
  }

  /// Returns whether there are rows and all of them passed.
  bool print() const {
    fmt::print("\n{:34} {:12} {:10} {:>10} {:>8} {:>10}\n", "variant", "family", "types",
               "max error", "share", "time us");
    std::size_t num_passed = 0;
    for (const auto& [key, row] : rows_) {
      const bool passed = row.deviation.passed();
      num_passed += passed ? 1 : 0;
      const char* verdict = passed ? "ok" : "FAILED";
      if (row.deviation.compared == 0) verdict = "FAILED: never ran";
      fmt::print("{:34} {:12} {:10} {:10.2e} {:7.1f}% {:10.1f}  {}\n", key.first,
                 fmt::format("{}", fmt::join(row.families, "+")), key.second,
                 row.deviation.max_error, std::min(row.deviation.worst_share * 100, 999.9),
                 row.latency_us, verdict);
    }
    for (const auto& [refusal, types] : refusals_) {
      fmt::print("family {} not run with {}: {}\n", refusal.first, fmt::join(types, ", "),
                 refusal.second);
    }
    for (const std::string& failure : failures_) fmt::print("FAILED: {}\n", failure);
    const std::vector<std::string> not_built = context_->build_failures();
    for (const std::string& kernel : not_built) fmt::print("FAILED to build: {}\n", kernel);
    fmt::print("{} of {} variants passed on {}\n", num_passed, rows_.size(),
               context_->capabilities().name);
    std::fflush(stdout);
    // A backend on kernels of others has no variants.
    const bool none_to_run = !only_backend_.empty() && only_family_.empty() && rows_.empty();
    return (any_family_ran() || none_to_run) && num_passed == rows_.size() && failures_.empty() &&
           not_built.empty();
  }

  bool any_family_ran() const {
    return std::ranges::any_of(rows_, [](const auto& entry) {
      return entry.second.deviation.compared > 0 && !entry.second.families.contains("auto");
    });
  }

  std::shared_ptr<Context> context_;
  std::string_view only_backend_, only_family_;
  std::map<std::pair<std::string, std::string>, Row> rows_;  // by variant and types
  /// Types that were refused, by family and reasons.
  std::map<std::pair<std::string_view, std::string>, std::set<std::string>> refusals_;
  std::vector<std::string> failures_;
  std::uint32_t seed_ = 7000;
};

}  // namespace

bool is_chosen(KernelFamily family, const DeviceCapabilities& capabilities) {
  return family == KernelFamily::kAuto ||
         (family == KernelFamily::kCpu) == runs_single_items(capabilities);
}

void plan_variants(const std::shared_ptr<Context>& context, VariantFilter only, CheckPlan& plan) {
  std::make_shared<VariantCheck>(context, only)->add_to(plan);
}

}  // namespace clattn::cli
