#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "program/check/report.hpp"
#include "program/commands.hpp"
#include "program/common/options.hpp"
#include "program/common/progress.hpp"
#include "program/common/statistics.hpp"
#include "program/common/text.hpp"
#include "program/fuzz/recipe.hpp"
#include "program/fuzz/trial.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {
namespace {

struct FuzzOptions {
  DrawOptions draw;
  std::string device, out = "clattn-fuzz";
  std::uint64_t first = 0, count = 0;  ///< count 0: until the time is over
  bool write_all = false;              ///< writes every case, right or wrong
  double seconds = 0;                  ///< 0: no limit, unless there is no count either
};

constexpr double kDefaultSeconds = 60;
constexpr int kMostFailures = 5;  // then something is wrong with the device as a whole
constexpr int kMostShrinkTrials = 250;
constexpr double kKeptSeverity = 4;  // a smaller case that is much less wrong may be another fault
/// A context keeps every kernel that it built: this many layers, then a new one.
constexpr std::uint64_t kLayersPerContext = 100;

/// What was drawn and what came of it.
class Tally {
 public:
  void add(const Recipe& recipe, const FuzzResult& trial) {
    ++states_[static_cast<std::size_t>(trial.state)];
    if (trial.state == FuzzState::kRefused) ++refusals_[trial.why];
    if (trial.state == FuzzState::kPassed) add_kinds(recipe);
    for (const LaunchReport& launch : trial.launches) ++kernels_[launch.name];
  }
  int count(FuzzState state) const { return states_[static_cast<std::size_t>(state)]; }
  std::string counts() const {
    return fmt::format("{} passed, {} refused, {} failed", count(FuzzState::kPassed),
                       count(FuzzState::kRefused), count(FuzzState::kFailed));
  }
  void print(double seconds) const {
    fmt::print("{} in {:.0f} s\n", counts(), seconds);
    print_counts("passed with", kinds_);
    print_counts("launched", kernels_);
    print_counts("refused for", refusals_);
  }

 private:
  using Counts = std::map<std::string, int>;

  static void print_counts(std::string_view what, const Counts& counts) {
    if (counts.empty()) return;
    std::string text;
    for (const auto& [name, count] : counts)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, count);
    fmt::print("  {}: {}\n", what, text);
  }

  void add_kinds(const Recipe& recipe) {
    ++kinds_[types_of(recipe.config.dtype, recipe.config.cache_dtype())];
    for (const std::string_view option : names_of_options(recipe)) ++kinds_[std::string(option)];
  }

  std::array<int, 3> states_{};
  Counts kinds_, kernels_, refusals_;
};

class Fuzz {
 public:
  explicit Fuzz(FuzzOptions options) : options_(std::move(options)) {
    if (options_.count == 0 && options_.seconds == 0) options_.seconds = kDefaultSeconds;
  }

  /// Whether no case failed.
  bool run() {
    for (std::uint64_t index = options_.first; !over(index); ++index) {
      const Recipe recipe = draw(options_.draw, index);
      begin(index, recipe);
      const FuzzResult trial = try_recipe(recipe, execute_);
      tally_.add(recipe, trial);
      if (trial.state == FuzzState::kFailed) report(index, recipe, trial);
      if (trial.state == FuzzState::kPassed && options_.write_all) write(recipe, place_of(index));
    }
    show_progress("");
    tally_.print(seconds_since(start_));
    return tally_.count(FuzzState::kFailed) == 0;
  }

 private:
  bool over(std::uint64_t index) const {
    return (options_.count > 0 && index - options_.first >= options_.count) ||
           (options_.seconds > 0 && seconds_since(start_) >= options_.seconds) ||
           tally_.count(FuzzState::kFailed) >= kMostFailures;
  }

