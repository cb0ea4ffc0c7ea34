#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

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

void run_reshape_and_cache(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const std::array<std::int64_t, 3> any_key = {-1, -1, -1};
  const std::array<std::int64_t, 4> any_cache = {-1, -1, -1, -1};
  NpyArray key = file.array("key", "", any_key);
  NpyArray key_cache = file.array("key_cache", "", any_cache);
  const std::vector<std::int64_t> shape = key_cache.shape;
  const DType dtype = read_dtype(file, std::string(to_string(dtype_of(key, "key"))));
  const std::optional<DType> stated = read_kv_cache_dtype(file);
  require_extent(file, "block_size", kBlockSize, shape[1]);
  require_extent(file, "num_kv_heads", kHeads, shape[2]);
  require_extent(file, "head_size", kHeadSize, shape[3]);
  const DType cache_dtype = stated.value_or(dtype);
  const std::vector<float> scales =
      read_scales(file, cache_dtype, static_cast<std::int32_t>(shape[2]));
  const std::string backend_name = read_backend(file, options);
  const std::optional<KVCacheLayout> wanted = read_layout(file);
  file.refuse_unknown_keys();

  const std::array<std::int64_t, 3> key_shape = {key.shape[0], shape[2], shape[3]};
  key = file.array("key", descr_of(dtype), key_shape);
  const NpyArray value = file.array("value", descr_of(dtype), key_shape);
  key_cache = file.array("key_cache", descr_of(cache_dtype), shape);
  NpyArray value_cache = file.array("value_cache", descr_of(cache_dtype), shape);
  const std::vector<std::int64_t> slots = read_slots(file, key.shape[0], shape[0] * shape[1]);

  const auto context = Context::create(options.device);
  AttentionConfig config;
  config.num_kv_heads = config.num_heads = static_cast<std::int32_t>(shape[2]);
  config.head_size = static_cast<std::int32_t>(shape[3]);
  config.block_size = static_cast<std::int32_t>(shape[1]);
  config.dtype = dtype;
  config.kv_cache_dtype = cache_dtype;
  const AttentionBackend& backend =
      get_attn_backend(config, &context->capabilities(), backend_name);
  const KVCacheLayout layout = choose_layout(backend, wanted, config, &context->capabilities());
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  KVCache cache = make_cache(*context, backend, layout,
                             {.block_size = config.block_size,
                              .num_kv_heads = config.num_kv_heads,
                              .head_size = config.head_size,
                              .dtype = cache_dtype},
                             shape[0]);
  set_scales(*context, queue, scales, cache);
  LogicalCache logical{std::move(key_cache.data), std::move(value_cache.data)};
  Event event;
  if (shape[0] > 0) {
    upload_cache(queue, cache, logical);
    const Buffer keys = upload(*context, queue, std::span<const std::byte>(key.data));
    const Buffer values = upload(*context, queue, std::span<const std::byte>(value.data));
    const Buffer mapping = upload(*context, queue, std::span<const std::int64_t>(slots));
    reshape_and_cache_flash(*context, queue, {.buffer = keys.handle()}, {.buffer = values.handle()},
                            dtype, cache, mapping.handle(), 0,
                            static_cast<std::int64_t>(slots.size()), &event);
    logical = download_cache(queue, cache);
  }
  const std::string type(descr_of(cache_dtype));
  outputs.add("key_cache_out", NpyArray{type, shape, std::move(logical.key)});
  outputs.add("value_cache_out", NpyArray{type, shape, std::move(logical.value)});
  nlohmann::json info = device_info("reshape_and_cache", *context, event);
  info["backend"] = backend.name();
  info["layout"] = to_string(layout);
  outputs.add("info", info);
}

}  // namespace clattn::cli
