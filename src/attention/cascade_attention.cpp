#include <algorithm>
#include <clattn/attention_backend.hpp>
#include <clattn/cascade.hpp>
#include <limits>
#include <optional>
#include <utility>

#include "base/checked.hpp"
#include "capture/capture.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kernels/step/paged_step.hpp"
#include "kv_cache/op_kernel.hpp"
#include "metadata/cascade_batch.hpp"
#include "metadata/validate.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

struct MultiLevelCascadeAttentionWrapper::Batch : detail::CascadeBatch {};
struct MultiLevelCascadeAttentionWrapper::Merge : detail::OpKernel {};

namespace {

using detail::throw_invalid, detail::throw_invalid_if, detail::to_size;

/// The layer for keys that all queries of a sequence see, however many there are of either.
AttentionConfig cross_config(AttentionConfig config) {
  config.attn_type = AttentionType::kEncoderDecoder;
  for (const detail::ListField& list : detail::kListFields) config.*list.use = false;
  config.span_rule = SpanRule::kWhole;
  return config;
}

/// The same kernels, but nothing joins the denominator.
AttentionConfig without_sinks(AttentionConfig config) {
  for (float& sink : config.sinks) sink = -std::numeric_limits<float>::infinity();
  return config;
}

void require_cascade(const AttentionBackend& backend, const AttentionConfig& config) {
  detail::require_valid(backend.name(), validate_cascade_configuration(config));
}

/// Runs `work`; what it throws names the level.
template <typename Work>
void at_level(std::size_t level, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("level {}: {}", level, error.what()), error.cl_code());
  }
}

}  // namespace

CascadeImpl::CascadeImpl(const std::shared_ptr<Context>& context, const AttentionBackend& backend,
                         const AttentionConfig& config)
    : config_(config) {
  require_cascade(backend, config);
  inner_ = backend.make_impl(context, without_sinks(cross_config(config)));
  last_ = backend.make_impl(context, cross_config(config));
  last_causal_ = backend.make_impl(context, config);
}

MultiLevelCascadeAttentionWrapper::MultiLevelCascadeAttentionWrapper(
    const std::shared_ptr<Context>& context, const AttentionBackend& backend,
    const AttentionConfig& config, std::int32_t num_levels, const BuilderOptions& options)
    : context_(context), config_(config), limits_(options.limits) {
  require_cascade(backend, config);
  if (num_levels < 1) throw_invalid("num_levels is {}, legal: >= 1", num_levels);
  throw_invalid_if(options.graph_batch_size != 0,
                   "graph_batch_size is {}, legal: 0: cascades are not recorded",
                   options.graph_batch_size);
  detail::throw_unsupported_if(
      options.device_seq_lens,
      "device_seq_lens: true, supported by cascades: false (levels are cut by the "
      "host's lengths)");
  BuilderOptions shared = options;
  shared.decode_threshold = std::numeric_limits<std::int32_t>::max();  // no order of sequences
  if (shared.workspace == nullptr) shared.workspace = std::make_shared<AttentionWorkspace>();
  for (std::int32_t level = 0; level < num_levels; ++level) {
    builders_.push_back(backend.make_builder(context, cross_config(config), shared));
  }
  causal_builder_ = backend.make_builder(context, config, shared);
  batches_.resize(builders_.size());
  metadata_.reserve(builders_.size());
  if (num_levels == 1) return;
  merge_ = std::make_unique<Merge>(Merge{detail::merge_kernel(*context, {.dtype = config.dtype})});
  const std::size_t rows =
      detail::checked_mul(to_size(limits_.max_num_batched_tokens), to_size(config.num_heads),
                          "rows of a level's output");
  level_output_ = context->allocate(detail::checked_mul(rows * to_size(config.output_head_size()),
                                                        element_size_bytes(config.dtype),
                                                        "bytes of a level's output"));
  level_lse_ = context->allocate(rows * sizeof(float));
  merged_lse_ = context->allocate(rows * sizeof(float));
}

MultiLevelCascadeAttentionWrapper::MultiLevelCascadeAttentionWrapper(
    MultiLevelCascadeAttentionWrapper&&) noexcept = default;
MultiLevelCascadeAttentionWrapper& MultiLevelCascadeAttentionWrapper::operator=(
    MultiLevelCascadeAttentionWrapper&&) noexcept = default;
MultiLevelCascadeAttentionWrapper::~MultiLevelCascadeAttentionWrapper() = default;