  /// Names the layer before its first case, so that the last line tells which one ended the
  /// process, and what came of the cases before.
  void begin(std::uint64_t index, const Recipe& recipe) {
    const std::uint64_t calls = options_.draw.layer_calls;
    const bool first = index == options_.first, new_layer = index % calls == 0;
    if (first || index % (calls * kLayersPerContext) == 0) {
      context_ = Context::create(options_.device);
      execute_ = [context = context_](const Recipe& drawn, const AttentionCall& call) {
        return execute(context, call, drawn.repeat);
      };
    }
    if (first) fmt::print("seed {} on {}\n", options_.draw.seed, context_->capabilities().name);
    show_progress("");
    if (new_layer && !first) fmt::print("        so far {}\n", tally_.counts());
    if (first || new_layer) fmt::print("{:6}: {}\n", index, describe_layer(recipe));
    std::fflush(stdout);
    show_progress(fmt::format("{:6}: {}", index, describe_batch(recipe)));
  }

  void report(std::uint64_t index, const Recipe& recipe, const FuzzResult& trial) {
    show_progress("");
    fmt::print("FAILED {}: {}; {}\n  {}\n", index, describe_layer(recipe), describe_batch(recipe),
               trial.why);
    fmt::print(
        "  again: clattn fuzz --seed {} --first {} --count 1 --most-tokens {} --calls {}{}{}\n",
        options_.draw.seed, index, options_.draw.most_tokens, options_.draw.layer_calls,
        options_.draw.family == KernelFamily::kAuto
            ? ""
            : fmt::format(" --family {}", to_string(options_.draw.family)),
        options_.device.empty() ? "" : fmt::format(" --device '{}'", options_.device));
    const auto fails = [&](const Recipe& other) {
      show_progress(fmt::format("  {}; {}", describe_layer(other), describe_batch(other)));
      const FuzzResult again = try_recipe(other, execute_);
      return again.state == FuzzState::kFailed && kKeptSeverity * again.severity >= trial.severity;
    };
    const Recipe small = shrink(recipe, fails, kMostShrinkTrials);
    show_progress("");
    write(small, place_of(index));
    fmt::print("  smallest: {}; {}\n  {}\n  its case: clattn run --verify {}\n",
               describe_layer(small), describe_batch(small), try_recipe(small, execute_).why,
               place_of(index).string());
    std::fflush(stdout);
  }

  std::filesystem::path place_of(std::uint64_t index) const {
    return std::filesystem::path(options_.out) / fmt::format("{}-{}", options_.draw.seed, index);
  }
  static void write(const Recipe& recipe, const std::filesystem::path& place) {
    const AttentionCall call = make_call(recipe);
    if (recipe.order == CacheOrder::kLatent) {
      write_latent_case(call, place);
    } else {
      write_case(call, place);
    }
  }

  FuzzOptions options_;
  Tally tally_;
  std::shared_ptr<Context> context_;
  Execute execute_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

void add_fuzz_command(CLI::App& app) {
  auto* command = app.add_subcommand("fuzz", "Run random calls and compare them with the oracle");
  const auto options = std::make_shared<FuzzOptions>();
  const auto family = std::make_shared<std::string>("auto");
  DrawOptions& draw = options->draw;
  add_device(*command, options->device);
  command->add_option("--seed", draw.seed, "Cases depend on this and their number alone");
  command->add_option("--first", options->first, "Number of the first case");
  command->add_option("--count", options->count, "Number of cases (default: until time is over)");
  command
      ->add_option("--seconds", options->seconds,
                   "Start no case after this time (default 60, or none with --count)")
      ->check(number_in(0.0, 1e7));
  command->add_option("--family", *family, "Force kernels of this family")
      ->check(CLI::IsMember(
          names_of(kKernelFamilies, [](KernelFamily each) { return to_string(each); })));
  command->add_option("--most-tokens", draw.most_tokens, "Keys of a batch, all requests together")
      ->check(number_in(1, 1 << 20));
  command->add_option("--calls", draw.layer_calls, "Calls in a row on the same layer")
      ->check(number_in(std::uint64_t{1}, std::uint64_t{1} << 20U));
  command->add_option("--out", options->out, "Folder of the cases that failed");
  command->add_flag("--write-all", options->write_all, "Write the cases that passed, too");
  command->callback([options, family] {
    options->draw.family = parse_kernel_family(*family);
    if (!Fuzz(*options).run()) throw ExitCode{Status::kFailed};
  });
}

}  // namespace clattn::cli
