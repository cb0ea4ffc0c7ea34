// Each cost is the difference between two batches that differ in little else, so that what all
// launches have in common cancels out.

#include "program/tune/costs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

constexpr double kLeastUs = 0.01;  // stands for times too short to measure
constexpr double kNoise = 0.03;    // relative differences below this are noise
constexpr std::int64_t kMostPieces = 64;

std::int32_t ceil_div(std::int64_t value, std::int64_t by) {
  return static_cast<std::int32_t>(cli::ceil_div<std::int64_t>(value, by));
}
std::int32_t round_up(std::int64_t value, std::int64_t to) {
  return static_cast<std::int32_t>(ceil_div(value, to) * to);
}

bool is_stage(std::string_view role) {
  return role == "decode" || role == "prefill" || role == "mla_decode";
}

/// A stage and the query lengths that it takes.
struct Stage {
  KernelInfo kernel;
  std::int32_t shortest = 1, longest = 1;
};

/// Kernels stand in the order of the lengths that they take. A tile holds all query heads of a KV
/// head as often as they fit.
std::vector<Stage> stages_of(const CostBench& bench) {
  std::vector<Stage> stages;
  std::int32_t taken = 0;
  for (const KernelInfo& kernel : bench.kernels()) {
    if (!is_stage(kernel.role)) continue;
    const std::int32_t group = std::max(bench.config().num_queries_per_kv(), 1);
    const std::int32_t longest = std::max(kernel.block_rows / group, 1);
    const std::int32_t few = kernel.few_rows / group;  // have costs of their own
    stages.push_back({kernel, std::min(std::max(taken, few) + 1, longest), longest});
    taken = longest;
  }
  return stages;
}

/// Batches and what they took.
class Timings {
 public:
  explicit Timings(CostBench& bench) : bench_(bench) {}
  /// Names a batch for later.
  std::size_t add(const CostBatch& batch) {
    batches_.push_back(batch);
    return batches_.size() - 1;
  }
  void take() { times_ = bench_.time_us(batches_); }
  double operator[](std::size_t batch) const { return times_.at(batch); }
  const CostBatch& batch(std::size_t batch) const { return batches_.at(batch); }
  /// Time per unit by which the second batch exceeds the first; `more` units in all.
  double slope(std::size_t first, std::size_t second, double more) const {
    return std::max(times_.at(second) - times_.at(first), 0.0) / more;
  }

 private:
  CostBench& bench_;
  std::vector<CostBatch> batches_;
  std::vector<double> times_;
};

/// Keys enough for a single request to take much longer than its launch.
std::int32_t telling_keys(CostBench& bench, const Stage& stage, DeviceKind kind) {
  constexpr std::int32_t kLeast = 512, kMost = 16384;
  const double wanted_us = kind == DeviceKind::kCpu ? 1500 : 150;
  const CostBatch pilot{.query_len = stage.longest, .keys = kLeast};
  const double time = bench.time_us(std::array{pilot}).front();
  const double keys = std::clamp(kLeast * wanted_us / time, double{kLeast}, double{kMost});
  const std::int32_t step = std::lcm(std::max(bench.config().block_size, 1), 64) * 4;
  const std::int32_t fewest =
      ceil_div(4 * std::int64_t{stage.longest}, step);  // a quarter is timed
  return std::max(static_cast<std::int32_t>(keys) / step, fewest) * step;
}

/// Enough requests to fill all concurrent groups at least twice, the last wave included.
std::int32_t filling_requests(const CostTasks& tasks) {
  constexpr std::int64_t kFewest = 8;
  const std::int64_t groups = tasks.concurrent;
  const std::int64_t even = groups / std::gcd(groups, tasks.each_tile);
  const std::int64_t wanted = std::max(2 * groups, kFewest);
  if (even * tasks.each_tile <= 4 * groups) {
    return round_up(ceil_div(wanted, tasks.each_tile), even);
  }
  // Where waves cannot be made even, many of them hide the uneven last one.
  return ceil_div(6 * groups, tasks.each_tile);
}

