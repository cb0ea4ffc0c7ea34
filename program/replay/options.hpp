#pragma once

#include <CLI/CLI.hpp>
#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "program/common/layer_options.hpp"
#include "program/replay/trace.hpp"

namespace clattn::cli {

/// What `clattn replay` is asked for. The defaults are a demonstration that a 2-core CPU finishes
/// in about a minute.
struct ReplayOptions : LayerOptions {
  std::string trace_path;  ///< empty = the built-in profile
  std::int64_t requests = 48;
  double seconds = 0;  ///< of replay, 0 = until all requests are served
  double length_scale = 1;
  double rate = 5.5;  ///< requests per second of the built-in profile: the Azure trace's mean
  std::int32_t system_prompt = 0;  ///< tokens that the built-in profile's prompts share
  double speed = 1;                ///< arrivals come this many times faster
  std::int64_t seed = 0;

  std::optional<std::int32_t> layers;  ///< none = as few as show the model
  std::string layout = "auto";

  std::int32_t max_num_seqs = 32;
  std::int32_t max_num_batched_tokens = 2048;
  std::int64_t num_blocks = 0;  ///< 0 = by kv_memory
  std::string kv_memory;        ///< a size for all layers together; empty = chosen

  std::string device;
  std::string backend;
  double verify = 0.01;
  std::string json_path;
  std::string html_path;
  bool no_progress = false;

  void add_to(CLI::App& command);
  /// With the layout that was asked for.
  BenchModel layer() const;
  /// How many layers of each kind a step runs.
  struct Layers {
    std::int32_t attention = 0, recurrent = 0;
  };
  Layers num_layers(const DeltaNet& net) const;
  /// The requests to replay, scaled and with arrivals at the wanted speed.
  Trace load_trace() const;
};

/// "4096", "64M", "1.5GiB": bytes, with K, M, G and T as powers of 1024. Nothing if it is no size.
std::optional<std::uint64_t> parse_size(const std::string& text);

/// Cache blocks for a trace: what was asked for, else what all its requests together need, as far
/// as a modest share of the device's memory holds it for the layers of attention.
std::int32_t choose_num_blocks(const ReplayOptions& options, const BenchModel& model,
                               const Trace& trace, const DeviceCapabilities& capabilities);

}  // namespace clattn::cli
