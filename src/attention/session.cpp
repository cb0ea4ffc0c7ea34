#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <clattn/cache_ops.hpp>
#include <clattn/session.hpp>
#include <concepts>
#include <functional>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {

namespace {

using detail::throw_invalid_if;

using detail::ceil_div;
using detail::to_size;

std::int32_t to_int(std::integral auto count) {
  return static_cast<std::int32_t>(count);
}

/// All layers read one block table, whatever their windows: blocks behind a window are kept.
KVCacheSpec common_spec(const LayerRegistry& layers) {
  KVCacheSpec spec = get_kv_cache_spec(layers).begin()->second;
  spec.kind = KVCacheKind::kFull;
  spec.sliding_window = spec.attention_chunk_size = 0;
  return spec;
}

}  // namespace

/// A step on trial: unless it is kept, its blocks and tokens go back.
class Session::Attempt {
 public:
  explicit Attempt(BlockPool& pool) : pool_(pool) {}
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;
  ~Attempt() {
    pool_.release(blocks_);
    for (const auto& [tokens, count] : grown_) tokens->resize(count);
  }

  void append(std::vector<std::int32_t>& tokens, std::span<const std::int32_t> fresh) {
    grown_.emplace_back(&tokens, tokens.size());
    tokens.insert(tokens.end(), fresh.begin(), fresh.end());
  }
  void share(std::span<const std::int32_t> blocks) {
    blocks_.insert(blocks_.end(), blocks.begin(), blocks.end());
    pool_.share(blocks);
  }
  std::vector<std::int32_t> allocate(std::int32_t count) {
    std::vector<std::int32_t> blocks = pool_.allocate(count);
    blocks_.insert(blocks_.end(), blocks.begin(), blocks.end());
    return blocks;
  }
  /// From now on what goes back are the blocks that `copies` replace.
  void keep(std::span<const BlockPair> copies) {
    grown_.clear();
    blocks_.clear();
    for (const BlockPair& copy : copies) blocks_.push_back(to_int(copy.source));
  }

 private:
  BlockPool& pool_;
  std::vector<std::int32_t> blocks_;
  std::vector<std::pair<std::vector<std::int32_t>*, std::size_t>> grown_;
};

Session::Session(std::shared_ptr<Context> context, Queue queue, SessionConfig config)
    : context_(std::move(context)),
      queue_(queue == nullptr ? context_->create_queue() : std::move(queue)),
      config_(std::move(config)),
      layers_(make_layers()),
      spec_(common_spec(registry_)),
      pool_(count_blocks(), spec_.block_size) {
  KVCacheConfig caches{.num_blocks = pool_.num_blocks(), .tensors = {}, .groups = {{{}, spec_}}};
  for (const auto& [name, spec] : get_kv_cache_spec(registry_)) {
    caches.groups[0].layer_names.push_back(name);
    caches.tensors.push_back({to_size(caches.num_blocks) * spec_.page_size_bytes(), {name}});
  }
  BuilderOptions options = config_.builder;
  options.limits.num_blocks = pool_.num_blocks();
  groups_ = init_attn_backend(caches, registry_, context_, options);
  for (const KVCache* cache :
       init_kv_cache(caches, registry_, groups_, *context_, queue_, choose_layout())) {
    caches_.push_back(*cache);
  }
}

Session::Session(SessionConfig config, std::string_view device)
    : Session(Context::create(device), Queue(), std::move(config)) {}

Session::~Session() = default;

std::vector<std::unique_ptr<Attention>> Session::make_layers() {
  throw_invalid_if(config_.layers.empty(), "Session: layers is empty, legal: one for each layer");
  throw_invalid_if(config_.builder.graph_batch_size != 0,
                   "Session: builder.graph_batch_size is {}, legal: 0",
                   config_.builder.graph_batch_size);
  std::vector<std::unique_ptr<Attention>> layers;
  for (AttentionOptions options : config_.layers) {
    if (options.prefix.empty()) options.prefix = fmt::format("layers.{}", layers.size());
    layers.push_back(std::make_unique<Attention>(context_, registry_, std::move(options)));
  }
  return layers;
}

