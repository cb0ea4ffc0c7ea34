#include "attention/session_recurrent.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/session_attempt.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"
#include "opencl/staged_lists.hpp"

// What a session does with recurrent layers.

namespace clattn {

using detail::throw_invalid_if, detail::to_size;

namespace {

/// Throws unless a layer's states are those of a convolution, a state or both, in this order.
void check_tensors(const KVCacheSpec& spec, std::size_t layer) {
  std::string ranks;
  for (const StateTensor& tensor : spec.states)
    ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", tensor.shape.size());
  throw_invalid_if(ranks != "2" && ranks != "3" && ranks != "2, 3",
                   "Session: recurrent: layers[{}]: states have {} dimensions, legal: 2 "
                   "(convolution), 3 (state), or both in this order",
                   layer, ranks);
  const StateTensor& conv = spec.states[0];
  throw_invalid_if(
      conv.shape.size() == 2 && conv.shape[0] < 1 + spec.num_speculative_blocks,
      "Session: recurrent: layers[{}]: a convolution has {} rows, legal: its width - 1 "
      "and num_speculative_blocks, {}",
      layer, conv.shape[0], spec.num_speculative_blocks);
}

void check_layer(const RecurrentLayers& given, std::size_t layer, std::int32_t block_size) {
  const KVCacheSpec &spec = given.layers[layer], &first = given.layers[0];
  const auto check = [&](bool wrong, std::string_view field, const auto& value, const auto& legal) {
    throw_invalid_if(wrong, "Session: recurrent: layers[{}]: {} is {}, legal: {}", layer, field,
                     value, legal);
  };
  check(spec.kind != KVCacheKind::kMamba, "kind", to_string(spec.kind), "mamba");
  static_cast<void>(spec.page_size_bytes());  // checks the other fields
  check_tensors(spec, layer);
  const MambaCacheMode mode = spec.mamba_cache_mode;
  check(mode == MambaCacheMode::kAll, "mamba_cache_mode", to_string(mode), "none, align");
  check(mode != first.mamba_cache_mode, "mamba_cache_mode", to_string(mode),
        fmt::format("{}, as of layers[0]", to_string(first.mamba_cache_mode)));
  check(spec.block_size != first.block_size, "block_size", spec.block_size,
        fmt::format("{}, as of layers[0]", first.block_size));
  check(mode == MambaCacheMode::kAlign && spec.block_size % block_size != 0, "block_size",
        spec.block_size, fmt::format("multiples of {}, the layers'", block_size));
  check(spec.num_speculative_blocks != first.num_speculative_blocks, "num_speculative_blocks",
        spec.num_speculative_blocks,
        fmt::format("{}, as of layers[0]", first.num_speculative_blocks));
}

/// The checked number of slots.
std::int32_t slots_of(const RecurrentLayers& given, std::int32_t block_size) {
  throw_invalid_if(given.layers.empty(),
                   "Session: recurrent: layers is empty, legal: one for each recurrent layer");
  for (std::size_t layer = 0; layer < given.layers.size(); ++layer)
    check_layer(given, layer, block_size);
  detail::check_between("Session: recurrent: num_slots", given.num_slots, 2, BlockPool::kMaxBlocks);
  return given.num_slots;
}

/// Pages for every slot, by layer.
std::vector<Buffer> allocate_states(const RecurrentLayers& given, const Context& context,
                                    const Queue& queue) {
  KVCacheConfig config{.num_blocks = given.num_slots};
  config.groups.resize(1);
  config.groups[0].spec = given.layers[0];
  std::vector<std::string> names;
  for (const KVCacheSpec& spec : given.layers) {
    names.push_back(fmt::format("recurrent.{}", names.size()));
    config.tensors.push_back({detail::checked_mul(to_size(given.num_slots), spec.page_size_bytes(),
                                                  "Session: bytes of a layer's states"),
                              {names.back()}});
    config.groups[0].layer_names.push_back(names.back());
    config.groups[0].layer_specs.emplace(names.back(), spec);
  }
  const std::map<std::string, Buffer> buffers = allocate_kv_cache(context, queue, config);
  std::vector<Buffer> found;
  found.reserve(names.size());
  for (const std::string& name : names) found.push_back(buffers.at(name));
  return found;
}

}  // namespace

Session::States::States(const RecurrentLayers& layers, std::int32_t block_size,
                        const Context& context, const Queue& queue)
    : pool_(slots_of(layers, block_size), block_size), staging_(context.runtime()) {
  max_drafts_ = layers.layers[0].num_speculative_blocks;
  if (layers.layers[0].mamba_cache_mode == MambaCacheMode::kAlign)
    interval_ = layers.layers[0].block_size;
  const std::vector<Buffer> buffers = allocate_states(layers, context, queue);
  for (std::size_t layer = 0; layer < buffers.size(); ++layer) {
    Views& views = views_.emplace_back();
    for (StateView& view : view_state_pages(buffers[layer], layers.layers[layer]))
      (view.tensor.shape.size() == 2 ? views.conv : views.state) = std::move(view);
  }
}

void Session::States::share(const StateSlots& slots) {
  if (slots.state < 0) return;
  pool_.share(std::span(&slots.state, 1));
  if (slots.conv != slots.state) pool_.share(std::span(&slots.conv, 1));
}

void Session::States::release(std::int32_t slot) noexcept {
  if (slot >= 0) pool_.release(std::span(&slot, 1));
}

void Session::States::release(const StateSlots& slots) noexcept {
  release(slots.state);
  if (slots.conv != slots.state) release(slots.conv);
}

void Session::States::drop_step(Request& request) noexcept {
  release(std::exchange(request.from, {}));
  for (const std::int32_t slot : request.next_states) release(slot);
  request.next_states.clear();
}

void Session::States::advance(Request& request) noexcept {
  if (request.next_states.empty()) return;  // it was evicted
  release(std::exchange(request.from, {}));
  const std::int32_t slot = request.next_states[0];
  release(std::exchange(request.states, {slot, slot, 0}));
  request.next_states.erase(request.next_states.begin());
}

void Session::States::accept(Request& request, std::size_t count) noexcept {
  if (count > 0) {
    request.states.state = std::exchange(request.next_states[count - 1], -1);
    request.states.window = static_cast<std::int32_t>(count);
  }
  drop_step(request);
}

/// Of a step, request after request.
struct Session::States::Lists {
  explicit Lists(std::span<const Scheduled> scheduled) {
    for (const Scheduled& part : scheduled) {
      columns = std::max(columns, part.next_states.size() + 1);
      from_columns = std::max(from_columns, to_size(part.from.window) + 1);
    }
    for (const Scheduled& part : scheduled) add(part);
  }
  void add(const Scheduled& part) {
    const std::size_t row = indices.size(), from_row = from.size();
    const std::int32_t tokens = part.seq_len - part.num_computed;
    const bool continues = part.from.state >= 0;
    // One token, or one and its drafts, reads a slot and writes others; else the state is copied.
    const bool by_columns = continues && std::cmp_equal(tokens, part.next_states.size());
    indices.resize(row + columns, -1);
    from.resize(from_row + from_columns, -1);
    for (std::size_t i = 0; i < part.next_states.size(); ++i)
      indices[row + i] = part.next_states[i];
    if (by_columns) indices.back() = part.from.state;
    from[from_row] = part.from.conv;
    from[from_row + to_size(part.from.window)] = part.from.state;
    accepted.push_back(by_columns ? static_cast<std::int32_t>(columns) : -1);
    conv_accepted.push_back(part.next_states.size() > 1 ? 1 : -1);
    from_accepted.push_back(part.from.window + 1);
    conv_targets.push_back(continues ? part.next_states[0] : -1);
    state_targets.push_back(continues && !by_columns ? part.next_states[0] : -1);
    initial.push_back(continues ? 1 : 0);
    max_query_len = std::max<std::int64_t>(max_query_len, tokens);
  }

