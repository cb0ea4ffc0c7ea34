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
#include <unordered_map>
#include <utility>

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

/// A step that is being made: unless it is kept, it is given up and its blocks go back.
class Session::Attempt {
 public:
  explicit Attempt(Session& session) : session_(session) {}
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;
  ~Attempt() {
    session_.pool_->release(returning_);
    if (!kept_) session_.give_up_step();
  }

  void share(std::span<const std::int32_t> blocks) {
    returning_.reserve(returning_.size() + blocks.size());
    session_.pool_->share(blocks);
    returning_.insert(returning_.end(), blocks.begin(), blocks.end());
  }
  std::vector<std::int32_t> allocate(std::size_t count) {
    const BlockPool& pool = *session_.pool_;
    if (count > to_size(pool.num_free()))
      throw Error(ErrorCode::kOutOfBlocks,
                  fmt::format("Session: the step needs {} more blocks, {} of {} are free; evict() "
                              "or finish() a request",
                              count, pool.num_free(), pool.num_blocks()));
    returning_.reserve(returning_.size() + count);
    std::vector<std::int32_t> blocks = session_.pool_->allocate(to_int(count));
    returning_.insert(returning_.end(), blocks.begin(), blocks.end());
    return blocks;
  }
  /// A block that the step no longer holds if it is kept.
  void replace(std::int32_t block) { replaced_.push_back(block); }
  void keep() noexcept {
    returning_.swap(replaced_);
    kept_ = true;
  }

 private:
  Session& session_;
  std::vector<std::int32_t> returning_, replaced_;
  bool kept_ = false;
};

Session::Session(std::shared_ptr<Context> context, Queue queue, SessionConfig config)
    : context_(not_null(std::move(context))),
      queue_(queue == nullptr ? context_->create_queue() : std::move(queue)),
      config_(std::move(config)),
      layers_(make_layers()),
      caches_(make_caches()),
      pool_(std::make_unique<BlockPool>(to_int(caches_.front().num_blocks),
                                        caches_.front().block_size)) {}

Session::Session(SessionConfig config, std::string_view device)
    : Session(Context::create(device), Queue(), std::move(config)) {}

Session::~Session() = default;

std::vector<std::unique_ptr<Attention>> Session::make_layers() {
  throw_invalid_if(config_.layers.empty(), "Session: layers is empty, legal: one for each layer");
  throw_invalid_if(config_.builder.graph_batch_size != 0,
                   "Session: builder.graph_batch_size is {}, legal: 0",
                   config_.builder.graph_batch_size);
  const auto progress = std::exchange(config_.progress, nullptr);
  std::vector<std::unique_ptr<Attention>> layers;
  const auto tell = [&] {
    if (progress) progress(to_int(layers.size()), to_int(config_.layers.size()));
  };
  tell();
  for (AttentionOptions options : config_.layers) {
    if (options.prefix.empty()) options.prefix = fmt::format("layers.{}", layers.size());
    if (options.config.custom_mask) config_.prefix_caching = false;
    layers.push_back(std::make_unique<Attention>(context_, registry_, std::move(options)));
    tell();
  }
  return layers;
}

