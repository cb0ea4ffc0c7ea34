#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/packed_call.hpp"
#include "cli/run.hpp"

namespace clattn::cli {

DType dtype_of(const NpyArray& array, std::string_view file) {
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kFp8E4M3, DType::kInt8}) {
    if (array.descr == descr_of(dtype)) return dtype;
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}.npy: expected element type <f4, <f2, <u2 (bf16), |u1 (fp8) or |i1, got {}",
                  file, array.descr));
}

void require_extent(CaseFile& file, const char* key, Range range, std::int64_t extent) {
  const std::int64_t stated = file.integer(key, range, extent);
  if (stated != extent) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("case.json: {}: {}; the arrays say {}", key, stated, extent));
  }
}

std::vector<std::int64_t> read_slots(const CaseFile& file, std::int64_t num_tokens,
                                     std::int64_t num_slots) {
  std::vector<std::int64_t> slots = file.indices64("slot_mapping", std::array<std::int64_t, 1>{-1});
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < -1 || slots[i] >= num_slots) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("slot_mapping.npy: token {}: slot {}; expected [-1, {})", i, slots[i],
                              num_slots));
    }
    if (std::cmp_greater_equal(i, num_tokens) && slots[i] >= 0) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("slot_mapping.npy: token {} stores, but there are {} tokens", i, num_tokens));
    }
  }
  slots.resize(std::min(slots.size(), static_cast<std::size_t>(num_tokens)));
  return slots;
}

nlohmann::json device_info(std::string_view op, const Context& context, const Event& event) {
  return {{"op", op},
          {"device", context.capabilities().name},
          {"driver", context.capabilities().driver_version},
          {"times_us", {{op, event ? static_cast<double>(event.duration_ns()) * 1e-3 : 0.0}}}};
}

namespace {

/// A reshape_and_cache case, checked.
struct WriteCase {
  AttentionConfig config;
  std::vector<std::int64_t> shape;  // of the caches
  std::vector<std::byte> key, value;
  LogicalCache cache;
  std::vector<std::int64_t> slots;
  std::vector<float> scales;
  std::string backend;
  std::optional<KVCacheLayout> layout;
  bool packed = false;
};

WriteCase read_write(CaseFile& file, const RunOptions& options) {
  const std::array<std::int64_t, 3> any_key = {-1, -1, -1};
  const std::array<std::int64_t, 4> any_cache = {-1, -1, -1, -1};
  WriteCase given;
  AttentionConfig& config = given.config;
  const NpyArray key = file.array("key", "", any_key);
  given.shape = file.array("key_cache", "", any_cache).shape;
  const std::vector<std::int64_t>& shape = given.shape;
  config.dtype = read_dtype(file, std::string(to_string(dtype_of(key, "key"))));
  config.kv_cache_dtype = read_kv_cache_dtype(file).value_or(config.dtype);
  require_extent(file, "block_size", kBlockSize, shape[1]);
  require_extent(file, "num_kv_heads", kHeads, shape[2]);
  require_extent(file, "head_size", kHeadSize, shape[3]);
  config.block_size = static_cast<std::int32_t>(shape[1]);
  config.num_kv_heads = config.num_heads = static_cast<std::int32_t>(shape[2]);
  config.head_size = static_cast<std::int32_t>(shape[3]);
  given.scales = read_scales(file, config.cache_dtype(), config.num_kv_heads);
  given.backend = read_backend(file, options);
  given.layout = read_layout(file, &given.packed);
  if (given.packed) require_no_backend(given.backend);
  file.refuse_unknown_keys();

  const std::array<std::int64_t, 3> key_shape = {key.shape[0], shape[2], shape[3]};
  given.key = file.array("key", descr_of(config.dtype), key_shape).data;
  given.value = file.array("value", descr_of(config.dtype), key_shape).data;
  given.cache = {file.array("key_cache", descr_of(config.cache_dtype()), shape).data,
                 file.array("value_cache", descr_of(config.cache_dtype()), shape).data};
  given.slots = read_slots(file, key.shape[0], shape[0] * shape[1]);
  return given;
}

/// The rows of a write on the device.
struct Rows {
  Buffer key, value, slots;
  Rows(const Context& context, const Queue& queue, const WriteCase& given)
      : key(upload(context, queue, std::span<const std::byte>(given.key))),
        value(upload(context, queue, std::span<const std::byte>(given.value))),
        slots(upload(context, queue, std::span<const std::int64_t>(given.slots))) {}
};

/// Runs the write; gives back the cache and says in `info` where it ran.
LogicalCache write(const Context& context, const WriteCase& given, nlohmann::json& info) {
  const AttentionConfig& config = given.config;
  const AttentionBackend& backend =
      get_attn_backend(config, &context.capabilities(), given.backend);
  const KVCacheLayout layout =
      choose_layout(backend, layout_on(context, given.layout), config, &context.capabilities());
  const Queue queue = context.create_queue(QueueProfiling::kOn);
  KVCache cache = make_cache(context, backend, layout, spec_of(config), given.shape[0]);
  set_scales(context, queue, given.scales, cache);
  LogicalCache stored = given.cache;
  Event event;
  if (given.shape[0] > 0) {
    upload_cache(queue, cache, given.cache);
    const Rows rows(context, queue, given);
    reshape_and_cache_flash(context, queue, {.buffer = rows.key.handle()},
                            {.buffer = rows.value.handle()}, config.dtype, cache,
                            rows.slots.handle(), 0, std::ssize(given.slots), &event);
    stored = download_cache(queue, cache);
  }
  info = device_info("reshape_and_cache", context, event);
  info["backend"] = backend.name();
  info["layout"] = to_string(layout);
  return stored;
}

/// The same into an x-packed cache.
LogicalCache write_packed(const Context& context, const WriteCase& given, nlohmann::json& info) {
  const Queue queue = context.create_queue(QueueProfiling::kOn);
  const PackedMemory memory(context, queue, given.config, given.shape[0], given.cache,
                            given.scales);
  const Rows rows(context, queue, given);
  Event event;
  reshape_and_cache(context, queue, {.buffer = rows.key.handle()}, {.buffer = rows.value.handle()},
                    given.config.dtype, memory.cache, rows.slots.handle(), 0,
                    std::ssize(given.slots), &event);
  LogicalCache stored = memory.download(queue, given.config, given.cache.key.size());
  info = device_info("reshape_and_cache", context, event);
  info["layout"] = "packed";
  return stored;
}

}  // namespace

void run_reshape_and_cache(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const WriteCase given = read_write(file, options);
  const auto context = Context::create(options.device);
  nlohmann::json info;
  LogicalCache stored =
      given.packed ? write_packed(*context, given, info) : write(*context, given, info);
  const std::string type(descr_of(given.config.cache_dtype()));
  outputs.add("key_cache_out", NpyArray{type, given.shape, std::move(stored.key)});
  outputs.add("value_cache_out", NpyArray{type, given.shape, std::move(stored.value)});
  outputs.add("info", info);
}

}  // namespace clattn::cli
