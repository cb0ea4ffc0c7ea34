#pragma once

#include <array>
#include <clattn/attention.hpp>
#include <clattn/device.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "opencl/device/units.hpp"

namespace clattn::detail {

/// How the work-groups of a launch come to their tasks.
enum class Tasks : std::uint8_t {
  kOneEach,
  kDealt,   ///< persistent groups, whose number is fixed: the plan dealt the tasks to them
  kInTurn,  ///< persistent groups, any number n of them: each takes every n-th task
  kQueue,   ///< persistent groups that take from a queue (kernels_cl/attention/cpu/queue.clh)
};

/// How many keys a work-group processes at a time.
enum class StepKeys : std::uint8_t {
  kTile,     ///< block_kv
  kPerWarp,  ///< block_kv for each warp of the unit's lanes
  kPerSlot,  ///< block_kv for as many lanes as share a key (CLA_TEAM of attention/decode_gpu.cl)
};

/// Head sizes that a kernel takes; empty = all.
using HeadSizes = std::array<std::int32_t, 3>;
/// A head size of keys with a smaller one of values.
struct HeadPair {
  std::int32_t key = 0, value = 0;
  bool operator==(const HeadPair&) const = default;
};

struct KernelTraits {
  Tasks tasks = Tasks::kOneEach;
  /// Work-groups that plans take a compute unit to run at once, or that with tasks other than
  /// kOneEach it is given, whatever their size; 0 = not known. Most were measured on NVIDIA.
  std::int32_t groups = 0;
  std::int32_t groups_8bit = 0;  ///< the same over 8-bit caches
  StepKeys keys = StepKeys::kTile;
  bool merges_splits = false;  ///< on units with a fence; else the merge kernel does
  /// With kDealt: a group stops at the first item without query tokens (padding), so that padding
  /// may be anywhere in a list.
  bool ends_at_padding = false;
  std::int32_t most_kv_heads = 1;    ///< of a page, that one work-group takes; see head_tiling()
  std::int32_t most_grown_rows = 0;  ///< its tiles grow with the heads of a KV head, up to this
  TypeSet cache = kSameType | kAnyType;
  HeadSizes heads{};
  /// Heads of this size on are padded to the next of `heads`, over caches of the queries' type;
  /// 0 = none are.
  std::int32_t pads_from = 0;
  HeadPair head_pair{};             ///< also these, without pages, whatever most_key_elements
  bool values_apart = false;        ///< without pages, values of any smaller size
  std::int32_t rope_dim = 0;        ///< the only one that it takes; 0 = any
  std::int32_t most_head = 256;     ///< elements of a head's keys; of latent ones without rope_dim
  bool values_in_pages = false;     ///< in pages, values of any smaller size
  std::int32_t row_bytes_step = 1;  ///< bytes of a head's row in the cache are a multiple of it
  std::int32_t page_step = 0;       ///< it wants pages, of a multiple of this many tokens
  std::int32_t most_row_elements = 0;  ///< block_rows * head_size; 0 = any
  std::int32_t most_key_elements = 0;  ///< block_kv * mean size of a key and a value; 0 = any
  std::int32_t few_rows = 0;           ///< tasks of up to this many cost otherwise; 0 = none do
  bool row_scales = false;             ///< over 8 bits: also a scale for each token and head
  bool tensor_maps = false;            ///< describes the cache to the device's copy engine
  /// NVIDIA's driver answers that its groups are too large, and they run: it divides registers by
  /// what a work-item begins with, while warps hand them to each other.
  bool misjudged_size = false;
  /// Its tiles come beside the role's own: a plan takes those that end earlier.
  bool wide = false;
};

/// A row KERNEL of kernels.inc.
struct Kernel {
  std::string_view file;  ///< of kernels_cl
  std::string_view entry;
  KernelTraits traits;
};

/// Whether kernels on the unit are compiled with CLA_PTX=2: kernels_cl/tile/lanes.clh.
bool runs_by_sub_groups(const Unit& unit, const DeviceCapabilities& device);
/// "-DCLA_PTX=…" and what else tells a kernel how the device runs the unit's lanes.
std::string unit_options(const Unit& unit, const DeviceCapabilities& device);
/// Why the device does not meet the unit's needs; nothing if it does.
std::optional<std::string> unmet_need(const Unit& unit, const DeviceCapabilities& device);
/// Why the device meets the needs of no unit of the family; nothing if it does.
std::optional<std::string> unmet_need(KernelFamily family, const DeviceCapabilities& device);

enum class KernelId : std::uint8_t {
#define KERNEL(name, ...) name,
#include "kernels/choose/kernels.inc"
};
const Kernel& kernel_of(KernelId id);

}  // namespace clattn::detail
