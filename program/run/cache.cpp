#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <clattn/mla.hpp>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "program/common/error.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {

DType dtype_of(const NpyArray& array, std::string_view file) {
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kFp8E4M3, DType::kInt8}) {
    if (array.descr == descr_of(dtype)) return dtype;
  }
  throw_invalid("{}.npy: expected element type <f4, <f2, <u2 (bf16), |u1 (fp8) or |i1, got {}",
                file, array.descr);
}

void require_extent(CaseFile& file, const char* key, Range range, std::int64_t extent) {
  const std::int64_t stated = file.integer(key, range, extent);
  throw_invalid_if(stated != extent, "case.json: {}: {}; the arrays say {}", key, stated, extent);
}

std::vector<std::int64_t> read_slots(const CaseFile& file, std::int64_t num_tokens,
                                     std::int64_t num_slots) {
  std::vector<std::int64_t> slots = file.indices64("slot_mapping", {-1});
  for (std::size_t i = 0; i < slots.size(); ++i) {
    throw_invalid_if(slots[i] < -1 || slots[i] >= num_slots,
                     "slot_mapping.npy: token {}: slot {}; expected [-1, {})", i, slots[i],
                     num_slots);
    throw_invalid_if(std::cmp_greater_equal(i, num_tokens) && slots[i] >= 0,
                     "slot_mapping.npy: token {} stores, but there are {} tokens", i, num_tokens);
  }
  slots.resize(std::min(slots.size(), to_size(num_tokens)));
  return slots;
}

std::vector<BlockPair> read_mapping(const CaseFile& file) {
  const std::vector<std::int64_t> ids = file.indices64("block_mapping", {-1, 2});
  std::vector<BlockPair> mapping;
  for (std::size_t i = 0; i + 1 < ids.size(); i += 2) mapping.push_back({ids[i], ids[i + 1]});
  return mapping;
}

MovedSlots read_moves(const CaseFile& file) {
  MovedSlots moves;
  moves.src = file.indices64("src_slots", {-1});
  moves.dst = file.indices64("dst_slots", {std::ssize(moves.src)});
  moves.starts = read_prefix_sums(file, "starts", -1);
  return moves;
}

DType read_cache_dtype(CaseFile& file, const NpyArray& array, std::string_view name) {
  const std::optional<DType> stated = read_kv_cache_dtype(file);
  if (stated) return *stated;
  const DType seen = dtype_of(array, name);
  return is_quantized(seen) ? seen : read_dtype(file, array, name);
}

namespace {

/// The extents of a cache's keys, or of its values.
Extents plane_shape(const AttentionConfig& config, std::int64_t num_blocks, std::int32_t width) {
  return {num_blocks, config.block_size, config.num_kv_heads, width};
}

}  // namespace

LogicalCache read_caches(const CaseFile& file, const AttentionConfig& config,
                         std::int64_t& num_blocks) {
  const auto read = [&](const char* name, std::int32_t width) {
    return file.array(name, descr_of(config.cache_dtype()), plane_shape(config, num_blocks, width));
  };
  NpyArray keys = read("key_cache", config.head_size);
  num_blocks = keys.shape[0];
  return {std::move(keys.data), read("value_cache", value_width(config)).data};
}

void add_caches(CaseOutputs& outputs, const AttentionConfig& config, std::int64_t num_blocks,
                LogicalCache cache) {
  const auto add = [&](const char* name, std::int32_t width, std::vector<std::byte>& elements) {
    outputs.add_elements(name, config.cache_dtype(), plane_shape(config, num_blocks, width),
                         std::move(elements));
  };
  add("key_cache_out", config.head_size, cache.key);
  add("value_cache_out", value_width(config), cache.value);
}

nlohmann::json device_info(std::string_view op, const Context& context, const Event& event) {
  return {{"op", op},
          {"device", context.capabilities().name},
          {"driver", context.capabilities().driver_version},
          {"times_us", {{op, microseconds(event)}}}};
}