/// Makes the group, too.
std::vector<KVCache> Session::make_caches() {
  const auto specs = get_kv_cache_spec(registry_);
  // All layers read one block table, whatever their windows: blocks that have left one are kept.
  const KVCacheSpec common = detail::whole_spec(specs.begin()->second);
  const std::size_t page_bytes = common.page_size_bytes();
  const std::size_t block_bytes = detail::checked_mul(specs.size(), page_bytes, "bytes of a block");
  const std::int64_t num_blocks = config_.num_blocks == 0
                                      ? static_cast<std::int64_t>(config_.cache_bytes / block_bytes)
                                      : config_.num_blocks;
  throw_invalid_if(num_blocks < 1 || num_blocks > BlockPool::kMaxBlocks,
                   "Session: num_blocks is {} and cache_bytes {}, legal: 1 to {} blocks; a block "
                   "takes {} bytes over all layers",
                   config_.num_blocks, config_.cache_bytes, BlockPool::kMaxBlocks, block_bytes);
  KVCacheConfig config{.num_blocks = num_blocks, .tensors = {}, .groups = {{{}, common}}};
  for (const auto& [name, spec] : specs) {
    config.groups[0].layer_names.push_back(name);
    config.tensors.push_back({to_size(num_blocks) * page_bytes, {name}});
  }
  BuilderOptions options = config_.builder;
  options.limits.num_blocks = config.num_blocks;
  groups_ = init_attn_backend(config, registry_, context_, options);
  for (const AttentionGroup& group : groups_)
    throw_invalid_if(group.backend != groups_[0].backend,
                     "Session: layers have backends {} and {}, legal: one",
                     groups_[0].backend->name(), group.backend->name());
  for (const std::unique_ptr<Attention>& layer : layers_) {
    const auto is_of = [&](const AttentionGroup& group) {
      return std::ranges::find(group.layer_names, layer->layer_name()) != group.layer_names.end();
    };
    group_of_.push_back(to_size(std::ranges::find_if(groups_, is_of) - groups_.begin()));
  }
  std::vector<KVCache> caches;
  for (const KVCache* cache :
       init_kv_cache(config, registry_, groups_, *context_, queue_, config_.layout)) {
    caches.push_back(*cache);
  }
  return caches;
}

Attention& Session::layer(std::int32_t index) const {
  detail::check_between("Session: layer", index, 0, num_layers() - 1);
  return *layers_[to_size(index)];
}

void Session::warm_up(const std::function<void(std::int32_t, std::int32_t)>& progress) {
  const detail::CapturePause pause;              // no calls of the application's
  if (next_id_ == 0 && pool_->num_blocks() > 1)  // no block holds anything yet
    copy_blocks(*context_, queue_, caches_, std::array{BlockPair{0, 1}});
  if (layers_[0]->config().use_trees) {  // a token moves onto itself
    const std::array slot{std::int64_t{0}};
    move_tokens(*context_, queue_, caches_, TokenMoves{slot, slot, std::array{0, 1}});
  }
  for (std::int32_t done = 0; done < num_layers(); ++done) {
    if (progress) progress(done, num_layers());
    layer(done).warm_up(queue_);
  }
  queue_.finish();
  if (progress) progress(num_layers(), num_layers());
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
  pool_->share(place->second.blocks);
  return next_id_++;
}

RequestId Session::add(std::span<const std::int32_t> prompt, std::uint64_t cache_salt) {
  throw_invalid_if(prompt.empty(), "Session: the prompt has 0 tokens, legal: at least 1");
  Request request{.tokens = {prompt.begin(), prompt.end()}, .cache_salt = cache_salt};
  if (config_.prefix_caching)
    request.blocks = pool_->find_prefix(prompt.first(prompt.size() - 1), cache_salt);
  request.num_computed = to_int(request.blocks.size()) * pool_->block_size();
  return insert(std::move(request));
}

RequestId Session::fork(RequestId id) {
  check_no_drafts("fork", id);
  Request copy = request(id);
  copy.blocks.resize(num_blocks_of(copy.num_computed));
  return insert(std::move(copy));
}

void Session::evict(RequestId id) {
  pool_->release(request(id).blocks);
  requests_[id].blocks.clear();
  requests_[id].num_computed = 0;
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
    part.spans = wanted.spans;
    advancing_.push_back({wanted.id, now.tokens.size(), 0});
    auto& tokens = part.request->tokens;
    tokens.insert(tokens.end(), wanted.new_tokens.begin(), wanted.new_tokens.end());
    if (!wanted.compute_every_row) share_known(part, attempt);
    part.end =
        part.num_computed + std::min(wanted.max_tokens, to_int(tokens.size()) - part.num_computed);
    advancing_.back().num_computed_after = part.seq_len = part.end;
    take_drafts(wanted, part);
  }
  return scheduled;
}