  std::size_t columns = 2, from_columns = 1;
  /// [requests, columns]: slots that are written and, last, the one that is read without a copy.
  std::vector<std::int32_t> indices = {};
  std::vector<std::int32_t> from = {};  ///< [requests, from_columns]: slots that are copied
  std::vector<std::int32_t> accepted = {}, conv_accepted = {}, from_accepted = {};
  std::vector<std::int32_t> conv_targets = {}, state_targets = {};
  std::vector<std::uint8_t> initial = {};
  std::int64_t max_query_len = 0;
};

void Session::States::build(const Queue& queue, const Step& step,
                            std::span<const Scheduled> scheduled) {
  const Lists lists(scheduled);
  const auto names_any = [](const std::vector<std::int32_t>& slots) {
    return std::ranges::any_of(slots, [](std::int32_t slot) { return slot >= 0; });
  };
  copies_conv_ = names_any(lists.conv_targets);
  copies_states_ = names_any(lists.state_targets);

  const std::size_t requests = scheduled.size();
  const std::size_t words =
      step.query_start_loc.size() + lists.indices.size() + lists.from.size() + 5 * requests;
  detail::StagedLists to(staging_, queue, words * sizeof(std::int32_t) + requests);
  rule_ = {.query_start_loc = to.add(step.query_start_loc),
           .state_indices = to.add(lists.indices),
           .num_reqs = static_cast<std::int32_t>(requests),
           .state_columns = static_cast<std::int32_t>(lists.columns),
           .num_tokens = step.num_tokens(),
           .max_query_len = lists.max_query_len};
  conv_ = copy_ = rule_;
  copy_.state_indices = to.add(lists.from);
  copy_.state_columns = static_cast<std::int32_t>(lists.from_columns);
  rule_.num_accepted_tokens = to.add(lists.accepted);
  conv_.num_accepted_tokens = to.add(lists.conv_accepted);
  copy_.num_accepted_tokens = to.add(lists.from_accepted);
  conv_targets_ = to.add(lists.conv_targets);
  state_targets_ = to.add(lists.state_targets);
  rule_.has_initial_state = conv_.has_initial_state = to.add(lists.initial);
  to.upload();
}

RecurrentStep Session::States::begin(const Context& context, const Queue& queue,
                                     std::size_t layer) const {
  const Views& views = views_[layer];
  if (copies_conv_ && views.conv.buffer)
    mamba_copy_blocks(context, queue, views.conv, {}, copy_, conv_targets_);
  if (copies_states_ && views.state.buffer)
    mamba_copy_blocks(context, queue, {}, views.state, copy_, state_targets_);
  return {views.conv, conv_, views.state, rule_};
}

/// Slots 0 and 1 belong to nobody yet.
void Session::States::warm_up(const Context& context, const Queue& queue) {
  Scheduled part;
  part.from = {0, 0, 0};
  part.next_states = {1};
  build(queue, {.query_start_loc = {0, 0}}, std::span(&part, 1));
  for (std::size_t layer = 0; layer < num_layers(); ++layer) begin(context, queue, layer);
}

void Session::recur(std::int32_t index, const std::function<void(const RecurrentStep&)>& run) {
  throw_invalid_if(states_ == nullptr,
                   "recur: layer is {}, legal: none in a session without recurrent layers", index);
  detail::check_between("recur: layer", index, 0, num_recurrent_layers() - 1);
  throw_invalid_if(attended_.empty(),
                   "recur: layer is {} outside of a step, legal: after step(), each layer once",
                   index);
  throw_invalid_if(recurred_[to_size(index)],
                   "recur: layer is {} for the second time, legal: each layer once a step", index);
  run(states_->begin(*context_, queue_, to_size(index)));
  recurred_[to_size(index)] = true;
  if (!config_.explicit_commit && all_have_run()) complete_step();
}

const BlockPool* Session::state_slots() const noexcept {
  return states_ == nullptr ? nullptr : &states_->pool();
}

std::unique_ptr<Session::States> Session::make_states() {
  if (config_.recurrent == nullptr) return nullptr;
  auto states = std::make_unique<States>(*config_.recurrent, caches_[0].caches[0].block_size,
                                         *context_, queue_);
  if (states->interval() == 0) config_.prefix_caching = false;
  config_.recurrent.reset();
  return states;
}

/// The state after the tokens of blocks that find() gave.
Session::StateSlots Session::known_state(std::span<const std::int32_t> tokens,
                                         const BlockTables& known) const {
  if (states_ == nullptr || known[0].empty()) return {};
  const std::int32_t slot = pools_->find_state(tokens, known);
  return {slot, slot, 0};
}

/// The end of a part that ends with a kept state, or what it is already.
std::int32_t Session::end_at_state(const Scheduled& part) const {
  if (states_ == nullptr || !config_.prefix_caching) return part.end;
  const std::int64_t interval = states_->interval();
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(part.end, (part.num_computed / interval + 1) * interval));
}

