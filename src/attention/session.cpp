#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <clattn/attn_utils.hpp>
#include <clattn/block_pool.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/session.hpp>
#include <concepts>
#include <set>
#include <utility>

#include "attention/session_attempt.hpp"
#include "attention/session_prepare.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"
#include "capture/capture_pause.hpp"
#include "kv_cache/spec.hpp"
#include "metadata/validate.hpp"

namespace clattn {

namespace {

using detail::throw_invalid_if, detail::to_size;

std::int32_t to_int(std::integral auto count) {
  return static_cast<std::int32_t>(count);
}

std::shared_ptr<Context> not_null(std::shared_ptr<Context> context) {
  throw_invalid_if(context == nullptr, "Session: context is null, legal: Context::create()");
  return context;
}

}  // namespace

Session::Session(std::shared_ptr<Context> context, Queue queue, SessionConfig config)
    : context_(not_null(std::move(context))),
      queue_(queue == nullptr ? context_->create_queue() : std::move(queue)),
      config_(std::move(config)),
      layers_(make_layers()),
      caches_(make_caches()),
      states_(make_states()),
      pools_(make_pools()),
      prepared_(std::make_unique<Prepared>(*context_, layers_.size())),
      recurred_(states_ == nullptr ? 0 : states_->num_layers()) {}

Session::Session(SessionConfig config, std::string_view device)
    : Session(Context::create(device), Queue(), std::move(config)) {}

Session::~Session() = default;

Attention& Session::layer(std::int32_t index) const {
  detail::check_between("Session: layer", index, 0, num_layers() - 1);
  return *layers_[to_size(index)];
}

const Session::Request& Session::request(RequestId id) const {
  const auto found = requests_.find(id);
  throw_invalid_if(found == requests_.end(),
                   "Session: request {} does not exist, legal: one of add() or fork() that has not "
                   "finished",
                   id);
  return found->second;
}

/// The request holds its blocks from here on, which are held or found already.
RequestId Session::insert(Request request) {
  const auto place = requests_.emplace_hint(requests_.end(), next_id_, std::move(request));
  pools_->share(place->second.blocks);
  if (states_ != nullptr) states_->share(place->second.states);
  return next_id_++;
}

RequestId Session::add(std::span<const std::int32_t> prompt, std::uint64_t cache_salt) {
  throw_invalid_if(prompt.empty(), "Session: the prompt has 0 tokens, legal: at least 1");
  Request request{.tokens = {prompt.begin(), prompt.end()}, .cache_salt = cache_salt};
  request.blocks.resize(pools_->num_groups());
  if (config_.prefix_caching)
    request.blocks = pools_->find(prompt.first(prompt.size() - 1), cache_salt, request.blocks);
  request.states = known_state(prompt, request.blocks);
  request.num_computed = to_int(request.blocks[0].size()) * pools_->block_size();
  return insert(std::move(request));
}

RequestId Session::fork(RequestId id) {
  check_no_drafts("fork", id);
  Request copy = request(id);
  for (auto& blocks : copy.blocks) blocks.resize(pools_->num_blocks_of(copy.num_computed));
  copy.from = {};
  copy.next_states.clear();
  return insert(std::move(copy));
}

/// Its tokens are to be computed again.
void Session::drop_blocks(Request& request) {
  pools_->release_behind(request.blocks, 0);
  request.num_computed = 0;
  if (states_ == nullptr) return;
  states_->release(std::exchange(request.states, {}));
  states_->drop_step(request);
}

void Session::evict(RequestId id) {
  static_cast<void>(request(id));  // throws unless there is one
  drop_blocks(requests_[id]);
  drop_drafts(requests_[id]);
  for (Advance& entry : advancing_)
    if (entry.id == id) entry.num_computed_after = 0;
}

void Session::finish(RequestId id) {
  evict(id);
  std::erase_if(advancing_, [&](const Advance& entry) { return entry.id == id; });
  requests_.erase(id);
}

std::vector<Session::Scheduled> Session::schedule(std::span<const StepRequest> requests,
                                                  Attempt& attempt) {
  std::set<RequestId> seen;
  std::vector<Scheduled> scheduled;
  for (const StepRequest& wanted : requests) {
    throw_invalid_if(!seen.insert(wanted.id).second, "step: request {} is repeated, legal: once",
                     wanted.id);
    throw_invalid_if(wanted.max_tokens < 1, "step: request {}: max_tokens is {}, legal: >= 1",
                     wanted.id, wanted.max_tokens);
    const Request& now = request(wanted.id);
    check_no_drafts("step", wanted.id);
    throw_invalid_if(wanted.new_tokens.empty() && now.num_computed == to_int(now.tokens.size()),
                     "step: request {}: new_tokens is empty, legal: at least 1, since its {} "
                     "tokens are computed",
                     wanted.id, now.tokens.size());
    Scheduled& part = scheduled.emplace_back();
    check_spans(wanted);
    part = {&requests_[wanted.id], now.blocks, now.num_computed};
    part.from = now.states;
    part.spans = wanted.spans;
    advancing_.push_back({wanted.id, now.tokens.size(), 0});
    auto& tokens = part.request->tokens;
    tokens.insert(tokens.end(), wanted.new_tokens.begin(), wanted.new_tokens.end());
    if (!wanted.compute_every_row) share_known(part, attempt);
    if (states_ != nullptr) attempt.share(part.from);
    part.end =
        part.num_computed + std::min(wanted.max_tokens, to_int(tokens.size()) - part.num_computed);
    part.end = end_at_state(part);
    advancing_.back().num_computed_after = part.seq_len = part.end;
    take_drafts(wanted, part);
  }
  return scheduled;
}

/// At the end of a block, what others have computed of the request's further tokens becomes its
/// own. The last token is left, as its query is wanted.
void Session::share_known(Scheduled& part, Attempt& attempt) const {
  const auto tokens = std::span(part.request->tokens).first(part.request->tokens.size() - 1);
  const auto held = to_int(part.blocks[0].size()) * pools_->block_size();
  if (!config_.prefix_caching || part.num_computed != held) return;
  const BlockTables known = pools_->find(tokens, part.request->cache_salt, part.blocks);
  if (known[0].empty()) return;
  attempt.share(known);
  for (std::size_t group = 0; group < known.size(); ++group) {
    part.blocks[group].resize(known[group].size(), -1);
    for (std::size_t block = 0; block < known[group].size(); ++block)
      if (known[group][block] >= 0) part.blocks[group][block] = known[group][block];
  }
  part.num_computed = to_int(known[0].size()) * pools_->block_size();
  part.from = known_state(tokens, known);
}

/// Fills in step_ but for its metadata, and checks it: a step that is too large is refused before
/// blocks that can still be found are taken for it.
void Session::list_rows(std::span<const Scheduled> scheduled) {
  step_ = {.query_start_loc = {0}};
  for (const Scheduled& part : scheduled) {
    for (std::int32_t i = part.num_computed; i < part.end; ++i) {
      step_.token_ids.push_back(part.request->tokens[to_size(i)]);
      step_.positions.push_back(i);
    }
    const std::size_t first = step_.positions.size();  // of the drafts
    for (std::size_t draft = 0; draft < part.request->drafts.size(); ++draft) {
      const std::int32_t parent = part.request->parents[draft];
      step_.token_ids.push_back(part.request->drafts[draft]);
      step_.positions.push_back(parent < 0 ? part.end
                                           : step_.positions[first + to_size(parent)] + 1);
    }
    step_.query_start_loc.push_back(step_.num_tokens());
    step_.seq_lens.push_back(part.seq_len);
    step_.num_drafts.push_back(part.seq_len - part.end);
  }
  const auto batch = CommonAttentionMetadata::of(step_.query_start_loc, step_.seq_lens, {});
  detail::validate_limits(batch, {.max_seq_len = detail::validate_sequences(batch)},
                          config_.builder.limits);
}

namespace {

void check_lack(std::size_t num_blocks, const BlockPool& pool, std::size_t group) {
  if (num_blocks <= to_size(pool.num_free())) return;
  throw Error(ErrorCode::kOutOfBlocks,
              fmt::format("Session: the step needs {} more blocks{}, {} of {} are free; evict() or "
                          "finish() a request",
                          num_blocks, group == 0 ? "" : " of layers with a window", pool.num_free(),
                          pool.num_blocks()));
}

}  // namespace

const Step& Session::step(std::span<const StepRequest> requests) {
  give_up_step();
  Attempt attempt(*this);
  std::vector<Scheduled> scheduled = schedule(requests, attempt);
  list_rows(scheduled);
  std::vector<Lack> lacks;  // of all groups before any block that can still be found is taken
  lacks.reserve(pools_->num_groups());
  for (std::size_t group = 0; group < pools_->num_groups(); ++group) {
    lacks.push_back(count_lack(scheduled, group));
    check_lack(lacks.back().num_blocks, pools_->pool(group), group);
  }
  take_states(scheduled, attempt);
  std::vector<std::vector<BlockPair>> copies;
  copies.reserve(lacks.size());
  for (std::size_t group = 0; group < lacks.size(); ++group)
    copies.push_back(take_blocks(scheduled, group, lacks[group], attempt));
  build(scheduled);
  for (std::size_t group = 0; group < copies.size(); ++group) copy_blocks(group, copies[group]);
  attended_.assign(layers_.size(), false);
  prepared_->begin_step();
  recurred_.assign(recurred_.size(), false);
  for (Scheduled& part : scheduled) {  // nothing throws now
    part.request->blocks.swap(part.blocks);
    part.request->from = part.from;
    part.request->next_states.swap(part.next_states);
  }
  attempt.keep();
  return step_;
}

/// Whether the layer may be attended now.
void Session::check_turn(std::int32_t index, const AttentionTensors& tensors) const {
  const Attention& attention = layer(index);
  throw_invalid_if(attended_.empty(),
                   "attend: layer is {} outside of a step, legal: after step(), each layer once",
                   index);
  throw_invalid_if(attended_[to_size(index)],
                   "attend: layer is {} for the second time, legal: each layer once a step", index);
  const bool key = tensors.key.buffer != nullptr, value = tensors.value.buffer != nullptr;
  const bool is_prepared = prepared_->has(to_size(index));
  throw_invalid_if(
      is_prepared && (key || value),
      "attend: layer {}: {} is given, legal after prepare_qkv(), which stored it: none", index,
      key ? "key" : "value");
  if (!attention.shares_kv_cache()) {
    throw_invalid_if(!is_prepared && !(key && value),
                     "attend: layer {}: {} is null, legal: the step's rows", index,
                     key ? "value" : "key");
    return;
  }
  const std::string& target = attention.options().kv_sharing_target_layer_name;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    throw_invalid_if(layers_[i]->layer_name() == target && !attended_[i],
                     "attend: layer is {}, which shares the cache of layer {}, legal: after that "
                     "one",
                     index, i);
  }
}

