#include "backends/plugin_adapter.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/launch/step_launch.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kv_cache/spec.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

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

/// The first stride, in elements, of those in the C interface in which a cache differs from what it
/// should be.
struct Difference {
  std::string_view field;
  std::int64_t value = 0, wanted = 0;
};

/// Against a cache whose dimensions memory holds in `order`, slowest first; `kv`: which of the
/// first two is K and V. Padded pages may lie further apart. Equal values if there is none.
Difference difference(const KVCache& cache, std::size_t kv, const StrideOrder& order, bool padded) {
  std::array<std::int64_t, 5> extents = {2, cache.num_blocks, cache.block_size, cache.num_kv_heads,
                                         cache.head_size};
  if (kv == 1) std::swap(extents[0], extents[1]);
  const auto strides = strides_of(extents, order);
  const std::int64_t block = strides.at(1 - kv);
  const Difference strides_wanted[] = {
      {"v_offset - k_offset", cache.v_offset - cache.k_offset, strides.at(kv)},
      {"token_stride", cache.token_stride, strides[2]},
      {"head_stride", cache.head_stride, strides[3]},
      {"block_stride", cache.block_stride, padded ? std::max(block, cache.block_stride) : block}};
  for (const Difference& each : strides_wanted)
    if (each.value != each.wanted) return each;
  return {};
}

