#include <algorithm>
#include <clattn/kv_cache.hpp>
#include <set>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {

namespace {

using detail::throw_invalid_if;

/// Bytes of a page of each layer. Every layer of the groups must stand in exactly one tensor, and
/// no other layer in any.
std::map<std::string, std::size_t> page_bytes_of(const KVCacheConfig& config) {
  std::map<std::string, std::size_t> page_bytes;
  for (const KVCacheGroupSpec& group : config.groups) {
    const std::size_t bytes = group.spec.page_size_bytes();
    for (const std::string& layer : group.layer_names) {
      throw_invalid_if(!page_bytes.emplace(layer, bytes).second,
                       "KVCacheConfig: layer '{}' stands in two groups", layer);
    }
  }
  std::set<std::string> given;
  for (const KVCacheTensor& tensor : config.tensors) {
    for (const std::string& layer : tensor.shared_by) {
      throw_invalid_if(!page_bytes.contains(layer),
                       "KVCacheConfig: tensor for layer '{}', which is in no group", layer);
      throw_invalid_if(!given.insert(layer).second,
                       "KVCacheConfig: layer '{}' is given two tensors", layer);
    }
  }
  for (const auto& [layer, bytes] : page_bytes) {
    throw_invalid_if(!given.contains(layer),
                     "KVCacheConfig: some layers are not correctly initialized: '{}' has no tensor",
                     layer);
  }
  return page_bytes;
}

/// Where the number of blocks is given, each tensor must hold that many pages of its layers' spec.
void require_whole_pages(const KVCacheConfig& config,
                         const std::map<std::string, std::size_t>& page_bytes) {
  if (config.num_blocks == 0) return;
  throw_invalid_if(config.num_blocks < 0,
                   "KVCacheConfig: num_blocks is {}, legal: >= 0 (0 = as many as fit)",
                   config.num_blocks);
  for (const KVCacheTensor& tensor : config.tensors) {
    for (const std::string& layer : tensor.shared_by) {
      const std::size_t wanted = detail::checked_mul(static_cast<std::size_t>(config.num_blocks),
                                                     page_bytes.at(layer), "KVCacheConfig");
      throw_invalid_if(
          tensor.size_bytes != wanted,
          "KVCacheConfig: the tensor of layer '{}' has {} bytes, legal: {} ({} blocks)", layer,
          tensor.size_bytes, wanted, config.num_blocks);
    }
  }
}

void require_fit(const KVCacheConfig& config, const std::map<std::string, std::size_t>& page_bytes,
                 const DeviceCapabilities& device) {
  std::size_t total = 0, block_bytes = 0;
  for (const KVCacheTensor& tensor : config.tensors) {
    const bool named = !tensor.shared_by.empty();
    const std::string layer = named ? tensor.shared_by.front() : "?";
    throw_invalid_if(tensor.size_bytes == 0, "KVCacheConfig: the tensor of layer '{}' has 0 bytes",
                     layer);
    const std::size_t page = named ? page_bytes.at(layer) : 1;
    block_bytes += page;
    detail::throw_unsupported_if(
        tensor.size_bytes > device.max_alloc_bytes,
        "KV cache: layer '{}' needs {} bytes, but '{}' allows {} bytes in one allocation: at most "
        "{} blocks fit",
        layer, tensor.size_bytes, device.name, device.max_alloc_bytes,
        device.max_alloc_bytes / page);
    total = detail::checked_add(total, tensor.size_bytes, "KVCacheConfig: bytes of all tensors");
  }
  detail::throw_unsupported_if(
      total > device.global_mem_bytes,
      "KV cache: {} tensors need {} bytes, but '{}' has {} bytes of memory: at most {} blocks fit",
      config.tensors.size(), total, device.name, device.global_mem_bytes,
      device.global_mem_bytes / std::max<std::size_t>(block_bytes, 1));
}

}  // namespace

std::map<std::string, Buffer> allocate_kv_cache(const Context& context, cl_command_queue queue,
                                                const KVCacheConfig& config) {
  const std::map<std::string, std::size_t> page_bytes = page_bytes_of(config);
  require_whole_pages(config, page_bytes);
  require_fit(config, page_bytes, context.capabilities());
  const Queue commands = Queue::adopt(queue);
  std::map<std::string, Buffer> caches;
  for (const KVCacheTensor& tensor : config.tensors) {
    constexpr std::size_t kFillUnit = 4;
    const std::size_t size = detail::round_up(tensor.size_bytes, kFillUnit);
    const Buffer buffer = context.allocate(size);
    commands.fill(buffer, 0, 0, size);
    for (const std::string& layer : tensor.shared_by) caches.emplace(layer, buffer);
  }
  commands.finish();
  return caches;
}

}  // namespace clattn
