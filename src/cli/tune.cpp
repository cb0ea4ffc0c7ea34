#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <cstdio>
#include <ctime>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cli/check_report.hpp"
#include "cli/commands.hpp"
#include "cli/commit.hpp"
#include "cli/models.hpp"
#include "cli/tune_race.hpp"
#include "cli/tune_target.hpp"

namespace clattn::cli {
namespace {

/// A new row has to beat the default by more than machines vary.
constexpr double kNoise = 1.02;
constexpr int kRounds = 5, kFinalRounds = 15;
constexpr std::size_t kRowsShown = 8;

struct Arguments {
  std::vector<std::string> models, dtypes = {"f16"};
  std::vector<std::string> roles = {"decode", "prefill", "mla_decode"};
  std::string device, output, kv_cache_dtype = "auto";
  std::int32_t block_size = 16;
  double budget_seconds = 600;
  bool submit = false;
};

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

std::string describe(const TuningRow& row) {
  std::vector<std::string> parts;
  if (!row.variant.empty()) {
    parts.push_back(fmt::format("{} {}x{} wg {}", row.variant, row.block_rows, row.block_kv,
                                row.work_group_size));
  }
  if (row.items_per_compute_unit > 0) {
    parts.push_back(
        fmt::format("{} items, {} keys a split", row.items_per_compute_unit, row.min_split_keys));
  }
  return parts.empty() ? "default" : fmt::format("{}", fmt::join(parts, ", "));
}

/// The cuts of a step's work that are tried.
std::vector<std::pair<std::int32_t, std::int32_t>> plans_for(const TuningRow& key,
                                                             DeviceKind kind) {
  if (key.role == "prefill") return {};  // decode's row cuts the step
  const bool cpu = kind == DeviceKind::kCpu;
  std::vector<std::pair<std::int32_t, std::int32_t>> plans;
  for (const std::int32_t items : {2, 4, 8, 16}) {
    for (const std::int32_t keys : {128, 256, 512}) {
      plans.emplace_back(cpu ? items * 4 : items, cpu ? keys / 4 : keys);
    }
  }
  return plans;
}

/// One target's search, phase by phase: the rows as they are, then the cuts with the best of them,
/// then the rows' other tiles with the best cut.
class Search {
 public:
  Search(std::shared_ptr<Context> context, const TuneTarget& target, TuneClock::time_point deadline,
         TuneClock::time_point budget_end)
      : context_(std::move(context)),
        target_(target),
        deadline_(deadline),
        budget_end_(budget_end),
        race_(context_, target),
        best_(race_.base()) {}

  /// Returns the winner; nothing if the default stays.
  std::optional<TuningRow> run() {
    std::vector<TuningRow> rows = tuning_candidates(*context_, target_.key);
    const auto tiles = std::stable_partition(rows.begin(), rows.end(), [&](const TuningRow& row) {
      return seen_.insert(row.variant).second;  // the first of each variant is its own tile
    });
    // A budget that ends early has then seen some of each kind.
    std::shuffle(tiles, rows.end(), std::mt19937(1));
    const auto plans = plans_for(target_.key, context_->capabilities().kind);
    num_candidates_ = rows.size() + plans.size();
    for (auto row = rows.begin(); row != tiles; ++row) try_tile(*row);
    for (const auto& [items, keys] : plans) {
      TuningRow row = best_.row;
      row.items_per_compute_unit = items;
      row.min_split_keys = keys;
      try_row(row);
    }
    for (auto row = tiles; row != rows.end(); ++row) try_tile(*row);
    return confirm();
  }

  void print() const {
    show_progress("");
    const std::vector<const Trial*> timed = by_speed();
    fmt::print("\n{}: {} of {} candidates timed\n", target_.name, timed.size(), num_candidates_);
    fmt::print("  {:76} {:>10} {:>17} {:>9} {:>8}\n", "candidate", "time us", "rate", "error",
               "speed-up");
    print_line(race_.base());
    for (std::size_t i = 0; i < std::min(timed.size(), kRowsShown); ++i) print_line(*timed[i]);
    if (timed.size() > kRowsShown) fmt::print("  and {} slower\n", timed.size() - kRowsShown);
    for (const Trial& trial : trials_) {
      if (trial.state == TrialState::kWrong) {
        fmt::print("  {:76} NOT USED: {}\n", describe(trial.row), trial.note);
      }
    }
    print_counts();
    fmt::print("  {}\n", verdict_);
    std::fflush(stdout);
  }

 private:
  void try_tile(TuningRow row) {
    row.items_per_compute_unit = best_.row.items_per_compute_unit;
    row.min_split_keys = best_.row.min_split_keys;
    try_row(row);
  }

