#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "program/ceilings/ceilings.hpp"
#include "program/replay/engine.hpp"
#include "program/replay/verify.hpp"

namespace clattn::cli {

/// One step as it was measured.
struct StepRecord {
  double start_s = 0;      ///< on the replay's clock, which leaps over idle time
  double schedule_us = 0;  ///< host: scheduler and batch arrays, the part an engine would play
  StepTimes times;         ///< total_us does not hold schedule_us
  std::int32_t num_reqs = 0;
  std::int32_t decode_tokens = 0;
  std::int32_t prefill_tokens = 0;
  std::int32_t blocks_used = 0;
  std::int32_t preemptions = 0;
  std::int64_t prefix_hit_tokens = 0;
  double kv_bytes = 0;  ///< keys and values that attention must read at least once, all layers
  double flops = 0;     ///< 4 * head_size per query head and visible key, all layers
};

struct ReplayReport {
  const Trace& trace;
  const Engine& engine;
  const Scheduler& scheduler;
  const DeviceCapabilities& device;
  std::string model;
  Ceilings ceilings;
  std::vector<StepRecord> steps;
  VerifyStats verify;
  double replay_s = 0;  ///< wall-clock, verification included
};

/// The report's numbers and, under "series", one array a column with one entry a step.
nlohmann::ordered_json to_json(const ReplayReport& report);
/// The same for people, as an aligned table.
std::string to_text(const nlohmann::ordered_json& report);
/// Both as a page, with plots over the steps of time, batch, blocks and share of the ceilings.
std::string to_html(const nlohmann::ordered_json& report, std::string_view text);

}  // namespace clattn::cli
