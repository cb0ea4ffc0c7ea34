#include "backends/gathered_attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "backends/clblast_gemm.hpp"
#include "backends/gathered_step.hpp"
#include "base/error.hpp"
#include "capture/capture.hpp"
#include "kernels/attention_kernels.hpp"
#include "kernels/cache_checks.hpp"
#include "kernels/kv_view.hpp"
#include "kernels/step_launch.hpp"
#include "kv_cache/op_kernel.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

class GatheredImpl final : public AttentionImpl {
 public:
  GatheredImpl(std::shared_ptr<Context> context, const AttentionConfig& config)
      : context_(std::move(context)),
        config_(config),
        shape_(kernel_shape(config)),
        window_(window_of(config)),
        head_params_(make_head_params(context_->runtime(), config)),
        num_groups_(static_cast<std::size_t>(std::max(context_->capabilities().compute_units, 1)) *
                    16),
        gather_(kernel("clattn_gather", config.cache_dtype(), {})),
        pack_(kernel("clattn_pack", DType::kF32, {})),
        unpack_(kernel("clattn_unpack", DType::kF32, {})),
        weigh_(kernel("clattn_weigh", DType::kF32, option_macros(shape_.options, Role::kPrefill))) {
  }

  const AttentionConfig& config() const noexcept override { return config_; }

  void write_kv_cache(cl_command_queue queue, TensorRef key, TensorRef value, const KVCache& cache,
                      const AttentionMetadata& metadata, Event* event) const override {
    if (config_.contiguous_kv()) {
      throw_unsupported("attn_type {}: this layer has no cache to write",
                        to_string(config_.attn_type));
    }
    refuse_recording(queue, kGatheredName);
    check_own_cache(cache);
    if (!step_of(metadata, &cache).plan().has_slots()) {
      throw_invalid(
          "attn_metadata: without slots, since its queries are not in the cache; legal: a batch "
          "with a slot_mapping, or reshape_and_cache_flash()");
    }
    reshape_and_cache_flash(*context_, queue, key, value, config_.dtype, cache,
                            metadata.slot_mapping_buffer(), metadata.slot_mapping_offset_bytes(),
                            metadata.num_actual_tokens(), event);
  }

  void forward(cl_command_queue queue, TensorRef query, const KVCache& cache,
               const AttentionMetadata& metadata, TensorRef output, cl_mem lse, Event* event,
               std::vector<LaunchRecord>* launches, const ForwardOptions& options) const override {
    refuse_recording(queue, kGatheredName);
    check_own_cache(cache);
    const GatheredMetadata& step = step_of(metadata, &cache);
    attend({queue, step, KVView(cache), query, output, lse, options, event, launches}, &cache);
  }

  void forward_encoder(cl_command_queue queue, TensorRef query, TensorRef key, TensorRef value,
                       const AttentionMetadata& metadata, TensorRef output, cl_mem lse,
                       Event* event, std::vector<LaunchRecord>* launches,
                       const ForwardOptions& options) const override {
    if (!config_.contiguous_kv()) {
      throw_unsupported("attn_type {}: keys and values come from the cache, use forward()",
                        to_string(config_.attn_type));
    }
    refuse_recording(queue, kGatheredName);
    const GatheredMetadata& step = step_of(metadata, nullptr);
    const KVView kv(key, value, config_.num_kv_heads, config_.head_size);
    kv.check_length(step.keys_at().back(), std::int64_t{config_.num_kv_heads} * config_.head_size,
                    config_.dtype);
    attend({queue, step, kv, query, output, lse, options, event, launches}, nullptr, key, value);
  }

  std::vector<KernelInfo> kernels() const override {
    std::vector<KernelInfo> infos;
    for (const OpKernel* each : {&gather_, &pack_, &weigh_, &unpack_}) {
      infos.push_back(
          {each->pool->entry(), "prefill", static_cast<std::int32_t>(each->group_size)});
    }
    return infos;
  }

 private:
  void check_own_cache(const KVCache& cache) const {
    check_layer_cache(cache, shape_);
    if (cache.tiles) {
      throw_unsupported("kv_cache: tiles, supported by {}: none (rows are gathered)",
                        kGatheredName);
    }
    if (!cache.keys_by_dim()) return;
    throw_unsupported("kv_cache: key_dim_stride is {}, supported by {}: 1 (rows are gathered)",
                      cache.key_dim_stride, kGatheredName);
  }

  struct Call {
    cl_command_queue queue = nullptr;
    const GatheredMetadata& step;
    KVView kv;
    TensorRef query, output;
    cl_mem lse = nullptr;
    const ForwardOptions& options;
    Event* event = nullptr;
    std::vector<LaunchRecord>* launches = nullptr;
  };
  /// Query tokens of one request whose scores fit the workspace.
  struct Tokens {
    std::int32_t row = 0;  ///< in the batch, of the first
    std::int32_t count = 0;
    std::int32_t position = 0;  ///< in the request, of the first
    std::int32_t num_keys = 0;
  };