void MultiLevelCascadeAttentionWrapper::plan(cl_command_queue queue,
                                             std::span<const CascadeLevel> levels) {
  metadata_.clear();
  throw_invalid_if(levels.size() != batches_.size(), "levels: {} given, legal: {} (num_levels)",
                   levels.size(), batches_.size());
  for (std::size_t i = 0; i < levels.size(); ++i) {
    at_level(i, [&] {
      throw_invalid_if(levels[i].causal && i + 1 < levels.size(),
                       "causal is true, legal: false; the last level may be causal");
      batches_[i].set_pages(levels[i], config_.block_size);
      throw_invalid_if(batches_[i].num_tokens() != batches_[0].num_tokens(),
                       "qo_indptr ends at {}, legal: {} as in level 0", batches_[i].num_tokens(),
                       batches_[0].num_tokens());
    });
  }
  plan_batches(queue);
}

void MultiLevelCascadeAttentionWrapper::plan_batches(cl_command_queue queue) {
  metadata_.clear();
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    at_level(i, [&] {
      AttentionMetadataBuilder& builder = batches_[i].causal() ? *causal_builder_ : *builders_[i];
      metadata_.push_back(&builder.build(queue, batches_[i].batch()));
    });
  }
}

const AttentionImpl& MultiLevelCascadeAttentionWrapper::layer_of(const CascadeImpl& impl,
                                                                 std::size_t level) const {
  if (level + 1 < batches_.size()) return *impl.inner_;
  return batches_[level].causal() ? *impl.last_causal_ : *impl.last_;
}

void MultiLevelCascadeAttentionWrapper::run(cl_command_queue queue, const CascadeImpl& impl,
                                            const AttentionTensors& tensors, const KVCache& cache,
                                            Event* event,
                                            std::vector<LaunchRecord>* launches) const {
  throw_invalid_if(metadata_.size() != batches_.size(),  // refused levels leave nothing to run by
                   "run: {} of {} levels are planned, legal: run() after plan()", metadata_.size(),
                   batches_.size());
  if (launches != nullptr) launches->clear();
  AttentionTensors merged = tensors;
  if (metadata_.size() > 1 && merged.lse == nullptr) merged.lse = merged_lse_.handle();
  const auto tensors_of = [&](std::size_t level) -> AttentionTensors {
    if (level == 0) return {.query = tensors.query, .output = merged.output, .lse = merged.lse};
    return {.query = tensors.query, .output = {level_output_.handle()}, .lse = level_lse_.handle()};
  };
  for (std::size_t i = 0; i < metadata_.size(); ++i)  // before the first one writes the output
    layer_of(impl, i).check_forward(queue, tensors_of(i), cache, *metadata_[i]);
  std::vector<LaunchRecord> of_level;
  for (std::size_t i = 0; i < metadata_.size(); ++i) {
    layer_of(impl, i).forward_checked(
        queue, tensors_of(i), cache, *metadata_[i],
        {.event = event, .launches = launches == nullptr ? nullptr : &of_level});
    if (launches != nullptr) std::ranges::move(of_level, back_inserter(*launches));
    if (i > 0) merge_level(queue, merged, event, launches);
  }
}

/// Merges the level just run into what stands in `merged`.
void MultiLevelCascadeAttentionWrapper::merge_level(cl_command_queue queue,
                                                    const AttentionTensors& merged, Event* event,
                                                    std::vector<LaunchRecord>* launches) const {
  const std::int32_t num_tokens = batches_.front().num_tokens();
  if (num_tokens == 0) return;
  const OutputWithLse so_far{merged.output, {merged.lse}};
  Event done;
  Event* const wanted = launches == nullptr ? event : &done;
  detail::enqueue_merge(*merge_, queue,
                        {.num_tokens = num_tokens,
                         .num_heads = config_.num_heads,
                         .head_size = config_.output_head_size(),
                         .dtype = config_.dtype},
                        so_far, so_far, {{level_output_.handle()}, {level_lse_.handle()}}, wanted);
  if (launches == nullptr) return;
  if (event != nullptr) *event = done;
  LaunchRecord& record = launches->emplace_back();
  record.kernel = "merge_attn_states";
  record.tasks = num_tokens;
  record.work_groups = num_tokens;
  record.work_group_size = static_cast<std::int32_t>(merge_->group_size);
  record.event = std::move(done);
}

