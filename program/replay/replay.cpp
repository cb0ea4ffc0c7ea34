#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "program/commands.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/error.hpp"
#include "program/common/progress.hpp"
#include "program/common/statistics.hpp"
#include "program/replay/options.hpp"
#include "program/replay/report.hpp"

namespace clattn::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// One line on standard error: redrawn in place on a terminal, else a new one every few seconds.
class Progress {
 public:
  explicit Progress(bool silent) : silent_(silent), last_(Clock::now()) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  bool due() const { return !silent_ && seconds_since(last_) >= (on_terminal() ? 0.2 : 5.0); }
  void say(const std::string& text) {
    show_stage(text);
    last_ = Clock::now();
  }
  /// For whoever watches: a log needs no stages.
  void stage(const std::string& text) const {
    if (!silent_) show_progress(text);
  }
  void clear() const { stage(""); }

 private:
  bool silent_;
  Clock::time_point last_;
};

/// Says with numbers what no device memory can hold, before host memory is spent on managing it.
void check_cache_fits(const EngineConfig& config, const DeviceCapabilities& capabilities) {
  const KVCacheSpec spec = spec_of(config.attention);
  const std::uint64_t most = capabilities.max_alloc_bytes / spec.page_size_bytes();
  if (std::cmp_greater(config.limits.num_blocks, most)) {
    throw_unsupported(
        "a layer's cache of {} blocks of {} bytes exceeds this device's "
        "largest allocation, {} bytes: legal is at most {} blocks, see "
        "--num-blocks and --kv-memory",
        config.limits.num_blocks, spec.page_size_bytes(), capabilities.max_alloc_bytes, most);
  }
}

EngineConfig engine_config(const ReplayOptions& options, const BenchModel& layer,
                           const Trace& trace, const DeviceCapabilities& capabilities) {
  EngineConfig config;
  config.attention = layer.config;
  config.layout = layer.layout;
  config.delta_net = layer.delta_net;
  const auto [attention, recurrent] = options.num_layers(layer.delta_net);
  config.num_layers = attention;
  config.num_recurrent_layers = recurrent;
  config.state_pages =
      static_cast<std::int32_t>(std::min(to_size(options.max_num_seqs), trace.requests.size()));
  config.limits.max_num_reqs = options.max_num_seqs;
  config.limits.max_num_batched_tokens = options.max_num_batched_tokens;
  config.limits.max_model_len = 1;
  for (const TraceRequest& request : trace.requests) {
    config.limits.max_model_len = std::max(config.limits.max_model_len, cached_tokens(request));
  }
  config.limits.num_blocks = choose_num_blocks(options, layer, trace, capabilities);
  config.backend = options.backend;
  config.seed = static_cast<std::uint64_t>(options.seed);
  config.capture = options.verify > 0;
  return config;
}

/// Serves the trace. Its clock advances by what each step took and leaps to the next arrival when
/// nothing is there to do, so that a slow device sees a queue and nobody waits for idle time.
class Replay {
 public:
  Replay(const ReplayOptions& options, const Trace& trace, Scheduler& scheduler, Engine& engine)
      : options_(options),
        scheduler_(scheduler),
        engine_(engine),
        verifier_(engine, options.verify, static_cast<std::uint64_t>(options.seed)),
        batch_(options.max_num_seqs,
               ceil_div(engine.config().limits.max_model_len, engine.config().attention.block_size),
               engine.config().attention.block_size),
        num_requests_(trace.requests.size()) {}

  void serve(Progress& progress) {
    const auto start = Clock::now();
    // However short the time, one step runs and is verified: an empty replay proves nothing.
    while (!scheduler_.done() && (steps_.empty() || !time_is_up(start))) {
      if (scheduler_.idle())
        now_s_ = std::max(now_s_, scheduler_.next_arrival_s().value_or(now_s_));
      scheduler_.arrive(now_s_);
      step();
      if (!progress.due()) continue;
      progress.say(fmt::format(
          "replay: {} of {} requests, {} running, {} waiting, step {}, {:.0f} s, {} rows verified",
          scheduler_.num_finished(), num_requests_, scheduler_.num_running(),
          scheduler_.num_waiting(), steps_.size(), seconds_since(start), verifier_.stats().rows));
    }
  }
  std::vector<StepRecord> take_steps() { return std::move(steps_); }
  const VerifyStats& verified() const { return verifier_.stats(); }

 private:
  bool time_is_up(Clock::time_point start) const {
    return options_.seconds > 0 && seconds_since(start) >= options_.seconds;
  }