/// Time of a key of a lone task of this many query tokens.
double key_us(const KernelCosts& costs, const CostTasks& tasks, double tokens) {
  double time = 0;
  if (costs.read_gbs > 0) time += tasks.key_bytes / costs.read_gbs * 1e-3;
  if (costs.math_gflops > 0) {
    time += tokens * tasks.rows_each_token * tasks.flops_each / costs.math_gflops * 1e-3;
  }
  return time;
}

/// Rates of a group from the time of a key at few and at many query tokens.
void set_rates(KernelCosts& costs, const CostTasks& tasks, const Stage& stage, double few_us,
               double many_us) {
  costs.math_gflops = 0;
  double read_us = (few_us + many_us) / 2;
  if (stage.longest > stage.shortest && many_us > few_us * (1 + kNoise)) {
    const double flops = tasks.rows_each_token * tasks.flops_each;
    const double token_us = (many_us - few_us) / (stage.longest - stage.shortest);
    read_us = few_us - stage.shortest * token_us;
    costs.math_gflops = flops / token_us * 1e-3;
    if (read_us <= kNoise * few_us) {  // all of it is products
      read_us = 0;
      costs.math_gflops = flops * stage.longest / many_us * 1e-3;
    }
  }
  costs.read_gbs = read_us > 0 ? tasks.key_bytes / read_us * 1e-3 : 0;
}

/// What being a split adds to a task. `apart_us`: time of the split batch minus that of the whole.
double split_cost(KernelCosts costs, const CostTasks& tasks, const CostBatch& whole,
                  const CostBatch& split, double apart_us) {
  costs.split_us = 0;
  const double known = predicted_us(costs, tasks, split) - predicted_us(costs, tasks, whole);
  const double turns = std::ceil(
      static_cast<double>(tasks.each_tile * split.requests * split.splits) / tasks.concurrent);
  return std::max((apart_us - known) / turns, kLeastUs);
}

/// What is known of a stage's kernel, and of the merge that follows where it does not join splits.
struct StageCosts {
  KernelCosts stage;
  std::optional<KernelCosts> merge;
  std::string merge_kernel;
};

/// Costs of the merge. The device's clock separates its time from the launches before it.
/// `launched_us` is what a merge launch added to a step of one split tile; what its tasks do not
/// explain is the cost of the launch.
KernelCosts merge_costs(CostBench& bench, const Stage& stage, const KernelInfo& merge,
                        const CostBatch& once, double launched_us) {
  const AttentionConfig& config = bench.config();
  const double groups = std::max(merge.concurrent_groups, 1);
  const double split_bytes = 4.0 * config.output_head_size() + 4;
  const std::int64_t tile_rows = std::int64_t{stage.longest} * config.num_heads;
  const std::int32_t requests = std::clamp(
      ceil_div(16 * static_cast<std::int64_t>(groups), tile_rows), stage.longest > 1 ? 1 : 4, 64);
  constexpr std::int32_t kMany = 8;
  const std::int32_t keys = kMany * std::max(config.block_size, 32);
  const auto time = [&](std::int32_t num_requests, std::int32_t tokens, std::int32_t splits) {
    for (const CostLaunch& launch : bench.launches({num_requests, tokens, keys, splits})) {
      if (launch.kernel == merge.name) return launch.event_us;
    }
    return 0.0;
  };
  const double few = time(1, stage.shortest, 2);
  const double many = time(requests, stage.longest, 2);
  const double split = time(requests, stage.longest, kMany);
  const double few_tasks = static_cast<double>(stage.shortest) * config.num_heads;
  const double tasks = static_cast<double>(tile_rows) * requests;
  KernelCosts costs;
  const double byte_us = (split - many) * groups / (tasks * (kMany - 2) * split_bytes);
  const double each_us = std::max(many - few, 0.0) * groups / (tasks - few_tasks);
  // Neither free nor more than the whole time of a task.
  const double most_us = each_us / (2 * split_bytes);
  costs.read_gbs =
      1e-3 / std::clamp(byte_us, std::max(most_us / 100, 1e-9), std::max(most_us, 2e-9));
  costs.task_us = std::max(each_us - 2 * split_bytes / costs.read_gbs * 1e-3, kLeastUs);
  const double once_tasks = static_cast<double>(once.requests) * once.query_len * config.num_heads;
  const double once_us = std::ceil(once_tasks / groups) *
                         (costs.task_us + once.splits * split_bytes / costs.read_gbs * 1e-3);
  costs.launch_us = std::max(launched_us - once_us, kLeastUs);
  return costs;
}

