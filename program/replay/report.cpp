#include "program/replay/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "program/common/statistics.hpp"

namespace clattn::cli {
namespace {

using Json = nlohmann::ordered_json;
using Column = std::function<double(const StepRecord&)>;

struct NamedColumn {
  const char* name;
  const char* title;
  Column value;
};

/// The parts that a step's time falls into; they add up to "total".
const std::vector<NamedColumn>& time_columns() {
  static const std::vector<NamedColumn> columns = {
      {"schedule_us", "scheduler", [](const StepRecord& s) { return s.schedule_us; }},
      {"metadata_us", "host metadata", [](const StepRecord& s) { return s.times.metadata_us; }},
      {"upload_us", "upload", [](const StepRecord& s) { return s.times.upload_us; }},
      {"cache_write_us", "cache write", [](const StepRecord& s) { return s.times.cache_write_us; }},
      {"attention_us", "attention", [](const StepRecord& s) { return s.times.attention_us; }},
      {"rest_us", "enqueue and wait",
       [](const StepRecord& s) {
         const StepTimes& t = s.times;
         return std::max(
             0.0, t.total_us - t.metadata_us - t.upload_us - t.cache_write_us - t.attention_us);
       }},
      {"total_us", "total", [](const StepRecord& s) { return s.schedule_us + s.times.total_us; }},
  };
  return columns;
}

double ratio(double part, double whole) {
  return whole > 0 ? part / whole : 0;
}

double gb_per_s(const StepRecord& s) {
  return ratio(s.kv_bytes * 1e-3, s.times.attention_us);
}
double gflop_per_s(const StepRecord& s) {
  return ratio(s.flops * 1e-3, s.times.attention_us);
}

std::vector<double> column(const ReplayReport& report, const Column& value) {
  std::vector<double> values;
  values.reserve(report.steps.size());
  for (const StepRecord& step : report.steps) values.push_back(value(step));
  return values;
}

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

Json step_time_json(const ReplayReport& report) {
  Json times;
  double total_us = 0;
  // Their kernels are not timed one by one.
  const bool hybrid = report.engine.config().num_recurrent_layers > 0;
  for (const StepRecord& step : report.steps) total_us += step.schedule_us + step.times.total_us;
  for (const NamedColumn& part : time_columns()) {
    const std::vector<double> values = column(report, part.value);
    const bool rest = std::string_view(part.name) == "rest_us";
    times[part.name] = {{"title", rest && hybrid ? "recurrent, rest" : part.title},
                        {"p50", percentile(values, 0.50)},
                        {"p99", percentile(values, 0.99)},
                        {"share", ratio(sum(values), total_us)}};
  }
  return times;
}

constexpr const char* kAboveCeiling =
    "Above 100 %: the read ceiling is that of the device's memory, and what stays in a processor's "
    "cache comes faster; and the ceilings were measured before the replay, when the device may "
    "have been slower.";

/// Rates over the steps that they say something about: reading bounds decodes, arithmetic prefills.
Json achieved_json(const ReplayReport& report) {
  double decode_bytes = 0, decode_us = 0, prefill_flops = 0, prefill_us = 0;
  for (const StepRecord& step : report.steps) {
    if (step.prefill_tokens == 0) {
      decode_bytes += step.kv_bytes;
      decode_us += step.times.attention_us;
    } else {
      prefill_flops += step.flops;
      prefill_us += step.times.attention_us;
    }
  }
  const Arithmetic arithmetic =
      arithmetic_of(report.engine.config().attention.dtype, report.ceilings);
  const double gb = ratio(decode_bytes * 1e-3, decode_us);
  const double gflop = ratio(prefill_flops * 1e-3, prefill_us);
  const double of_read = ratio(gb, report.ceilings.read_gb_per_s);
  const double of_arithmetic = ratio(gflop, arithmetic.gflop_per_s);
  const bool above = std::max({of_read, of_arithmetic, 1.0}) > 1;
  return {{"decode_steps_gb_per_s", gb},
          {"decode_steps_share_of_read", of_read},
          {"prefill_steps_gflop_per_s", gflop},
          {"prefill_steps_share_of_arithmetic", of_arithmetic},
          {"note", above ? kAboveCeiling : ""}};
}

Json series_json(const ReplayReport& report) {
  Json series;
  const auto add = [&](const char* name, const Column& value) {
    std::vector<double> values = column(report, value);
    for (double& v : values) v = std::round(v * 1e4) / 1e4;  // keeps large reports small
    series[name] = std::move(values);
  };
  add("start_s", [](const StepRecord& s) { return s.start_s; });
  for (const NamedColumn& part : time_columns()) add(part.name, part.value);
  add("num_reqs", [](const StepRecord& s) { return s.num_reqs; });
  add("decode_tokens", [](const StepRecord& s) { return s.decode_tokens; });
  add("prefill_tokens", [](const StepRecord& s) { return s.prefill_tokens; });
  add("blocks_used", [](const StepRecord& s) { return s.blocks_used; });
  add("preemptions", [](const StepRecord& s) { return s.preemptions; });
  add("gb_per_s", gb_per_s);
  add("gflop_per_s", gflop_per_s);
  return series;
}

Json kernels_json(const ReplayReport& report) {
  Json kernels = Json::array();
  const auto& uses = report.engine.kernel_use();
  for (const KernelInfo& kernel : report.engine.impl().kernels()) {
    const auto use = uses.find(kernel.name);
    const KernelUse used = use == uses.end() ? KernelUse{} : use->second;
    kernels.push_back({{"name", kernel.name},
                       {"role", kernel.role},
                       {"work_group_size", kernel.work_group_size},
                       {"block_rows", kernel.block_rows},
                       {"block_kv", kernel.block_kv},
                       {"launches", used.launches},
                       {"time_us", used.time_us}});
  }
  return kernels;
}

}  // namespace

Json to_json(const ReplayReport& report) {
  double busy_s = 0;
  std::int64_t prefill = 0, decode = 0, hits = 0, preemptions = 0;
  for (const StepRecord& step : report.steps) {
    busy_s += (step.schedule_us + step.times.total_us) * 1e-6;
    prefill += step.prefill_tokens;
    decode += step.decode_tokens;
    hits += step.prefix_hit_tokens;
    preemptions += step.preemptions;
  }
  const AttentionConfig& attention = report.engine.config().attention;
  const BlockPool& blocks = report.scheduler.blocks();
  Json json;
  json["trace"] = report.trace.source;
  if (const std::int32_t shared = report.trace.system_prompt; shared > 0)
    json["trace"] = fmt::format("{}, {} tokens shared", report.trace.source, shared);
  json["model"] = {{"name", report.model},
                   {"num_heads", attention.num_heads},
                   {"num_kv_heads", attention.num_kv_heads},
                   {"head_size", attention.head_size},
                   {"num_layers", report.engine.config().num_layers},
                   {"num_recurrent_layers", report.engine.config().num_recurrent_layers},
                   {"dtype", to_string(attention.dtype)},
                   {"kv_cache_dtype", to_string(attention.cache_format())}};
  json["device"] = {{"name", report.device.name},
                    {"driver", report.device.driver_version},
                    {"platform", report.device.platform_name},
                    {"platform_version", report.device.platform_version}};
  json["backend"] = report.engine.backend().name();
  json["kv_cache"] = {{"layout", to_string(report.engine.layout())},
                      {"block_size", attention.block_size},
                      {"num_blocks", blocks.num_blocks()},
                      {"peak_blocks", blocks.peak_used()}};
  json["kernels"] = kernels_json(report);
  const Arithmetic arithmetic = arithmetic_of(attention.dtype, report.ceilings);
  json["ceilings"] = {{"read_gb_per_s", report.ceilings.read_gb_per_s},
                      {"arithmetic", arithmetic.ceiling},
                      {"arithmetic_gflop_per_s", arithmetic.gflop_per_s}};
  json["requests"] = {{"total", report.trace.requests.size()},
                      {"finished", report.scheduler.num_finished()},
                      {"preemptions", preemptions},
                      {"prefix_hit_tokens", hits}};
  json["steps"] = report.steps.size();
  json["replay_s"] = report.replay_s;
  json["step_s"] = busy_s;
  json["tokens"] = {{"prefill", prefill},
                    {"decode", decode},
                    {"prefill_per_s", ratio(static_cast<double>(prefill), busy_s)},
                    {"decode_per_s", ratio(static_cast<double>(decode), busy_s)}};
  json["step_time_us"] = step_time_json(report);
  json["achieved"] = achieved_json(report);
  json["verify"] = {{"steps", report.verify.steps},
                    {"rows", report.verify.rows},
                    {"failed_rows", report.verify.failed_rows},
                    {"worst_error", report.verify.deviation.max_error},
                    {"worst_share_of_allowance", report.verify.deviation.worst_share},
                    {"failures", report.verify.failures}};
  json["series"] = series_json(report);
  return json;
}

std::string to_text(const Json& report) {
  std::string text;
  const auto line = [&]<typename... Args>(std::string_view title,
                                          fmt::format_string<Args...> format, Args&&... args) {
    text += fmt::format("{:<18}{}\n", title, fmt::format(format, std::forward<Args>(args)...));
  };
  const auto number = [&](const char* group, const char* field) {
    const Json& value = report[group][field];
    return value.is_number() ? value.get<double>() : std::nan("");  // null: was not finite
  };
  const auto string = [](const Json& value) { return value.get<std::string>(); };
  const Json& model = report["model"];
  line("device", "{} (driver {}, {})", string(report["device"]["name"]),
       string(report["device"]["driver"]), string(report["device"]["platform"]));
  line("trace", "{}", string(report["trace"]));
  line("model", "{}: {} query / {} KV heads x {}, {} layers, {}, cache {} {}",
       string(model["name"]), number("model", "num_heads"), number("model", "num_kv_heads"),
       number("model", "head_size"), number("model", "num_layers"), string(model["dtype"]),
       string(model["kv_cache_dtype"]), string(report["kv_cache"]["layout"]));
  if (const double recurrent = number("model", "num_recurrent_layers"); recurrent > 0)
    line("", "and {} layers of gated delta nets", recurrent);
  line("backend", "{}", string(report["backend"]));
  for (const Json& kernel : report["kernels"]) {
    if (kernel["launches"] == 0) continue;
    line("  " + string(kernel["role"]), "{} (work-group {}, {} launches, {:.1f} ms)",
         string(kernel["name"]), kernel["work_group_size"].get<int>(),
         kernel["launches"].get<std::int64_t>(), kernel["time_us"].get<double>() * 1e-3);
  }
  text += '\n';
  line("requests", "{} of {} finished, {} preemptions", number("requests", "finished"),
       number("requests", "total"), number("requests", "preemptions"));
  line("prefix hits", "{} tokens", number("requests", "prefix_hit_tokens"));
  line("steps", "{} in {:.1f} s of step time, {:.1f} s in all", report["steps"].get<std::size_t>(),
       report["step_s"].get<double>(), report["replay_s"].get<double>());
  line("prefill", "{:.0f} tokens, {:.0f} tokens/s", number("tokens", "prefill"),
       number("tokens", "prefill_per_s"));
  line("decode", "{:.0f} tokens, {:.0f} tokens/s", number("tokens", "decode"),
       number("tokens", "decode_per_s"));
  text += fmt::format("\n{:<18}{:>12}{:>12}{:>9}\n", "step time", "p50 us", "p99 us", "of total");
  for (const auto& part : report["step_time_us"]) {
    text += fmt::format("  {:<16}{:>12.1f}{:>12.1f}{:>8.1f}%\n", string(part["title"]),
                        part["p50"].get<double>(), part["p99"].get<double>(),
                        100 * part["share"].get<double>());
  }
  text += fmt::format("\n{:<18}{:>12}{:>12}{:>14}\n", "attention", "achieved", "ceiling",
                      "of the ceiling");
  text +=
      fmt::format("  {:<16}{:>12.1f}{:>12.1f}{:>13.1f}%  GB/s of keys and values\n", "decode steps",
                  number("achieved", "decode_steps_gb_per_s"), number("ceilings", "read_gb_per_s"),
                  100 * number("achieved", "decode_steps_share_of_read"));
  const std::string rate = string(report["ceilings"]["arithmetic"]);
  text += fmt::format("  {:<16}{:>12.1f}{:>12.1f}{:>13.1f}%  GFLOP/s, of the measured {} rate\n\n",
                      "prefill steps", number("achieved", "prefill_steps_gflop_per_s"),
                      number("ceilings", "arithmetic_gflop_per_s"),
                      100 * number("achieved", "prefill_steps_share_of_arithmetic"),
                      rate == "fma" ? "multiply-add" : rate);
  if (const std::string note = string(report["achieved"]["note"]); !note.empty())
    text += note + "\n\n";
  const double peak = number("kv_cache", "peak_blocks");
  const double blocks = number("kv_cache", "num_blocks");
  line("blocks", "peak {} of {} ({:.1f}% of them), {} tokens each", peak, blocks,
       100 * ratio(peak, blocks), number("kv_cache", "block_size"));
  line("verified", "{} rows in {} steps, {} failed", number("verify", "rows"),
       number("verify", "steps"), number("verify", "failed_rows"));
  line("  worst error", "{:.3g}, {:.1f}% of the error that is allowed there",
       number("verify", "worst_error"), 100 * number("verify", "worst_share_of_allowance"));
  return text;
}

}  // namespace clattn::cli