namespace {

Extents any_cache() {
  return {-1, -1, -1, -1};
}

/// What cases over caches of K and V have in common.
struct CacheCase {
  AttentionConfig config;
  std::int64_t num_blocks = 0;
  LogicalCache cache;
  std::string backend;
  std::optional<KVCacheLayout> layout;
  bool packed = false;
};

/// The extents of a cache, which the case may state too.
void require_extents(CaseFile& file, const Extents& shape) {
  require_extent(file, "block_size", kBlockSize, shape[1]);
  require_extent(file, "num_kv_heads", kHeads, shape[2]);
  require_extent(file, "head_size", kHeadSize, shape[3]);
}

/// Everything of a CacheCase but its types, which are there, and its caches, whose keys have this
/// shape.
void read_place(CaseFile& file, const RunOptions& options, const Extents& shape, CacheCase& given) {
  require_extents(file, shape);
  given.num_blocks = shape[0];
  given.config.block_size = static_cast<std::int32_t>(shape[1]);
  given.config.num_kv_heads = given.config.num_heads = static_cast<std::int32_t>(shape[2]);
  given.config.head_size = static_cast<std::int32_t>(shape[3]);
  const std::int64_t value = file.array("value_cache", "", any_cache()).shape[3];
  throw_invalid_if(value > shape[3], "value_cache.npy: {} elements a head; expected at most {}",
                   value, shape[3]);
  if (value != shape[3]) given.config.head_size_v = static_cast<std::int32_t>(value);
  given.backend = read_backend(file, options);
  given.layout = read_layout(file, &given.packed);
  if (given.packed) require_no_backend(given.backend);
}

KVCacheLayout layout_of(const Context& context, const AttentionBackend& backend,
                        const CacheCase& given) {
  return choose_layout(backend, given.layout, &context.capabilities());
}

/// A reshape_and_cache case, checked.
struct WriteCase : CacheCase {
  std::vector<std::byte> key, value;
  std::vector<std::int64_t> slots;
  std::vector<float> scales;
};

WriteCase read_write(CaseFile& file, const RunOptions& options) {
  WriteCase given;
  AttentionConfig& config = given.config;
  const NpyArray key = file.array("key", "", {-1, -1, -1});
  const Extents shape = file.array("key_cache", "", any_cache()).shape;
  config.dtype = read_dtype(file, key, "key");
  config.kv_cache_dtype = read_kv_cache_dtype(file).value_or(config.dtype);
  read_place(file, options, shape, given);
  given.scales = read_scales(file, config.cache_dtype(), config.num_kv_heads);
  file.refuse_unknown_keys();

  const auto read = [&](const char* name, std::int64_t width) {
    return file.array(name, descr_of(config.dtype), {key.shape[0], shape[2], width}).data;
  };
  given.key = read("key", config.head_size);
  given.value = read("value", value_width(config));
  given.cache = read_caches(file, config, given.num_blocks);
  given.slots = read_slots(file, key.shape[0], shape[0] * shape[1]);
  return given;
}

/// Runs the write; gives back the cache and says in `info` where it ran.
LogicalCache write(const OnDevice& on, const WriteCase& given, nlohmann::json& info) {
  const AttentionConfig& config = given.config;
  const Buffer key = on.up(given.key), value = on.up(given.value), slots = on.up(given.slots);
  Event event;
  const auto store = [&](auto* operation, const auto& cache) {
    operation(*on.context, on.queue, {.buffer = key.handle()}, {.buffer = value.handle()},
              config.dtype, cache, slots.handle(), 0, std::ssize(given.slots), &event);
  };
  if (given.packed) {
    const PackedMemory memory(*on.context, on.queue, config, given.num_blocks, given.cache,
                              given.scales);
    store(reshape_and_cache, memory.cache);
    LogicalCache stored = memory.download(on.queue, config, given.cache.key.size());
    info = device_info("reshape_and_cache", *on.context, event);
    info["layout"] = "packed";
    return stored;
  }
  const AttentionBackend& backend =
      *get_attn_backend(config, &on.context->capabilities(), given.backend);
  const KVCacheLayout layout = layout_of(*on.context, backend, given);
  KVCache cache = make_cache(*on.context, backend, layout, spec_of(config), given.num_blocks);
  set_scales(*on.context, on.queue, given.scales, cache);
  LogicalCache stored = given.cache;
  if (given.num_blocks > 0) {
    upload_cache(on.queue, cache, given.cache);
    store(reshape_and_cache_flash, cache);
    stored = download_cache(on.queue, cache);
  }
  info = device_info("reshape_and_cache", *on.context, event);
  info["backend"] = backend.name();
  info["layout"] = to_string(layout);
  return stored;
}

/// A case of a cache alone, checked but for ids and slots.
CacheCase read_cache_case(CaseFile& file, const RunOptions& options) {
  const NpyArray key = file.array("key_cache", "", any_cache());
  CacheCase given;
  given.config.kv_cache_dtype = read_cache_dtype(file, key, "key_cache");
  read_place(file, options, key.shape, given);
  file.refuse_unknown_keys();
  given.cache = read_caches(file, given.config, given.num_blocks);
  return given;
}

/// The cache of such a case on the device, changed by `change` of a span of one.
template <typename Change>
LogicalCache changed(const OnDevice& on, const CacheCase& given, const Change& change) {
  const AttentionConfig& config = given.config;
  const AttentionBackend& backend = backend_named(given.backend);
  const KVCacheLayout layout = layout_of(*on.context, backend, given);
  KVCache cache = make_cache(*on.context, backend, layout, spec_of(config), given.num_blocks);
  cache.num_blocks = given.num_blocks;
  upload_cache(on.queue, cache, given.cache);
  change(std::span<const KVCache>(&cache, 1));
  return download_cache(on.queue, cache);
}

LogicalCache copy(const OnDevice& on, const CacheCase& given, const std::vector<BlockPair>& mapping,
                  Event& event) {
  if (given.packed) {
    const PackedMemory memory(*on.context, on.queue, given.config, given.num_blocks, given.cache,
                              {});
    copy_blocks(*on.context, on.queue, std::span<const PackedKVCache>(&memory.cache, 1), mapping,
                &event);
    return memory.download(on.queue, given.config, given.cache.key.size());
  }
  return changed(on, given, [&](std::span<const KVCache> caches) {
    copy_blocks(*on.context, on.queue, caches, mapping, &event);
  });
}

}  // namespace