std::int32_t Session::count_blocks() const {
  const std::size_t block_bytes = detail::checked_mul(get_kv_cache_spec(registry_).size(),
                                                      spec_.page_size_bytes(), "bytes of a block");
  const auto fitting = static_cast<std::int64_t>(config_.cache_bytes / block_bytes);
  const std::int64_t blocks = config_.num_blocks == 0 ? fitting : config_.num_blocks;
  throw_invalid_if(blocks < 1 || blocks > INT32_MAX,
                   "Session: num_blocks is {} and cache_bytes {}, legal: 1 to {} blocks, of {} "
                   "bytes in all layers",
                   config_.num_blocks, config_.cache_bytes, INT32_MAX, block_bytes);
  return static_cast<std::int32_t>(blocks);
}

/// What is wanted, else the fastest one that all layers' kernels take.
std::optional<KVCacheLayout> Session::choose_layout() const {
  const std::optional<KVCacheLayout> wanted =
      config_.layout ? config_.layout : get_kv_cache_layout();
  if (wanted) return wanted;
  const AttentionBackend& backend = *groups_[0].backend;
  const KVCacheLayout fastest = backend.preferred_layout(context_->capabilities());
  const bool fits = std::ranges::all_of(registry_.layers(), [&](const Attention* layer) {
    return backend.validate_layout(fastest, layer->config(), &context_->capabilities()).empty();
  });
  return fits ? std::optional(fastest) : std::nullopt;
}

Attention& Session::layer(std::int32_t index) const {
  throw_invalid_if(index < 0 || index >= num_layers(), "Session: layer is {}, legal: 0 … {}", index,
                   num_layers() - 1);
  return *layers_[to_size(index)];
}

