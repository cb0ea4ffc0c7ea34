#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/tuning.hpp>
#include <cstdio>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "program/bench/cards.hpp"
#include "program/bench/shapes.hpp"
#include "program/commands.hpp"
#include "program/common/built_in.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"
#include "program/common/models.hpp"
#include "program/common/options.hpp"
#include "program/common/progress.hpp"
#include "program/tune/costs.hpp"
#include "program/tune/search.hpp"
#include "program/tune/target.hpp"

namespace clattn::cli {
namespace {

struct Arguments {
  std::vector<std::string> models, dtypes = {"f16"};
  std::vector<std::string> roles = {"decode", "prefill", "mla_decode"};
  std::string device, output, kv_cache_dtype = "auto";
  std::int32_t block_size = 16;
  double budget_seconds = 600;
  bool submit = false;
  bool costs = false;  // alone
};

bool has(const std::vector<std::string>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

/// What tuning rows know of a layer, and the number of its KV heads.
AttentionConfig layer_of(const BenchModel& model) {
  const AttentionConfig& config = model.config;
  return {.num_heads = config.num_heads,
          .num_kv_heads = config.num_kv_heads,
          .head_size = config.head_size,
          .scale = config.scale,
          .use_mla = config.use_mla,
          .rope_dim = config.rope_dim};
}

/// The layers of the wanted models, or of all: a row's own number of heads is that of a device with
/// tensor parallelism.
std::vector<AttentionConfig> wanted_layers(const std::vector<std::string>& wanted) {
  for (const std::string& name : wanted) static_cast<void>(model_named(name));
  std::vector<AttentionConfig> layers;
  for (const Model& model : models()) {
    if (!wanted.empty() && !has(wanted, model.layer.name)) continue;
    layers.push_back(layer_of(model.layer));
    for (const BenchShape& row : model.rows) layers.push_back(layer_of(row.model));
  }
  return layers;
}

/// The different shapes of the wanted models' layers in every wanted role and type.
std::vector<TuneShape> wanted_shapes(const Arguments& arguments) {
  const std::vector<AttentionConfig> layers = wanted_layers(arguments.models);
  std::vector<TuneShape> shapes;
  for (const std::string& dtype : arguments.dtypes) {
    std::set<std::string> seen;
    for (const AttentionConfig& layer : layers) {
      for (const std::string_view role : kTuneRoles) {
        TuneShape shape{.config = layer, .role = role};
        shape.config.block_size = arguments.block_size;
        shape.config.dtype = parse_dtype(dtype);
        shape.config.kv_cache_dtype = parse_kv_cache_dtype(arguments.kv_cache_dtype);
        const bool wanted =
            has(arguments.roles, role) && (role == kLatentRole) == shape.config.use_mla;
        if (wanted && seen.insert(shape.name()).second) shapes.push_back(shape);
      }
    }
  }
  if (!shapes.empty()) return shapes;
  throw_invalid(
      "--roles: {} fits no layer of {}; mla_decode is for latent attention, "
      "as in deepseek-v3, the other roles are not",
      fmt::join(arguments.roles, ", "), fmt::join(arguments.models, ", "));
}

void print_costs(const MeasuredCosts& measured) {
  constexpr std::string_view kLine = "  {:28} {:>9} {:>9} {:>9} {:>9} {:>12} {:>8}\n";
  const auto number = [](double value) {
    return value > 0 ? fmt::format("{:.4g}", value) : std::string("-");
  };
  if (!measured.rows.empty()) {
    fmt::print(kLine, "costs of", "launch us", "task us", "split us", "read GB/s", "math GFLOP/s",
               "groups");
  }
  for (const CostRow& row : measured.rows) {
    const KernelCosts& costs = row.costs;
    fmt::print(kLine, row.kernel, number(costs.launch_us), number(costs.task_us),
               number(costs.split_us), number(costs.read_gbs), number(costs.math_gflops),
               number(costs.groups));
  }
  for (const std::string& why : measured.left_out) fmt::print("  costs not measured: {}\n", why);
  std::fflush(stdout);
}

/// Searches one target after the other, each within its share of what time is left, and measures
/// what its kernels cost then.
class Session {
 public:
  /// `start`: costs that plans begin with; measured ones come before them.
  Session(std::shared_ptr<Context> context, std::string path, std::vector<CostRow> start,
          double seconds)
      : context_(std::move(context)),
        path_(std::move(path)),
        start_(std::move(start)),
        end_(TuneClock::now() + std::chrono::duration_cast<TuneClock::duration>(
                                    std::chrono::duration<double>(seconds))) {}

  void tune_all(const std::vector<TuneShape>& shapes) {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const auto now = TuneClock::now();
      const std::string name = shapes[i].name();
      std::string why = "out of time";
      if (now < end_) {
        show_stage(fmt::format("target {} of {}: {}", i + 1, shapes.size(), name));
        const auto share = (end_ - now) / static_cast<int>(shapes.size() - i);
        why = tune(shapes[i],
                   now + std::chrono::duration_cast<TuneClock::duration>(share * kSearchShare));
      }
      if (why.empty()) continue;
      show_progress("");
      fmt::print("{}: not tuned: {}\n", name, why);
      std::fflush(stdout);
    }
  }

  /// Measures the costs of the shapes' layers under the rows of the context, each layer once.
  void measure_all(const std::vector<TuneShape>& shapes, const std::vector<std::string>& roles) {
    std::set<std::string> seen;
    for (const TuneShape& shape : shapes) {
      if (!seen.insert(shape.layer()).second) continue;
      measure(shape, [&](std::string_view role) { return has(roles, role); });
    }
  }

  std::size_t num_tuned() const { return num_tuned_; }
  const std::vector<TuningRow>& winners() const { return winners_; }
  const std::vector<CostRow>& costs() const { return costs_; }

 private:
  /// Of a target's time; the rest is for its costs.
  static constexpr double kSearchShare = 0.8;

  /// Why no candidate was timed; empty if one was.
  std::string tune(const TuneShape& shape, TuneClock::time_point deadline) {
    try {
      TuneTarget target = make_target(context_, shape);
      target.costs = start_;
      TuneSearch search(context_, target, deadline);
      const std::optional<TuningRow> winner = search.run();
      search.print();
      if (winner) {
        winners_.push_back(*winner);
        save_tuning(path_, std::span(&*winner, 1));  // at once: what was found is kept
      }
      if (search.raced()) ++num_tuned_;
      if (TuneClock::now() < end_) {
        set_tuning(*context_, winners_, start_);
        measure(shape, [&](std::string_view role) { return role == shape.role; });
      }
      return search.raced() ? std::string{} : search.why_not_raced();
    } catch (const OutOfTime&) {
      return "out of time before the default was ready";
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kIo) throw;
      return error.what();
    }
  }