void run_reshape_and_cache(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const WriteCase given = read_write(file, options);
  const OnDevice on{Context::create(options.device)};
  nlohmann::json info;
  add_caches(outputs, given.config, given.num_blocks, write(on, given, info));
  outputs.add("info", info);
}

void run_copy_blocks(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const CacheCase given = read_cache_case(file, options);
  const std::vector<BlockPair> mapping = read_mapping(file);
  const OnDevice on{Context::create(options.device)};
  Event event;
  add_caches(outputs, given.config, given.num_blocks, copy(on, given, mapping, event));
  outputs.add("info", device_info("copy_blocks", *on.context, event));
}

void run_move_tokens(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const CacheCase given = read_cache_case(file, options);
  if (given.packed) throw_unsupported("case.json: layout: move_tokens takes NHD and HND");
  const MovedSlots moves = read_moves(file);
  const OnDevice on{Context::create(options.device)};
  Event event;
  add_caches(outputs, given.config, given.num_blocks,
             changed(on, given, [&](std::span<const KVCache> caches) {
               move_tokens(*on.context, on.queue, caches, moves.view(), &event);
             }));
  outputs.add("info", device_info("move_tokens", *on.context, event));
}

void run_swap_blocks(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  constexpr std::array<std::string_view, 3> kDirections = {"device_to_host", "host_to_device",
                                                           "device_to_device"};
  const std::string direction = file.choice("direction", kDirections, {});
  NpyArray source = file.array("src_cache", "", any_cache());
  const DType dtype = read_cache_dtype(file, source, "src_cache");
  require_extents(file, source.shape);
  file.refuse_unknown_keys();
  source = file.array("src_cache", descr_of(dtype), any_cache());
  NpyArray destination = file.array("dst_cache", descr_of(dtype),
                                    {-1, source.shape[1], source.shape[2], source.shape[3]});
  const std::vector<BlockPair> mapping = read_mapping(file);

  const OnDevice on{Context::create(options.device)};
  const auto side = [&](NpyArray& array, bool on_host) -> SwapSpace {
    if (on_host) return std::span<std::byte>(array.data);
    const Extents& shape = array.shape;  // on the device a cache of a single plane
    return MLACache{.buffer = on.up(array.data),
                    .dtype = dtype,
                    .num_blocks = shape[0],
                    .block_size = static_cast<std::int32_t>(shape[1]),
                    .kv_lora_rank = static_cast<std::int32_t>(shape[2] * shape[3]),
                    .scale = {}};
  };
  const SwapSpace from = side(source, direction == "host_to_device");
  const SwapSpace to = side(destination, direction == "device_to_host");
  Event event;
  swap_blocks(*on.context, on.queue, from, to, mapping, &event);
  on.queue.finish();
  if (const auto* device = std::get_if<MLACache>(&to))
    on.queue.read(device->buffer, destination.data);
  outputs.add("dst_cache_out", std::move(destination));
  outputs.add("info", device_info("swap_blocks", *on.context, event));
}

}  // namespace clattn::cli
