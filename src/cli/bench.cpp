#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_shapes.hpp"
#include "cli/bench_workload.hpp"
#include "cli/ceilings.hpp"
#include "cli/commands.hpp"
#include "cli/device_report.hpp"
#include "cli/shape_options.hpp"
#include "npy/npy.hpp"

namespace clattn::cli {
namespace {

using nlohmann::json;

struct Arguments {
  std::string suite = "all", shapes_file, json_file, device, backend;
  bool quick = false;
  ShapeOptions shape;
};

/// How long a measurement takes and over how much memory it walks.
struct Effort {
  double round_seconds;
  int repetitions;
  std::size_t rotate_bytes;
  bool exceeds_caches;  ///< whether what is walked over comes from memory
};
// 640 MiB is more than twice the largest last-level cache that this was measured on (260 MiB).
constexpr Effort kFull{0.1, 5, std::size_t{640} << 20, true};
constexpr Effort kQuick{0.01, 3, std::size_t{16} << 20, false};

struct Row {
  BenchShape shape;
  double median_us = 0, low_us = 0, high_us = 0;
  double rate = 0;                ///< in GB/s or GFLOP/s; 0 where there is none
  std::optional<double> share{};  ///< of the ceiling, where the measurement can be held against it
  WorkUnit unit = WorkUnit::kNone;
  Deviation deviation{};
  std::string backend{}, kernels{}, skipped{};

  bool passed() const { return !skipped.empty() || deviation.passed(); }
  std::string unit_name() const {
    return unit == WorkUnit::kBytes ? "GB/s" : unit == WorkUnit::kFlop ? "GFLOP/s" : "";
  }
};

/// Collects the seconds per launch of each repetition.
class Collector final : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& /*context*/) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type == Run::RT_Iteration && run.iterations > 0) {
        seconds.push_back(run.real_accumulated_time / static_cast<double>(run.iterations));
      }
    }
  }
  std::vector<double> seconds;
};

/// Launches that fill a round, from two trials; the first also warms up.
int launches_per_round(Workload& workload, double round_seconds) {
  constexpr int kMost = 20000;
  workload.run(1);
  const double once = std::max(workload.run(2), 1e-7);
  return std::clamp(static_cast<int>(std::min(round_seconds / once, double{kMost})),
                    workload.fewest_launches, kMost);
}

Row measure(const std::shared_ptr<Context>& context, const BenchOptions& options,
            const BenchShape& shape, const Effort& effort, const Ceilings& ceilings) {
  Row row{.shape = shape};
  const std::unique_ptr<Workload> workload = make_workload(context, options, shape);
  const int launches = launches_per_round(*workload, effort.round_seconds);
  Collector collector;
  const std::string name =
      fmt::format("{}/{}x{}x{}", shape.suite, shape.batch, shape.query_len, shape.seq_len);
  benchmark::RegisterBenchmark(name.c_str(),
                               [&](benchmark::State& state) {
                                 for ([[maybe_unused]] auto _ : state)
                                   state.SetIterationTime(workload->run(launches));
                               })
      ->UseManualTime()
      ->Iterations(1)
      ->Repetitions(effort.repetitions);
  benchmark::RunSpecifiedBenchmarks(&collector);
  benchmark::ClearRegisteredBenchmarks();

  std::vector<double>& seconds = collector.seconds;
  if (seconds.empty()) throw Error(ErrorCode::kOpenCL, name + ": nothing was measured");
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  row.median_us = median * 1e6;
  row.low_us = seconds.front() * 1e6;
  row.high_us = seconds.back() * 1e6;
  row.unit = workload->unit;
  row.rate = workload->work_per_launch / median * 1e-9;
  const double ceiling =
      row.unit == WorkUnit::kBytes ? ceilings.read_gb_per_s : ceilings.fma_gflop_per_s;
  // What was read from a cache of the device says nothing about its memory.
  const bool comparable =
      row.unit == WorkUnit::kFlop || (row.unit == WorkUnit::kBytes && effort.exceeds_caches);
  if (comparable) row.share = row.rate / ceiling;
  row.deviation = workload->verify();
  row.backend = workload->backend;
  row.kernels = workload->kernels;
  return row;
}

void print_row(const Row& row) {
  const BenchShape& shape = row.shape;
  fmt::print("{:9} {:>5} {:>6} {:>7}  ", shape.suite, shape.batch, shape.query_len, shape.seq_len);
  if (!row.skipped.empty()) {
    fmt::print("skipped: {}\n", row.skipped);
  } else {
    const std::string share = row.share ? fmt::format("{:.0f}%", *row.share * 100) : "-";
    const std::string rate =
        row.unit == WorkUnit::kNone
            ? std::string(22, ' ')
            : fmt::format("{:8.1f} {:7} {:>5}", row.rate, row.unit_name(), share);
    fmt::print("{:11.1f} us {}  {:9.2e} {:4.0f}% {}  {} {}\n", row.median_us, rate,
               row.deviation.max_error, row.deviation.worst_share * 100,
               row.deviation.passed() ? "ok" : "WRONG", row.backend, row.kernels);
  }
  std::fflush(stdout);
}

