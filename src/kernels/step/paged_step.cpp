// A step: where its keys are, its plan, and the upload that holds both.
#include <algorithm>
#include <optional>
#include <string_view>

#include "base/checked.hpp"
#include "kernels/step/paged_builder.hpp"
#include "metadata/page_list.hpp"

namespace clattn::detail {

namespace {

constexpr std::size_t kIntBytes = sizeof(std::int32_t);
constexpr std::size_t kItemAlign = sizeof(ClaWorkItem);  // kernels read items as whole vectors

/// Takes what another step of the same lengths has cut.
void copy_plan(const PagedStepView& taken, const PlanOutput& output) {
  for (std::size_t i = 0; i < output.items.size(); ++i) {
    std::copy_n(taken.plan.items.at(i).begin(), taken.planned.num_items.at(i),
                output.items.at(i).begin());
  }
  // What is listed says where it stands.
  throw_unsupported_if(
      taken.planned.num_listed > 0 && (taken.plan.listed_at != output.listed_at ||
                                       taken.plan.gap_rows_at != output.gap_rows_at),
      "attn_metadata: its lists stand elsewhere, legal: metadata of a builder with "
      "this one's graph_batch_size, decode_threshold and limits");
  std::copy_n(taken.plan.listed.begin(), taken.planned.num_listed, output.listed.begin());
  std::copy_n(taken.plan.gap_rows.begin(), taken.planned.num_gap_ints, output.gap_rows.begin());
  if (!output.sources.empty())
    std::copy_n(taken.plan.sources.begin(), taken.planned.num_listed, output.sources.begin());
  std::copy_n(taken.plan.merges.begin(), taken.planned.num_merges, output.merges.begin());
}

/// Items that the plan did not need: empty ones, whose work-groups do nothing.
void clear_padding(const PlanCounts& planned, const PlanOutput& output) {
  for (std::size_t i = 0; i < output.items.size(); ++i) {
    const auto used = to_size(planned.num_items.at(i));
    for (ClaWorkItem& item : output.items.at(i).subspan(used)) {
      item = {};
      item.partial_row = -1;
    }
  }
  if (!output.splits.empty()) {
    for (ClaSplit& split : output.splits.subspan(to_size(planned.all_items()))) split = {};
  }
  if (!output.sources.empty()) {
    ClaRowSource padding{};
    padding.request = -1;
    std::ranges::fill(output.sources.subspan(to_size(planned.num_listed)), padding);
  }
}

}  // namespace

/// The parts of a step in their order in memory.
struct PagedBuilder::Layout {
  template <typename T>
  struct Part {
    std::size_t at = 0;  ///< bytes
    std::int64_t count = 0;
    cl_int in_ints() const { return static_cast<cl_int>(at / kIntBytes); }
    std::span<T> in(std::span<std::byte> bytes) const { return part<T>(bytes, at, count); }
  };

  PlanCounts counts;
  std::int64_t num_tokens = 0;  ///< of the batch; of recorded steps those of their pad size
  Part<std::int64_t> slots;
  std::array<Part<ClaWorkItem>, kMaxTileClasses> items;
  Part<ClaMergeItem> merges;
  Part<ClaListedRow> listed;
  Part<std::int32_t> gap_rows;
  Part<ClaMergeCounts> merge_counts;  ///< of recorded steps
  Part<std::int32_t> lens;            ///< of steps that take lengths or lists from the device
  Part<ClaSplit> splits;              ///< of steps that take their lengths from there
  Part<ClaQueryBounds> bounds;        ///< of steps that take their query lengths from there, too
  Part<std::int32_t> starts;          ///< of these, or of steps that take lists from there
  Part<ClaListedRequest> requests;    ///< of steps whose rows are listed there
  Part<ClaRowSource> sources;         ///< of the same
  Part<std::int32_t> tree_bits;       ///< of the same, if they have trees
  Part<std::int32_t> pages;
  std::size_t total = 0;  ///< bytes

