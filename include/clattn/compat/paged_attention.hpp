#pragma once

// For caches whose keys are packed by x elements, as vLLM V0's paged_attention_v1 and v2 read
// them; new engines use AttentionImpl, which takes more options and is faster.

#include <clattn/attention.hpp>
#include <clattn/compat/packed_cache.hpp>
#include <clattn/context.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace CLATTN_API clattn {

/// Keys of a partition of paged_attention_v2.
inline constexpr std::int32_t kPagedAttentionPartitionSize = 512;

/// vLLM's chooser: whether a batch runs as paged_attention_v1 (one kernel) or v2 (a kernel over
/// partitions of kPagedAttentionPartitionSize keys and a merge): v1 if and only if max_seq_len <=
/// 8192 and there is one partition, or num_seqs * num_heads > 512.
bool use_paged_attention_v1(std::int32_t max_seq_len, std::int32_t num_seqs,
                            std::int32_t num_heads);

/// Why a configuration cannot run over x-packed caches, one sentence each; empty = it can. Takes
/// every head size up to 256 that is a multiple of 8 and of x, and every block size, not only those
/// that the original kernels list. ALiBi, scale and 8-bit caches with scales are supported;
/// windows, chunks, soft caps, sinks, masks, fp8 outputs and encoders are not. `capabilities` may
/// be null.
std::vector<std::string> validate_paged_attention(const AttentionConfig& config,
                                                  const DeviceCapabilities* capabilities);

/// Decode over an x-packed cache (vLLM: paged_attention_v1 and v2), compiled for one layer
/// configuration. Immutable and thread-safe.
class PagedAttention {
 public:
  virtual ~PagedAttention() = default;
  /// What it was made from.
  virtual const AttentionConfig& config() const noexcept = 0;
  /// output[r, h, :] = attention of request r's one query token over all seq_lens[r] keys of its
  /// pages; query and output [num_reqs, num_heads, head_size]; no key or value, which
  /// reshape_and_cache() stores. A request without keys gets 0 and
  /// lse -inf; nothing is added to the denominator. V beyond a sequence's end is never used. `lse`,
  /// if given, receives f32 [num_reqs, num_heads]: the natural log of the softmax denominator.
  /// `launches`, if given, is cleared and gets one record per kernel. Asynchronous, allocates
  /// nothing; `event` completes with the last kernel. Throws kInvalidArgument for caches that are
  /// smaller than they say.
  virtual void forward(cl_command_queue queue, const AttentionTensors& tensors,
                       const PackedKVCache& cache, const AttentionMetadata& metadata,
                       Event* event = nullptr,
                       std::vector<LaunchRecord>* launches = nullptr) const = 0;
  /// The kernels that forward() launches.
  virtual std::vector<KernelInfo> kernels() const = 0;
};

/// Compiles a configuration. Throws kUnsupported with the reasons that validate_paged_attention()
/// gives. The context must outlive the object.
std::shared_ptr<const PagedAttention> make_paged_attention(Context& context,
                                                           const AttentionConfig& config);

/// The builder of its metadata. Every request has at most one query token, which sees all its keys;
/// slots are not computed (reshape_and_cache() takes its own). BuilderOptions::num_splits forces 1
/// (v1) or more splits; 0 leaves it to use_paged_attention_v1(), and partitions are longer than
/// 512 keys only where the limits could ask for more than 256 MiB of partial results.
/// SplitPolicy::kDeterministic is always v2.
std::unique_ptr<AttentionMetadataBuilder> make_paged_attention_builder(
    std::shared_ptr<Context> context, const AttentionConfig& config,
    const BuilderOptions& options = {});

}  // namespace clattn
