#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <cstdio>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "cli/attention_call.hpp"
#include "cli/check_batches.hpp"
#include "cli/check_packed.hpp"
#include "cli/check_variants.hpp"
#include "cli/commands.hpp"
#include "cli/elements.hpp"
#include "cli/verify.hpp"

namespace clattn::cli {
namespace {

constexpr int kRepeats = 2;  // the second run is timed: the first pays for lazy compilation

/// Small shapes that reach every path: all element types, a cache in another type than the queries,
/// a large head, a page size that is no power of two.
const std::vector<AttentionConfig>& check_configs() {
  const auto config = [](std::int32_t heads, std::int32_t kv_heads, std::int32_t head_size,
                         std::int32_t block_size, DType dtype, DType cache) {
    AttentionConfig result;
    result.num_heads = heads;
    result.num_kv_heads = kv_heads;
    result.head_size = head_size;
    result.block_size = block_size;
    result.dtype = dtype;
    result.kv_cache_dtype = cache;
    return result;
  };
  static const std::vector<AttentionConfig> configs = {
      config(8, 2, 64, 16, DType::kF32, DType::kF32),
      config(8, 2, 64, 16, DType::kF16, DType::kF16),
      config(8, 2, 64, 16, DType::kBF16, DType::kBF16),
      config(4, 2, 64, 16, DType::kF32, DType::kF16),
      config(6, 1, 128, 48, DType::kF16, DType::kF16),
  };
  return configs;
}

/// One line of the report: a kind of work in one configuration, over all backends and layouts.
struct Line {
  std::string what;
  Deviation deviation{};
  double latency_us = 0;
  std::set<std::string> kernels{};
  std::vector<std::string> failures{};

  bool passed() const { return failures.empty() && deviation.passed(); }
};

void print_header() {
  fmt::print("{:24} {:10} {:>10} {:>10} {:>7} {:>10}  {}\n", "work", "types", "max error",
             "allowed", "share", "time us", "kernels");
}

void print_line(const Line& line, const AttentionConfig& config) {
  const std::string types =
      fmt::format("{}/{}", to_string(config.dtype), to_string(config.cache_dtype()));
  fmt::print("{:24} {:10} {:10.2e} {:10.2e} {:6.1f}% {:10.1f}  {}  {}\n", line.what, types,
             line.deviation.max_error, line.deviation.allowance,
             std::min(line.deviation.worst_share * 100, 999.9), line.latency_us,
             fmt::join(line.kernels, " + "), line.passed() ? "ok" : "FAILED");
  for (const std::string& failure : line.failures) fmt::print("    {}\n", failure);
  std::fflush(stdout);
}

class Check {
 public:
  Check(std::shared_ptr<Context> context, std::string backend)
      : context_(std::move(context)), only_backend_(std::move(backend)) {}

  /// Returns whether everything passed and something ran.
  bool run() {
    print_header();
    for (const AttentionConfig& config : check_configs()) {
      const std::vector<const AttentionBackend*> backends =
          usable_backends(context_->capabilities(), config, only_backend_);
      if (backends.empty()) continue;
      Line writes{.what = "cache write"};
      std::uint32_t seed = 1;
      for (const BatchFamily& family : batch_families()) {
        check_family(family, config, backends, writes, seed += 10);
      }
      finish(writes, config);
      check_packed_write(config);
    }
    if (num_lines_ == 0) fmt::print("nothing ran: no backend takes any of the shapes\n");
    fmt::print("{} of {} passed on {}\n", num_passed_, num_lines_, context_->capabilities().name);
    return num_lines_ > 0 && num_passed_ == num_lines_;
  }

 private:
  void check_family(const BatchFamily& family, const AttentionConfig& config,
                    const std::vector<const AttentionBackend*>& backends, Line& writes,
                    std::uint32_t seed) {
    AttentionCall call = make_call(family, config, seed);
    const oracle::AttentionResult truth =
        oracle::attention(oracle_case(call), element_of(config.dtype));
    const LogicalCache cache = expected_cache(call);
    Line line{.what = std::string(family.name)};
    for (const AttentionBackend* backend : backends) {
      for (const KVCacheLayout layout : backend->supported_layouts()) {
        call.backend = backend->name();
        call.layout = layout;
        check_call(call, truth, cache, line, writes);
      }
    }
    finish(line, config);
  }

  void check_call(const AttentionCall& call, const oracle::AttentionResult& truth,
                  const LogicalCache& cache, Line& line, Line& writes) {
    const std::string where = fmt::format("{} {}", call.backend, to_string(*call.layout));
    try {
      const AttentionOutcome outcome = execute(context_, call, kRepeats);
      const Deviation deviation =
          compare(call.config.dtype, outcome.out, outcome.lse, truth, outcome.rounds_weights);
      if (!deviation.passed()) line.failures.push_back(where + ": differs from the oracle");
      if (outcome.launches.empty()) line.failures.push_back(where + ": launched no kernel");
      line.deviation.merge(deviation);
      line.latency_us = std::max(line.latency_us, outcome.attention_us);
      for (const LaunchReport& launch : outcome.launches) line.kernels.insert(launch.kernel);

      Deviation stored = compare_bytes(outcome.cache.key, cache.key);
      stored.merge(compare_bytes(outcome.cache.value, cache.value));
      if (!stored.passed()) writes.failures.push_back(where + ": the cache holds other bytes");
      writes.deviation.merge(stored);
      writes.latency_us = std::max(writes.latency_us, outcome.cache_write_us);
      writes.kernels.insert(fmt::format("{} {}", outcome.backend, to_string(outcome.layout)));
    } catch (const Error& error) {
      line.failures.push_back(fmt::format("{}: {}", where, error.what()));
    }
  }

  /// The x-packed cache of the original paged-attention kernels, which no backend here attends
  /// over.
  void check_packed_write(const AttentionConfig& config) {
    Line line{.what = "cache write, x-packed", .kernels = {"reshape_and_cache"}};
    try {
      line.deviation = compare_packed_write(*context_, config, line.latency_us);
    } catch (const Error& error) {
      line.failures.emplace_back(error.what());
    }
    finish(line, config);
  }

  void finish(const Line& line, const AttentionConfig& config) {
    ++num_lines_;
    num_passed_ += line.passed() ? 1 : 0;
    print_line(line, config);
  }

  std::shared_ptr<Context> context_;
  std::string only_backend_;
  int num_lines_ = 0, num_passed_ = 0;
};

}  // namespace

void add_check_command(CLI::App& app) {
  struct Arguments {
    std::string device, backend;
  };
  auto* command =
      app.add_subcommand("check", "Test every kernel on a device against a double oracle");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("--device", arguments->device, "gpu, cpu, P:D or part of a name");
  command->add_option("--backend", arguments->backend, "Check this backend only");
  command->callback([arguments] {
    if (!arguments->backend.empty()) static_cast<void>(find_backend(arguments->backend));
    const std::shared_ptr<Context> context = Context::create(arguments->device);
    const bool work_passed = Check(context, arguments->backend).run();
    const bool variants_passed = check_variants(context, arguments->backend);
    if (!work_passed || !variants_passed) throw ExitCode{1};
  });
}

}  // namespace clattn::cli