  void measure(const TuneShape& shape, const WantsRole& wants) {
    show_stage(fmt::format("costs: {}", shape.layer()));
    MeasuredCosts measured;
    try {
      measured = measure_costs(context_, shape.config, wants);
    } catch (const Error& error) {
      measured.left_out.emplace_back(error.what());
    }
    for (CostRow& row : measured.rows) stamp(row);
    show_progress("");
    fmt::print("\n{}\n", shape.layer());
    print_costs(measured);
    costs_.insert(costs_.end(), measured.rows.begin(), measured.rows.end());
    save_tuning(path_, {}, measured.rows);
  }

  std::shared_ptr<Context> context_;
  std::string path_;
  std::vector<CostRow> start_;
  TuneClock::time_point end_;
  std::size_t num_tuned_ = 0;
  std::vector<CostRow> costs_;
  std::vector<TuningRow> winners_;
};

void print_rows(const DeviceCapabilities& device, const Session& session) {
  if (session.winners().empty() && session.costs().empty()) {
    fmt::print("no row to submit\n");
    return;
  }
  fmt::print("\n# {}, driver {}, clattn {}: rows for the shipped database\n", device.name,
             device.driver_version, commit());
  for (TuningRow row : session.winners()) {
    row.driver.clear();
    fmt::print("{}", format_tuning_row(row));
  }
  for (CostRow row : session.costs()) {
    row.driver.clear();
    fmt::print("{}", format_cost_row(row));
  }
}

void run_tune(Arguments arguments) {
  const std::string path = arguments.output.empty() ? tuning_path() : arguments.output;
  throw_invalid_if(path.empty(),
                   "--output: missing, and the environment names no tuning file "
                   "(CLATTN_TUNING, CLATTN_TUNING_FILE)");
  if (arguments.costs && arguments.models.empty()) arguments.models = {"llama-3-8b"};
  const std::vector<TuneShape> shapes = wanted_shapes(arguments);
  const std::shared_ptr<Context> context = Context::create(arguments.device);
  const DeviceCapabilities& device = context->capabilities();
  for (const std::string& problem : tuning_problems(*context)) fmt::print("{}\n", problem);
  const std::vector<CostRow> start = predicted_start(device);
  // A file that cannot be written is found out now, not with a winner in hand.
  save_tuning(path, {}, start);
  fmt::print("{} ({}), driver {}, clattn {} {}: ", device.name,
             fmt::join(device_classes(device), ", "), device.driver_version, CLATTN_VERSION,
             commit());
  fmt::print("{}\n", arguments.costs ? std::string("costs only")
                                     : fmt::format("{} targets, {:.0f} s", shapes.size(),
                                                   arguments.budget_seconds));
  if (!start.empty()) fmt::print("{} rows of predicted costs to start with\n", start.size());
  std::fflush(stdout);
  Session session(context, path, start, arguments.budget_seconds);
  if (arguments.costs) {
    session.measure_all(shapes, arguments.roles);
    fmt::print("\n{} rows of costs written to {}\n", session.costs().size(), path);
  } else {
    session.tune_all(shapes);
    fmt::print("\n{} of {} targets tuned, {} rows and {} of costs written to {}\n",
               session.num_tuned(), shapes.size(), session.winners().size(), session.costs().size(),
               path);
  }
  if (arguments.submit) print_rows(device, session);
  if (arguments.costs) {
    if (session.costs().empty()) throw_unsupported("no costs were measured");
    return;
  }
  if (session.num_tuned() == 0) throw_unsupported("no target could be tuned");
  if (session.num_tuned() < shapes.size()) throw ExitCode{Status::kFailed};
}

}  // namespace