void Session::attend(std::int32_t index, const AttentionTensors& tensors,
                     const ForwardOptions& options) {
  check_turn(index, tensors);
  layer(index).forward(queue_, tensors, metadata_[group_of_[to_size(index)]], options);
  attended_[to_size(index)] = true;
  if (!config_.explicit_commit && all_have_run()) complete_step();
}

bool Session::all_have_run() const {
  return std::ranges::count(attended_, false) == 0 && std::ranges::count(recurred_, false) == 0;
}

void Session::commit() {
  throw_invalid_if(!config_.explicit_commit,
                   "commit: explicit_commit is false, legal: a session made with it");
  const auto left = std::ranges::count(attended_, false);
  throw_invalid_if(attended_.empty() || left > 0,
                   "commit: {} of {} layers have been attended, legal: all of them, once a step",
                   std::ssize(attended_) - left, layers_.size());
  const auto missing = std::ranges::count(recurred_, false);
  throw_invalid_if(missing > 0,
                   "commit: {} of {} recurrent layers have run, legal: all of them, once a step",
                   std::ssize(recurred_) - missing, recurred_.size());
  complete_step();
}

void Session::complete_step() {
  for (const Advance& entry : advancing_) {
    Request& request = requests_[entry.id];
    if (states_ != nullptr) states_->advance(request);
    set_computed(request, entry.num_computed_after);
  }
  advancing_.clear();
  attended_.clear();
}

/// Takes back what the current step, if there is one, gave to its requests.
void Session::give_up_step() {
  for (const Advance& entry : advancing_) {
    Request& request = requests_[entry.id];
    request.tokens.resize(entry.num_tokens_before);
    drop_drafts(request);
    pools_->release_behind(request.blocks, request.num_computed);
    if (states_ != nullptr) states_->drop_step(request);
  }
  advancing_.clear();
  attended_.clear();
}

}  // namespace clattn
