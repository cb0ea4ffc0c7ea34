#include "cli/check_variants.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "cli/check_batches.hpp"
#include "cli/check_packed.hpp"
#include "cli/elements.hpp"
#include "cli/verify.hpp"

namespace clattn::cli {
namespace {

constexpr KernelFamily kFamilies[] = {KernelFamily::kCpu, KernelFamily::kGpu,
                                      KernelFamily::kGpuPtx};
constexpr int kRepeats = 2;  // the first pays for lazy compilation

/// Query heads of a KV head: the decode tiles of GPUs hold 1, 2, 4 and 8, beyond that their prefill
/// tiles decode too. One shape in f32, the rest in f16: each is its own program to compile.
const std::vector<std::pair<std::int32_t, DType>>& groups() {
  static const std::vector<std::pair<std::int32_t, DType>> groups = {
      {1, DType::kF16}, {2, DType::kF16}, {4, DType::kF16},
      {8, DType::kF16}, {9, DType::kF16}, {4, DType::kF32}};
  return groups;
}

/// Each batch reaches one kernel of every family, whatever the group (the split one also the
/// merge): two tokens are too many for a GPU's decode tile and fit its small prefill tile, 65 are
/// too many for all but the largest.
const std::vector<BatchFamily>& single_kernel_batches() {
  static const std::vector<BatchFamily> batches = {
      {"decode", {{1, 1}, {1, 17}, {1, 130}, {1, 300}}, 1},
      {"decode, 4 splits", {{1, 300}, {1, 64}, {1, 130}}, 4},
      {"2 tokens", {{2, 61}, {2, 2}}, 1},
      {"prefill", {{65, 65}, {70, 150}}, 1},
  };
  return batches;
}

AttentionConfig make_config(std::int32_t group, DType dtype, KernelFamily family) {
  constexpr std::int32_t kKvHeads = 2;
  AttentionConfig config;
  config.num_heads = group * kKvHeads;
  config.num_kv_heads = kKvHeads;
  config.head_size = 128;
  config.block_size = 16;
  config.dtype = dtype;
  config.kernel_family = family;
  return config;
}

std::string types_of(const AttentionConfig& config) {
  return fmt::format("{}/{}", to_string(config.dtype), to_string(config.cache_dtype()));
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

class VariantCheck {
 public:
  VariantCheck(std::shared_ptr<Context> context, std::string_view only_backend)
      : context_(std::move(context)), only_backend_(only_backend) {}

  bool run() {
    for (const KernelFamily family : kFamilies) check_family(family);
    check_packed_writes();
    return print();
  }

 private:
  void check_family(KernelFamily family) {
    std::uint32_t seed = 1000;
    for (const auto& [group, dtype] : groups()) {
      const AttentionConfig config = make_config(group, dtype, family);
      const auto backends = usable_backends(context_->capabilities(), config, only_backend_);
      if (backends.empty()) {
        note_refusal(config);
        continue;
      }
      try {
        const auto impl = backends.front()->make_impl(context_, config);
        // A row for each, so that one that no batch reaches shows up, and fails.
        for (const KernelInfo& kernel : impl->kernels()) row_of(kernel.name, config);
        for (const BatchFamily& batch : single_kernel_batches()) {
          check_batch(batch, config, backends, cache_kernel(*impl), seed += 10);
        }
      } catch (const Error& error) {
        note_failure(config, error.what());
      }
    }
  }

  /// Keeps the reasons of the first backend that is checked: the family's are the same in all.
  void note_refusal(const AttentionConfig& config) {
    for (const AttentionBackend* backend : list_attn_backends()) {
      if (!only_backend_.empty() && backend->name() != only_backend_) continue;
      const auto reasons = backend->validate_configuration(config, &context_->capabilities());
      const std::string why = fmt::format("{}", fmt::join(reasons, "; "));
      refusals_[{to_string(config.kernel_family), why}].insert(types_of(config));
      return;
    }
  }

  void note_failure(const AttentionConfig& config, const std::string& what) {
    failures_.push_back(
        fmt::format("family {}, {} heads a KV head, {}: {}", to_string(config.kernel_family),
                    config.num_heads / config.num_kv_heads, types_of(config), what));
  }

  static std::string cache_kernel(const AttentionImpl& impl) {
    for (const KernelInfo& kernel : impl.kernels()) {
      if (kernel.role == "cache") return kernel.name;
    }
    return "cache write";
  }

  void check_batch(const BatchFamily& batch, const AttentionConfig& config,
                   const std::vector<const AttentionBackend*>& backends,
                   const std::string& cache_writer, std::uint32_t seed) {
    AttentionCall call = make_call(batch, config, seed);
    const oracle::AttentionResult truth =
        oracle::attention(oracle_case(call), element_of(config.dtype));
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
      double& slowest = row_of(kernel, config).latency_us;
      slowest = std::max(slowest, time_us);
    }
  }

  void check_call(const AttentionCall& call, const oracle::AttentionResult& truth,
                  const LogicalCache& cache, const std::string& cache_writer,
                  const std::string& where, Times& times) {
    const AttentionOutcome outcome = execute(context_, call, kRepeats);
    const Deviation attention =
        compare(call.config.dtype, outcome.out, outcome.lse, truth, outcome.rounds_weights);
    if (!attention.passed()) note_failure(call.config, where + ": differs from the oracle");
    if (outcome.launches.empty()) note_failure(call.config, where + ": launched no kernel");
    for (const LaunchReport& launch : outcome.launches) {
      row_of(launch.kernel, call.config).deviation.merge(attention);
      keep_best(times, launch.kernel, launch.time_us);
    }
    Deviation stored = compare_bytes(outcome.cache.key, cache.key);
    stored.merge(compare_bytes(outcome.cache.value, cache.value));
    if (!stored.passed()) note_failure(call.config, where + ": the cache holds other bytes");
    row_of(cache_writer, call.config).deviation.merge(stored);
    keep_best(times, cache_writer, outcome.cache_write_us);
  }

  /// The x-packed write takes no family: the device's own runs.
  void check_packed_writes() {
    for (const DType dtype : {DType::kF16, DType::kF32}) {
      const AttentionConfig config = make_config(4, dtype, KernelFamily::kAuto);
      Row& row = row_of("reshape_and_cache (x-packed)", config);
      try {
        for (int i = 0; i < kRepeats; ++i) {
          row.deviation.merge(compare_packed_write(*context_, config, row.latency_us));
        }
      } catch (const Error& error) {
        note_failure(config, fmt::format("cache write, x-packed: {}", error.what()));
      }
    }
  }

  Row& row_of(const std::string& kernel, const AttentionConfig& config) {
    Row& row = rows_[{kernel, types_of(config)}];
    row.families.insert(to_string(config.kernel_family));
    return row;
  }

  /// Returns whether there are rows and all of them passed.
  bool print() const {
    fmt::print("\n{:30} {:12} {:10} {:>10} {:>8} {:>10}\n", "variant", "family", "types",
               "max error", "share", "time us");
    std::size_t num_passed = 0;
    for (const auto& [key, row] : rows_) {
      const bool passed = row.deviation.passed();
      num_passed += passed ? 1 : 0;
      const char* verdict = passed ? "ok" : "FAILED";
      if (row.deviation.compared == 0) verdict = "FAILED: never ran";
      fmt::print("{:30} {:12} {:10} {:10.2e} {:7.1f}% {:10.1f}  {}\n", key.first,
                 fmt::format("{}", fmt::join(row.families, "+")), key.second,
                 row.deviation.max_error, std::min(row.deviation.worst_share * 100, 999.9),
                 row.latency_us, verdict);
    }
    for (const auto& [refusal, types] : refusals_) {
      fmt::print("family {} not run with {}: {}\n", refusal.first, fmt::join(types, ", "),
                 refusal.second);
    }
    for (const std::string& failure : failures_) fmt::print("FAILED: {}\n", failure);
    fmt::print("{} of {} variants passed on {}\n", num_passed, rows_.size(),
               context_->capabilities().name);
    std::fflush(stdout);
    return any_family_ran() && num_passed == rows_.size() && failures_.empty();
  }

  bool any_family_ran() const {
    return std::any_of(rows_.begin(), rows_.end(), [](const auto& entry) {
      return entry.second.deviation.compared > 0 && !entry.second.families.contains("auto");
    });
  }

  std::shared_ptr<Context> context_;
  std::string_view only_backend_;
  std::map<std::pair<std::string, std::string>, Row> rows_;  // by variant and types
  /// Types that were refused, by family and reasons.
  std::map<std::pair<std::string_view, std::string>, std::set<std::string>> refusals_;
  std::vector<std::string> failures_;
};

}  // namespace

std::vector<const AttentionBackend*> usable_backends(const DeviceCapabilities& capabilities,
                                                     const AttentionConfig& config,
                                                     std::string_view only_backend) {
  std::vector<const AttentionBackend*> usable;
  for (const AttentionBackend* backend : list_attn_backends()) {
    const bool wanted = only_backend.empty() || backend->name() == only_backend;
    if (wanted && backend->validate_configuration(config, &capabilities).empty()) {
      usable.push_back(backend);
    }
  }
  return usable;
}

bool check_variants(const std::shared_ptr<Context>& context, std::string_view only_backend) {
  return VariantCheck(context, only_backend).run();
}

}  // namespace clattn::cli
