#include <algorithm>
#include <clattn/attn_utils.hpp>
#include <clattn/block_pool.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/session.hpp>
#include <new>
#include <numeric>
#include <set>
#include <utility>

#include "attention/session_pools.hpp"
#include "attention/session_recurrent.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/tree_rows.hpp"

// What a session does with drafts, and how requests become shorter.

namespace clattn {

using detail::throw_invalid_if, detail::to_size;

void Session::drop_drafts(Request& request) noexcept {
  request.drafts.clear();
  request.parents.clear();
}

void Session::check_no_drafts(std::string_view call, RequestId id) const {
  const std::size_t count = request(id).drafts.size();
  throw_invalid_if(count > 0, "{}: request {} has {} drafts, legal: none, as after accept()", call,
                   id, count);
}

void Session::check_not_in_step(std::string_view call, RequestId id) const {
  throw_invalid_if(
      std::ranges::find(advancing_, id, &Advance::id) != advancing_.end(),
      "{}: request {} is in a step that does not count yet, legal: one that is in none", call, id);
}

void Session::set_computed(Request& request, std::int32_t num_computed) {
  const std::int32_t before = std::exchange(request.num_computed, num_computed);
  const auto tokens = std::span(request.tokens).first(to_size(num_computed));
  if (config_.prefix_caching) pools_->publish(tokens, request.blocks, request.cache_salt, before);
  const StateSlots& states = request.states;
  if (config_.prefix_caching && states.state >= 0 && states.window == 0 &&
      num_computed % states_->interval() == 0)
    pools_->publish_state(tokens, request.blocks, states.state);
  pools_->release_left(request.blocks, before, num_computed);
}

void Session::truncate(RequestId id, std::int32_t length) {
  check_no_drafts("truncate", id);
  check_not_in_step("truncate", id);
  Request& request = requests_[id];
  const std::size_t most = request.tokens.size();
  throw_invalid_if(length < 1 || std::cmp_greater(length, most),
                   "truncate: request {}: length is {}, legal: 1 … {} (its tokens)", id, length,
                   most);
  request.tokens.resize(to_size(length));
  if (states_ != nullptr && length < request.num_computed) return drop_blocks(request);
  request.num_computed = std::min(request.num_computed, length);
  pools_->release_behind(request.blocks, request.num_computed);
  if (!pools_->holds_window(request.blocks, request.num_computed)) drop_blocks(request);
}

/// Checks the drafts and makes them the request's, in the step that is being made.
void Session::take_drafts(const StepRequest& wanted, Scheduled& part) const {
  throw_invalid_if(
      !wanted.draft_parents.empty() && wanted.draft_parents.size() != wanted.drafts.size(),
      "step: request {}: draft_parents holds {} elements, legal: {} (drafts), or none", wanted.id,
      wanted.draft_parents.size(), wanted.drafts.size());
  if (wanted.drafts.empty()) return;
  Request& request = *part.request;
  const auto left = std::ssize(request.tokens) - part.num_computed;
  throw_invalid_if(wanted.max_tokens < left,
                   "step: request {}: max_tokens is {}, legal with drafts: >= {} (its tokens that "
                   "are not computed)",
                   wanted.id, wanted.max_tokens, left);
  request.drafts = wanted.drafts;
  request.parents = wanted.draft_parents;
  if (request.parents.empty()) {
    request.parents.resize(request.drafts.size());
    std::iota(request.parents.begin(), request.parents.end(), -1);
  }
  for (std::size_t draft = 0; draft < request.parents.size(); ++draft)
    throw_invalid_if(
        request.parents[draft] < -1 || std::cmp_greater_equal(request.parents[draft], draft),
        "step: request {}: draft_parents[{}] is {}, legal: -1 … {}", wanted.id, draft,
        request.parents[draft], static_cast<std::int64_t>(draft) - 1);
  part.seq_len += static_cast<std::int32_t>(request.drafts.size());
  part.has_tree = !detail::is_chain(request.parents);
  check_drafts_of_states(wanted, part, left);
  if (part.has_tree) check_tree(wanted, part);
}

/// Throws unless every layer takes trees, and one has room for the request's rows.
void Session::check_tree(const StepRequest& wanted, const Scheduled& part) const {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer)
    throw_invalid_if(!layers_[layer]->config().use_trees,
                     "step: request {}: its drafts are a tree, legal in layer {} without "
                     "use_trees: a chain",
                     wanted.id, layer);
  const std::int32_t rows = part.seq_len - part.num_computed;
  throw_invalid_if(rows > kMaxTreeNodes,
                   "step: request {}: its drafts are a tree and it has {} rows, legal: at most {}",
                   wanted.id, rows, kMaxTreeNodes);
}