  OpKernel kernel(std::string_view entry, DType cache_dtype, const std::string& options) const {
    return op_kernel(*context_, entry, "gathered_attention.cl",
                     fmt::format("{} -DCLA_HEAD_DIM={} -DCLA_GROUP={} -DCLA_PAGE_SIZE={}{}",
                                 dtype_options(config_.dtype, cache_dtype), config_.head_size,
                                 config_.num_queries_per_kv(), shape_.block_size, options));
  }

  /// `cache`: null where there is none.
  const GatheredMetadata& step_of(const AttentionMetadata& metadata, const KVCache* cache) const {
    const auto* step = dynamic_cast<const GatheredMetadata*>(&metadata);
    if (step == nullptr || !step->is_for(config_)) {
      throw_invalid(
          "attn_metadata: built for another configuration; legal: metadata of a builder of {} with "
          "this layer's heads, head_size and block_size",
          kGatheredName);
    }
    if (cache != nullptr && step->plan().num_blocks() > cache->num_blocks) {
      throw_invalid(
          "attn_metadata: its block ids reach up to {}, legal: below the cache's {} blocks",
          step->plan().num_blocks() - 1, cache->num_blocks);
    }
    return *step;
  }

  void check_options(const ForwardOptions& options, const GatheredMetadata& step) const {
    if (options.output_fp8 != nullptr || options.output_scale != nullptr) {
      throw_invalid(
          "output_fp8, output_scale: given, legal: none under this layer's configuration");
    }
    if ((options.custom_mask != nullptr) != config_.custom_mask) {
      throw_invalid("custom_mask: {}, legal: {} this layer's configuration",
                    config_.custom_mask ? "missing" : "given",
                    config_.custom_mask ? "required by" : "none under");
    }
    if (config_.custom_mask && options.custom_mask_stride < step.max_seq_len()) {
      throw_invalid("custom_mask_stride is {}, legal: >= {} (the longest seq_len)",
                    options.custom_mask_stride, step.max_seq_len());
    }
  }

  /// The groups of a kernel that strides over its work.
  void enqueue(const Call& call, const OpKernel& kernel, KernelLease& lease,
               std::optional<std::size_t> groups = std::nullopt) const {
    const std::size_t count = groups.value_or(num_groups_);
    LaunchRecord record;
    const bool wanted = call.event != nullptr || call.launches != nullptr;
    lease.enqueue(call.queue, count, kernel.group_size, wanted ? &record.event : nullptr);
    if (call.event != nullptr) *call.event = record.event;
    if (call.launches == nullptr) return;
    record.kernel = kernel.pool->entry();
    record.tasks = static_cast<std::int64_t>(count);
    record.work_groups = static_cast<std::int64_t>(count);
    record.work_group_size = static_cast<std::int32_t>(kernel.group_size);
    call.launches->push_back(std::move(record));
  }

  /// `cache`, or the key and value tensors without one: what `call.kv` shows.
  void attend(Call call, const KVCache* cache, TensorRef key = {}, TensorRef value = {}) const {
    check_options(call.options, call.step);
    if (capturing()) capture(call, cache, key, value);
    const std::int64_t row = std::int64_t{config_.num_heads} * config_.head_size;
    const std::int64_t tokens = call.step.num_actual_tokens();
    check_tensor(call.query, tokens, row, config_.dtype, "query");
    check_tensor(call.output, tokens, row, config_.dtype, "output");
    const std::int64_t heads = config_.num_heads;
    if (call.lse != nullptr) check_rows({call.lse, DType::kF32}, {0, tokens, heads, heads}, "lse");
    if (config_.custom_mask) {
      check_rows({call.options.custom_mask, DType::kInt8},
                 {0, tokens, call.options.custom_mask_stride, call.step.max_seq_len()},
                 "custom_mask");
    }
    if (call.launches != nullptr) call.launches->clear();
    if (call.event != nullptr) call.event->reset();
    for (std::int32_t r = 0; r < call.step.plan().batch().num_reqs; ++r) attend(call, r);
  }

  void capture(const Call& call, const KVCache* cache, TensorRef key, TensorRef value) const {
    const ClattnBatch& batch = call.step.plan().batch();
    const auto reqs = static_cast<std::size_t>(batch.num_reqs);
    const BatchRecord record = {
        .backend = call.step.backend(),
        .query_start_loc = {batch.query_start_loc, reqs + 1},
        .seq_lens = {batch.seq_lens, reqs},
        .pages_at = call.step.keys_at(),
        .pages = {batch.block_table, reqs * static_cast<std::size_t>(batch.block_table_stride)}};
    capture_attention({.queue = call.queue,
                       .config = config_,
                       .batch = record,
                       .causal = batch.causal != 0,
                       .query = call.query,
                       .cache = cache,
                       .key = key,
                       .value = value,
                       .options = call.options,
                       .return_lse = call.lse != nullptr});
  }