/// At the end of a block, what others have computed of the request's further tokens becomes its
/// own. The last token is left, as its query is wanted.
void Session::share_known(Scheduled& part, Attempt& attempt) const {
  const auto tokens = std::span(part.request->tokens).first(part.request->tokens.size() - 1);
  const std::size_t held = part.blocks.size();
  const std::size_t block_size = to_size(pool_->block_size());
  if (!config_.prefix_caching || to_size(part.num_computed) != held * block_size ||
      tokens.size() / block_size <= held) {
    return;
  }
  const std::vector<std::int32_t> known = pool_->find_prefix(tokens, part.request->cache_salt);
  if (known.size() <= held) return;
  attempt.share(std::span(known).subspan(held));
  part.blocks.insert(part.blocks.end(), known.begin() + to_int(held), known.end());
  part.num_computed = to_int(part.blocks.size()) * pool_->block_size();
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

/// Gives each part the blocks that it lacks, and a block of its own for one that it would write
/// into although others hold it or may find it: those pairs are to be copied before anything is
/// stored.
std::vector<BlockPair> Session::take_blocks(std::span<Scheduled> scheduled,
                                            Attempt& attempt) const {
  const std::int32_t block_size = pool_->block_size();
  std::unordered_map<std::int32_t, std::int32_t> leaving;  // holders that get a copy, by block
  std::vector<std::int32_t*> replaced;
  std::size_t missing = 0;
  for (Scheduled& part : scheduled) {
    missing += num_blocks_of(part.seq_len) - part.blocks.size();
    if (part.num_computed % block_size == 0) continue;
    std::int32_t& block = part.blocks[to_size(part.num_computed / block_size)];
    if (pool_->reference_count(block) - leaving[block] == 1 && !pool_->is_published(block))
      continue;
    ++leaving[block];
    attempt.replace(block);
    replaced.push_back(&block);
  }
  const std::vector<std::int32_t> fresh = attempt.allocate(missing + replaced.size());
  auto next = fresh.begin();
  std::vector<BlockPair> copies;
  for (std::int32_t* block : replaced) {
    copies.push_back({*block, *next});
    *block = *next++;
  }
  for (Scheduled& part : scheduled) {
    while (part.blocks.size() < num_blocks_of(part.seq_len)) part.blocks.push_back(*next++);
  }
  return copies;
}

const Step& Session::step(std::span<const StepRequest> requests) {
  give_up_step();
  Attempt attempt(*this);
  std::vector<Scheduled> scheduled = schedule(requests, attempt);
  list_rows(scheduled);
  const std::vector<BlockPair> copies = take_blocks(scheduled, attempt);
  build(scheduled);
  copy_blocks(*context_, queue_, caches_, copies);
  attended_.assign(layers_.size(), false);
  for (Scheduled& part : scheduled) part.request->blocks.swap(part.blocks);  // nothing throws now
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
  if (!attention.shares_kv_cache()) {
    throw_invalid_if(tensors.key.buffer == nullptr || tensors.value.buffer == nullptr,
                     "attend: layer {}: {} is null, legal: the step's rows", index,
                     tensors.key.buffer == nullptr ? "key" : "value");
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
  if (!config_.explicit_commit && std::ranges::find(attended_, false) == attended_.end())
    complete_step();
}

void Session::commit() {
  throw_invalid_if(!config_.explicit_commit,
                   "commit: explicit_commit is false, legal: a session made with it");
  const auto left = std::ranges::count(attended_, false);
  throw_invalid_if(attended_.empty() || left > 0,
                   "commit: {} of {} layers have been attended, legal: all of them, once a step",
                   std::ssize(attended_) - left, layers_.size());
  complete_step();
}

void Session::complete_step() {
  for (const Advance& entry : advancing_)
    set_computed(requests_[entry.id], entry.num_computed_after);
  advancing_.clear();
  attended_.clear();
}

/// Takes back what the current step, if there is one, gave to its requests.
void Session::give_up_step() {
  for (const Advance& entry : advancing_) {
    Request& request = requests_[entry.id];
    request.tokens.resize(entry.num_tokens_before);
    drop_drafts(request);
    release_behind(request, request.num_computed);
  }
  advancing_.clear();
  attended_.clear();
}

}  // namespace clattn
