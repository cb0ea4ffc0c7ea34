#include "backends/gathered_attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "backends/clblast_gemm.hpp"
#include "backends/plugin_step.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/attention_kernels.hpp"
#include "kernels/cache_checks.hpp"
#include "kernels/cache_write.hpp"
#include "kernels/step_launch.hpp"
#include "kv_cache/op_kernel.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

constexpr std::string_view kName = "backend CLBLAST";

/// Where the parts of one request's arithmetic lie in the workspace, in f32 elements.
struct Parts {
  static constexpr std::int64_t kScores = std::int64_t{4} << 20;  ///< at a time, of several tokens
  std::int64_t tokens = 0;  ///< queries at a time, so that their scores stay small
  std::int64_t k = 0, v = 0, q = 0, sums = 0, scores = 0, end = 0;

  Parts(const AttentionConfig& config, std::int64_t query_len, std::int64_t num_keys) {
    constexpr std::string_view kWhat = "workspace";
    const std::int64_t keys =
        checked_mul(num_keys, std::int64_t{config.num_kv_heads} * config.head_size, kWhat);
    const std::int64_t scores_each = checked_mul(num_keys, std::int64_t{config.num_heads}, kWhat);
    tokens = std::clamp<std::int64_t>(kScores / std::max<std::int64_t>(scores_each, 1), 1,
                                      std::max<std::int64_t>(query_len, 1));
    const std::int64_t rows = tokens * config.num_heads * config.head_size;
    v = keys;
    q = checked_add(v, keys, kWhat);
    sums = checked_add(q, rows, kWhat);
    scores = checked_add(sums, rows, kWhat);
    end = checked_add(scores, checked_mul(tokens, scores_each, kWhat), kWhat);
  }
};

/// A step's batch on host and device, and the memory that its layers compute in.
class GatheredMetadata final : public AttentionMetadata {
 public:
  void refresh(const AttentionMetadata& built, const AttentionConfig& config, const Buffer& work) {
    static_cast<AttentionMetadata&>(*this) = built;
    plan_ = &dynamic_cast<const PluginMetadata&>(built);
    config_ = &config;
    work_ = work;
  }
  const PluginMetadata& plan() const noexcept { return *plan_; }
  bool is_for(const AttentionConfig& layer) const noexcept {
    return plan_ != nullptr && plan_->batch().struct_size != 0 &&
           config_->block_size == layer.block_size && config_->num_heads == layer.num_heads &&
           config_->num_kv_heads == layer.num_kv_heads && config_->head_size == layer.head_size;
  }
  cl_mem work() const noexcept { return work_.handle(); }

 private:
  const PluginMetadata* plan_ = nullptr;
  const AttentionConfig* config_ = nullptr;
  Buffer work_;
};

class GatheredBuilder final : public AttentionMetadataBuilder {
 public:
  GatheredBuilder(std::shared_ptr<const AttentionBackend> backend, std::shared_ptr<Context> context,
                  AttentionConfig config, const BuilderOptions& options)
      : context_(std::move(context)),
        config_(std::move(config)),
        batches_(std::move(backend), context_, config_, checked(options)),
        limits_(options.limits) {}

  const AttentionMetadata& build(cl_command_queue queue, const CommonAttentionMetadata& batch,
                                 Event* upload, const BuildOptions& options) override {
    const AttentionMetadata& built = batches_.build(queue, batch, upload, options);
    std::size_t wanted = bytes(batch);
    if (work_.size_bytes() == 0) wanted = std::max(wanted, reserved_bytes());
    if (work_.size_bytes() < wanted) work_ = context_->allocate(wanted);
    metadata_.refresh(built, config_, work_);
    return metadata_;
  }
  std::size_t workspace_bytes(const CommonAttentionMetadata& batch) const override {
    batches_.workspace_bytes(batch);  // checks the batch
    return bytes(batch);
  }
  bool can_run_in_graph(const CommonAttentionMetadata&) const override { return false; }
  bool reorder_batch(std::span<const std::int32_t> num_scheduled_tokens,
                     std::span<std::int32_t> order) const override {
    return batches_.reorder_batch(num_scheduled_tokens, order);
  }
  std::int32_t decode_threshold() const noexcept override { return batches_.decode_threshold(); }

