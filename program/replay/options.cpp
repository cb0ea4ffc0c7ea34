#include "program/replay/options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <vector>

#include "program/common/device_memory.hpp"
#include "program/common/error.hpp"
#include "program/common/options.hpp"
#include "program/common/text.hpp"
#include "program/replay/scheduler.hpp"

namespace clattn::cli {
namespace {

std::string check_size(std::string& text) {
  if (parse_size(text)) return {};
  return fmt::format("'{}' is not legal: a size of at least 1 byte, with K, M, G or T", text);
}

/// Why a model has no cache to serve from.
std::string_view has_no_pages(const Model& model) {
  return model.layer.config.contiguous_kv()
             ? "has keys and values without pages, none to serve from"
             : "";
}

constexpr std::int32_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
constexpr std::uint64_t kGibibyte = std::uint64_t{1} << 30U;

}  // namespace

void ReplayOptions::add_to(CLI::App& command) {
  std::string group = "Traffic";
  const auto text = [&](const char* name, std::string& target, const std::string& help) {
    return command.add_option(name, target, help)->group(group);
  };
  const auto number = [&](const char* name, auto& target, auto low, auto high, const char* help) {
    return command.add_option(name, target, help)->check(number_in(low, high))->group(group);
  };
  text("--trace", trace_path, "Azure 2023 CSV or Mooncake JSON lines; default: a built-in profile");
  number("--requests", requests, std::int64_t{0}, std::int64_t{10'000'000},
         "Requests to replay, 0 = the whole trace (48)");
  number("--seconds", seconds, 0.0, 1e6,
         "Stop after this many seconds of replay, 0 = when all are served (0)");
  number("--length-scale", length_scale, 1e-4, 1e4, "Multiply prompt and output lengths (1)");
  number("--rate", rate, 1e-3, 1e6, "Requests per second of the built-in profile (5.5)");
  number("--system-prompt", system_prompt, 0, static_cast<int>(kMaxTraceTokens),
         "Tokens with which all prompts of the built-in profile begin (0)");
  number("--speed", speed, 1e-3, 1e6, "Arrivals come this many times faster (1)");
  number("--seed", seed, std::int64_t{0}, std::numeric_limits<std::int64_t>::max(),
         "Seed of lengths, arrivals, contents and verified rows (0)");

  LayerOptions::add_to(command, 1 << 20);
  group = "Model";
  number("--layers", layers, 1, 256,
         "Layers that a step runs, each with its own cache or states (2; hybrid models: as many as "
         "have one of attention)");
  text("--layout", layout, "Layout of the cache (auto: the model's, else the backend's choice)")
      ->check(one_of({"auto", "NHD", "HND"}));

  group = "Engine";
  CLI::Option* blocks =
      number("--num-blocks", num_blocks, std::int64_t{1}, std::int64_t{kMaxInt32 - 1},
             "Cache blocks; default: what the requests need, within memory");
  text("--kv-memory", kv_memory, "Cache memory of all layers together, e.g. 512M or 8G")
      ->check(CLI::Validator(check_size, "SIZE"))
      ->excludes(blocks);
  number("--max-num-seqs", max_num_seqs, 1, 65536, "Requests that run at once (32)");
  number("--max-batched-tokens", max_num_batched_tokens, 1, 1 << 20,
         "Tokens per step; longer prompts are chunked (2048)");
  add_device(command, device)->group(group);
  text("--backend", backend, "Force a backend by its name or vLLM's for it (auto)");

  group = "Report";
  number("--verify", verify, 0.0, 1.0, "Share of steps whose rows the oracle checks (0.01)");
  text("--json", json_path, "Write everything to this file, - = standard output");
  text("--html", html_path, "Write a page with plots to this file");
  command.add_flag("--no-progress", no_progress, "Print no progress while replaying")->group(group);
}

BenchModel ReplayOptions::layer() const {
  BenchModel result = LayerOptions::layer(has_no_pages);
  if (layout != "auto") result.layout = parse_kv_cache_layout(layout);
  return result;
}

ReplayOptions::Layers ReplayOptions::num_layers(const DeltaNet& net) const {
  if (!net.exists()) return {.attention = layers.value_or(2)};
  const std::int32_t interval = net.full_attention_interval;
  const std::int32_t count = layers.value_or(interval);
  throw_invalid_if(count < interval, "--layers: {}, legal: at least {}, every {}th is attention",
                   count, interval, interval);
  return {.attention = count / interval, .recurrent = count - count / interval};
}

Trace ReplayOptions::load_trace() const {
  throw_invalid_if(trace_path.empty() && requests == 0,
                   "--requests: 0 is not legal without --trace: the built-in profile has no end");
  Trace trace =
      trace_path.empty()
          ? make_builtin_trace(requests, rate, static_cast<std::uint64_t>(seed), system_prompt)
          : read_trace_file(trace_path, requests);
  if (length_scale != 1.0) scale_lengths(trace, length_scale);
  for (TraceRequest& request : trace.requests) request.arrival_s /= speed;
  return trace;
}

std::optional<std::uint64_t> parse_size(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || text[0] == '-' || !std::isfinite(number)) return {};
  std::string_view unit = end;
  double bytes = number;
  const std::size_t power =
      unit.empty() ? std::string_view::npos : std::string_view("kmgtKMGT").find(unit[0]);
  if (power != std::string_view::npos) {
    bytes = std::ldexp(number, 10 * (static_cast<int>(power % 4) + 1));
    unit.remove_prefix(1);
  }
  if (!unit.empty() && unit != "B" && unit != "iB") return {};
  if (bytes < 1 || bytes >= 0x1p63) return {};
  return static_cast<std::uint64_t>(bytes);
}

std::int32_t choose_num_blocks(const ReplayOptions& options, const BenchModel& model,
                               const Trace& trace, const DeviceCapabilities& capabilities) {
  if (options.num_blocks > 0) return static_cast<std::int32_t>(options.num_blocks);
  const std::int32_t layers = options.num_layers(model.delta_net).attention;
  const std::uint64_t per_layer = spec_of(model.config).page_size_bytes();
  const std::uint64_t per_block = per_layer * static_cast<std::uint64_t>(layers);
  std::uint64_t blocks = 0;
  if (const auto kv_memory_bytes = parse_size(options.kv_memory)) {
    blocks = *kv_memory_bytes / per_block;
    throw_invalid_if(blocks == 0, "--kv-memory: {} bytes hold no block, one of {} layers takes {}",
                     *kv_memory_bytes, layers, per_block);
  } else {
    // A CPU's global memory is everybody's: take little of it.
    const std::uint64_t most = capabilities.kind == DeviceKind::kCpu ? kGibibyte : 16 * kGibibyte;
    const std::uint64_t memory = std::min(capabilities.global_mem_bytes / 4, most);
    std::uint64_t needed = 0;
    for (const TraceRequest& request : trace.requests) {
      needed += static_cast<std::uint64_t>(blocks_needed(request, model.config.block_size));
    }
    blocks = std::min({needed, memory / per_block, capabilities.max_alloc_bytes / per_layer});
    throw_invalid_if(blocks == 0,
                     "--block-size: a block of {} layers takes {} bytes, this device has {} for "
                     "caches; ask for more with --kv-memory",
                     layers, per_block, memory);
  }
  return static_cast<std::int32_t>(std::min<std::uint64_t>(blocks, kMaxInt32 - 1));
}

}  // namespace clattn::cli
