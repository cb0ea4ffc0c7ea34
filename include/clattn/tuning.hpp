#pragma once

#include <clattn/attention.hpp>
#include <clattn/context.hpp>
#include <clattn/device.hpp>
#include <clattn/explain.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace CLATTN_API clattn {

/// One row of a tuning file that chooses a kernel: the layers that it is for, what they use, and
/// what was measured. Empty texts, zeros and empty optionals mean any layer in the first part, the
/// library's own choice in the second and unknown in the third; the file writes them as *, - and -.
/// docs/tuning.md describes the file.
struct TuningRow {
  /// A device's name, the beginning of one with '*' after it, or one of device_classes().
  std::string device = {};
  std::string driver = {};                ///< DeviceCapabilities::driver_version
  std::string role = {};                  ///< KernelInfo::role
  std::int32_t head_size = 0;             ///< elements; latent caches: kv_lora_rank
  std::int32_t group = 0;                 ///< query heads per KV head
  std::optional<DType> dtype = {};        ///< of query and output
  std::optional<DType> cache_dtype = {};  ///< of keys and values
  std::string pages = {};                 ///< page_class() of the block size

  std::string variant = {};          ///< KernelInfo::name that is tried before the others
  std::int32_t block_rows = 0;       ///< query rows of a work item; replaces the variant's own
  std::int32_t block_kv = 0;         ///< keys of a tile; likewise
  std::int32_t work_group_size = 0;  ///< work-items of a group

  double time_us = 0;        ///< of one launch
  double error = 0;          ///< largest absolute difference from exact attention
  std::string version = {};  ///< of the library that measured
  std::string date = {};     ///< YYYY-MM-DD

  bool operator==(const TuningRow&) const = default;
};

/// What a kernel costs on a device; the planner chooses by these costs (docs/performance.md). A
/// launch takes launch_us plus the time of its busiest work-group. A group spends on each task
/// task_us plus the time of its keys: their bytes at read_gbs, and the products of its rows at
/// math_gflops. Zero stands for free or unknown.
struct KernelCosts {
  double launch_us = 0;    ///< of one more launch in a queue, without its tasks
  double task_us = 0;      ///< fixed part of every task
  double split_us = 0;     ///< extra for a task that is a split, which stores partial results
  double read_gbs = 0;     ///< rate at which one group reads keys and values, alone on the device
  double math_gflops = 0;  ///< rate of one group's products; 0: time does not depend on the rows
  double groups = 0;       ///< concurrent groups at which each takes twice as long; 0: no slowdown
  bool operator==(const KernelCosts&) const = default;
};

/// One cost row of a tuning file: which kernels it is for, what they cost, and who measured it.
/// Empty texts, zeros and empty optionals in the first part match anything.
struct CostRow {
  std::string device = {};     ///< as TuningRow::device
  std::string driver = {};     ///< DeviceCapabilities::driver_version
  std::string kernel = {};     ///< KernelInfo::name, or the beginning of some with '*' after it
  std::int32_t head_size = 0;  ///< elements; latent caches: kv_lora_rank
  std::int32_t group = 0;      ///< query heads per KV head
  std::optional<DType> dtype = {};        ///< of query and output
  std::optional<DType> cache_dtype = {};  ///< of keys and values

  KernelCosts costs = {};  ///< what was measured

  std::string version = {};  ///< of the library that measured
  std::string date = {};     ///< YYYY-MM-DD

  bool operator==(const CostRow&) const = default;
};

/// The rows of a tuning file, and a line for each part of it that was left out.
struct TuningText {
  std::vector<TuningRow> rows = {};        ///< in the order of the file
  std::vector<CostRow> costs = {};         ///< in the order of the file
  std::vector<std::string> problems = {};  ///< "NAME:LINE: what is wrong; ignored"
};

/// The classes of a device, by which rows for more than one device are found, closest first:
/// "cpu:16" (float lanes), "gpu:sm_90", "gpu:ptx"; the last is "cpu" or "gpu".
std::vector<std::string> device_classes(const DeviceCapabilities& capabilities);
/// "none" for contiguous keys (0), "small" below 16 tokens a page, "medium", "large" from 64 on.
std::string_view page_class(std::int32_t block_size);

/// The text of a tuning file.
std::string format_tuning(std::span<const TuningRow> rows, std::span<const CostRow> costs = {});
/// One line of it, with its end.
std::string format_tuning_row(const TuningRow& row);
/// One line of it, with its end.
std::string format_cost_row(const CostRow& row);
/// Reads what format_tuning() writes. Never throws: what it cannot read is left out and listed in
/// `problems`. `name` stands for the file there.
TuningText parse_tuning(std::string_view text, const std::string& name);

/// The user's file as the environment names it; empty = none is used.
std::string tuning_path();
/// Adds rows to a tuning file, in place of those that are for the same layers of the same device,
/// of costs also for the same kernel; other lines stay. The file changes as a whole or not at all;
/// of two writers at once the last one wins. Creates the folder if it is missing. Throws kIo for a
/// path that cannot be written or holds another file.
void save_tuning(const std::string& path, std::span<const TuningRow> rows,
                 std::span<const CostRow> costs = {});

/// The launches that would be planned for a layer's step on a device that need not be present.
/// `device` says what it can do; `costs`, and the shipped rows where `costs` has none, say what
/// kernels cost there. Every kernel that the capabilities allow is assumed to compile. Only the
/// lengths of `batch` are read. Throws kUnsupported if no kernel fits, and for any attn_type but
/// decoder.
std::vector<PlannedLaunch> predicted_launches(const AttentionConfig& config,
                                              const DeviceCapabilities& device,
                                              std::span<const CostRow> costs,
                                              const CommonAttentionMetadata& batch);

/// Gives a context these rows in place of the user's file. Layers and builders that are made from
/// now on follow them; a layer takes metadata only of builders made under the same rows.
void set_tuning(Context& context, std::span<const TuningRow> rows,
                std::span<const CostRow> costs = {});
/// What a context left out of the user's file: lines that cannot be read, and rows for kernels or
/// tile sizes that this library does not have.
std::vector<std::string> tuning_problems(const Context& context);
/// Every tile that kernels of key.role have for the layers that `key` names (role, sizes, types)
/// and that the device may run, as copies of `key`: the rows of variants.inc in their order, then
/// their other tiles. Some may not build, or not fit; then a layer uses the next kernel.
std::vector<TuningRow> tuning_candidates(const Context& context, const TuningRow& key);

}  // namespace clattn
