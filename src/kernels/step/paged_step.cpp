#include "kernels/step/paged_step.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/page_list.hpp"

namespace clattn::detail {

namespace {

constexpr std::size_t kIntBytes = sizeof(std::int32_t);
constexpr std::size_t kItemAlign = sizeof(ClaWorkItem);  // kernels read items as whole vectors

cl_int in_ints(std::size_t offset_bytes) {
  return static_cast<cl_int>(offset_bytes / kIntBytes);
}

std::size_t bytes_per_partial_row(const KernelShape& shape) {
  return to_size(shape.num_heads) * to_size(shape.value_size() + 1) * sizeof(float);
}

}  // namespace

std::int64_t most_partial_rows(const KernelShape& shape, const DeviceCapabilities& capabilities) {
  const std::size_t row = bytes_per_partial_row(shape);
  const std::size_t counters = row / to_size(shape.value_size() + 1);
  const std::size_t device = capabilities.max_alloc_bytes;
  const std::size_t room = device - std::min(device, most_workspace_overhead());
  return static_cast<std::int64_t>(std::min(kMaxWorkspaceBytes / row, room / (row + counters)));
}

/// How much of each part of a step there is.
struct PagedStep::Sizes {
  PlanCounts counts;
  std::int64_t num_slots = 0;
  std::int64_t num_pages = 0;
  std::int32_t num_lens = 0;  ///< of steps with device_seq_lens, as are splits
  bool recorded = false;
  std::int64_t num_splits() const { return num_lens > 0 ? counts.all_items() : 0; }
};

/// Byte offsets of a step's parts: slots first, then items by class, merges, their counts for
/// recorded steps, lengths and splits of steps that take their lengths from the device, page ids.
struct PagedStep::Layout {
  std::array<std::size_t, kMaxTileClasses> items{};
  std::size_t merges = 0;
  std::size_t merge_counts = 0;
  std::size_t lens = 0;
  std::size_t splits = 0;
  std::size_t pages = 0;
  std::size_t total = 0;

  explicit Layout(const Sizes& sizes, std::string_view owner = "batch") {
    const PlanCounts& counts = sizes.counts;
    total = to_size(sizes.num_slots) * sizeof(std::int64_t);
    for (std::size_t i = 0; i < items.size(); ++i) {
      items.at(i) = take(counts.num_items.at(i), sizeof(ClaWorkItem));
    }
    merges = take(counts.num_merges, sizeof(ClaMergeItem));
    merge_counts = take(sizes.recorded ? 1 : 0, sizeof(ClaMergeCounts));
    lens = take(sizes.num_lens, kIntBytes);
    splits = take(sizes.num_splits(), sizeof(ClaSplit));
    pages = take(sizes.num_pages, kIntBytes);
    // Kernels index the metadata with 32-bit ints.
    throw_invalid_if(total / kIntBytes > to_size(std::numeric_limits<cl_int>::max()),
                     "{}: its metadata needs {} bytes, legal: < 8 GiB", owner, total);
  }