/// Measures a stage. `bench` must be of a layer whose single tile leaves most of the device idle.
StageCosts measure_stage(CostBench& bench, const Stage& stage, DeviceKind kind) {
  const CostTasks tasks = tasks_of(bench, stage.kernel, stage.longest);
  const std::int32_t groups = tasks.concurrent;
  const std::int32_t keys = telling_keys(bench, stage, kind);
  // Prefill has many tiles, most of them full and of one prompt; the filling batch does the same.
  const bool prompts = stage.kernel.role == "prefill";
  const std::int32_t usual = prompts ? stage.longest : stage.shortest;
  const auto pages = prompts ? CostBatch::Pages::kShared : CostBatch::Pages::kOwn;
  const std::int32_t filling = filling_requests(tasks);
  const std::int64_t room = bench.pool_tokens() / std::int64_t{filling};
  const auto fitting_keys = static_cast<std::int32_t>(std::min<std::int64_t>(room, keys));
  const std::int32_t filling_keys =
      std::min(keys, std::max({fitting_keys / 64 * 64, std::int32_t{256}, usual}));
  const std::int32_t few_keys = std::max(std::min(bench.config().block_size, 64), stage.shortest);
  const std::int32_t many = ceil_div(std::max(4 * groups, 128), tasks.each_tile);
  // As many splits of whole pages as there are groups.
  const auto pieces =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(groups / tasks.each_tile, 2, kMostPieces));
  const std::int32_t piece_keys =
      round_up(std::max(128, stage.shortest), bench.config().block_size);

  Timings times(bench);
  const std::size_t single = times.add({1, stage.shortest, few_keys});
  const std::size_t short_few = times.add({1, stage.shortest, keys / 4});
  const std::size_t long_few = times.add({1, stage.shortest, keys});
  const std::size_t short_many = times.add({1, stage.longest, keys / 4});
  const std::size_t long_many = times.add({1, stage.longest, keys});
  const std::size_t tasks_few = times.add({many, stage.shortest, few_keys});
  const std::size_t tasks_many = times.add({3 * many, stage.shortest, few_keys});
  const std::size_t full = times.add({filling, usual, filling_keys, 1, pages});
  // A lone split request wakes cores of a CPU that would sleep, which is no cost of splits: there
  // many requests are split that keep all cores busy anyway.
  const bool wakes = kind == DeviceKind::kCpu;
  const std::int32_t cut = wakes ? 8 * groups : 1;
  const std::int32_t splits = wakes ? 2 : pieces;
  const std::size_t whole =
      times.add({cut, stage.shortest, wakes ? piece_keys * splits : piece_keys});
  const std::size_t split = times.add({cut, stage.shortest, piece_keys * splits, splits});
  times.take();

  StageCosts result;
  KernelCosts& costs = result.stage;
  // The tasks of one tile run in several waves if there are more of them than groups.
  const auto each_tile = static_cast<double>(tasks.each_tile);
  const double turns = std::max(1.0, each_tile / groups);
  const std::int32_t more_keys = keys - keys / 4;
  const double few_us = times.slope(short_few, long_few, more_keys);
  const double many_us = times.slope(short_many, long_many, more_keys);
  // Each further task of few keys adds its time divided by the number of groups.
  const double quick = times.slope(tasks_few, tasks_many, 2.0 * many * each_tile);
  const double full_tasks = filling * each_tile;
  const double full_turns = std::ceil(full_tasks / groups);
  double shared = 0;             // 1 / groups: part of all tasks' key time that the launch adds
  for (int i = 0; i < 5; ++i) {  // the costs depend on each other: iterate
    constexpr double kLeastKeyUs = 1e-6;
    const double each = turns + each_tile * shared;
    set_rates(costs, tasks, stage, std::max(few_us / each, kLeastKeyUs),
              std::max(many_us / each, kLeastKeyUs));
    const double quick_keys = few_keys * key_us(costs, tasks, stage.shortest);
    // A task cannot take longer than a single one did, launch included.
    const double lone = times[single] - each_tile * shared * quick_keys - turns * quick_keys;
    costs.task_us = std::clamp((quick - quick_keys * shared) * groups - quick_keys, kLeastUs,
                               std::max(lone / turns, 2 * kLeastUs) - kLeastUs);
    costs.launch_us = std::max(lone - turns * costs.task_us, kLeastUs);
    const double full_keys = filling_keys * key_us(costs, tasks, usual);
    const double alone = costs.launch_us + full_turns * (costs.task_us + full_keys);
    shared = std::clamp((times[full] - alone) / (full_tasks * full_keys), 0.0, 1.0);
  }
  costs.groups = shared * groups < kNoise ? 0 : 1 / shared;

  const CostBatch &unsplit = times.batch(whole), &divided = times.batch(split);
  const std::vector<CostLaunch> launches = bench.launches(divided);
  const double apart = times[split] - times[whole];
  if (launches.size() < 2) {
    costs.split_us = split_cost(costs, tasks, unsplit, divided, apart);
    return result;
  }
  const double stage_apart = launches[0].event_us - bench.launches(unsplit).at(0).event_us;
  costs.split_us = split_cost(costs, tasks, unsplit, divided, stage_apart);
  result.merge_kernel = launches[1].kernel;
  for (const KernelInfo& kernel : bench.kernels()) {
    if (kernel.name != result.merge_kernel) continue;
    result.merge = merge_costs(bench, stage, kernel, divided, apart - stage_apart);
  }
  return result;
}