  void step() {
    const auto index = static_cast<std::int64_t>(steps_.size());
    StepRecord record;
    record.start_s = now_s_;
    const auto start = Clock::now();
    const ScheduledStep& scheduled = scheduler_.schedule();
    batch_.assemble(scheduled, engine_.order(scheduled));
    record.schedule_us = seconds_since(start) * 1e6;

    const auto row = static_cast<std::int64_t>(mix64(static_cast<std::uint64_t>(options_.seed) +
                                                     mix64(static_cast<std::uint64_t>(index))) %
                                               static_cast<std::uint64_t>(Engine::kStartRows));
    const auto layers = verifier_.choose_layers(index);
    record.times = engine_.run(batch_, row, layers);
    now_s_ += (record.schedule_us + record.times.total_us) * 1e-6;
    verifier_.record(batch_, row);
    if (layers) verifier_.check(index, *layers, batch_, row);

    std::vector<RequestShape> lengths;
    lengths.reserve(scheduled.requests.size());
    for (const ScheduledRequest& request : scheduled.requests)
      lengths.push_back({request.num_new, request.num_computed + request.num_new});
    const Work work = attention_work(engine_.config().attention, lengths);
    record.num_reqs = batch_.num_reqs();
    record.decode_tokens = scheduled.num_decode_tokens;
    record.prefill_tokens = scheduled.num_tokens - scheduled.num_decode_tokens;
    record.blocks_used = scheduler_.blocks().num_used();
    record.preemptions = scheduled.num_preemptions;
    record.prefix_hit_tokens = scheduled.num_prefix_hit_tokens;
    record.kv_bytes = work.bytes * engine_.config().num_layers;
    record.flops = work.flops * engine_.config().num_layers;
    steps_.push_back(record);
    scheduler_.complete();
  }

  const ReplayOptions& options_;
  Scheduler& scheduler_;
  Engine& engine_;
  Verifier verifier_;
  StepBatch batch_;
  std::size_t num_requests_;
  double now_s_ = 0;
  std::vector<StepRecord> steps_;
};

void write_reports(const ReplayOptions& options, const ReplayReport& report) {
  const nlohmann::ordered_json results = to_json(report);
  const std::string text = to_text(results);
  if (options.json_path != "-") fmt::print("{}", text);
  // Names come from drivers and files: bytes that are no UTF-8 must not cost the report.
  const auto keep = nlohmann::ordered_json::error_handler_t::replace;
  if (!options.json_path.empty()) {
    write_text(options.json_path, results.dump(1, ' ', false, keep) + "\n");
  }
  if (!options.html_path.empty()) write_text(options.html_path, to_html(results, text));
}

void run_replay(const ReplayOptions& options) {
  const Trace trace = options.load_trace();
  const BenchModel layer = options.layer();
  for (const std::string& path : {options.json_path, options.html_path}) {
    if (!path.empty()) check_writable(path);
  }
  const auto start = Clock::now();
  Progress progress(options.no_progress);
  progress.stage("replay: opening the device");
  const auto context = Context::create(options.device);
  const EngineConfig config = engine_config(options, layer, trace, context->capabilities());
  check_cache_fits(config, context->capabilities());
  Scheduler scheduler({.max_num_seqs = options.max_num_seqs,
                       .max_num_batched_tokens = options.max_num_batched_tokens,
                       .block_size = config.attention.block_size,
                       .num_blocks = static_cast<std::int32_t>(config.limits.num_blocks),
                       // A prefix would need the states behind it.
                       .share_prefixes = config.num_recurrent_layers == 0},
                      trace);
  progress.stage("replay: compiling kernels, making caches and inputs");
  Engine engine(context, config);
  engine.warm_up_and_poison();
  progress.stage("replay: measuring the device's ceilings");
  const Ceilings ceilings = measure_ceilings(*context);

  Replay replay(options, trace, scheduler, engine);
  replay.serve(progress);
  const VerifyStats& verified = replay.verified();
  progress.clear();
  for (const std::string& failure : verified.failures) {
    fmt::print(stderr, "clattn: replay: {}\n", failure);
  }
  write_reports(options, {.trace = trace,
                          .engine = engine,
                          .scheduler = scheduler,
                          .device = context->capabilities(),
                          .model = options.name(),
                          .ceilings = ceilings,
                          .steps = replay.take_steps(),
                          .verify = verified,
                          .replay_s = seconds_since(start)});
  if (options.verify > 0 && verified.rows == 0) {
    fmt::print(stderr, "clattn: replay: no row was verified, --verify asks for some\n");
    throw ExitCode{Status::kFailed};
  }
  if (verified.failed_rows > 0) throw ExitCode{Status::kFailed};
}

}  // namespace

/// `clattn replay`: continuous batching over a trace, every step executed and some verified.
void add_replay_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "replay", "Serve a request trace: every step runs, some are checked against the oracle");
  const auto options = std::make_shared<ReplayOptions>();
  options->add_to(*command);
  command->callback([options] { run_replay(*options); });
}

}  // namespace clattn::cli