  void try_row(const TuningRow& row) {
    ++num_tried_;
    if (TuneClock::now() > deadline_) {
      ++num_untried_;
      return;
    }
    const double left = std::chrono::duration<double>(budget_end_ - TuneClock::now()).count();
    show_progress(fmt::format("{}: candidate {} of {}, best so far x{:.3f}, {:.0f} s left: {}",
                              target_.name, num_tried_, num_candidates_, best_.speed_up, left,
                              describe(row)));
    trials_.push_back(race_.run(row, kRounds));
    const Trial& trial = trials_.back();
    if (trial.state == TrialState::kTimed && trial.speed_up > best_.speed_up) best_ = trial;
  }

  /// The best of many noisy candidates look better than they are: one has to win twice more, each
  /// time against tensors made anew.
  std::optional<TuningRow> confirm() {
    constexpr std::size_t kMostLeaders = 3;
    const std::vector<const Trial*> leaders = by_speed();
    for (std::size_t i = 0; i < std::min(leaders.size(), kMostLeaders); ++i) {
      double speed_up = leaders[i]->speed_up;
      TuningRow row = leaders[i]->row;
      for (int again = 0; again < 2 && speed_up > kNoise; ++again) {
        race_.refresh();
        const Trial trial = race_.run(leaders[i]->row, kFinalRounds);
        speed_up = trial.state == TrialState::kTimed ? std::min(speed_up, trial.speed_up) : 0;
        row = trial.row;
      }
      if (speed_up <= kNoise) continue;
      verdict_ = fmt::format("winner: {}, x{:.3f} at least", describe(row), speed_up);
      row.version = CLATTN_VERSION;
      row.date = today();
      return row;
    }
    verdict_ = "the default stays";
    return std::nullopt;
  }

  /// The timed candidates, fastest first.
  std::vector<const Trial*> by_speed() const {
    std::vector<const Trial*> timed;
    for (const Trial& trial : trials_) {
      if (trial.state == TrialState::kTimed) timed.push_back(&trial);
    }
    std::stable_sort(timed.begin(), timed.end(),
                     [](const Trial* a, const Trial* b) { return a->speed_up > b->speed_up; });
    return timed;
  }

  void print_line(const Trial& trial) const {
    fmt::print("  {:76} {:10.1f} {:9.1f} {:7} {:9.2e} {:7.3f}x\n", describe(trial.row),
               trial.row.time_us, trial.rate, race_.unit_name(), trial.row.error, trial.speed_up);
  }

  void print_counts() const {
    const auto count = [&](TrialState state) {
      return std::count_if(trials_.begin(), trials_.end(),
                           [&](const Trial& trial) { return trial.state == state; });
    };
    fmt::print("  {} far slower, {} do not fit, {} wrong, {} not tried for want of time\n",
               count(TrialState::kSlow), count(TrialState::kUnfit), count(TrialState::kWrong),
               num_untried_);
  }

