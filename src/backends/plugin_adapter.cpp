#include "backends/plugin_adapter.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/launch/step_launch.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

// The ABI's numbers are the library's: the structs are filled by casts.
static_assert(static_cast<int>(DType::kF32) == CLATTN_F32 &&
              static_cast<int>(DType::kF16) == CLATTN_F16 &&
              static_cast<int>(DType::kBF16) == CLATTN_BF16 &&
              static_cast<int>(DType::kFp8E4M3) == CLATTN_FP8_E4M3 &&
              static_cast<int>(DType::kFp8E5M2) == CLATTN_FP8_E5M2 &&
              static_cast<int>(DType::kInt8) == CLATTN_INT8);
static_assert(static_cast<int>(KVCacheLayout::kNHD) == CLATTN_NHD &&
              static_cast<int>(KVCacheLayout::kHND) == CLATTN_HND);

ClattnAttentionConfig c_config(const AttentionConfig& config) {
  return {.struct_size = sizeof(ClattnAttentionConfig),
          .num_heads = config.num_heads,
          .num_kv_heads = config.num_kv_heads,
          .head_size = config.head_size,
          .block_size = config.block_size,
          .dtype = static_cast<std::int32_t>(config.dtype),
          .kv_cache_dtype = static_cast<std::int32_t>(config.cache_dtype()),
          .scale = softmax_scale(config.scale, config.head_size),
          .logits_soft_cap = config.logits_soft_cap,
          .sliding_window = config.sliding_window,
          .attention_chunk_size = config.attention_chunk_size,
          .alibi_slopes = config.alibi_slopes.empty() ? nullptr : config.alibi_slopes.data(),
          .sinks = config.sinks.empty() ? nullptr : config.sinks.data()};
}

ClattnDevice c_device(const DeviceCapabilities* capabilities) {
  if (capabilities == nullptr) return {};
  return {.struct_size = sizeof(ClattnDevice),
          .kind = static_cast<std::int32_t>(capabilities->kind),
          .compute_units = capabilities->compute_units,
          .name = capabilities->name.c_str(),
          .vendor = capabilities->vendor.c_str(),
          .driver_version = capabilities->driver_version.c_str(),
          .max_work_group_size = capabilities->max_work_group_size,
          .global_mem_bytes = capabilities->global_mem_bytes,
          .max_alloc_bytes = capabilities->max_alloc_bytes,
          .local_mem_bytes = capabilities->local_mem_bytes};
}

/// A tensor of [num_tokens, heads, head_size] that lies inside its buffer.
ClattnTensor c_tensor(const TensorRef& tensor, std::int32_t num_tokens, std::int64_t row,
                      DType dtype, std::string_view name) {
  return {tensor.buffer, tensor.offset,
          bounded_token_stride(tensor, {num_tokens, row, dtype}, name)};
}

ClattnKVCache c_cache(const KVCache& cache) {
  return {.buffer = cache.buffer.handle(),
          .dtype = static_cast<std::int32_t>(cache.dtype),
          .block_size = cache.block_size,
          .num_kv_heads = cache.num_kv_heads,
          .head_size = cache.head_size,
          .num_blocks = cache.num_blocks,
          .k_offset = cache.k_offset,
          .v_offset = cache.v_offset,
          .block_stride = cache.block_stride,
          .token_stride = cache.token_stride,
          .head_stride = cache.head_stride,
          .scales = cache.scales.handle(),
          .scales_per_head = cache.scales_per_head ? 1 : 0};
}

static_assert(static_cast<int>(DeviceKind::kGpu) == CLATTN_GPU &&
              static_cast<int>(DeviceKind::kCpu) == CLATTN_CPU &&
              static_cast<int>(DeviceKind::kOther) == CLATTN_OTHER);

/// Throws what a plugin's call reported.
void check_status(ClattnStatus& status, std::string_view backend, std::string_view call) {
  if (status.code == CLATTN_OK) return;
  status.message[sizeof(status.message) - 1] = '\0';
  constexpr std::array kCodes = {ErrorCode::kInvalidArgument, ErrorCode::kUnsupported,
                                 ErrorCode::kOpenCL};
  const bool known = status.code >= CLATTN_INVALID_ARGUMENT && status.code <= CLATTN_OPENCL;
  throw Error(known ? kCodes.at(to_size(status.code - 1)) : ErrorCode::kUnsupported,
              fmt::format("backend {}: {}: {}", backend, call, status.message), status.cl_code);
}

