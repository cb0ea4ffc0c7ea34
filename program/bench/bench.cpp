#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/tuning.hpp>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "files/files.hpp"
#include "program/bench/cards.hpp"
#include "program/bench/report.hpp"
#include "program/bench/shapes.hpp"
#include "program/bench/workload.hpp"
#include "program/ceilings/ceilings.hpp"
#include "program/commands.hpp"
#include "program/common/error.hpp"
#include "program/common/models.hpp"
#include "program/common/options.hpp"
#include "program/common/statistics.hpp"
#include "program/common/text.hpp"
#include "program/compare/compare.hpp"

namespace clattn::cli {
namespace {

struct Arguments {
  std::vector<std::string> suites, models, shapes_files, compared, backends;
  std::string json_file, html_file, device, filter, layout, card;
  bool quick = false, plan = false;
};

/// How long a measurement takes and over how much memory it walks.
struct Effort {
  double round_seconds;
  int rounds;
  std::size_t rotate_bytes;
};
// 640 MiB is more than twice the largest last-level cache that this was measured on (260 MiB).
constexpr Effort kFull{0.05, 11, std::size_t{640} << 20};
constexpr Effort kQuick{0.01, 5, std::size_t{16} << 20};

/// Whether launches that rotate over so much may find their data in a cache. Drivers do not report
/// the last cache reliably, so these are large ones of their kind.
bool is_resident(DeviceKind kind, std::size_t touched_bytes) {
  const std::size_t last_cache = std::size_t{kind == DeviceKind::kGpu ? 128U : 64U} << 20;
  return touched_bytes <= 2 * last_cache;
}

/// Launches that fill a round, from two trials; the first also warms up.
int launches_per_round(Workload& workload, double round_seconds) {
  workload.run(1);
  const double once = std::max(workload.run(2), 1e-7);
  const double most = workload.most_launches;
  return std::clamp(static_cast<int>(std::min(round_seconds / once, most)),
                    workload.fewest_launches, workload.most_launches);
}

BenchRow measure(const std::shared_ptr<Context>& context, const BenchOptions& options,
                 const BenchShape& shape, const Effort& effort, const Ceilings& ceilings) {
  BenchRow row{.shape = shape, .rounds = effort.rounds};
  try {
    const std::unique_ptr<Workload> workload = make_workload({context, options, shape});
    row.launches = launches_per_round(*workload, effort.round_seconds);
    std::vector<double> microseconds;
    microseconds.reserve(to_size(effort.rounds));
    for (int round = 0; round < effort.rounds; ++round) {
      microseconds.push_back(workload->run(row.launches) * 1e6);
    }
    row.median_us = percentile(microseconds, 0.5);
    row.p10_us = percentile(microseconds, 0.1);
    row.p90_us = percentile(microseconds, 0.9);
    row.work = workload->work;
    row.resident = is_resident(context->capabilities().kind, workload->touched_bytes);
    row.backend = workload->backend;
    row.kernels = workload->kernels;
    judge(row, ceilings);
    row.deviation = workload->verify();
    if (options.plan) row.plan = workload->plan();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    row.skipped = error.what();
  }
  return row;
}

std::string_view has_no_rows(const Model& model) {
  return model.rows.empty() ? "has no rows but those that a file of --shapes gives it" : "";
}

/// The built-in shapes and those of --shapes, whose models are wanted unless --model names others.
std::vector<BenchShape> all_shapes(Arguments& arguments) {
  std::vector<BenchShape> all;
  for (const Model& model : models()) all.insert(all.end(), model.rows.begin(), model.rows.end());
  std::vector<std::string> own;
  for (const std::string& path : arguments.shapes_files) {
    const std::vector<BenchShape> shapes = parse_shapes(files::read_file(path, 1 << 20), path);
    throw_invalid_if(shapes.empty(), "--shapes: {} has no row", path);
    for (const BenchShape& shape : shapes) {
      throw_invalid_if(std::ranges::find(all, shape.name(), &BenchShape::name) != all.end(),
                       "{}: row '{}' is one of another file; reports name each once", path,
                       shape.name());
      if (own.empty() || own.back() != shape.model.name) own.push_back(shape.model.name);
    }
    all.insert(all.end(), shapes.begin(), shapes.end());
  }
  if (arguments.models.empty()) arguments.models = own;
  if (arguments.models.empty()) arguments.models = {"llama-3-8b", "qwen3.5-9b"};
  own.insert(own.begin(), "all");
  for (const std::string& model : arguments.models) {
    if (std::ranges::find(own, model) == own.end())
      static_cast<void>(model_named(model, has_no_rows, own));
  }
  return all;
}

bool names(const std::vector<std::string>& wanted, const std::string& name) {
  return wanted.empty() || std::ranges::any_of(wanted, [&](const std::string& one) {
           return one == "all" || one == name;
         });
}

std::vector<BenchShape> wanted_shapes(Arguments& arguments, DeviceKind kind) {
  const std::vector<BenchShape> all = all_shapes(arguments);
  const std::string set = arguments.quick ? "quick" : kind == DeviceKind::kGpu ? "gpu" : "cpu";
  std::vector<BenchShape> wanted;
  for (const BenchShape& shape : all) {
    if (shape.in_set(set) && names(arguments.suites, shape.suite) &&
        names(arguments.models, shape.model.name) &&
        shape.name().find(arguments.filter) != std::string::npos) {
      wanted.push_back(shape);
    }
  }
  if (!wanted.empty()) return wanted;
  std::string what = fmt::format("of models {}", fmt::join(arguments.models, ", "));
  if (!arguments.suites.empty())
    what += fmt::format(", of suites {}", fmt::join(arguments.suites, ", "));
  if (!arguments.filter.empty()) what += fmt::format(", with '{}' in its name", arguments.filter);
  throw_invalid("no row of set {} is {}", set, what);
}

std::optional<KVCacheLayout> wanted_layout(const Arguments& arguments) {
  if (arguments.layout.empty()) return get_kv_cache_layout();
  return parse_kv_cache_layout(arguments.layout);
}

/// Throws for a name that no backend has, or that is given twice. The rows say what fits them.
void check_backends(const std::vector<std::string>& backends, const BenchShape& shape,
                    const DeviceCapabilities& device) {
  for (auto name = backends.begin(); name != backends.end(); ++name) {
    throw_invalid_if(std::find(backends.begin(), name, *name) != name,
                     "--backend: '{}' stands twice, legal: each once", *name);
    try {
      static_cast<void>(get_attn_backend(shape.model.config, &device, *name));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
    }
  }
}

void write_report(const BenchReport& report, const std::string& path) {
  write_text(path, report_text(to_json(report)));
}

/// Whether a report can be written time and again: not to a pipe, nor to standard output.
bool is_file(const std::string& path) {
  return !path.empty() && path != "-" &&
         (!std::filesystem::exists(path) || std::filesystem::is_regular_file(path));
}

void run_bench(Arguments arguments, const std::shared_ptr<Context>& context) {
  const Effort& effort = arguments.quick ? kQuick : kFull;
  BenchOptions options{.device = arguments.device,
                       .backend = {},
                       .layout = wanted_layout(arguments),
                       .rotate_bytes = effort.rotate_bytes,
                       .plan = arguments.plan};
  // Before anything is measured: rows, backends, and that the report can be kept.
  const std::vector<BenchShape> shapes = wanted_shapes(arguments, context->capabilities().kind);
  std::vector<std::string>& backends = arguments.backends;
  if (backends.empty()) backends.emplace_back();  // the library's choice
  check_backends(backends, shapes.front(), context->capabilities());
  if (!arguments.json_file.empty()) check_writable(arguments.json_file);
  BenchReport report{.device = context->capabilities(),
                     .ceilings = measure_ceilings(*context),
                     .quick = arguments.quick,
                     .layout = options.layout,
                     .rows = {}};
  const bool to_stdout = arguments.json_file == "-";
  if (!to_stdout) print_header(report);
  for (const BenchShape& shape : shapes) {
    for (const std::string& backend : backends) {
      options.backend = backend;
      report.rows.push_back(measure(context, options, shape, effort, report.ceilings));
      if (backends.size() > 1) report.rows.back().asked_backend = backend;
      if (!to_stdout) print_row(report.rows.back());
      // So that a run that is ended early leaves what it found out.
      if (is_file(arguments.json_file)) write_report(report, arguments.json_file);
    }
  }
  if (!to_stdout) {
    print_notes(report);
    for (const std::string& failure : context->build_failures()) {
      fmt::print("not built: {}\n", failure);
    }
  }
  if (!arguments.json_file.empty() && !is_file(arguments.json_file)) {
    write_report(report, arguments.json_file);
  }
  const auto& rows = report.rows;
  if (std::ranges::all_of(rows, [](const BenchRow& r) { return !r.skipped.empty(); }))
    throw_unsupported("no row fits this device: {}", rows.back().skipped);
  if (!std::ranges::all_of(rows, &BenchRow::passed)) throw ExitCode{Status::kFailed};
}

/// A context on the card itself, or null if this machine does not have it.
std::shared_ptr<Context> find_card(const Card& card, const std::string& device) {
  try {
    auto context = Context::create(device.empty() ? card.device : device);
    return card_of(built_in_cards(), context->capabilities()) == &card ? context : nullptr;
  } catch (const Error& error) {
    const bool absent = error.code() == ErrorCode::kInvalidArgument ||
                        error.cl_code() == CL_DEVICE_NOT_FOUND;  // no device at all
    if (!absent || !device.empty()) throw;
    return nullptr;
  }
}

/// Prints predictions; if this machine has the card, also measures the rows, planned by the
/// predicted costs.
void run_prediction(Arguments arguments) {
  const Card& card = card_named(arguments.card);
  const std::shared_ptr<Context> context = find_card(card, arguments.device);
  throw_invalid_if(context == nullptr && !arguments.json_file.empty(),
                   "--json: '{}' with --predict, legal: on a machine that has the card",
                   arguments.json_file);
  print_predictions(card, wanted_shapes(arguments, DeviceKind::kGpu));
  if (context == nullptr) return;
  const std::vector<CostRow> costs = predicted_rows(card, built_in_loops());
  if (!costs.empty()) set_tuning(*context, {}, costs);
  arguments.plan = true;
  fmt::print("\nMEASURED, planned and predicted by the same costs:\n");
  run_bench(arguments, context);
}

void run(const Arguments& arguments) {
  if (!arguments.card.empty()) return run_prediction(arguments);
  if (arguments.compared.empty()) return run_bench(arguments, Context::create(arguments.device));
  if (!arguments.html_file.empty()) check_writable(arguments.html_file);
  const std::vector<ComparedReport> reports = read_reports(arguments.compared);
  fmt::print("{}", comparison_table(reports));
  if (!arguments.html_file.empty()) write_text(arguments.html_file, comparison_page(reports));
}

}  // namespace

void add_bench_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "bench", "Measure attention as shares of what the device can do, or compare reports");
  const auto arguments = std::make_shared<Arguments>();
  std::vector<std::string> suites = bench_suites();
  suites.emplace_back("all");
  command
      ->add_option("suite", arguments->suites,
                   fmt::format("{}; default: all", fmt::join(suites, ", ")))
      ->check(CLI::IsMember(suites));
  add_list(*command, "--model", arguments->models,
           "Model with built-in rows (a wrong name lists them), or all; default: llama-3-8b, and "
           "qwen3.5-9b for recurrent layers");
  add_list(*command, "--shapes", arguments->shapes_files,
           "Shapes file in addition to the built-in ones");
  command->add_option("--filter", arguments->filter, "Only rows with this text in their name");
  auto* const json_file =
      command->add_option("--json", arguments->json_file, "Write JSON to a file, or - for stdout");
  add_device(*command, arguments->device);
  add_list(*command, "--backend", arguments->backends,
           "Force a backend by name; with several, each row is measured with all");
  command
      ->add_option("--layout", arguments->layout,
                   "Layout of the cache: NHD or HND (the backend's choice)")
      ->check(CLI::IsMember({"NHD", "HND"}));
  command->add_flag("--plan", arguments->plan,
                    "Also print how each step was cut, and predicted times beside measured ones");
  command->add_option("--predict", arguments->card,
                      fmt::format("Predict times on a card, and measure where it is: {}",
                                  fmt::join(names_of(built_in_cards(), &Card::name), ", ")));
  command->add_flag("--quick", arguments->quick, "Small shapes and short measurements");
  auto* const compare = command
                            ->add_option("--compare", arguments->compared,
                                         "Compare these JSON reports and measure nothing")
                            ->excludes(json_file);
  command->add_option("--html", arguments->html_file, "The comparison as a page of plots")
      ->needs(compare);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace clattn::cli