CostRow row_for(const Context& context, const AttentionConfig& config, const std::string& kernel,
                const KernelCosts& costs) {
  CostRow row;
  row.device = context.capabilities().name;
  row.driver = context.capabilities().driver_version;
  row.kernel = kernel;
  row.head_size = config.output_head_size();
  row.group = config.num_queries_per_kv();
  row.dtype = config.dtype;
  row.cache_dtype = config.cache_dtype();
  row.costs = costs;
  return row;
}

/// Whether a single tile leaves enough of the device idle to measure groups undisturbed.
bool is_alone(const CostTasks& tasks) {
  return tasks.each_tile <= std::max<std::int64_t>(tasks.concurrent / 8, 1);
}

/// Whether one launch of this kernel alone takes a prompt of `query_len` tokens.
bool takes(CostBench& bench, const KernelInfo& kernel, std::int32_t query_len) {
  const std::int32_t keys = round_up(query_len, bench.config().block_size);
  const std::vector<CostLaunch> launches = bench.launches({1, query_len, keys, 1});
  return launches.size() == 1 && launches.front().kernel == kernel.name;
}

/// A context of the same device with a tuning row that names the kernel. Without it plans choose
/// between a wide tile and the role's other tile, and never give forced splits to the wide one.
std::shared_ptr<Context> context_for(const Context& context, const KernelInfo& kernel) {
  TuningRow row;
  row.device = context.capabilities().name;
  row.role = kernel.role;
  row.variant = kernel.name;
  std::shared_ptr<Context> own = Context::adopt(context.handle(), context.device());
  set_tuning(*own, std::span(&row, 1));
  return own;
}

/// The stage that a kernel is in this bench's layer.
Stage stage_of(const CostBench& bench, const KernelInfo& kernel) {
  for (Stage& stage : stages_of(bench))
    if (stage.kernel.name == kernel.name) return stage;
  throw_unsupported("the layer does not use it, even under a tuning row that names it");
}

}  // namespace