  /// Sets what the parts for the device's lengths and lists hold at most; `counts` and `num_tokens`
  /// must be set.
  void set_device_parts(const BuilderOptions& options, bool lists, std::int64_t num_reqs,
                        std::int64_t tree_words) {
    if (options.device_seq_lens || lists) lens.count = num_reqs;
    if (options.device_seq_lens) splits.count = counts.all_items();
    if (options.device_query_lens) bounds.count = num_reqs;
    if (options.device_query_lens || lists) starts.count = num_reqs + 1;
    if (!lists) return;
    requests.count = num_reqs;
    sources.count = counts.num_listed;
    tree_bits.count = num_tokens * tree_words;
  }
  bool recorded() const { return merge_counts.count > 0; }
  /// Sets the sizes that follow from `counts` and places all parts; errors call the step `owner`.
  void place(std::string_view owner) {
    const auto put = [&]<typename T>(Part<T>& placed, std::int64_t count) {
      placed = {round_up(total, kItemAlign), count};
      total = placed.at + to_size(count) * sizeof(T);
    };
    put(slots, slots.count);
    for (std::size_t i = 0; i < items.size(); ++i) put(items.at(i), counts.num_items.at(i));
    put(merges, counts.num_merges);
    put(listed, counts.num_listed);
    put(gap_rows, counts.num_gap_ints);
    put(merge_counts, merge_counts.count);
    put(lens, lens.count);
    put(splits, splits.count);
    put(bounds, bounds.count);
    put(starts, starts.count);
    put(requests, requests.count);
    put(sources, sources.count);
    put(tree_bits, tree_bits.count);
    put(pages, pages.count);
    // Kernels index the metadata with 32-bit ints.
    throw_invalid_if(total / kIntBytes > to_size(std::numeric_limits<cl_int>::max()),
                     "{}: its metadata needs {} bytes, legal: < 8 GiB", owner, total);
  }
  /// Where the plan is written.
  PlanOutput plan_in(std::span<std::byte> bytes) const {
    PlanOutput plan;
    plan.merges = merges.in(bytes);
    plan.merges_at = merges.in_ints();
    plan.splits = splits.in(bytes);
    plan.listed = listed.in(bytes);
    plan.listed_at = static_cast<std::int32_t>(listed.at / sizeof(ClaListedRow));
    plan.gap_rows = gap_rows.in(bytes);
    plan.gap_rows_at = gap_rows.in_ints();
    plan.sources = sources.in(bytes);
    for (std::size_t i = 0; i < items.size(); ++i) {
      plan.items.at(i) = items.at(i).in(bytes);
      plan.items_at.at(i) = items.at(i).in_ints();
    }
    return plan;
  }
};

/// The most nodes of a tree of the batch.
std::int32_t most_tree_nodes(const CommonAttentionMetadata& batch) {
  std::int32_t most = 0;
  for (std::size_t r = 1; r < batch.tree_start_loc.size(); ++r)
    most = std::max(most, batch.tree_start_loc[r] - batch.tree_start_loc[r - 1]);
  return most;
}

/// Metadata bytes of the largest step within the limits. Page lists longer than a million entries
/// (which sharing of prefixes and tiny pages make possible) are left to growth.
std::size_t PagedBuilder::largest_step_bytes() const {
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
  Layout layout;
  layout.counts = largest_plan(options_.graph_batch_size);
  layout.num_tokens = layout.slots.count = limits.max_num_batched_tokens;
  layout.pages.count = recorded ? pages : std::min(pages, kPages);
  layout.set_device_parts(options_, lists_on_device(), limits.max_num_reqs,
                          tree_words(kMaxTreeNodes));
  layout.merge_counts.count = recorded ? 1 : 0;
  layout.place(owner + ": the largest step");
  return layout.total;
}

/// Keeps the small arrays that metadata readers see, and decides where every request's keys are:
/// its page ids or, without pages, the row of its first key.
void PagedBuilder::keep_lengths(const CommonAttentionMetadata& batch) {
  num_reqs_ = to_size(batch.num_reqs);
  const auto keep = [&](std::span<const std::int32_t> starts, std::vector<std::int32_t>& kept) {
    kept.assign(starts.begin(), starts.begin() + batch.num_reqs + 1);
  };
  keep(batch.query_start_loc, query_start_loc_);
  seq_lens_.assign(batch.seq_lens.begin(), batch.seq_lens.begin() + batch.num_reqs);
  for_each_list([](auto& kept, const auto& list) { kept.assign(list.begin(), list.end()); }, lists_,
                batch);
  last_page_len_.assign(num_reqs_, 0);
  table_width_ = 0;
  if (key_source() == KeySource::kContiguous)
    return keep(batch.key_start_loc.empty() ? batch.query_start_loc : batch.key_start_loc,
                pages_at_);
  const std::int32_t block_size = kernels_->shape.block_size;
  table_width_ = page_count(summary_.max_seq_len, block_size);
  pages_at_.resize(num_reqs_ + 1);
  std::int64_t at = 0;
  for (std::size_t r = 0; r < num_reqs_; ++r) {
    const std::int32_t count = page_count(seq_lens_[r], block_size);
    last_page_len_[r] = seq_lens_[r] - (count - (count > 0 ? 1 : 0)) * block_size;
    pages_at_[r] = static_cast<std::int32_t>(at);
    at += rules_.page_table == PageTable::kCsr ? count : table_width_;
    throw_invalid_if(at > INT32_MAX, "request {}: the batch's page lists exceed {} entries", r,
                     INT32_MAX);
  }
  pages_at_[num_reqs_] = static_cast<std::int32_t>(at);
}

void PagedBuilder::copy_pages(const CommonAttentionMetadata& batch,
                              std::span<std::int32_t> pages) const {
  const std::int32_t block_size = kernels_->shape.block_size;
  const std::int64_t num_blocks = options_.limits.num_blocks;
  const std::int32_t last_id = last_block_id(num_blocks);
  // Lengths on the device may be below their bounds, and then earlier keys are seen.
  const bool skips = key_source() == KeySource::kOwnPages && !options_.device_seq_lens;
  for (std::size_t r = 0; r < num_reqs_; ++r) {
    const auto count = to_size(page_count(seq_lens_[r], block_size));
    const auto request = static_cast<std::int32_t>(r);
    UnseenPages unseen;
    if (skips) unseen = unseen_pages(planner_, batch, request);
    if (unseen.gap_begin >= unseen.gap_end) unseen.gap_begin = unseen.gap_end = count;
    const auto room =
        pages.subspan(to_size(pages_at_[r]), to_size(pages_at_[r + 1] - pages_at_[r]));
    std::ranges::fill(room.first(unseen.first), 0);
    std::ranges::fill(room.subspan(unseen.gap_begin, unseen.gap_end - unseen.gap_begin), 0);
    const std::pair<std::size_t, std::size_t> seen[] = {{unseen.first, unseen.gap_begin},
                                                        {unseen.gap_end, count}};
    for (const auto& [first, end] : seen) {
      if (!append_pages(room.data() + first, table_row(batch, r) + first, end - first, last_id))
        throw_bad_page_id(batch, block_size, num_blocks, r, first);
    }
    std::ranges::fill(room.subspan(count), 0);
  }
}

void PagedBuilder::copy_slots(const CommonAttentionMetadata& batch,
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

/// The builder's own queue, if the plan has launches that run at the same time.
cl_command_queue PagedBuilder::side_queue_of(const PlanCounts& planned) {
  if (std::ranges::all_of(planned.slower, [](double times) { return times == 0; })) return nullptr;
  if (side_queue_ == nullptr) side_queue_ = context_->create_queue(QueueProfiling::kOn);
  return side_queue_;
}

/// The layout for the batch, whose lengths are kept, and its plan.
PagedBuilder::Layout PagedBuilder::layout_of_step(const CommonAttentionMetadata& batch) const {
  const bool paged = key_source() != KeySource::kContiguous;
  Layout layout;
  layout.counts = view_.planned;
  layout.num_tokens = batch.num_actual_tokens;
  layout.pages.count = paged ? pages_at_.back() : 0;
  std::int32_t num_reqs = batch.num_reqs, most_nodes = kMaxTreeNodes;
  const bool recorded = options_.graph_batch_size > 0;
  if (recorded) {
    const std::int32_t pad_size = pad_size_of(batch);
    const GraphSize size = graph_size(pad_size);
    layout.counts = largest_plan(pad_size);
    layout.num_tokens = size.num_tokens;
    layout.merge_counts.count = 1;
    num_reqs = size.num_reqs;
  } else {
    most_nodes = most_tree_nodes(batch);
  }
  layout.set_device_parts(options_, lists_on_device(), num_reqs, tree_words(most_nodes));
  if (paged) {
    layout.slots.count = recorded || key_source() == KeySource::kOwnPages
                             ? layout.num_tokens
                             : std::ssize(batch.slot_mapping);
  }
  layout.place("batch");
  return layout;
}

void PagedBuilder::build_step(cl_command_queue queue, const CommonAttentionMetadata& given,
                              Event* upload, const BuildOptions& options,
                              const PagedStepView* taken) {
  CommonAttentionMetadata batch = resolve_causal(given);
  summary_ = check_batch(batch, options);
  summary_.max_query_len = std::max(summary_.max_query_len, planner_.most_query_len);
  record_.fast_build = taken != nullptr ? taken->batch.plan.fast_build : options.fast_build;
  const PlannerConfig planner = planner_for(batch, summary_, options.fast_build);
  keep_lengths(batch);
  std::optional<AttentionPlan> own;
  if (taken == nullptr) own.emplace(planner, batch);
  view_.planned = own ? own->counts() : taken->planned;
  view_.side_queue = side_queue_of(view_.planned);
  const Layout layout = layout_of_step(batch);
  if (staging_.buffer().size_bytes() == 0) staging_.host(queue, largest_step_bytes());
  const std::span<std::byte> bytes = staging_.host(queue, std::max<std::size_t>(layout.total, 1));

  const auto pages = layout.pages.in(bytes);
  const auto slots = layout.slots.in(bytes);
  slots_ = slots;
  if (key_source() != KeySource::kContiguous) {
    copy_pages(batch, pages);
    copy_slots(batch, slots);
  }
  throw_invalid_if(view_.planned.num_partial_rows > layout.counts.num_partial_rows,
                   "batch: it needs {} partial rows, legal: {}", view_.planned.num_partial_rows,
                   layout.counts.num_partial_rows);
  view_.plan = layout.plan_in(bytes);
  if (own) {
    own->write(pages_at_, view_.plan);
  } else {
    copy_plan(*taken, view_.plan);
  }
  if (layout.recorded()) {
    clear_padding(view_.planned, view_.plan);
    layout.merge_counts.in(bytes)[0] = {view_.planned.num_merges, view_.planned.most_splits};
  }
  put_lengths(batch, layout, bytes);
  if (lists_on_device()) put_lists(batch, layout, bytes);
  reserve_workspace(view_.planned.num_partial_rows);
  staging_.upload(queue, layout.total, upload);
  bind_view(queue, batch, layout);
  view_.batch.pages = pages;
  view_.block_ids = {options_.limits.num_blocks, pages};
  view_.kernels = kernels_.get();  // from now on it can be run
}

/// Lengths and rows of requests, which are the host's until the device has some, and what the
/// device checks its own against.
void PagedBuilder::put_lengths(const CommonAttentionMetadata& batch, const Layout& layout,
                               std::span<std::byte> bytes) const {
  const auto lens = layout.lens.in(bytes), starts = layout.starts.in(bytes);
  if (!lens.empty()) std::ranges::copy(seq_lens_, lens.begin());
  if (starts.empty()) return;
  std::ranges::fill(starts, batch.num_actual_tokens);
  std::ranges::copy(query_start_loc_, starts.begin());
  const auto bounds = layout.bounds.in(bytes);
  if (bounds.empty()) return;
  std::ranges::fill(bounds, ClaQueryBounds{});
  QueryBounds walk(batch, planner_.most_query_len);
  for (std::size_t r = 0; r < num_reqs_; ++r) {
    bounds[r] = walk.next();
    bounds[r].pages_at = pages_at_[r];
  }
}

/// What attention/list_rows.cl lists the rows of requests by, besides their lengths.
void PagedBuilder::put_lists(const CommonAttentionMetadata& batch, const Layout& layout,
                             std::span<std::byte> bytes) const {
  const auto requests = layout.requests.in(bytes);
  const auto tree_bits = layout.tree_bits.in(bytes);
  std::ranges::fill(requests, ClaListedRequest{});
  std::ranges::fill(tree_bits, 0);
  const std::size_t words =
      tree_bits.size() / to_size(std::max<std::int64_t>(layout.num_tokens, 1));
  QueryBounds walk(batch, planner_.most_query_len);
  for (std::size_t r = 0; r < num_reqs_; ++r) {
    const auto request = static_cast<std::int32_t>(r);
    const RequestRows own = rows_of(planner_.lists, batch, request);
    const RequestRows widest = widest_rows_of(planner_.lists, batch, request, walk.next().most);
    requests[r] = {static_cast<const ClaRequestRows&>(widest), own.direction, own.tree_nodes};
    const std::int32_t first_node = own.tree.size() - own.query_len;
    for (std::int32_t i = 0; !own.tree.empty() && i < own.query_len; ++i) {
      const std::size_t row = to_size(query_start_loc_[r] + i);
      set_tree_bits(own.tree, first_node + i, own.tree.begin,
                    tree_bits.subspan(row * words, words));
    }
  }
}

/// Where the uploaded parts are, and what a launch asks of the batch.
void PagedBuilder::bind_view(cl_command_queue queue, const CommonAttentionMetadata& batch,
                             const Layout& layout) {
  view_.queue = queue;
  view_.planner = &planner_;
  view_.meta = staging_.buffer().handle();
  view_.counts = layout.counts;
  view_.pages_at = layout.pages.in_ints();
  view_.merge_counts_at = layout.recorded() ? layout.merge_counts.in_ints() : -1;
  view_.splits_at = layout.splits.in_ints();
  view_.num_splits = static_cast<cl_int>(layout.splits.count);
  view_.lens_at = layout.lens.in_ints();
  view_.num_lens = static_cast<cl_int>(layout.lens.count);
  view_.bounds_at = options_.device_query_lens ? layout.bounds.in_ints() : -1;
  view_.starts_at = layout.starts.in_ints();
  view_.num_slots = static_cast<cl_int>(layout.slots.count);
  view_.requests_at = layout.requests.in_ints();
  view_.sources_at = layout.sources.in_ints();
  view_.tree_bits_at = layout.tree_bits.in_ints();
  view_.tree_words =
      static_cast<cl_int>(layout.tree_bits.count / std::max<std::int64_t>(layout.num_tokens, 1));
  view_.workspace = workspace_.buffer.handle();
  view_.workspace_layout = layout_of(workspace_);
  // A kernel argument, so it must be the same in all recorded steps.
  view_.causal = layout.recorded() ? records_causal() : *batch.causal;
  view_.window = planner_.window;
  view_.lists = rules_.lists;
  view_.slots_of_queries = key_source() == KeySource::kOwnPages;
  view_.has_slots = view_.slots_of_queries || !batch.slot_mapping.empty();
  view_.recordable = layout.recorded();
  view_.graph_pad_size = batch.graph_pad_size;
  if (layout.recorded()) publish(pad_size_of(batch));
  view_.most_tokens = layout.num_tokens;
  view_.most_keys = layout.recorded() ? options_.limits.max_model_len : summary_.max_seq_len;
  view_.batch = {.backend = rules_.backend,
                 .plan = record_,
                 .query_start_loc = query_start_loc_,
                 .seq_lens = seq_lens_,
                 .pages_at = pages_at_,
                 .pages = {}};
  for_each_list([](auto& list, const auto& kept) { list = kept; }, view_.batch, lists_);
  if (options_.device_seq_lens) view_.batch.device_lens = {view_.meta, layout.lens.at};
  if (options_.device_query_lens) view_.batch.device_starts = {view_.meta, layout.starts.at};
  if (options_.device_directions || options_.device_trees) {
    view_.batch.device_lists = {.buffer = view_.meta,
                                .requests_at = layout.requests.at,
                                .tree_bits_at = layout.tree_bits.at,
                                .tree_words = view_.tree_words,
                                .directions = options_.device_directions,
                                .trees = options_.device_trees};
  }
}

/// Writes for the graphs of this memory which of them may run, and how much of it.
void PagedBuilder::publish(std::int32_t pad_size) {
  static_assert(std::tuple_size_v<decltype(PreparedStep::num_used)> == kMaxTileClasses + 1);
  if (view_.prepared == nullptr) view_.prepared = std::make_shared<PreparedStep>();
  view_.prepared->batch_size = pad_size;
  for (std::size_t i = 0; i < view_.planned.num_items.size(); ++i)
    view_.prepared->num_used.at(i) = view_.planned.num_items.at(i);
  view_.prepared->num_used.at(kMaxTileClasses) = view_.planned.num_merges;
}

}  // namespace clattn::detail