/// A layer of a plugin.
class PluginImpl final : public AttentionImpl {
 public:
  PluginImpl(std::shared_ptr<const PluginLibrary> library, const AttentionBackend& backend,
             std::shared_ptr<Context> context, AttentionConfig config)
      : library_(std::move(library)),
        context_(std::move(context)),
        config_(std::move(config)),
        places_(backend),
        name_(fmt::format("backend {}", table().name)) {
    const ClattnAttentionConfig wanted = c_config(config_);
    ClattnStatus status{};
    impl_ =
        table().impl_create(table().self, context_->handle(), context_->device(), &wanted, &status);
    check_status(status, table().name, "impl_create");
  }
  ~PluginImpl() override { table().impl_destroy(table().self, impl_); }
  PluginImpl(const PluginImpl&) = delete;
  PluginImpl& operator=(const PluginImpl&) = delete;

  const AttentionConfig& config() const noexcept override { return config_; }

  void write_kv_cache(cl_command_queue queue, TensorRef key, TensorRef value, const KVCache& cache,
                      const AttentionMetadata& metadata, Event* event) const override {
    refuse_recording(queue, name_);
    const ClattnBatch& batch = batch_of(metadata, cache);
    const ClattnKVCache where = c_cache(cache);
    const TwoTensors rows = stored_rows(key, value, batch);
    AddResults add;
    if (capturing()) {
      const SlotSource slots{batch.device, batch.slot_mapping_bytes, batch.num_actual_tokens};
      add = capture_cache_write({queue, key, value, config_.dtype, &cache, slots});
    }
    call("write_kv_cache", event, [&](cl_event* done, ClattnStatus* status) {
      table().write_kv_cache(table().self, impl_, queue, &rows.first, &rows.second, &where, &batch,
                             done, status);
    });
    add_results(add, queue);
  }

  void forward(cl_command_queue queue, const AttentionTensors& tensors, const KVCache& cache,
               const AttentionMetadata& metadata, const ForwardOptions& options) const override {
    const ClattnBatch& batch = checked_batch(queue, cache, metadata, options);
    const ClattnKVCache where = c_cache(cache);
    const TwoTensors rows = attended_rows(tensors, batch);
    const cl_mem lse = tensors.lse;
    AddResults add;
    if (capturing()) add = capture(queue, tensors, cache, batch, options);
    if (options.launches != nullptr)
      options.launches->clear();  // what a plugin launches is its own affair
    call("forward", options.event, [&](cl_event* done, ClattnStatus* status) {
      table().forward(table().self, impl_, queue, &rows.first, &where, &batch, &rows.second, lse,
                      done, status);
    });
    add_results(add, queue);
  }

  void forward_encoder(cl_command_queue, const AttentionTensors&, const AttentionMetadata&,
                       const ForwardOptions&) const override {
    throw_unsupported(
        "backend {}: attn_type {}: keys and values come from the cache, use forward()",
        table().name, to_string(config_.attn_type));
  }

  void check_forward(cl_command_queue queue, const AttentionTensors& tensors, const KVCache& cache,
                     const AttentionMetadata& metadata,
                     const ForwardOptions& options) const override {
    const ClattnBatch& batch = checked_batch(queue, cache, metadata, options);
    attended_rows(tensors, batch);
    if (tensors.key.buffer != nullptr) stored_rows(tensors.key, tensors.value, batch);
  }

  std::vector<KernelInfo> kernels() const override { return {}; }

 private:
  const ClattnBackendPlugin& table() const noexcept { return library_->table(); }

  const ClattnBatch& checked_batch(cl_command_queue queue, const KVCache& cache,
                                   const AttentionMetadata& metadata,
                                   const ForwardOptions& options) const {
    throw_invalid_if(
        options.custom_mask != nullptr || options.output_fp8 != nullptr,
        "custom_mask, output_fp8: given, legal: none under this layer's configuration");
    refuse_recording(queue, name_);
    return batch_of(metadata, cache);
  }