  std::shared_ptr<Context> context_;
  const TuneTarget& target_;
  TuneClock::time_point deadline_, budget_end_;
  TuneRace race_;
  Trial best_;
  std::vector<Trial> trials_;
  std::set<std::string> seen_;
  std::size_t num_candidates_ = 0, num_tried_ = 0, num_untried_ = 0;
  std::string verdict_;
};

bool has(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

using MakeTarget = std::function<TuneTarget()>;

/// The different attention shapes of the wanted models; a tuning row does not know their number of
/// KV heads.
void add_attention_targets(const std::shared_ptr<Context>& context, const Arguments& arguments,
                           DType dtype, std::vector<MakeTarget>& targets) {
  std::set<std::pair<std::int32_t, std::int32_t>> seen;
  for (const ModelShape& model : model_shapes()) {
    if (!arguments.models.empty() && !has(arguments.models, model.name)) continue;
    if (!seen.emplace(model.num_heads / model.num_kv_heads, model.head_size).second) continue;
    AttentionConfig config;
    config.num_heads = model.num_heads;
    config.num_kv_heads = model.num_kv_heads;
    config.head_size = model.head_size;
    config.block_size = arguments.block_size;
    config.dtype = dtype;
    if (arguments.kv_cache_dtype != "auto") {
      config.kv_cache_dtype = parse_dtype(arguments.kv_cache_dtype);
    }
    for (const std::string_view role : {"decode", "prefill"}) {
      if (!has(arguments.roles, role)) continue;
      targets.emplace_back(
          [=] { return make_attention_target(context, {.config = config, .role = role}); });
    }
  }
}

std::vector<MakeTarget> make_targets(const std::shared_ptr<Context>& context,
                                     const Arguments& arguments) {
  for (const std::string& name : arguments.models) static_cast<void>(find_model(name));
  std::vector<MakeTarget> targets;
  for (const std::string& name : arguments.dtypes) {
    const DType dtype = parse_dtype(name);
    add_attention_targets(context, arguments, dtype, targets);
    if (!has(arguments.roles, "mla_decode") || !arguments.models.empty()) continue;
    MLAConfig config;
    config.num_heads = 128;  // DeepSeek-V3
    config.block_size = arguments.block_size;
    config.dtype = dtype;
    if (arguments.kv_cache_dtype != "auto") {
      config.kv_cache_dtype = parse_dtype(arguments.kv_cache_dtype);
    }
    targets.emplace_back([=] { return make_mla_target(context, config); });
  }
  if (targets.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "--roles: mla_decode, legal with --model: decode, prefill; its shape is no model's");
  }
  return targets;
}

void run_tune(const Arguments& arguments) {
  const std::string path = arguments.output.empty() ? tuning_path() : arguments.output;
  if (path.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "--output: missing, and the environment names no tuning file "
                "(CLATTN_TUNING, CLATTN_TUNING_FILE)");
  }
  const std::shared_ptr<Context> context = Context::create(arguments.device);
  const DeviceCapabilities& device = context->capabilities();
  for (const std::string& problem : tuning_problems(*context)) fmt::print("{}\n", problem);
  const std::vector<MakeTarget> targets = make_targets(context, arguments);
  save_tuning(path,
              {});  // a file that cannot be written is found out now, not with a winner in hand
  fmt::print("{} ({}), driver {}, clattn {} {}: {} targets, {:.0f} s\n", device.name,
             fmt::join(device_classes(device), ", "), device.driver_version, CLATTN_VERSION,
             commit(), targets.size(), arguments.budget_seconds);
  const auto end = TuneClock::now() + std::chrono::duration_cast<TuneClock::duration>(
                                          std::chrono::duration<double>(arguments.budget_seconds));
  std::vector<TuningRow> winners;
  std::size_t num_done = 0;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const auto now = TuneClock::now();
    if (now > end) break;
    const auto deadline = now + (end - now) / static_cast<int>(targets.size() - i);
    std::string name = "target";
    try {
      const TuneTarget target = targets[i]();
      name = target.name;
      Search search(context, target, deadline, end);
      const std::optional<TuningRow> winner = search.run();
      search.print();
      ++num_done;
      if (!winner) continue;
      winners.push_back(*winner);
      save_tuning(path, std::span(&*winner, 1));  // at once: what was found is kept
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kIo) throw;
      show_progress("");
      fmt::print("\n{}: not tuned: {}\n", name, error.what());
    }
  }
  if (num_done == 0) throw Error(ErrorCode::kUnsupported, "no target could be tuned");
  fmt::print("\n{} of {} targets tuned, {} rows written to {}\n", num_done, targets.size(),
             winners.size(), path);
  if (arguments.submit && !winners.empty()) {
    fmt::print("\n# {}, driver {}, clattn {}: rows for src/tuning/shipped.inc\n", device.name,
               device.driver_version, commit());
    for (TuningRow row : winners) {
      row.driver.clear();
      fmt::print("{}", format_tuning_row(row));
    }
  }
}

}  // namespace

void add_tune_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "tune", "Find the fastest tiles and cuts for this device and keep them in a tuning file");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("--model", arguments->models, "Shapes of these models alone, not of all");
  command->add_option("--roles", arguments->roles, "decode, prefill, mla_decode")
      ->delimiter(',')
      ->check(CLI::IsMember({"decode", "prefill", "mla_decode"}));
  command->add_option("--dtype", arguments->dtypes, "f32, f16, bf16")->delimiter(',');
  command->add_option("--kv-dtype", arguments->kv_cache_dtype,
                      "auto, f32, f16, bf16, fp8_e4m3, fp8_e5m2 or int8");
  command->add_option("--block-size", arguments->block_size, "Tokens a cache page")
      ->check(CLI::Range(1, 65536));
  command->add_option("--device", arguments->device, "gpu, cpu, P:D or part of a name");
  command->add_option("--budget", arguments->budget_seconds, "Seconds, shared by all targets")
      ->check(CLI::Range(1.0, 1e6));
  command->add_option("--output", arguments->output, "Tuning file in place of the user's own");
  command->add_flag("--submit", arguments->submit, "Print the rows for the shipped database");
  command->callback([arguments] { run_tune(*arguments); });
}

}  // namespace clattn::cli