void Session::warm_up(const std::function<void(std::int32_t, std::int32_t)>& progress) {
  if (pool_.num_free() > 1) {
    const std::vector<std::int32_t> blocks = pool_.allocate(2);
    pool_.release(blocks);
    copy_blocks(*context_, queue_, caches_, std::array{BlockPair{blocks[0], blocks[1]}});
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

RequestId Session::add(std::span<const std::int32_t> prompt) {
  throw_invalid_if(prompt.empty(), "Session: the prompt has 0 tokens, legal: at least 1");
  Request& request = requests_[next_id_];
  request.tokens.assign(prompt.begin(), prompt.end());
  if (config_.prefix_caching) request.blocks = pool_.find_prefix(prompt.first(prompt.size() - 1));
  request.num_computed = to_int(request.blocks.size()) * pool_.block_size();
  pool_.share(request.blocks);
  return next_id_++;
}

RequestId Session::fork(RequestId id) {
  Request copy = request(id);
  copy.blocks.resize(to_size(ceil_div(copy.num_computed, pool_.block_size())));
  pool_.share(copy.blocks);
  requests_.emplace(next_id_, std::move(copy));
  return next_id_++;
}

void Session::leave_step(RequestId id) {
  std::erase_if(advancing_, [&](const auto& entry) { return entry.first == id; });
}

void Session::evict(RequestId id) {
  pool_.release(request(id).blocks);
  leave_step(id);
  requests_[id].blocks.clear();
  requests_[id].num_computed = 0;
}

void Session::finish(RequestId id) {
  evict(id);
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
    throw_invalid_if(wanted.new_tokens.empty() && now.num_computed == to_int(now.tokens.size()),
                     "step: request {}: new_tokens is empty, legal: at least 1, since its {} "
                     "tokens are computed",
                     wanted.id, now.tokens.size());
    Scheduled& part = scheduled.emplace_back();
    part = {wanted.id, &requests_[wanted.id], now.blocks, now.num_computed, 0};
    attempt.append(part.request->tokens, wanted.new_tokens);
    share_known(part, attempt);
    part.num_new = std::min(wanted.max_tokens, to_int(now.tokens.size()) - part.num_computed);
  }
  return scheduled;
}

/// At the end of a block, what others have computed of the request's further tokens becomes its
/// own. The last token is left, as its query is wanted.
void Session::share_known(Scheduled& part, Attempt& attempt) const {
  const auto tokens = std::span(part.request->tokens).first(part.request->tokens.size() - 1);
  const std::size_t held = part.blocks.size();
  const std::size_t block_size = to_size(pool_.block_size());
  if (!config_.prefix_caching || to_size(part.num_computed) != held * block_size ||
      tokens.size() / block_size <= held) {
    return;
  }
  const std::vector<std::int32_t> known = pool_.find_prefix(tokens);
  if (known.size() <= held) return;
  attempt.share(std::span(known).subspan(held));
  part.blocks.insert(part.blocks.end(), known.begin() + to_int(held), known.end());
  part.num_computed = to_int(part.blocks.size()) * pool_.block_size();
}

/// Gives each part the blocks that it lacks, and a block of its own for one that is partly full
/// and shared: those pairs are to be copied before anything is stored.
std::vector<BlockPair> Session::take_blocks(std::span<Scheduled> scheduled,
                                            Attempt& attempt) const {
  const std::int32_t block_size = pool_.block_size();
  const auto end_of = [&](const Scheduled& part) {
    return to_size(ceil_div(part.num_computed + part.num_new, block_size));
  };
  std::unordered_map<std::int32_t, std::int32_t> leaving;  // holders that get a copy, by block
  std::vector<std::int32_t*> replaced;
  std::size_t missing = 0;
  for (Scheduled& part : scheduled) {
    missing += std::max(end_of(part), part.blocks.size()) - part.blocks.size();
    if (part.num_computed % block_size == 0) continue;
    std::int32_t& block = part.blocks[to_size(part.num_computed / block_size)];
    if (pool_.reference_count(block) - leaving[block] == 1) continue;
    ++leaving[block];
    replaced.push_back(&block);
  }
  const std::vector<std::int32_t> fresh = attempt.allocate(to_int(missing + replaced.size()));
  auto next = fresh.begin();
  std::vector<BlockPair> copies;
  for (std::int32_t* block : replaced) {
    copies.push_back({*block, *next});
    *block = *next++;
  }
  for (Scheduled& part : scheduled) {
    while (part.blocks.size() < end_of(part)) part.blocks.push_back(*next++);
  }
  return copies;
}

/// Fills in step_.
void Session::build(std::span<const Scheduled> scheduled) {
  step_ = {.query_start_loc = {0}};
  std::size_t columns = 0;
  for (const Scheduled& part : scheduled) columns = std::max(columns, part.blocks.size());
  std::vector<std::int32_t> block_table(scheduled.size() * columns);
  auto row = block_table.begin();
  for (const Scheduled& part : scheduled) {
    const std::int32_t end = part.num_computed + part.num_new;
    for (std::int32_t i = part.num_computed; i < end; ++i) {
      step_.token_ids.push_back(part.request->tokens[to_size(i)]);
      step_.positions.push_back(i);
    }
    step_.query_start_loc.push_back(step_.num_tokens());
    step_.seq_lens.push_back(end);
    std::ranges::copy(part.blocks, row);
    row += to_int(columns);
  }
  step_.metadata = &groups_[0].builder->build(
      queue_, CommonAttentionMetadata::of(step_.query_start_loc, step_.seq_lens, block_table));
}

const Step& Session::step(std::span<const StepRequest> requests) {
  advancing_.clear();
  attended_.clear();
  Attempt attempt(pool_);
  std::vector<Scheduled> scheduled = schedule(requests, attempt);
  const std::vector<BlockPair> copies = take_blocks(scheduled, attempt);
  build(scheduled);
  copy_blocks(*context_, queue_, caches_, copies);
  for (Scheduled& part : scheduled) {
    part.request->blocks = std::move(part.blocks);
    part.request->num_computed = part.num_computed;
    advancing_.emplace_back(part.id, part.num_new);
  }
  attempt.keep(copies);
  attended_.assign(layers_.size(), false);
  return step_;
}

void Session::attend(std::int32_t index, const AttentionTensors& tensors,
                     const ForwardOptions& options) {
  Attention& attention = layer(index);
  throw_invalid_if(attended_.empty(),
                   "attend: layer is {} outside of a step, legal: after step(), each layer once",
                   index);
  throw_invalid_if(attended_[to_size(index)],
                   "attend: layer is {} for the second time, legal: each layer once a step", index);
  attention.forward(queue_, tensors, step_.metadata, options);
  attended_[to_size(index)] = true;
  if (std::ranges::find(attended_, false) == attended_.end()) complete_step();
}

void Session::complete_step() {
  for (const auto& [id, num_new] : advancing_) {
    Request& request = requests_[id];
    request.num_computed += num_new;
    if (!config_.prefix_caching) continue;
    pool_.publish(std::span(request.tokens).first(to_size(request.num_computed)), request.blocks);
  }
  advancing_.clear();
  attended_.clear();
}

}  // namespace clattn