  using TwoTensors = std::pair<ClattnTensor, ClattnTensor>;
  /// Query and output; checks lse, too.
  TwoTensors attended_rows(const AttentionTensors& tensors, const ClattnBatch& batch) const {
    const std::int64_t heads = config_.num_heads, row = heads * config_.head_size;
    const std::int32_t tokens = batch.num_actual_tokens;
    if (tensors.lse != nullptr) {
      check_rows({tensors.lse, DType::kF32}, {0, tokens, heads, heads}, "lse");
    }
    return {c_tensor(tensors.query, tokens, row, config_.dtype, "query"),
            c_tensor(tensors.output, tokens, row, config_.dtype, "output")};
  }

  TwoTensors stored_rows(const TensorRef& key, const TensorRef& value,
                         const ClattnBatch& batch) const {
    const std::int64_t row = std::int64_t{config_.num_kv_heads} * config_.head_size;
    return {c_tensor(key, batch.num_actual_tokens, row, config_.dtype, "key"),
            c_tensor(value, batch.num_actual_tokens, row, config_.dtype, "value")};
  }

  AddResults capture(cl_command_queue queue, const AttentionTensors& tensors, const KVCache& cache,
                     const ClattnBatch& batch, const ForwardOptions& options) const {
    const auto reqs = to_size(batch.num_reqs), stride = to_size(batch.block_table_stride);
    std::vector<std::int32_t> pages_at(reqs);
    for (std::size_t r = 0; r < reqs; ++r) pages_at[r] = static_cast<std::int32_t>(r * stride);
    const BatchRecord record{.backend = table().name,
                             .query_start_loc = {batch.query_start_loc, reqs + 1},
                             .seq_lens = {batch.seq_lens, reqs},
                             .pages_at = pages_at,
                             .pages = {batch.block_table, reqs * stride}};
    return capture_attention({queue, config_, record, batch.causal != 0, tensors, &cache, options});
  }

  const ClattnBatch& batch_of(const AttentionMetadata& metadata, const KVCache& cache) const {
    const auto* step = dynamic_cast<const PluginMetadata*>(&metadata);
    throw_invalid_if(step == nullptr || step->batch().struct_size == 0 ||
                         step->block_size() != config_.block_size,
                     "attn_metadata: built for another configuration; legal: metadata of a builder "
                     "of this backend with block_size {}",
                     config_.block_size);
    throw_invalid_if(
        cache.block_size != config_.block_size || cache.num_kv_heads != config_.num_kv_heads ||
            cache.head_size != config_.head_size || cache.dtype != config_.cache_dtype(),
        "kv_cache: {} tokens x {} heads x {} of {}, legal: {} x {} x {} of {}", cache.block_size,
        cache.num_kv_heads, cache.head_size, to_string(cache.dtype), config_.block_size,
        config_.num_kv_heads, config_.head_size, to_string(config_.cache_dtype()));
    check_cache(cache);
    places_.check(cache);
    check_block_ids(step->block_ids(), cache.num_blocks);
    return step->batch();
  }

  template <typename Function>
  void call(std::string_view what, Event* event, Function function) const {
    ClattnStatus status{};
    cl_event done = nullptr;
    function(event == nullptr ? nullptr : &done, &status);
    if (event != nullptr) event->reset(done);
    check_status(status, table().name, what);
  }

  std::shared_ptr<const PluginLibrary> library_;
  std::shared_ptr<Context> context_;
  AttentionConfig config_;
  PluginCachePlaces places_;
  std::string name_;  ///< "backend …", for refusals
  void* impl_ = nullptr;
};