/// Throws unless recurrent layers can take the drafts of a part with `left` tokens.
void Session::check_drafts_of_states(const StepRequest& wanted, const Scheduled& part,
                                     std::int64_t left) const {
  if (states_ == nullptr) return;
  throw_invalid_if(std::cmp_greater(wanted.drafts.size(), states_->max_drafts()),
                   "step: request {}: drafts holds {} elements, legal: at most {} "
                   "(num_speculative_blocks of the recurrent layers)",
                   wanted.id, wanted.drafts.size(), states_->max_drafts());
  throw_invalid_if(part.has_tree,
                   "step: request {}: its drafts are a tree, legal with recurrent layers: a chain",
                   wanted.id);
  throw_invalid_if(left != 1 || part.from.state < 0,
                   "step: request {}: drafts follow {} tokens that are not computed, {} are; legal "
                   "with recurrent layers: 1 of at least 2",
                   wanted.id, left, part.num_computed);
}

/// Gives the parts slots for the states that they make. Throws if fewer are free.
void Session::take_states(std::span<Scheduled> scheduled, Attempt& attempt) const {
  if (states_ == nullptr) return;
  std::size_t wanted = 0;
  for (const Scheduled& part : scheduled) wanted += 1 + part.request->drafts.size();
  const BlockPool& pool = states_->pool();
  if (wanted > to_size(pool.num_free()))
    throw Error(ErrorCode::kOutOfBlocks,
                fmt::format("Session: the step needs {} more slots of states, {} of {} are free; "
                            "evict() or finish() a request",
                            wanted, pool.num_free(), pool.num_blocks()));
  for (Scheduled& part : scheduled)
    part.next_states = attempt.allocate_states(1 + part.request->drafts.size());
}

}  // namespace clattn
