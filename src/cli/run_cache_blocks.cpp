#include <array>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/packed_call.hpp"
#include "cli/run.hpp"

namespace clattn::cli {
namespace {

constexpr std::array<std::int64_t, 4> kAnyCache = {-1, -1, -1, -1};

std::vector<BlockPair> read_mapping(const CaseFile& file) {
  const std::vector<std::int64_t> ids =
      file.indices64("block_mapping", std::array<std::int64_t, 2>{-1, 2});
  std::vector<BlockPair> mapping;
  for (std::size_t i = 0; i + 1 < ids.size(); i += 2) mapping.push_back({ids[i], ids[i + 1]});
  return mapping;
}

/// The type of a cache: stated, or what its array stands for.
DType read_cache_dtype(CaseFile& file, const NpyArray& array, std::string_view name) {
  const std::optional<DType> stated = read_kv_cache_dtype(file);
  if (stated) return *stated;
  const DType seen = dtype_of(array, name);
  return is_quantized(seen) ? seen : read_dtype(file, std::string(to_string(seen)));
}

/// One tensor of blocks on the device: a cache of a single plane.
MLACache upload_blocks(const Context& context, const Queue& queue, const NpyArray& array,
                       DType dtype) {
  MLACache blocks;
  blocks.buffer = upload(context, queue, std::span<const std::byte>(array.data));
  blocks.dtype = dtype;
  blocks.num_blocks = array.shape[0];
  blocks.block_size = static_cast<std::int32_t>(array.shape[1]);
  blocks.kv_lora_rank = static_cast<std::int32_t>(array.shape[2] * array.shape[3]);
  return blocks;
}

/// A copy_blocks case, checked but for its ids.
struct CopyCase {
  AttentionConfig config;
  std::vector<std::int64_t> shape;
  LogicalCache cache;
  std::vector<BlockPair> mapping;
  std::string backend;
  std::optional<KVCacheLayout> layout;
  bool packed = false;
};

CopyCase read_copy(CaseFile& file, const RunOptions& options) {
  const NpyArray key = file.array("key_cache", "", kAnyCache);
  CopyCase given;
  given.shape = key.shape;
  const std::vector<std::int64_t>& shape = given.shape;
  given.config.kv_cache_dtype = read_cache_dtype(file, key, "key_cache");
  require_extent(file, "block_size", kBlockSize, shape[1]);
  require_extent(file, "num_kv_heads", kHeads, shape[2]);
  require_extent(file, "head_size", kHeadSize, shape[3]);
  given.config.block_size = static_cast<std::int32_t>(shape[1]);
  given.config.num_kv_heads = static_cast<std::int32_t>(shape[2]);
  given.config.head_size = static_cast<std::int32_t>(shape[3]);
  given.backend = read_backend(file, options);
  given.layout = read_layout(file, &given.packed);
  if (given.packed) require_no_backend(given.backend);
  file.refuse_unknown_keys();
  const std::string_view type = descr_of(given.config.cache_dtype());
  given.cache = {file.array("key_cache", type, shape).data,
                 file.array("value_cache", type, shape).data};
  given.mapping = read_mapping(file);
  return given;
}

LogicalCache copy(const Context& context, const CopyCase& given, Event& event) {
  const AttentionConfig& config = given.config;
  const Queue queue = context.create_queue(QueueProfiling::kOn);
  if (given.packed) {
    const PackedMemory memory(context, queue, config, given.shape[0], given.cache, {});
    copy_blocks(context, queue, std::span<const PackedKVCache>(&memory.cache, 1), given.mapping,
                &event);
    return memory.download(queue, config, given.cache.key.size());
  }
  const AttentionBackend& backend = backend_named(given.backend);
  const KVCacheLayout layout =
      choose_layout(backend, layout_on(context, given.layout), config, &context.capabilities());
  KVCache cache = make_cache(context, backend, layout, spec_of(config), given.shape[0]);
  cache.num_blocks = given.shape[0];
  upload_cache(queue, cache, given.cache);
  copy_blocks(context, queue, std::span<const KVCache>(&cache, 1), given.mapping, &event);
  return download_cache(queue, cache);
}

}  // namespace

void run_copy_blocks(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const CopyCase given = read_copy(file, options);
  const auto context = Context::create(options.device);
  Event event;
  LogicalCache copied = copy(*context, given, event);
  const std::string type(descr_of(given.config.cache_dtype()));
  outputs.add("key_cache_out", NpyArray{type, given.shape, std::move(copied.key)});
  outputs.add("value_cache_out", NpyArray{type, given.shape, std::move(copied.value)});
  outputs.add("info", device_info("copy_blocks", *context, event));
}

void run_swap_blocks(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  constexpr std::array<std::string_view, 3> kDirections = {"device_to_host", "host_to_device",
                                                           "device_to_device"};
  static_cast<void>(file.text("direction"));  // required
  const std::string direction = file.choice("direction", kDirections, "");
  NpyArray source = file.array("src_cache", "", kAnyCache);
  const DType dtype = read_cache_dtype(file, source, "src_cache");
  require_extent(file, "block_size", kBlockSize, source.shape[1]);
  require_extent(file, "num_kv_heads", kHeads, source.shape[2]);
  require_extent(file, "head_size", kHeadSize, source.shape[3]);
  file.refuse_unknown_keys();
  source = file.array("src_cache", descr_of(dtype), kAnyCache);
  NpyArray destination = file.array(
      "dst_cache", descr_of(dtype),
      std::array<std::int64_t, 4>{-1, source.shape[1], source.shape[2], source.shape[3]});
  const std::vector<BlockPair> mapping = read_mapping(file);

  const auto context = Context::create(options.device);
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  const auto side = [&](NpyArray& array, bool on_host) -> SwapSpace {
    if (on_host) return std::span<std::byte>(array.data);
    return upload_blocks(*context, queue, array, dtype);
  };
  const SwapSpace from = side(source, direction == "host_to_device");
  const SwapSpace to = side(destination, direction == "device_to_host");
  Event event;
  swap_blocks(*context, queue, from, to, mapping, &event);
  queue.finish();
  if (const auto* device = std::get_if<MLACache>(&to)) queue.read(device->buffer, destination.data);
  outputs.add("dst_cache_out", std::move(destination));
  outputs.add("info", device_info("swap_blocks", *context, event));
}

}  // namespace clattn::cli