class PluginBackend final : public AttentionBackend {
 public:
  explicit PluginBackend(std::shared_ptr<const PluginLibrary> library)
      : library_(std::move(library)), name_(table().name) {
    for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
      if ((table().layouts & 1U << static_cast<unsigned>(layout)) != 0) layouts_.push_back(layout);
    }
  }

  std::string_view name() const noexcept override { return name_; }
  BackendOrigin full_cls_name() const override {
    return {library_->path(), CLATTN_BACKEND_PLUGIN_ENTRY};
  }

  std::vector<std::string> validate_configuration(
      const AttentionConfig& config, const DeviceCapabilities* capabilities) const override {
    std::vector<std::string> reasons;
    append_config_reasons(config, reasons);
    append_if(reasons, config.head_size < 1, "head_size is {}, supported: >= 1", config.head_size);
    const std::pair<bool, std::string_view> beyond_abi[] = {
        {config.attn_type != AttentionType::kDecoder, "attn_type other than decoder"},
        {config.custom_mask, "custom_mask"},
        {config.output_fp8, "output_fp8"},
        {config.use_mla, "MLA"},
        {config.head_size_v != 0 && config.head_size_v != config.head_size, "head_size_v"},
        {config.use_batch_invariant, "batch invariance (SplitPolicy::kDeterministic)"}};
    for (const auto& [wanted, what] : beyond_abi)
      append_if(reasons, wanted, "{} not supported by plugins", what);
    // What is wrong already is not the plugin's to judge: it may rely on sane numbers.
    if (!reasons.empty()) return reasons;
    const ClattnAttentionConfig wanted = c_config(config);
    const auto add = [](void* sink, const char* reason) {
      static_cast<std::vector<std::string>*>(sink)->emplace_back(reason == nullptr ? "?" : reason);
    };
    const ClattnDevice device = c_device(capabilities);
    table().validate(table().self, &wanted, capabilities == nullptr ? nullptr : &device, add,
                     &reasons);
    return reasons;
  }

  std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t num_blocks, std::int32_t block_size,
                                                 std::int32_t num_kv_heads,
                                                 std::int32_t head_size) const override {
    std::array<std::int64_t, 5> shape{};
    ClattnStatus status{};
    table().kv_cache_shape(table().self, num_blocks, block_size, num_kv_heads, head_size,
                           shape.data(), &status);
    check_status(status, name_, "kv_cache_shape");
    check_plugin_shape(name_, table().kv_dimension, shape,
                       {2, num_blocks, block_size, num_kv_heads, head_size});
    return shape;
  }

  std::array<std::int32_t, 5> get_kv_cache_stride_order(KVCacheLayout layout) const override {
    throw_unsupported_if(std::ranges::find(layouts_, layout) == layouts_.end(),
                         "layout {} not supported by {}", to_string(layout), name_);
    std::array<std::int32_t, 5> order{};
    ClattnStatus status{};
    table().kv_cache_stride_order(table().self, static_cast<std::int32_t>(layout), order.data(),
                                  &status);
    check_status(status, name_, "kv_cache_stride_order");
    check_plugin_order(name_, order);
    return order;
  }

  std::int32_t kv_dimension() const noexcept override { return table().kv_dimension; }
  std::span<const KVCacheLayout> supported_layouts() const noexcept override { return layouts_; }
  KVCacheLayout preferred_layout(const DeviceCapabilities&) const noexcept override {
    return static_cast<KVCacheLayout>(table().preferred_layout);
  }

  std::shared_ptr<const AttentionImpl> make_impl(std::shared_ptr<Context> context,
                                                 const AttentionConfig& config) const override {
    require_valid(name_, validate_configuration(config, &context->capabilities()));
    return std::make_shared<const PluginImpl>(library_, *this, std::move(context), config);
  }

  std::unique_ptr<AttentionMetadataBuilder> make_builder(
      std::shared_ptr<Context> context, const AttentionConfig& config,
      const BuilderOptions& options) const override {
    require_valid(name_, validate_configuration(config, &context->capabilities()));
    return std::make_unique<PluginMetadataBuilder>(shared_from_this(), std::move(context), config,
                                                   options);
  }

 private:
  const ClattnBackendPlugin& table() const noexcept { return library_->table(); }

  std::shared_ptr<const PluginLibrary> library_;
  std::string name_;
  std::vector<KVCacheLayout> layouts_;
};

}  // namespace

std::shared_ptr<const AttentionBackend> make_plugin_backend(
    std::shared_ptr<const PluginLibrary> library) {
  return std::make_shared<const PluginBackend>(std::move(library));
}

}  // namespace clattn::detail