json row_json(const Row& row) {
  json result = {{"suite", row.shape.suite},
                 {"batch", row.shape.batch},
                 {"query_len", row.shape.query_len},
                 {"seq_len", row.shape.seq_len}};
  if (!row.skipped.empty()) {
    result["skipped"] = row.skipped;
    return result;
  }
  result.update({{"median_us", row.median_us},
                 {"low_us", row.low_us},
                 {"high_us", row.high_us},
                 {"backend", row.backend},
                 {"kernels", row.kernels},
                 {"max_error", row.deviation.max_error},
                 {"error_share_of_allowance", row.deviation.worst_share},
                 {"verified_values", row.deviation.compared},
                 {"correct", row.deviation.passed()}});
  if (row.unit != WorkUnit::kNone) {
    result.update({{"rate", row.rate}, {"rate_unit", row.unit_name()}});
  }
  if (row.share) result["share_of_ceiling"] = *row.share;
  return result;
}

std::vector<BenchShape> wanted_shapes(const Arguments& arguments, DeviceKind kind) {
  std::vector<BenchShape> all;
  if (arguments.shapes_file.empty()) {
    all = parse_shapes(built_in_shapes(), "bench/shapes.txt");
  } else {
    const std::vector<std::byte> bytes = npy::read_file(arguments.shapes_file, 1 << 20);
    all = parse_shapes({reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                       arguments.shapes_file);
  }
  const std::string set = arguments.quick ? "quick" : kind == DeviceKind::kGpu ? "gpu" : "cpu";
  std::vector<BenchShape> wanted;
  for (const BenchShape& shape : all) {
    const bool in_suite = arguments.suite == "all" || shape.suite == arguments.suite;
    if (in_suite && shape.set == set) wanted.push_back(shape);
  }
  if (wanted.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--shapes: no row of suite {} in set {}", arguments.suite, set));
  }
  return wanted;
}

void initialize_google_benchmark() {
  std::string program = "clattn";
  char* argv[] = {program.data(), nullptr};
  int argc = 1;
  benchmark::Initialize(&argc, argv);
}

void run_bench(const Arguments& arguments) {
  const std::shared_ptr<Context> context = Context::create(arguments.device);
  const DeviceCapabilities& device = context->capabilities();
  const Effort& effort = arguments.quick ? kQuick : kFull;
  const BenchOptions options{.config = arguments.shape.config(),
                             .backend = arguments.backend,
                             .rotate_bytes = effort.rotate_bytes};
  const std::vector<BenchShape> shapes = wanted_shapes(arguments, device.kind);
  static_cast<void>(get_attn_backend(options.config, &device, options.backend));  // or say why not
  initialize_google_benchmark();
  const Ceilings ceilings = measure_ceilings(context);
  const bool to_stdout = arguments.json_file == "-";
  if (!to_stdout) {
    fmt::print("{} ({}), driver {}, clattn {} {}\n", device.name, device.platform_name,
               device.driver_version, CLATTN_VERSION, CLATTN_COMMIT);
    fmt::print("ceilings: streaming read {:.1f} GB/s, f32 multiply-add {:.1f} GFLOP/s\n\n",
               ceilings.read_gb_per_s, ceilings.fma_gflop_per_s);
    fmt::print("{:9} {:>5} {:>6} {:>7}  {:>14} {:>22}  {:>9} {:>5}\n", "suite", "batch", "query",
               "seq", "median", "rate, of ceiling", "error", "allow");
  }
  json rows = json::array();
  bool all_passed = true, any_ran = false;
  std::string last_reason;
  for (const BenchShape& shape : shapes) {
    Row row{.shape = shape};
    try {
      row = measure(context, options, shape, effort, ceilings);
      any_ran = true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      row.skipped = last_reason = error.what();
    }
    if (!to_stdout) print_row(row);
    all_passed = all_passed && row.passed();
    rows.push_back(row_json(row));
  }
  if (!arguments.json_file.empty()) {
    const json report = {{"version", CLATTN_VERSION},
                         {"commit", CLATTN_COMMIT},
                         {"device", capabilities_json(device)},
                         {"ceilings",
                          {{"read_gb_per_s", ceilings.read_gb_per_s},
                           {"fma_gflop_per_s", ceilings.fma_gflop_per_s}}},
                         {"rows", rows}};
    write_text(arguments.json_file,
               report.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
  }
  if (!any_ran) {
    throw Error(ErrorCode::kUnsupported, "no row fits this device: " + last_reason);
  }
  if (!all_passed) throw ExitCode{1};
}

}  // namespace

void add_bench_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "bench", "Measure decode, prefill, cache writes and metadata as shares of the ceilings");
  const auto arguments = std::make_shared<Arguments>();
  command
      ->add_option("suite", arguments->suite,
                   "decode, prefill, cache, metadata, step, replay or all")
      ->check(CLI::IsMember({"decode", "prefill", "cache", "metadata", "step", "replay", "all"}));
  command->add_option("--json", arguments->json_file, "Write JSON to a file, or - for stdout");
  command->add_option("--device", arguments->device, "gpu, cpu, P:D or part of a name");
  command->add_option("--backend", arguments->backend, "Force a backend by name");
  command->add_option("--shapes", arguments->shapes_file, "Shapes file in place of the built-in");
  command->add_flag("--quick", arguments->quick, "Small shapes and short measurements");
  arguments->shape.add_to(*command);
  command->callback([arguments] { run_bench(*arguments); });
}

}  // namespace clattn::cli