/// A layer of a plugin.
class PluginImpl final : public AttentionImpl {
 public:
  PluginImpl(std::shared_ptr<const PluginLibrary> library, const AttentionBackend& backend,
             std::shared_ptr<Context> context, AttentionConfig config)
      : library_(std::move(library)),
        context_(std::move(context)),
        config_(std::move(config)),
        name_(fmt::format("backend {}", table().name)) {
    for (const KVCacheLayout layout : backend.supported_layouts())
      orders_.emplace_back(layout, backend.get_kv_cache_stride_order(layout));
    const PluginConfig wanted(config_);
    ClattnStatus status{};
    impl_ = table().impl_create(table().self, context_->handle(), context_->device(),
                                &wanted.config, &status);
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
    if (brings_keys(tensors)) {
      check_forward(queue, tensors, cache, metadata, options);
      write_kv_cache(queue, tensors.key, tensors.value, cache, metadata, nullptr);
    }
    const ClattnBatch& batch = checked_batch(queue, cache, metadata, options);
    const ClattnKVCache where = c_cache(cache);
    const TwoTensors rows = attended_rows(tensors, batch);
    AddResults add;
    const KeptLists& lists = static_cast<const PluginMetadata&>(metadata).kept;
    if (capturing()) add = capture(queue, tensors, cache, {batch, lists}, options);
    if (options.launches != nullptr)
      options.launches->clear();  // what a plugin launches is its own affair
    call("forward", options.event, [&](cl_event* done, ClattnStatus* status) {
      table().forward(table().self, impl_, queue, &rows.first, &where, &batch, &rows.second,
                      tensors.lse, done, status);
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
    if (brings_keys(tensors)) stored_rows(tensors.key, tensors.value, batch);
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
    require_context({{"query", tensors.query.buffer},
                     {"key", tensors.key.buffer},
                     {"value", tensors.value.buffer},
                     {"output", tensors.output.buffer},
                     {"lse", tensors.lse}},
                    context_->handle());
    const std::int64_t key_row = std::int64_t{config_.num_kv_heads} * config_.head_size;
    check_apart(tensors, nullptr, kernel_shape(config_), tokens, {tokens, key_row, key_row});
    return {c_tensor(tensors.query, tokens, row, config_.dtype, "query"),
            c_tensor(tensors.output, tokens, row, config_.dtype, "output")};
  }

  TwoTensors stored_rows(const TensorRef& key, const TensorRef& value,
                         const ClattnBatch& batch) const {
    const std::int64_t row = std::int64_t{config_.num_kv_heads} * config_.head_size;
    return {c_tensor(key, batch.num_actual_tokens, row, config_.dtype, "key"),
            c_tensor(value, batch.num_actual_tokens, row, config_.dtype, "value")};
  }

  /// A batch as plugins are told it and as the caller did.
  struct TwoBatches {
    const ClattnBatch& batch;
    const KeptLists& lists;
  };
  AddResults capture(cl_command_queue queue, const AttentionTensors& tensors, const KVCache& cache,
                     const TwoBatches& given, const ForwardOptions& options) const {
    const ClattnBatch& batch = given.batch;
    const auto reqs = to_size(batch.num_reqs), stride = to_size(batch.block_table_stride);
    std::vector<std::int32_t> pages_at(reqs);
    for (std::size_t r = 0; r < reqs; ++r) pages_at[r] = static_cast<std::int32_t>(r * stride);
    BatchRecord record{.backend = table().name,
                       .query_start_loc = {batch.query_start_loc, reqs + 1},
                       .seq_lens = {batch.seq_lens, reqs},
                       .pages_at = pages_at,
                       .pages = {batch.block_table, reqs * stride}};
    for_each_list([](auto& list, const auto& kept) { list = kept; }, record, given.lists);
    return capture_attention({queue, config_, record, batch.causal != 0, tensors, &cache, options});
  }

  const ClattnBatch& batch_of(const AttentionMetadata& metadata, const KVCache& cache) const {
    const auto* step = dynamic_cast<const PluginMetadata*>(&metadata);
    throw_invalid_if(
        step == nullptr || step->batch.struct_size == 0 || step->block_size != config_.block_size,
        "attn_metadata: built for another configuration; legal: metadata of a builder "
        "of this backend with block_size {}",
        config_.block_size);
    const ListRules lists = lists_of(config_);
    const bool listed = lists.any() || step->lists.any();
    throw_invalid_if(
        listed && !(lists == step->lists && window_of(config_) == step->window),
        "attn_metadata: built for another window, span_rule, use_spans, use_directions, "
        "use_first_keys, use_keep_keys or use_trees than this layer's; legal: metadata "
        "of a builder with the layer's own");
    throw_invalid_if(
        cache.block_size != config_.block_size || cache.num_kv_heads != config_.num_kv_heads ||
            cache.head_size != config_.head_size || cache.dtype != config_.cache_dtype(),
        "kv_cache: {} tokens x {} heads x {} of {}, legal: {} x {} x {} of {}", cache.block_size,
        cache.num_kv_heads, cache.head_size, to_string(cache.dtype), config_.block_size,
        config_.num_kv_heads, config_.head_size, to_string(config_.cache_dtype()));
    check_cache(cache);
    require_context(cache.buffer.handle(), context_->handle(), "kv_cache");
    check_strides(cache);
    check_block_ids(step->block_ids, cache.num_blocks);
    return step->batch;
  }

  /// Throws kInvalidArgument for a cache whose strides are those of none of the layouts.
  void check_strides(const KVCache& cache) const {
    const auto kv = to_size(table().kv_dimension);
    std::string differences;
    for (const auto& [layout, order] : orders_) {
      const Difference found = difference(cache, kv, order, false);
      if (found.value == found.wanted) return;
      // Padded pages hold K and V together, whatever the order (reshape_kv_cache).
      StrideOrder paged = order;
      const auto blocks = std::ranges::find(paged, static_cast<std::int32_t>(1 - kv));
      std::rotate(paged.begin(), blocks, blocks + 1);
      const Difference padded = difference(cache, kv, paged, true);
      if (padded.value == padded.wanted) return;
      differences += fmt::format("{}{} has {} {}", differences.empty() ? "" : ", ",
                                 to_string(layout), found.field, found.wanted);
    }
    throw_invalid(
        "kv_cache: v_offset - k_offset {}, block_stride {}, token_stride {}, head_stride {}, "
        "legal: {}'s layouts: {}",
        cache.v_offset - cache.k_offset, cache.block_stride, cache.token_stride, cache.head_stride,
        name_, differences);
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
  std::vector<std::pair<KVCacheLayout, StrideOrder>> orders_;  ///< of the backend's layouts
  std::string name_;                                           ///< "backend …", for refusals
  void* impl_ = nullptr;
};

}  // namespace

std::shared_ptr<const AttentionImpl> make_plugin_impl(std::shared_ptr<const PluginLibrary> library,
                                                      const AttentionBackend& backend,
                                                      std::shared_ptr<Context> context,
                                                      const AttentionConfig& config) {
  return std::make_shared<const PluginImpl>(std::move(library), backend, std::move(context),
                                            config);
}

}  // namespace clattn::detail