 private:
  std::size_t take(std::int64_t count, std::size_t size) {
    const std::size_t at = round_up(total, kItemAlign);
    total = at + to_size(count) * size;
    return at;
  }
};

PagedStep::PagedStep(std::shared_ptr<Context> context,
                     std::shared_ptr<const AttentionKernels> kernels, const StepRules& rules,
                     BuilderOptions options, StepStyle style)
    : context_(std::move(context)),
      kernels_(std::move(kernels)),
      options_(std::move(options)),
      style_(style),
      rules_(rules),
      planner_(kernels_->planner),
      staging_(context_->runtime()) {
  if (options_.workspace == nullptr) options_.workspace = std::make_shared<AttentionWorkspace>();
  const BatchLimits& limits = options_.limits;
  validate_limits(limits);
  throw_invalid_if(options_.num_splits < 0, "num_splits is {}, legal: >= 0 (0 = planned)",
                   options_.num_splits);
  throw_invalid_if(options_.decode_threshold < 1, "decode_threshold is {}, legal: >= 1",
                   options_.decode_threshold);
  planner_.split_policy = options_.split_policy;
  planner_.num_splits = options_.num_splits;
  planner_.window = rules_.window;
  planner_.bidirectional = !may_be_causal(rules_.attn_type);
  if (options_.device_seq_lens) take_lengths_from_device();
  const bool fixed_launches = options_.device_seq_lens || options_.graph_batch_size > 0;
  planner_.fixed_groups = fixed_launches;
  if (!options_.side_by_side || fixed_launches)
    planner_.beside_ns = std::numeric_limits<double>::infinity();
  if (planner_.last_is_wide && fixed_launches) {
    planner_.last_is_wide = false;
    --planner_.num_tiles;
  }
  planner_.max_partial_rows = most_partial_rows(kernels_->shape, context_->capabilities());
  if (options_.split_policy == SplitPolicy::kDeterministic) {
    // Cuts may not depend on the batch, so the workspace must hold every request's splits at once:
    // only single queries are split, else the bound would make their cuts too long to help.
    planner_.max_split_query_len = 1;
  }
  planner_.deterministic_split_keys = fit_deterministic_split_keys(planner_, limits);
  record_.num_splits = options_.num_splits;
  record_.split_policy = options_.split_policy;
  record_.decode_threshold = options_.decode_threshold;
  record_.side_by_side = options_.side_by_side;
  if (options_.split_policy == SplitPolicy::kDeterministic || rules_.split != nullptr) {
    record_.limits = limits;  // before recorded steps narrow them
  }
  // After deterministic cuts are fixed: a recorded step has the bits of an eager one.
  if (options_.graph_batch_size != 0) limit_to_graphs();
  const auto reqs = to_size(limits.max_num_reqs);
  // What no step within the limits exceeds is allocated once, so that serving never stops to grow.
  static_cast<void>(largest_step_bytes());  // refuses limits that no step could fill
  reserve_workspace(largest_plan(limits.max_num_reqs).num_partial_rows);
  query_start_loc_.reserve(reqs + 1);
  seq_lens_.reserve(reqs);
  last_page_len_.reserve(reqs);
  pages_at_.reserve(reqs + 1);
}

/// Metadata bytes of the largest step within the limits. Page lists longer than a million entries
/// (which sharing of prefixes and tiny pages make possible) are left to growth.
std::size_t PagedStep::largest_step_bytes() const {
  constexpr std::int64_t kPages = std::int64_t{1} << 20;
  const BatchLimits& limits = options_.limits;
  const bool paged = key_source() != KeySource::kContiguous;
  const std::int64_t pages = paged
                                 ? std::int64_t{limits.max_num_reqs} *
                                       page_count(limits.max_model_len, kernels_->shape.block_size)
                                 : 0;
  // A recorded step's memory must never move.
  const bool recorded = options_.graph_batch_size > 0;
  std::string owner = fmt::format("limits: max_num_reqs {}, max_num_batched_tokens {}",
                                  limits.max_num_reqs, limits.max_num_batched_tokens);
  if (recorded && paged) {
    owner += fmt::format(", max_model_len {} in pages of block_size {}", limits.max_model_len,
                         kernels_->shape.block_size);
  }
  return Layout({.counts = largest_plan(limits.max_num_reqs),
                 .num_slots = limits.max_num_batched_tokens,
                 .num_pages = recorded ? pages : std::min(pages, kPages),
                 .num_lens = options_.device_seq_lens ? limits.max_num_reqs : 0,
                 .recorded = recorded},
                owner + ": the largest step")
      .total;
}

/// The batch with `causal` set: to the layer's default, if the batch leaves it open.
CommonAttentionMetadata PagedStep::resolve_causal(CommonAttentionMetadata batch) const {
  throw_invalid_if(planner_.bidirectional && batch.causal == true,
                   "causal is true, legal with attn_type {}: false, or not given",
                   to_string(rules_.attn_type));
  batch.causal = batch.is_causal(rules_.attn_type);
  return batch;
}

void PagedStep::set_workspace(std::shared_ptr<AttentionWorkspace> workspace) {
  throw_invalid_if(workspace == nullptr, "set_workspace_buffer: null, legal: a workspace");
  throw_unsupported_if(options_.graph_batch_size > 0,
                       "set_workspace_buffer: recorded launches are bound to the builder's own; "
                       "legal: BuilderOptions::workspace");
  options_.workspace = std::move(workspace);
}

BatchSummary PagedStep::check_lengths(const CommonAttentionMetadata& batch) const {
  const BatchSummary summary = validate_lengths(batch, kernels_->shape.block_size, key_source());
  validate_limits(batch, summary, options_.limits);
  check_graph(batch, summary.max_query_len);
  return summary;
}

/// Keeps the small arrays that metadata readers see.
void PagedStep::keep_lengths(const CommonAttentionMetadata& batch) {
  num_reqs_ = to_size(batch.num_reqs);
  const auto starts = batch.query_start_loc.first(num_reqs_ + 1);
  const auto lens = batch.seq_lens.first(num_reqs_);
  query_start_loc_.assign(starts.begin(), starts.end());
  seq_lens_.assign(lens.begin(), lens.end());
}

/// Without pages, an item's pages_at is the row of its request's first key.
void PagedStep::place_keys(const CommonAttentionMetadata& batch) {
  const auto all = batch.key_start_loc.empty() ? batch.query_start_loc : batch.key_start_loc;
  const auto starts = all.first(num_reqs_ + 1);
  pages_at_.assign(starts.begin(), starts.end());
  last_page_len_.assign(num_reqs_, 0);
  table_width_ = 0;
}

/// Decides where every request's page ids go.
void PagedStep::place_pages() {
  const std::int32_t block_size = kernels_->shape.block_size;
  last_page_len_.resize(num_reqs_);
  pages_at_.resize(num_reqs_ + 1);
  table_width_ = page_count(summary_.max_seq_len, block_size);
  std::int64_t at = 0;
  for (std::size_t r = 0; r < num_reqs_; ++r) {
    const std::int32_t count = page_count(seq_lens_[r], block_size);
    last_page_len_[r] = seq_lens_[r] - (count - (count > 0 ? 1 : 0)) * block_size;
    pages_at_[r] = static_cast<std::int32_t>(at);
    at += style_.page_table == PageTable::kCsr ? count : table_width_;
    throw_invalid_if(at > INT32_MAX, "request {}: the batch's page lists exceed {} entries", r,
                     INT32_MAX);
  }
  pages_at_[num_reqs_] = static_cast<std::int32_t>(at);
}

void PagedStep::copy_pages(const CommonAttentionMetadata& batch,
                           std::span<std::int32_t> pages) const {
  const std::int32_t block_size = kernels_->shape.block_size;
  const std::int64_t num_blocks = options_.limits.num_blocks;
  const std::int32_t last_id = last_block_id(num_blocks);
  for (std::size_t r = 0; r < num_reqs_; ++r) {
    const auto count = to_size(page_count(seq_lens_[r], block_size));
    const auto room =
        pages.subspan(to_size(pages_at_[r]), to_size(pages_at_[r + 1] - pages_at_[r]));
    if (!append_pages(room.data(), table_row(batch, r), count, last_id))
      throw_bad_page_id(batch, block_size, num_blocks, r);
    std::fill(room.begin() + static_cast<std::ptrdiff_t>(count), room.end(), 0);
  }
}

void PagedStep::copy_slots(const CommonAttentionMetadata& batch,
                           std::span<std::int64_t> slots) const {
  const std::int32_t block_size = kernels_->shape.block_size;
  const bool own = key_source() == KeySource::kOwnPages;
  if (own && batch.slot_mapping.empty()) return write_slot_mapping(batch, block_size, slots);
  validate_slots(batch, block_size, options_.limits.num_blocks, key_source());
  const std::size_t given = own ? to_size(batch.num_actual_tokens) : batch.slot_mapping.size();
  throw_invalid_if(given > slots.size(),
                   "slot_mapping holds {} elements, legal: at most {} "
                   "(graph_batch_size x decode_threshold)",
                   given, slots.size());
  std::copy_n(batch.slot_mapping.begin(), given, slots.begin());
  std::fill(slots.begin() + static_cast<std::ptrdiff_t>(given), slots.end(), kPadSlotId);
}

PlannerConfig PagedStep::planner_for(const CommonAttentionMetadata& batch,
                                     const BatchSummary& summary, bool fast) const {
  PlannerConfig planner = planner_;
  if (fast && planner.num_splits == 0 && planner.split_policy == SplitPolicy::kBalanced) {
    planner.num_splits = 1;
    planner.item_order = ItemOrder::kAsCut;
  }
  if (rules_.split != nullptr) rules_.split(kernels_->shape, batch, summary, planner);
  return planner;
}

std::size_t PagedStep::workspace_bytes(const CommonAttentionMetadata& given) const {
  const CommonAttentionMetadata batch = resolve_causal(given);
  const PlannerConfig planner = planner_for(batch, check_lengths(batch), false);
  const std::int64_t rows = AttentionPlan(planner, batch).counts().num_partial_rows;
  return to_size(rows) * bytes_per_partial_row(kernels_->shape);
}

/// Takes the workspace's buffer, grown to `rows` partial ones where it is smaller. Another builder
/// may have replaced it since; what this one's last step was bound to lives until here.
void PagedStep::reserve_workspace(std::int64_t rows) {
  // Recorded launches are bound to the buffer of the first step.
  if (options_.graph_batch_size > 0 && workspace_.buffer) return;
  AttentionWorkspace& shared = *options_.workspace;
  const std::size_t lse_row = to_size(kernels_->shape.num_heads) * sizeof(float);
  const std::size_t out_row = lse_row * to_size(kernels_->shape.value_size());
  const bool counts = std::ranges::any_of(planner_.tiles, &TileClass::merges_splits);
  const std::size_t counter_row = counts ? lse_row : 0;
  const WorkspaceBytes room = room_of(shared);
  std::size_t held = std::min(room.partial_out / out_row, room.partial_lse2 / lse_row);
  if (counter_row > 0) held = std::min(held, room.counters / counter_row);
  auto wanted = to_size(rows);
  if (wanted > held) {
    wanted = std::min(std::max(wanted, held * 3 / 2), to_size(planner_.max_partial_rows));
  }
  grow_workspace(shared, context_->runtime(),
                 {.counters = wanted * counter_row,
                  .partial_lse2 = wanted * lse_row,
                  .partial_out = wanted * out_row});
  if (workspace_.buffer.handle() != shared.buffer.handle()) workspace_ = shared;
}

/// The builder's own queue, if the plan has launches that run beside each other.
cl_command_queue PagedStep::side_queue_of(const PlanCounts& planned) {
  if (std::ranges::all_of(planned.slower, [](double times) { return times == 0; })) return nullptr;
  if (side_queue_ == nullptr) side_queue_ = context_->create_queue(QueueProfiling::kOn);
  return side_queue_;
}

void PagedStep::build(cl_command_queue queue, const CommonAttentionMetadata& given, Event* upload,
                      const BuildOptions& options, const PagedStepView* taken) {
  invalidate();
  const CommonAttentionMetadata batch = resolve_causal(given);
  summary_ = check_lengths(batch);
  if (options_.device_seq_lens) check_device_lengths(batch, options);
  validate_common_prefix(batch, kernels_->shape.block_size, options.common_prefix_len,
                         key_source());
  record_.fast_build = taken != nullptr ? taken->batch.plan.fast_build : options.fast_build;
  const PlannerConfig planner = planner_for(batch, summary_, options.fast_build);
  const bool paged = key_source() != KeySource::kContiguous;
  keep_lengths(batch);
  if (paged) {
    place_pages();
  } else {
    place_keys(batch);
  }
  const bool recorded = options_.graph_batch_size > 0;
  const std::int32_t pad_size =
      batch.graph_pad_size > 0 ? batch.graph_pad_size : options_.graph_batch_size;
  const std::int64_t num_tokens =
      recorded ? std::int64_t{pad_size} * options_.decode_threshold : batch.num_actual_tokens;
  const std::int64_t num_pages = paged ? pages_at_.back() : 0;
  const bool slots_of_queries = key_source() == KeySource::kOwnPages;
  std::int64_t num_slots = 0;
  if (paged) {
    num_slots = slots_of_queries || recorded ? num_tokens : std::ssize(batch.slot_mapping);
  }
  std::optional<AttentionPlan> own;
  if (taken == nullptr) own.emplace(planner, batch);
  const PlanCounts planned = own ? own->counts() : taken->planned;
  const PlanCounts counts = recorded ? largest_plan(pad_size) : planned;
  const cl_command_queue side_queue = side_queue_of(planned);
  const Sizes sizes{
      .counts = counts,
      .num_slots = num_slots,
      .num_pages = num_pages,
      .num_lens = options_.device_seq_lens ? (recorded ? pad_size : batch.num_reqs) : 0,
      .recorded = recorded};
  const Layout layout(sizes);
  if (staging_.buffer().size_bytes() == 0) staging_.host(queue, largest_step_bytes());
  const std::span<std::byte> bytes = staging_.host(queue, std::max<std::size_t>(layout.total, 1));

  const auto pages = part<std::int32_t>(bytes, layout.pages, num_pages);
  const auto slots = part<std::int64_t>(bytes, 0, num_slots);
  if (paged) {
    copy_pages(batch, pages);
    copy_slots(batch, slots);
  }
  PlanOutput output;
  for (std::size_t i = 0; i < counts.num_items.size(); ++i) {
    output.items.at(i) = part<ClaWorkItem>(bytes, layout.items.at(i), counts.num_items.at(i));
    output.items_at.at(i) = in_ints(layout.items.at(i));
  }
  output.merges = part<ClaMergeItem>(bytes, layout.merges, counts.num_merges);
  output.merges_at = in_ints(layout.merges);
  output.splits = part<ClaSplit>(bytes, layout.splits, sizes.num_splits());
  write_plan(own ? &*own : nullptr, taken, output);
  if (recorded) {
    clear_padding(planned, output);
    part<ClaMergeCounts>(bytes, layout.merge_counts, 1)[0] = {planned.num_merges,
                                                              planned.most_splits};
  }
  if (options_.device_seq_lens)
    std::ranges::copy(seq_lens_, part<std::int32_t>(bytes, layout.lens, batch.num_reqs).begin());
  reserve_workspace(planned.num_partial_rows);
  staging_.upload(queue, layout.total, upload);

  slots_ = slots;
  view_.kernels = kernels_.get();
  view_.planner = &planner_;
  view_.planned = planned;
  view_.side_queue = side_queue;
  view_.plan = output;
  view_.meta = staging_.buffer().handle();
  view_.counts = counts;
  view_.pages_at = in_ints(layout.pages);
  view_.merge_counts_at = recorded ? in_ints(layout.merge_counts) : -1;
  view_.splits_at = in_ints(layout.splits);
  view_.num_splits = static_cast<cl_int>(sizes.num_splits());
  view_.lens_at = in_ints(layout.lens);
  view_.num_lens = sizes.num_lens;
  view_.workspace = workspace_.buffer.handle();
  view_.workspace_layout = layout_of(workspace_);
  // A kernel argument, so it must be the same in all recorded steps.
  view_.causal = recorded ? records_causal() : *batch.causal;
  view_.window = planner_.window;
  view_.slots_of_queries = slots_of_queries;
  view_.has_slots = slots_of_queries || !batch.slot_mapping.empty();
  view_.recordable = recorded;
  view_.graph_pad_size = batch.graph_pad_size;
  if (recorded) publish(pad_size);
  view_.most_tokens = num_tokens;
  view_.most_keys = recorded ? options_.limits.max_model_len : summary_.max_seq_len;
  view_.batch = {.backend = style_.backend,
                 .plan = record_,
                 .query_start_loc = query_start_loc_,
                 .seq_lens = seq_lens_,
                 .pages_at = pages_at_,
                 .pages = pages};
  if (options_.device_seq_lens) view_.batch.device_lens = {view_.meta, layout.lens};
  view_.block_ids = {options_.limits.num_blocks, pages};
}

}  // namespace clattn::detail