/// Throws unless the request has drafts of a step that counts, and the path is one of them.
void Session::check_path(const Accepted& accepted) const {
  const auto& [id, path] = accepted;
  const std::vector<std::int32_t>& parents = request(id).parents;
  throw_invalid_if(parents.empty(),
                   "accept: request {} has no drafts, legal: after a step with some", id);
  check_not_in_step("accept", id);
  std::int32_t last = -1;
  for (std::size_t i = 0; i < path.size(); ++i) {
    const bool is_draft = path[i] >= 0 && std::cmp_less(path[i], parents.size());
    throw_invalid_if(!is_draft || parents[to_size(path[i])] != last,
                     "accept: request {}: path[{}] is {}, legal: one of its {} drafts whose parent "
                     "is {}",
                     id, i, path[i], parents.size(), last);
    last = path[i];
  }
}

/// TokenMoves of a group of layers.
struct Session::Moves {
  std::vector<std::int64_t> src = {}, dst = {};
  std::vector<std::int32_t> starts = {0};
};

/// Of each path's drafts behind its request's computed tokens.
Session::Moves Session::moves_of(std::span<const Accepted> requests, std::size_t group) const {
  const std::int32_t size = pools_->block_size();
  Moves moves;
  for (const Accepted& accepted : requests) {
    const Request& request = this->request(accepted.id);
    const auto slot = [&](std::size_t draft) {
      const std::int32_t position = request.num_computed + static_cast<std::int32_t>(draft);
      return std::int64_t{request.blocks[group][to_size(position / size)]} * size + position % size;
    };
    for (std::size_t i = 0; i < accepted.path.size(); ++i) {
      if (std::cmp_equal(accepted.path[i], i)) continue;
      moves.src.push_back(slot(to_size(accepted.path[i])));
      moves.dst.push_back(slot(i));
    }
    moves.starts.push_back(static_cast<std::int32_t>(moves.src.size()));
  }
  return moves;
}

/// Throws bad_alloc only before anything has moved; whatever else it throws, and bad_alloc after
/// that, evicts all of them: keys of some layers may have moved.
void Session::move_drafts(std::span<const Accepted> requests) {
  std::vector<Moves> moves;
  moves.reserve(pools_->num_groups());
  for (std::size_t group = 0; group < pools_->num_groups(); ++group)
    moves.push_back(moves_of(requests, group));
  if (moves[0].src.empty()) return;
  bool moved = false;
  const auto evict_all = [&] {
    for (const Accepted& accepted : requests) evict(accepted.id);
  };
  try {
    for (const LayerCaches& each : caches_) {
      const Moves& of = moves[each.group];
      clattn::move_tokens(*context_, queue_, each.caches, {of.src, of.dst, of.starts});
      moved = true;
    }
  } catch (const std::bad_alloc&) {
    if (moved) evict_all();
    throw;
  } catch (...) {
    evict_all();
    throw;
  }
}

void Session::accept(std::span<const Accepted> requests) {
  std::set<RequestId> seen;
  for (const Accepted& accepted : requests) {
    throw_invalid_if(!seen.insert(accepted.id).second,
                     "accept: request {} is repeated, legal: once", accepted.id);
    check_path(accepted);
  }
  for (const auto& [id, path] : requests) {
    std::vector<std::int32_t>& tokens = requests_[id].tokens;
    tokens.reserve(tokens.size() + path.size());  // nothing below allocates once tokens have moved
  }
  move_drafts(requests);
  for (const auto& [id, path] : requests) {
    Request& request = requests_[id];
    for (const std::int32_t draft : path) request.tokens.push_back(request.drafts[to_size(draft)]);
    drop_drafts(request);
    if (states_ != nullptr) states_->accept(request, path.size());
    set_computed(request, static_cast<std::int32_t>(request.tokens.size()));
    pools_->release_behind(request.blocks, request.num_computed);
  }
}

}  // namespace clattn