 private:
  static BuilderOptions checked(BuilderOptions options) {
    const std::pair<bool, std::string_view> refused[] = {
        {options.graph_batch_size != 0, "graph_batch_size is not 0"},
        {options.num_splits < 0 || options.num_splits > 1, "num_splits is not 0 or 1"},
        {options.split_policy != SplitPolicy::kBalanced, "split_policy is not balanced"}};
    for (const auto& [given, what] : refused) {
      if (given) {
        throw_unsupported("{}: {}, which CLBlast's own launches do not follow", kName, what);
      }
    }
    options.num_splits = 0;  // keys are in one piece in any case
    return options;
  }
  std::size_t bytes(const CommonAttentionMetadata& batch) const {
    std::int64_t most = 0;
    for (std::size_t r = 0; r < static_cast<std::size_t>(batch.num_reqs); ++r) {
      const std::int32_t query_len = batch.query_start_loc[r + 1] - batch.query_start_loc[r];
      if (query_len > 0) most = std::max(most, Parts(config_, query_len, batch.seq_lens[r]).end);
    }
    return static_cast<std::size_t>(most) * sizeof(float);
  }
  /// What no request within the limits exceeds, as far as kMaxWorkspaceBytes reaches: the longest
  /// one's keys and scores, and every token's rows.
  std::size_t reserved_bytes() const {
    const Parts longest(config_, 1, limits_.max_model_len);
    const std::int64_t rows = std::int64_t{config_.num_heads} * config_.head_size * 2;
    const std::int64_t most = longest.end + rows * limits_.max_num_batched_tokens + Parts::kScores;
    return std::min({static_cast<std::size_t>(most) * sizeof(float), kMaxWorkspaceBytes,
                     static_cast<std::size_t>(context_->capabilities().max_alloc_bytes)});
  }

