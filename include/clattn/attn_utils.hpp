#pragma once

#include <clattn/attention.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/layer.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace CLATTN_API clattn {

// vLLM's v1.worker.gpu.attn_utils: from a model's layers to their caches and a step's metadata.

/// What each layer that owns a cache keeps in it, by layer name: sliding-window, chunked-local or
/// full (latent rows with use_mla). Throws kInvalidArgument for a layer that is not a decoder.
std::map<std::string, KVCacheSpec> get_kv_cache_spec(const LayerRegistry& layers);

/// The layers of one KV cache group that have one backend, one spec and one number of query heads,
/// and take the same lists of a batch (use_spans and the like; if any, by one window), with one
/// builder and one metadata object per step.
struct AttentionGroup {
  std::int32_t kv_cache_group_id = 0;  ///< index in KVCacheConfig::groups: whose pages it reads
  std::shared_ptr<const AttentionBackend> backend = {};  ///< null of states, as builder
  AttentionConfig config =
      {};  ///< what the builder plans for; also what an AttentionState is made for
  std::unique_ptr<AttentionMetadataBuilder> builder = {};  ///< of one thread; null for states
  KVCacheSpec spec = {};                                   ///< of each layer's cache
  std::vector<std::string> layer_names = {};  ///< including those that share a cache of the group
};

/// The AttentionGroups of each group of `config`, in its order and in that of the layers; a layer
/// that attends to another one's cache is in the KV cache group of that one. For kMamba one for
/// each spec, with spec and names only, which need not be layers of the registry. Blocks of a group
/// may be several of its layers' blocks, if not padded. A builder plans for the widest window and
/// the smallest tile among its layers, whose other options (soft cap, ALiBi, sinks) may differ; all
/// builders share one workspace (`options.workspace`, or a new one), so that forward() calls of all
/// layers must run in order on one queue. A builder recommends a cascade only where every layer of
/// its group can. Throws kInvalidArgument for a layer that does not exist, whose dtype differs from
/// its group's, or whose cache differs from its spec in the group.
std::vector<AttentionGroup> init_attn_backend(const KVCacheConfig& config,
                                              const LayerRegistry& layers,
                                              const std::shared_ptr<Context>& context,
                                              const BuilderOptions& options = {});

/// What a model's groups can record.
struct AttentionCGSupportInfo {
  AttentionCGSupport min_cg_support = AttentionCGSupport::kAlways;  ///< all of them can
  std::string_view min_cg_attn_backend = {};  ///< name of the backend that allows least, valid as
                                              ///< long as that; empty: no group
};
/// Over the groups of init_attn_backend(); those of states have no attention to record.
AttentionCGSupportInfo get_attn_cg_support(std::span<const AttentionGroup> groups);

/// The tokens of a kernel's page where an allocator's blocks have `block_size` tokens: as many if
/// every backend takes pages of that size, else the largest size that a backend takes without its
/// multiples, that divides block_size and that all take. Throws kInvalidArgument if there is none,
/// or for a block_size below 1. Layers are made for the result (AttentionConfig::block_size), and
/// tables go through map_to_kernel_blocks().
std::int32_t select_common_block_size(
    std::int32_t block_size, std::span<const std::shared_ptr<const AttentionBackend>> backends);

/// Binds each cache to the layer of that name. Returns the bound caches ordered by layer index
/// (equal indices: as in the registry). Throws kInvalidArgument for a name that no layer has, and
/// what Attention::bind_kv_cache() throws; then no layer has been bound.
std::vector<const KVCache*> bind_kv_cache(const std::map<std::string, KVCache>& kv_caches,
                                          const LayerRegistry& layers);

/// The states of layers that keep some (KVCacheKind::kMamba), in the order of their specs.
using StatesByLayer = std::map<std::string, std::vector<StateView>>;

/// Allocates the caches in `layout` and binds them as bind_kv_cache() does, with the same result.
/// nullopt = default_kv_cache_layout() of each group's backend. Blocks until the caches are zeroed.
/// Views of kMamba groups go to `states`, for the application's kernels; layers may share tensors
/// with them if their pages are in one piece, as those of FLASHINFER, CLATTN_MLA and all padded
/// pages are. Throws kInvalidArgument for groups that do not hold every layer of `config`.
std::vector<const KVCache*> init_kv_cache(const KVCacheConfig& config, const LayerRegistry& layers,
                                          std::span<const AttentionGroup> groups,
                                          const Context& context, cl_command_queue queue,
                                          std::optional<KVCacheLayout> layout = std::nullopt,
                                          StatesByLayer* states = nullptr);

/// A step's metadata by layer name, valid until the next call: one object per group, the same for
/// all its layers. `common` says what all groups share; its block table and slots are not read and
/// max_query_len is the true maximum, whatever it says. `pages` has one entry per KV cache group
/// (AttentionGroup::kv_cache_group_id), in its layers' blocks (map_to_kernel_blocks() where the
/// group's are larger); for states it is not read. Throws what build() throws.
std::map<std::string, const AttentionMetadata*> build_attn_metadata(
    cl_command_queue queue, std::span<const AttentionGroup> groups,
    const CommonAttentionMetadata& common, std::span<const GroupPages> pages);

}  // namespace clattn
