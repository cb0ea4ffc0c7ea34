#include "program/bench/report.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/config_fields.hpp>
#include <cmath>
#include <cstdio>
#include <ctime>

#include "program/common/built_in.hpp"
#include "program/common/statistics.hpp"
#include "program/devices/devices.hpp"

namespace clattn::cli {
namespace {

using Json = nlohmann::ordered_json;

Json options_json(const BenchModel& model) {
  AttentionConfig config = model.config;
  config.kv_cache_dtype = config.cache_format();
  Json json;
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    if (row.uses == field::kSelection) return;
    if constexpr (std::is_same_v<Value, std::vector<float>>) {
      json[std::string(row.name)] = row.is_set(config);
    } else {
      json[std::string(row.name)] = Json::parse(json_text(config.*row.member));
    }
  });
  json["op"] = to_string(model.op);
  if (const DeltaNet& net = model.delta_net; net.exists()) {
    json["num_k_heads"] = net.num_k_heads;
    json["num_v_heads"] = net.num_v_heads;
    json["head_k_dim"] = net.head_k_dim;
    json["head_v_dim"] = net.head_v_dim;
    json["conv_width"] = net.conv_width;
    json["full_attention_interval"] = net.full_attention_interval;
    json["state_dtype"] = to_string(net.state_dtype);
    const bool in_f32 = net.kernel_family != KernelFamily::kAuto;
    const std::string_view chunk = in_f32 ? "chunk_f32" : "chunk";
    json["method"] = net.in_chunks ? chunk : "loop";
  }
  if (model.layout) json["layout"] = to_string(*model.layout);
  return json;
}

/// Equal neighbours together: [[count, query_len, seq_len], ...].
Json requests_json(const std::vector<RequestShape>& requests) {
  Json runs = Json::array();
  for (const RequestShape& request : requests) {
    const std::int32_t query_len = request.query_len, seq_len = request.seq_len;
    if (!runs.empty() && runs.back()[1] == query_len && runs.back()[2] == seq_len) {
      runs.back()[0] = runs.back()[0].get<int>() + 1;
    } else {
      runs.push_back({1, query_len, seq_len});
    }
  }
  return runs;
}

Json kernel_json(const BenchKernel& kernel) {
  Json json = {{"name", kernel.name}, {"role", kernel.role}};
  if (kernel.work_group_size > 0) json["work_group_size"] = kernel.work_group_size;
  if (kernel.work_groups == 0) return json;
  json["launches"] = kernel.launches;
  json["work_groups"] = kernel.work_groups;
  json["block_rows"] = kernel.block_rows;
  json["block_kv"] = kernel.block_kv;
  return json;
}

Json launch_json(const BenchLaunch& launch) {
  return {{"kernel", launch.plan.kernel},
          {"items", launch.plan.items},
          {"tasks", launch.plan.tasks},
          {"split_tiles", launch.plan.split_tiles},
          {"splits", launch.plan.splits},
          {"concurrent_groups", launch.plan.concurrent_groups},
          {"beside_last", launch.plan.beside_last},
          {"predicted_us", launch.plan.predicted_us},
          {"measured_us", launch.measured_us}};
}

Json row_json(const BenchRow& row) {
  const BenchShape& shape = row.shape;
  Json json = {{"name", row.name()},
               {"model", shape.model.name},
               {"suite", shape.suite},
               {"batch", shape.batch},
               {"requests", requests_json(shape.requests)},
               {"options", options_json(shape.model)}};
  if (!row.skipped.empty()) {
    json["skipped"] = row.skipped;
    return json;
  }
  json["median_us"] = row.median_us;
  json["p10_us"] = row.p10_us;
  json["p90_us"] = row.p90_us;
  json["launches"] = row.launches;
  json["rounds"] = row.rounds;
  json["unsteady"] = row.unsteady();
  if (!row.ceiling.empty()) {
    json["bytes"] = row.work.bytes;
    json["flops"] = row.work.flops;
    json["rate"] = row.rate;
    json["rate_unit"] = row.rate_unit();
    json["ceiling"] = row.ceiling;
    json["resident"] = row.resident;
    if (row.share) json["share_of_ceiling"] = *row.share;
    json["above_ceiling"] = row.above_ceiling();
  }
  json["max_error"] = row.deviation.max_error;
  json["error_share_of_allowance"] = row.deviation.worst_share;
  json["verified_values"] = row.deviation.compared;
  json["correct"] = row.deviation.passed();
  json["backend"] = row.backend;
  json["kernels"] = Json::array();
  for (const BenchKernel& kernel : row.kernels) json["kernels"].push_back(kernel_json(kernel));
  if (!row.plan.empty()) {
    json["predicted_us"] = row.predicted_us();
    json["plan"] = Json::array();
    for (const BenchLaunch& launch : row.plan) json["plan"].push_back(launch_json(launch));
  }
  return json;
}

std::string rate_text(const BenchRow& row) {
  if (row.ceiling.empty()) return "host time";
  const std::string share = row.share ? fmt::format("{:3.0f}% of {}", *row.share * 100, row.ceiling)
                            : row.resident && row.moves_bytes()
                                ? "in cache"
                                : fmt::format("  - of {}", row.ceiling);
  return fmt::format("{:9.1f} {:7} {}", row.rate, row.rate_unit(), share);
}