CascadeAttention::CascadeAttention(const std::shared_ptr<Context>& context,
                                   const AttentionBackend& backend, const AttentionConfig& config,
                                   const BuilderOptions& options)
    : levels_(context, backend, config, 2, options) {}

const AttentionMetadata& CascadeAttention::build(cl_command_queue queue,
                                                 const CommonAttentionMetadata& batch,
                                                 std::int32_t common_prefix_len) {
  levels_.metadata_.clear();
  const std::int32_t block_size = levels_.config_.block_size;
  const detail::BatchSummary summary = detail::validate_lengths(batch, block_size);
  detail::validate_limits(batch, summary, levels_.limits_);
  detail::validate_page_ids(batch, block_size, levels_.limits_.num_blocks);
  detail::validate_common_prefix(batch, block_size, common_prefix_len);
  throw_invalid_if(common_prefix_len == 0,
                   "common_prefix_len is 0, legal: multiples of block_size {}, >= {}", block_size,
                   block_size);
  detail::check_lists(batch, detail::lists_of(levels_.config_));
  if (!batch.is_causal()) throw_invalid("causal is false, legal: true in cascade attention");
  levels_.batches_[0].set_prefix(batch, block_size, common_prefix_len);
  levels_.batches_[1].set_suffix(batch, block_size, common_prefix_len);
  levels_.plan_batches(queue);
  return *levels_.metadata_.back();
}

void CascadeAttention::forward(cl_command_queue queue, const CascadeImpl& impl,
                               const AttentionTensors& tensors, const KVCache& cache, Event* event,
                               std::vector<LaunchRecord>* launches) const {
  const bool captures = detail::capturing() && levels_.metadata_.size() == 2;
  detail::AddResults add;
  if (captures) add = capture(queue, impl, cache, tensors);
  std::optional<detail::CapturePause> pause;  // the case is the whole, not its levels
  if (captures) pause.emplace();
  levels_.run(queue, impl, tensors, cache, event, launches);
  detail::add_results(add, queue);
}

/// The batch as build() was given it, from its levels: prefix and suffix of every request with
/// query tokens, nothing of the others.
std::function<void()> CascadeAttention::capture(cl_command_queue queue, const CascadeImpl& impl,
                                                const KVCache& cache,
                                                const AttentionTensors& tensors) const {
  detail::check_cache(cache);
  const CommonAttentionMetadata prefix = levels_.batches_[0].batch();
  const CommonAttentionMetadata suffix = levels_.batches_[1].batch();
  const std::int32_t prefix_len = prefix.seq_lens[0], block_size = levels_.config_.block_size;
  std::vector<std::int32_t> seq_lens, pages_at = {0}, pages;
  for (std::size_t r = 0; r < suffix.seq_lens.size(); ++r) {
    const bool idle = suffix.query_start_loc[r] == suffix.query_start_loc[r + 1];
    seq_lens.push_back(idle ? 0 : prefix_len + suffix.seq_lens[r]);
    if (!idle) {
      const std::int32_t* const row = detail::table_row(suffix, r);
      pages.insert(pages.end(), prefix.block_table.begin(),
                   prefix.block_table.begin() + prefix_len / block_size);
      pages.insert(pages.end(), row, row + detail::ceil_div(suffix.seq_lens[r], block_size));
    }
    pages_at.push_back(static_cast<std::int32_t>(pages.size()));
  }
  const detail::PagedStepView* const step = levels_.metadata_[1]->step();
  detail::BatchRecord batch = {.backend = levels_.metadata_[1]->backend(),
                               .plan = step != nullptr ? step->batch.plan : detail::PlanRecord{},
                               .query_start_loc = suffix.query_start_loc,
                               .seq_lens = seq_lens,
                               .pages_at = pages_at,
                               .pages = pages};
  for_each_list([](auto& list, const auto& own) { list = own; }, batch, suffix);
  std::vector<std::int32_t> spans(suffix.spans.begin(), suffix.spans.end());
  for (std::int32_t& position : spans) position += prefix_len;
  batch.spans = spans;
  return detail::capture_attention({.queue = queue,
                                    .config = impl.config(),
                                    .batch = batch,
                                    .causal = true,
                                    .tensors = tensors,
                                    .cache = &cache,
                                    .options = ForwardOptions{},
                                    .common_prefix_len = prefix_len});
}

}  // namespace clattn