  void attend(const Call& call, std::int32_t r) const {
    const ClattnBatch& batch = call.step.plan().batch();
    const std::int32_t begin = batch.query_start_loc[r], end = batch.query_start_loc[r + 1];
    const std::int32_t num_keys = batch.seq_lens[r];
    if (begin == end) return;
    const RequestParts parts(config_, end - begin, num_keys);
    if (num_keys > 0) gather(call, parts, r);
    for (std::int32_t row = begin; row < end;) {
      const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(parts.tokens, end - row));
      attend(call, parts, {row, count, num_keys - end + row, num_keys});
      row += count;
    }
  }

  void gather(const Call& call, const RequestParts& parts, std::int32_t r) const {
    const ClattnBatch& batch = call.step.plan().batch();
    const cl_long keys_at = call.step.keys_at()[static_cast<std::size_t>(r)];
    const auto table_at = static_cast<cl_long>(batch.block_table_bytes / sizeof(cl_int));
    KernelLease lease = gather_.pool->acquire();
    lease.arg(call.step.work())
        .arg<cl_long>(parts.k)
        .arg<cl_long>(parts.v)
        .arg(batch.device)
        .arg<cl_long>(config_.contiguous_kv() ? keys_at : table_at + keys_at)
        .arg<cl_int>(batch.seq_lens[r])
        .arg<cl_int>(config_.num_kv_heads);
    call.kv.bind(lease);
    if (is_quantized(config_.cache_dtype())) lease.arg(call.kv.scales).arg(call.kv.scale_stride);
    enqueue(call, gather_, lease);
  }

  void attend(const Call& call, const RequestParts& parts, const Tokens& tokens) const {
    const cl_mem work = call.step.work();
    const auto rows = static_cast<std::size_t>(tokens.count) *
                      static_cast<std::size_t>(config_.num_queries_per_kv());
    const auto keys = static_cast<std::size_t>(tokens.num_keys);
    const auto dims = static_cast<std::size_t>(config_.head_size);
    const auto heads = static_cast<std::size_t>(config_.num_kv_heads);
    if (keys > 0) {
      KernelLease lease = pack_.pool->acquire();
      lease.arg(work).arg<cl_long>(parts.q);
      move(call, pack_, lease, call.query, tokens);
      const float scale = softmax_scale(config_.scale, config_.head_size) * kLog2E;
      multiply(call.queue, work,
               {true, rows, keys, dims, heads, scale, parts.q, parts.k, parts.scores});
    }
    weigh(call, parts, tokens);
    if (keys > 0) {
      multiply(call.queue, work,
               {false, rows, dims, keys, heads, 1.0F, parts.scores, parts.v, parts.sums});
    }
    KernelLease lease = unpack_.pool->acquire();
    lease.arg(work)
        .arg<cl_long>(parts.sums)
        .arg<cl_long>(parts.scores)
        .arg<cl_long>(parts.v)
        .arg<cl_int>(tokens.num_keys);
    move(call, unpack_, lease, call.output, tokens);
  }

  /// Query tokens into the workspace, or output tokens from there.
  void move(const Call& call, const OpKernel& kernel, KernelLease& lease, const TensorRef& tensor,
            const Tokens& tokens) const {
    lease.arg(tensor.buffer)
        .arg<cl_long>(tensor.offset + tokens.row * tensor.token_stride)
        .arg<cl_long>(tensor.token_stride)
        .arg<cl_int>(tokens.count)
        .arg<cl_int>(config_.num_kv_heads);
    enqueue(call, kernel, lease);
  }

  void weigh(const Call& call, const RequestParts& parts, const Tokens& tokens) const {
    const KernelOptions& options = shape_.options;
    const bool is_causal =
        config_.attn_type == AttentionType::kDecoder && call.step.plan().batch().causal != 0;
    KernelLease lease = weigh_.pool->acquire();
    lease.arg(call.step.work())
        .arg<cl_long>(parts.scores)
        .arg<cl_int>(tokens.num_keys)
        .arg<cl_int>(tokens.count)
        .arg<cl_int>(tokens.row)
        .arg<cl_int>(tokens.position)
        .arg<cl_int>(config_.num_kv_heads)
        .arg<cl_int>(is_causal ? 1 : 0)
        .arg(call.lse)
        .arg<cl_int>(call.lse != nullptr ? 1 : 0);
    if (options.window) lease.arg(window_.left).arg(window_.right).arg(window_.chunk);
    if (options.soft_cap) lease.arg<cl_float>(config_.logits_soft_cap * kLog2E);
    if (options.alibi || options.sink) lease.arg(head_params_.handle());
    if (options.mask) {
      lease.arg(call.options.custom_mask).arg<cl_long>(call.options.custom_mask_stride);
    }
    enqueue(call, weigh_, lease,
            static_cast<std::size_t>(tokens.count) * static_cast<std::size_t>(config_.num_heads));
  }

  std::shared_ptr<Context> context_;
  AttentionConfig config_;
  KernelShape shape_;
  KeyWindow window_;
  Buffer head_params_;
  std::size_t num_groups_;  ///< that keep the device busy
  OpKernel gather_, pack_, unpack_, weigh_;
};

}  // namespace

std::shared_ptr<const AttentionImpl> make_gathered_impl(std::shared_ptr<Context> context,
                                                        const AttentionConfig& config) {
  return std::make_shared<const GatheredImpl>(std::move(context), config);
}

}  // namespace clattn::detail