  std::shared_ptr<Context> context_;
  AttentionConfig config_;
  PluginMetadataBuilder batches_;
  BatchLimits limits_;
  Buffer work_;
  GatheredMetadata metadata_;
};

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
    refuse_recording(queue, kName);
    check_layer_cache(cache, shape_);
    step_of(metadata, cache);
    reshape_and_cache_flash(*context_, queue, key, value, config_.dtype, cache,
                            metadata.slot_mapping_buffer(), metadata.slot_mapping_offset_bytes(),
                            metadata.num_actual_tokens(), event);
  }

  void forward(cl_command_queue queue, TensorRef query, const KVCache& cache,
               const AttentionMetadata& metadata, TensorRef output, cl_mem lse, Event* event,
               std::vector<LaunchRecord>* launches, const ForwardOptions& options) const override {
    refuse_recording(queue, kName);
    check_layer_cache(cache, shape_);
    const GatheredMetadata& step = step_of(metadata, cache);
    check_options(options, step);
    const std::int64_t row = std::int64_t{config_.num_heads} * config_.head_size;
    query.token_stride = checked_token_stride(query, row, "query");
    output.token_stride = checked_token_stride(output, row, "output");
    if (launches != nullptr) launches->clear();
    if (event != nullptr) event->reset();
    Call call{queue, step, cache, query, output, lse, options, event, launches};
    const ClattnBatch& batch = step.plan().batch();
    for (std::int32_t r = 0; r < batch.num_reqs; ++r) attend(call, r);
  }

  void forward_encoder(cl_command_queue, TensorRef, TensorRef, TensorRef, const AttentionMetadata&,
                       TensorRef, cl_mem, Event*, std::vector<LaunchRecord>*,
                       const ForwardOptions&) const override {
    throw_unsupported("attn_type {}: keys and values come from the cache, use forward()",
                      to_string(config_.attn_type));
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
  struct Call {
    cl_command_queue queue = nullptr;
    const GatheredMetadata& step;
    const KVCache& cache;
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
                                 config_.num_queries_per_kv(), config_.block_size, options));
  }

  const GatheredMetadata& step_of(const AttentionMetadata& metadata, const KVCache& cache) const {
    const auto* step = dynamic_cast<const GatheredMetadata*>(&metadata);
    if (step == nullptr || !step->is_for(config_)) {
      throw_invalid(
          "attn_metadata: built for another configuration; legal: metadata of a builder of {} with "
          "this layer's heads, head_size and block_size",
          kName);
    }
    if (step->plan().num_blocks() > cache.num_blocks) {
      throw_invalid(
          "attn_metadata: its block ids reach up to {}, legal: below the cache's {} blocks",
          step->plan().num_blocks() - 1, cache.num_blocks);
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
    record.work_groups = static_cast<std::int64_t>(count);
    record.work_group_size = static_cast<std::int32_t>(kernel.group_size);
    call.launches->push_back(std::move(record));
  }

  void attend(const Call& call, std::int32_t r) const {
    const ClattnBatch& batch = call.step.plan().batch();
    const std::int32_t begin = batch.query_start_loc[r], end = batch.query_start_loc[r + 1];
    const std::int32_t num_keys = batch.seq_lens[r];
    if (begin == end) return;
    const Parts parts(config_, end - begin, num_keys);
    gather(call, parts, r);
    for (std::int32_t row = begin; row < end;) {
      const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(parts.tokens, end - row));
      attend(call, parts, {row, count, num_keys - end + row, num_keys});
      row += count;
    }
  }

  void gather(const Call& call, const Parts& parts, std::int32_t r) const {
    const ClattnBatch& batch = call.step.plan().batch();
    const KVCache& cache = call.cache;
    KernelLease lease = gather_.pool->acquire();
    lease.arg(call.step.work())
        .arg<cl_long>(parts.k)
        .arg<cl_long>(parts.v)
        .arg(batch.device)
        .arg<cl_long>(static_cast<cl_long>(batch.block_table_bytes / sizeof(cl_int)) +
                      r * batch.block_table_stride)
        .arg<cl_int>(batch.seq_lens[r])
        .arg<cl_int>(config_.num_kv_heads)
        .arg(cache.buffer.handle())
        .arg<cl_long>(cache.k_offset)
        .arg(cache.buffer.handle())
        .arg<cl_long>(cache.v_offset)
        .arg<cl_long>(cache.block_stride)
        .arg<cl_long>(cache.token_stride)
        .arg<cl_long>(cache.head_stride);
    if (is_quantized(cache.dtype)) lease.arg(cache.scales.handle()).arg(scale_stride_of(cache));
    enqueue(call, gather_, lease);
  }

  void attend(const Call& call, const Parts& parts, const Tokens& tokens) const {
    const cl_mem work = call.step.work();
    const auto rows = static_cast<std::size_t>(tokens.count) *
                      static_cast<std::size_t>(config_.num_queries_per_kv());
    const auto keys = static_cast<std::size_t>(tokens.num_keys);
    const auto dims = static_cast<std::size_t>(config_.head_size);
    const auto heads = static_cast<std::size_t>(config_.num_kv_heads);
    move(call, pack_, parts.q, call.query, tokens);
    multiply(
        call.queue, work,
        {true, rows, keys, dims, heads, softmax_scale(config_.scale, config_.head_size) * kLog2E,
         parts.q, parts.k, parts.scores});
    weigh(call, parts, tokens);
    multiply(call.queue, work,
             {false, rows, dims, keys, heads, 1.0F, parts.scores, parts.v, parts.sums});
    move(call, unpack_, parts.sums, call.output, tokens);
  }

  /// Query tokens into the workspace, or output tokens from there.
  void move(const Call& call, const OpKernel& kernel, std::int64_t packed_at,
            const TensorRef& tensor, const Tokens& tokens) const {
    KernelLease lease = kernel.pool->acquire();
    lease.arg(call.step.work())
        .arg<cl_long>(packed_at)
        .arg(tensor.buffer)
        .arg<cl_long>(tensor.offset + tokens.row * tensor.token_stride)
        .arg<cl_long>(tensor.token_stride)
        .arg<cl_int>(tokens.count)
        .arg<cl_int>(config_.num_kv_heads);
    enqueue(call, kernel, lease);
  }

  void weigh(const Call& call, const Parts& parts, const Tokens& tokens) const {
    const KernelOptions& options = shape_.options;
    KernelLease lease = weigh_.pool->acquire();
    lease.arg(call.step.work())
        .arg<cl_long>(parts.scores)
        .arg<cl_int>(tokens.num_keys)
        .arg<cl_int>(tokens.count)
        .arg<cl_int>(tokens.row)
        .arg<cl_int>(tokens.position)
        .arg<cl_int>(config_.num_kv_heads)
        .arg<cl_int>(call.step.plan().batch().causal)
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

std::unique_ptr<AttentionMetadataBuilder> make_gathered_builder(
    std::shared_ptr<const AttentionBackend> backend, std::shared_ptr<Context> context,
    const AttentionConfig& config, const BuilderOptions& options) {
  return std::make_unique<GatheredBuilder>(std::move(backend), std::move(context), config, options);
}

}  // namespace clattn::detail