void add_tune_command(CLI::App& app) {
  auto* command =
      app.add_subcommand("tune",
                         "Find the fastest tiles for a device and what its kernels cost, for a "
                         "tuning file");
  const auto arguments = std::make_shared<Arguments>();
  add_list(*command, "--model", arguments->models, "Tune only the shapes of these models, not all");
  add_list(*command, "--roles", arguments->roles,
           "Kernel roles; default: decode, prefill, mla_decode")
      ->check(
          CLI::IsMember(std::vector<std::string>(std::begin(kTuneRoles), std::end(kTuneRoles))));
  add_list(*command, "--dtype", arguments->dtypes, "Type of the queries")
      ->transform(dtype_name)
      ->check(one_of({"f32", "f16", "bf16"}));
  command->add_option("--kv-dtype", arguments->kv_cache_dtype, "Type of the cache")
      ->transform(dtype_name)
      ->check(one_of(kCacheTypeNames));
  command->add_option("--block-size", arguments->block_size, "Tokens per cache page")
      ->check(number_in(1, 65536));
  add_device(*command, arguments->device);
  command->add_option("--budget", arguments->budget_seconds, "Seconds, shared by all targets")
      ->check(number_in(1.0, 1e6));
  command->add_option("--output", arguments->output, "Tuning file in place of the user's own");
  command->add_flag("--costs", arguments->costs, "Only measure costs; default model: llama-3-8b");
  command->add_flag("--submit", arguments->submit, "Print the rows for the shipped database");
  command->callback([arguments] { run_tune(*arguments); });
}

}  // namespace clattn::cli