/// "512 tasks of 64 items on 132 groups; 3 tiles in 12 splits".
std::string describe(const PlannedLaunch& plan) {
  if (plan.concurrent_groups == 0) {
    return fmt::format("{} heads of {} tokens, {} partial results", plan.tasks, plan.items,
                       plan.splits);
  }
  std::string text = fmt::format("{} tasks of {} items on {} groups", plan.tasks, plan.items,
                                 plan.concurrent_groups);
  if (plan.split_tiles > 0) {
    text += fmt::format("; {} tiles in {} splits", plan.split_tiles, plan.splits);
  }
  return text;
}

void print_plan(const BenchRow& row) {
  for (const auto& [plan, measured_us] : row.plan) {
    fmt::print("    {:26} {:58} predicted {:9.1f} us, measured {:9.1f}\n", plan.kernel,
               describe(plan), plan.predicted_us, measured_us);
  }
  if (row.plan.empty()) return;
  fmt::print("    {:85} predicted {:9.1f} us, median {:11.1f} {:+.0f}%\n", "all in a queue",
             row.predicted_us(), row.median_us, row.prediction_error() * 100);
}

}  // namespace

double BenchRow::predicted_us() const {
  StepTime time;
  for (const BenchLaunch& launch : plan)
    time.add(launch.plan.predicted_us, launch.plan.beside_last);
  return time.us();
}

Json to_json(const BenchReport& report) {
  Json ceilings;
  for (const auto& [name, value, always] : kCeilingNames)
    if (always || report.ceilings.*value > 0) ceilings[name] = report.ceilings.*value;
  Json json = {{"format", "clattn-bench"},
               {"schema_version", kBenchSchemaVersion},
               {"library_version", CLATTN_VERSION},
               {"commit", commit()},
               {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
               {"quick", report.quick},
               {"device", capabilities_json(report.device)},
               {"ceilings", std::move(ceilings)},
               {"rows", Json::array()}};
  if (report.layout) json["layout"] = to_string(*report.layout);
  for (const BenchRow& row : report.rows) json["rows"].push_back(row_json(row));
  return json;
}

void print_header(const BenchReport& report) {
  const auto matrix = [](const char* name, double gflop_per_s) {
    return gflop_per_s > 0 ? fmt::format(", {} {:.1f} GFLOP/s", name, gflop_per_s) : "";
  };
  const Ceilings& ceilings = report.ceilings;
  fmt::print("{} ({}), driver {}, clattn {} {}\n", report.device.name, report.device.platform_name,
             report.device.driver_version, CLATTN_VERSION, commit());
  fmt::print(
      "ceilings: streaming read {:.1f} GB/s, pages in random order {:.1f} GB/s, copy {:.1f} GB/s "
      "read and written, f32 multiply-add {:.1f} GFLOP/s{}{}{}\n\n",
      ceilings.read_gb_per_s, ceilings.page_read_gb_per_s, ceilings.copy_gb_per_s,
      ceilings.fma_gflop_per_s, matrix("bf16", ceilings.bf16_gflop_per_s),
      matrix("mma.sync", ceilings.mma_gflop_per_s), matrix("wgmma", ceilings.wgmma_gflop_per_s));
  fmt::print("{:44} {:>12} {:>12}  {:34} {:>9} {:>5}\n", "model/suite/batch", "median us",
             "p10-p90", "rate, of ceiling", "error", "allow");
}

void print_row(const BenchRow& row) {
  if (!row.skipped.empty()) {
    fmt::print("{:44} skipped: {}\n", row.name(), row.skipped);
  } else {
    std::vector<std::string> kernels;
    kernels.reserve(row.kernels.size());
    for (const BenchKernel& kernel : row.kernels) {
      kernels.push_back(kernel.launches > 1 ? fmt::format("{} x{}", kernel.name, kernel.launches)
                                            : kernel.name);
    }
    fmt::print("{:44} {:12.1f} {:>+6.1f}..{:+.1f}%{} {:33}{} {:9.2e} {:4.0f}% {:5}  {} {}\n",
               row.name(), row.median_us, (row.p10_us / row.median_us - 1) * 100,
               (row.p90_us / row.median_us - 1) * 100, row.unsteady() ? '~' : ' ', rate_text(row),
               row.above_ceiling() ? '!' : ' ', row.deviation.max_error,
               row.deviation.worst_share * 100, row.deviation.passed() ? "ok" : "WRONG",
               row.backend, fmt::join(kernels, " + "));
    print_plan(row);
  }
  std::fflush(stdout);
}

void print_predictions(const BenchReport& report) {
  constexpr double kClose = 0.15;
  std::size_t planned = 0, close = 0;
  for (const BenchRow& row : report.rows) {
    if (row.plan.empty()) continue;
    ++planned;
    if (std::abs(row.prediction_error()) <= kClose) ++close;
  }
  if (planned == 0) return;
  fmt::print("{} of {} rows are predicted within {:.0f} % of their median\n", close, planned,
             kClose * 100);
}

void print_notes(const BenchReport& report) {
  print_predictions(report);
  const auto any = [&](bool (BenchRow::*doubtful)() const) {
    return std::ranges::any_of(report.rows, doubtful);
  };
  if (any(&BenchRow::unsteady)) {
    fmt::print("~ rounds differ by more than 20 %: other work on the machine? Do not compare it\n");
  }
  if (any(&BenchRow::above_ceiling)) {
    fmt::print(
        "! more than 105 % of the ceiling, which was measured too low, or the row too fast\n");
  }
}

}  // namespace clattn::cli