double predicted_us(const KernelCosts& costs, const CostTasks& tasks, const CostBatch& batch) {
  const double number =
      static_cast<double>(tasks.each_tile) * batch.requests * std::max(batch.splits, 1);
  const double keys = static_cast<double>(batch.keys) / std::max(batch.splits, 1);
  const double keys_us = keys * key_us(costs, tasks, batch.query_len);
  const double turns = std::ceil(number / tasks.concurrent);
  const double around = costs.task_us + (batch.splits > 1 ? costs.split_us : 0);
  const double shared = costs.groups > 0 ? number * keys_us / costs.groups : 0;
  return costs.launch_us + turns * (around + keys_us) + shared;
}

CostTasks tasks_of(CostBench& bench, const KernelInfo& kernel, std::int32_t query_len) {
  const AttentionConfig& config = bench.config();
  const std::int32_t keys = round_up(query_len, config.block_size);
  const std::vector<CostLaunch> launches = bench.launches({1, query_len, keys, 1});
  if (launches.size() != 1 || launches.front().kernel != kernel.name) {
    throw_unsupported("queries of {} tokens are another kernel's", query_len);
  }
  CostTasks tasks;
  tasks.each_tile = std::max<std::int64_t>(launches.front().tasks, 1);
  tasks.concurrent = std::max(kernel.concurrent_groups, 1);
  const std::int32_t kv_heads = ceil_div(config.num_kv_heads, tasks.each_tile);
  const std::int32_t chunks =
      ceil_div(tasks.each_tile, config.num_kv_heads);  // of a KV head's query heads
  const std::int32_t width = config.head_size, value = config.output_head_size();
  tasks.key_bytes = static_cast<double>(kv_heads) * (config.use_mla ? width : width + value) *
                    static_cast<double>(element_size_bytes(config.cache_dtype())) /
                    codes_per_element(config.cache_dtype());
  tasks.rows_each_token =
      static_cast<double>(kv_heads) * ceil_div(config.num_queries_per_kv(), chunks);
  tasks.flops_each = 2.0 * (width + value);
  return tasks;
}

AttentionConfig with_kv_heads(AttentionConfig config, std::int32_t num_kv_heads) {
  config.num_heads = config.num_queries_per_kv() * num_kv_heads;
  config.num_kv_heads = num_kv_heads;
  return config;
}

MeasuredCosts measure_costs(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                            const WantsRole& wants, const MakeCostBench& make_bench) {
  MeasuredCosts result;
  const DeviceKind kind = context->capabilities().kind;
  const auto has = [&](const std::string& kernel) {
    return std::ranges::find(result.rows, kernel, &CostRow::kernel) != result.rows.end();
  };
  std::shared_ptr<Context> on = context;
  std::unique_ptr<CostBench> bench;
  const auto use_layer = [&](const AttentionConfig& layer) {
    bench.reset();  // its cache makes room
    bench = make_bench ? make_bench(on, layer) : std::make_unique<CostBench>(on, layer);
  };
  use_layer(config);
  for (Stage stage : stages_of(*bench)) {
    if (!wants(stage.kernel.role) || has(stage.kernel.name)) continue;
    try {
      if (on != context) {  // under the row of an earlier stage
        on = context;
        use_layer(config);
      }
      if (!takes(*bench, stage.kernel, stage.longest)) {  // a wide tile
        on = context_for(*context, stage.kernel);
        use_layer(config);
        stage = stage_of(*bench, stage.kernel);
      }
      const CostTasks tasks = tasks_of(*bench, stage.kernel, stage.longest);
      if (!is_alone(tasks) && bench->config().num_kv_heads > 1) use_layer(with_kv_heads(config, 1));
      const StageCosts costs = measure_stage(*bench, stage, kind);
      result.rows.push_back(row_for(*context, config, stage.kernel.name, costs.stage));
      if (costs.merge && !has(costs.merge_kernel)) {
        result.rows.push_back(row_for(*context, config, costs.merge_kernel, *costs.merge));
      }
    } catch (const Error& error) {
      result.left_out.push_back(fmt::format("{}: {}", stage.kernel.name, error.what()));
      if (bench == nullptr) break;
    }
  }
  return result;
}

}  // namespace clattn::cli
