#include "program/replay/recurrent.hpp"

#include "program/common/device_memory.hpp"
#include "program/replay/engine.hpp"

namespace clattn::cli {
namespace {

/// Pages of one layer: what a gated delta net keeps of a request.
KVCacheSpec pages_of(const DeltaNet& net, DType dtype) {
  return {.kind = KVCacheKind::kMamba,
          .states = gated_delta_net_state_shape(net.num_k_heads, net.num_v_heads, net.head_k_dim,
                                                net.head_v_dim, net.conv_width, 0, dtype,
                                                net.state_dtype)};
}

}  // namespace

RecurrentEngine::RecurrentEngine(const std::shared_ptr<Context>& context, const Queue& queue,
                                 const EngineConfig& config)
    : context_(context),
      queue_(queue),
      layer_(*context, queue, config.delta_net, config.attention.dtype),
      builder_(*context) {
  const KVCacheSpec spec = pages_of(config.delta_net, config.attention.dtype);
  const std::size_t bytes = to_size(config.state_pages) * spec.page_size_bytes();
  const std::uint64_t most = context->capabilities().max_alloc_bytes;
  if (bytes > most) {
    throw_unsupported(
        "a layer's states of {} requests of {} bytes exceed this device's largest allocation, {} "
        "bytes: legal is at most {} requests, see --max-num-seqs",
        config.state_pages, spec.page_size_bytes(), most, most / spec.page_size_bytes());
  }
  for (std::int32_t i = 0; i < config.num_recurrent_layers; ++i)
    states_.push_back(view_state_pages(context->allocate(bytes), spec));
  const std::int64_t tokens = config.limits.max_num_batched_tokens;
  outputs_ = make_outputs(tokens);
  if (config.capture) captured_ = make_outputs(tokens);
}

RecurrentEngine::Outputs RecurrentEngine::make_outputs(std::int64_t tokens) const {
  const std::size_t element = element_size_bytes(layer_.dtype());
  const auto rows = [&](std::int64_t width) {
    return context_->allocate(to_size(tokens * width) * element);
  };
  const DeltaNet& net = layer_.net();
  return {rows(net.channels()), rows(net.values()), rows(net.values())};
}

void RecurrentEngine::poison() const {
  for (const std::vector<StateView>& views : states_) {
    const Buffer& buffer = views.front().buffer;
    queue_.fill(buffer, kPoison, 0, buffer.size_bytes() / 4 * 4);
  }
}

void RecurrentEngine::begin(const StepBatch& batch, bool capture) {
  starts_.assign(1, 0);
  pages_.clear();
  continues_.clear();
  for (std::int32_t place = 0; place < batch.num_reqs(); ++place) {
    const ScheduledRequest& request = batch.request(place);
    starts_.push_back(starts_.back() + request.num_new);
    pages_.push_back(request.request->state_page);
    continues_.push_back(request.num_computed > 0 ? 1 : 0);
  }
  metadata_ = builder_.build(
      queue_,
      {.query_start_loc = starts_, .state_indices = pages_, .has_initial_state = continues_});
  if (!capture) return;
  for (const Buffer* buffer : {&captured_.mixed, &captured_.out, &captured_.normed})
    queue_.fill(*buffer, kPoison, 0, buffer->size_bytes() / 4 * 4);
}

void RecurrentEngine::run(std::int32_t layer, const SyntheticPool& pool, std::int64_t row,
                          bool capture) const {
  const Outputs& to = capture ? captured_ : outputs_;
  const std::vector<StateView>& states = states_[to_size(layer)];
  const CausalConv1d conv =
      layer_.conv(pool.rows_from(PoolTensor::kChannels, row), to.mixed.handle());
  causal_conv1d_fn(*context_, queue_, conv, states[0], metadata_);
  const GatedDeltaRule rule =
      layer_.rule(to.mixed.handle(), pool.rows_from(PoolTensor::kGates, row), to.out.handle());
  const auto call =
      layer_.net().in_chunks ? chunk_gated_delta_rule : fused_recurrent_gated_delta_rule;
  call(*context_, queue_, rule, states[1], metadata_, nullptr);
  rms_norm_gated(*context_, queue_,
                 layer_.norm(to.out.handle(), pool.rows_from(PoolTensor::kOutputGate, row),
                             to.normed.handle(), starts_.back()));
}

}  // namespace clattn::cli
