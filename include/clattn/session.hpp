#pragma once

#include <array>
#include <clattn/attention.hpp>
#include <clattn/context.hpp>
#include <clattn/error.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/layer.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace CLATTN_API clattn {

struct AttentionGroup;   // attn_utils.hpp
struct BlockPair;        // cache_ops.hpp
struct PrepareQKV;       // prepare_qkv.hpp
struct RecurrentLayers;  // session_states.hpp
struct RecurrentStep;    // session_states.hpp
class BlockPool;         // block_pool.hpp
struct WindowBlocks;     // block_pool.hpp

/// What a Session is made from.
struct SessionConfig {
  /// One for each layer of the model, of one block size and type of queries; all else may differ.
  /// Layers without a prefix are named "layers.N". Where some layers see all keys, those with a
  /// window or chunks give up the blocks that they no longer reach: the caches of these layers hold
  /// what builder.limits.max_num_reqs requests need in a step of max_num_batched_tokens, if that is
  /// less than num_blocks. Layers with spans that windows do not clip keep all.
  std::vector<AttentionOptions> layers = {};
  std::int64_t num_blocks = 0;  ///< of each layer's cache; 0 = as many as cache_bytes hold
  std::size_t cache_bytes = 0;  ///< of the caches of all layers; not read if num_blocks is given
  /// Requests that begin alike share full blocks, see add(). Layers with custom_mask share none:
  /// their keys depend on masks, which the session does not see.
  bool prefix_caching = true;
  /// nullopt: default_kv_cache_layout().
  std::optional<KVCacheLayout> layout = std::nullopt;
  /// Called while the layers are made, which compiles their kernels: before the first and after
  /// each, with the layers done so far and their number. Not kept; an exception that it throws ends
  /// the construction.
  std::function<void(std::int32_t done, std::int32_t total)> progress = {};
  /// Steps count when the caller says so, by commit(), not with the last attend(). For models that
  /// run on several sessions in lockstep: commit all of them after the last layer of the last one.
  bool explicit_commit = false;
  /// Limits of a step (num_blocks is the session's own), splits; graph_batch_size must be 0.
  BuilderOptions builder = {};
  /// A hybrid model's other layers, which keep a state of a request; null = none.
  std::shared_ptr<const RecurrentLayers> recurrent = nullptr;
};

/// A request of a session; no number is used twice.
using RequestId = std::int64_t;

/// A request's part of a step.
struct StepRequest {
  RequestId id = 0;                           ///< of add() or fork()
  std::vector<std::int32_t> new_tokens = {};  ///< token ids that join the request's
  /// Compute at most this many of the tokens that are not computed yet, the first ones; the others
  /// are for later steps (a chunk of a prompt).
  std::int32_t max_tokens = std::numeric_limits<std::int32_t>::max();
  /// Also those that published blocks hold: a row for each token, as a verifier of drafts and
  /// whoever wants every token's logits need. What add() found is computed already.
  bool compute_every_row = false;
  /// Tokens of the request that see one another, such as images: first position and one past the
  /// last of each span (CommonAttentionMetadata::spans). Only for sessions with layers of
  /// use_spans; the others of its layers ignore them. They are of this step alone, so every step
  /// that computes tokens of a span names it, and the token ids and the salt of a request have to
  /// determine its spans where prefixes are shared.
  std::vector<std::array<std::int32_t, 2>> spans = {};
  /// Token ids of guesses at what follows the request's tokens, for steps that max_tokens lets
  /// compute all of these. They are computed with them but join them only by accept(), which must
  /// come before the request's next step.
  std::vector<std::int32_t> drafts = {};
  /// [drafts]: the number of the earlier draft that each one follows, from 0; -1 = the request's
  /// last token. Empty = a chain, each follows the one before it. Other drafts are a tree: it needs
  /// layers that all have use_trees, and at most kMaxTreeNodes rows of the request in the step.
  std::vector<std::int32_t> draft_parents = {};
};

/// Which drafts of a request's last step join its tokens.
struct Accepted {
  RequestId id = 0;  ///< of add() or fork()
  /// Numbers of drafts: the first follows the request's last token, each further one the one before
  /// it; empty = none is right.
  std::vector<std::int32_t> path = {};
};

/// The rows of a step, request after request in the caller's order.
struct Step {
  std::vector<std::int32_t> token_ids = {};  ///< [rows]: whose query, key and value to compute
  /// [rows], in their request, for rotary embeddings; a draft stands one behind what it follows.
  std::vector<std::int32_t> positions = {};
  std::vector<std::int32_t> query_start_loc = {};  ///< [requests + 1]: a request's first row
  std::vector<std::int32_t> seq_lens = {};    ///< [requests]: computed after the step, with drafts
  std::vector<std::int32_t> num_drafts = {};  ///< [requests]: how many of its last rows are drafts
  const AttentionMetadata* metadata = nullptr;  ///< what attend(0, …) uses, for reports

  /// Rows of the step.
  std::int32_t num_tokens() const { return static_cast<std::int32_t>(token_ids.size()); }
  /// The row of the last token of request `i` of the step, whose logits give its next token. The
  /// rows of its drafts follow.
  std::int32_t last_row(std::size_t i) const {
    return query_start_loc.at(i + 1) - 1 - num_drafts.at(i);
  }
};

/// From a model's shape to decoded tokens: owns the KV caches, the layers (layer.hpp), the metadata
/// builder and a BlockPool, and keeps each request's tokens and blocks. The rest of a model is the
/// application's, and so is the choice of which requests run next; an engine with a block table of
/// its own uses the layers directly. For one thread at a time.
///
///     Session session({.layers = std::vector(32, layer), .cache_bytes = 4ULL << 30});
///     const RequestId id = session.add(prompt);
///     const Step& step = session.step({{id}});               // the prompt
///     for (int l = 0; l < 32; ++l) session.attend(l, {.query = q, .key = k, .value = v, ...});
///     session.step({{id, {sampled}}});                       // and so on, then
///     session.finish(id);
class Session {
 public:
  /// Allocates the caches (blocks until they are zeroed) and compiles what the layers need. An
  /// empty `queue` stands for one of the session's own; queues are in-order. Throws
  /// kInvalidArgument for a null context, no layers, no size of the cache, a cache without room for
  /// a block, and what Attention, init_attn_backend() and init_kv_cache() throw.
  Session(std::shared_ptr<Context> context, Queue queue, SessionConfig config);
  /// On the device that select_device(device) chooses; empty = the best one.
  explicit Session(SessionConfig config, std::string_view device = {});
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// Never null.
  const std::shared_ptr<Context>& context() const noexcept { return context_; }
  /// Where attend() enqueues; in order.
  const Queue& queue() const noexcept { return queue_; }
  /// Who holds which blocks, and how many are free, for layers that keep all tokens of a request.
  const BlockPool& blocks() const noexcept;
  /// The same for layers that give up what their window has left, for each window.
  std::vector<WindowBlocks> window_blocks() const;
  /// Who holds which states of recurrent layers, and how many are free; null without such layers.
  /// Between steps a request holds one state, after drafts were accepted two.
  const BlockPool* state_slots() const noexcept;
  /// Layers of the model, but for recurrent ones.
  std::int32_t num_layers() const noexcept { return static_cast<std::int32_t>(layers_.size()); }
  /// Recurrent layers, which have numbers of their own.
  std::int32_t num_recurrent_layers() const noexcept {
    return static_cast<std::int32_t>(recurred_.size());
  }
  /// A layer, to load scales, for reports, or to read its cache.
  Attention& layer(std::int32_t index) const;

  /// Launches every kernel once over no token (Attention::warm_up()), so that no request waits for
  /// a compiler, and, before the first request and with two blocks or more, the copy of blocks that
  /// fork() leads to, and of states; where layers have use_trees, also what accept() moves tokens
  /// by; not operations of recurrent layers. Changes nothing that requests or blocks() say. Calls
  /// `progress` with the layers done so far and their number; blocks.
  void warm_up(const std::function<void(std::int32_t done, std::int32_t total)>& progress = {});

  /// Adds a request with the token ids of its prompt, at least one. From now on it holds the
  /// published blocks with the prompt's beginning: num_computed_tokens() says how many tokens need
  /// not be computed. The last token is always computed. Blocks are shared between requests of one
  /// salt (vLLM's cache_salt): token ids and salt have to determine what the layers are given. Use
  /// one salt for each image, LoRA adapter or whatever else changes keys and values. Throws
  /// kInvalidArgument for an empty prompt. If this or fork() throws, there is no new request.
  RequestId add(std::span<const std::int32_t> prompt, std::uint64_t cache_salt = 0);
  /// The same.
  RequestId add(std::initializer_list<std::int32_t> prompt, std::uint64_t cache_salt = 0) {
    return add(std::span(prompt.begin(), prompt.size()), cache_salt);
  }
  /// Another request with the same tokens, those of the current step included, the same salt and,
  /// so far, the same blocks (parallel sampling, beams). Where one of the two would write into a
  /// block that is published, or shared and partly full, its next step copies that block first.
  /// Throws kInvalidArgument for a request with drafts.
  RequestId fork(RequestId id);
  /// Gives up the request's blocks but keeps its tokens: a later step computes them again, save
  /// what is still found in published blocks (preemption). Its rows in the current step no longer
  /// count, and its drafts are dropped.
  void evict(RequestId id);
  /// Ends the request. Its blocks become free; published ones can be found until they are reused.
  void finish(RequestId id);
  /// Takes the request back to its first `length` tokens (text that is rolled back) and gives up
  /// the blocks behind them. What others hold of these blocks, and what is published, stays; if the
  /// request would then write into such a block, its next step copies it first, as after fork().
  /// With recurrent layers it gives up all blocks if computed tokens go: its next step goes on from
  /// the last kept state that is found, or from the start. That step needs a new token if all that
  /// are left are computed. Throws kInvalidArgument unless length is 1 to the number of tokens, for
  /// a request with drafts, and for one in a step that does not count yet.
  void truncate(RequestId id, std::int32_t length);

  /// All token ids of the request, in a step or not, without drafts; valid until its next step(),
  /// accept() or truncate().
  std::span<const std::int32_t> tokens(RequestId id) const { return request(id).tokens; }
  /// How many of them have keys and values in the cache, without the current step's.
  std::int32_t num_computed_tokens(RequestId id) const { return request(id).num_computed; }
  /// Its row of the block table of layers that keep all tokens.
  std::span<const std::int32_t> block_table(RequestId id) const { return request(id).blocks[0]; }

  /// Begins a step: adds the new tokens, finds room for what is to be computed, uploads the step's
  /// metadata. Requests may be in any order, each once and with at least one token to compute. A
  /// request that has reached the end of a block skips further tokens that published blocks hold,
  /// unless compute_every_row; Step says which are left. Where recurrent layers keep states, it
  /// computes none behind the next state to keep (RecurrentLayers). The result is valid until the
  /// next call.
  ///
  /// A step that does not count yet, as not all of its layers have been attended or it has not been
  /// committed, is given up first, so that after whatever throws the same call begins it again.
  ///
  /// Throws kOutOfBlocks if too few blocks are free (evict() or finish() some request and try
  /// again), kInvalidArgument for unknown or repeated requests, for max_tokens below 1, for nothing
  /// to compute, for spans where no layer has use_spans, for drafts that are not as StepRequest
  /// says or that a former step left, for more than the builder's limits, and what
  /// AttentionMetadataBuilder::build() throws. Then every request has the tokens and blocks that it
  /// had before a step was begun, and there is no current step. A step that is refused, by a limit
  /// or for too few blocks, costs no published block.
  const Step& step(std::span<const StepRequest> requests);
  /// The same.
  const Step& step(std::initializer_list<StepRequest> requests) {
    return step(std::span(requests.begin(), requests.size()));
  }

  /// Free blocks that step() with these requests would take, of blocks() and of each element of
  /// window_blocks(). Changes nothing but the order in which blocks that it finds are reused.
  /// Throws as step() for single requests, and kInvalidArgument in a step that does not count yet.
  std::vector<std::int64_t> blocks_needed(std::span<const StepRequest> requests);

  /// prepare_qkv() of a layer's rows in the current step: norm, rotation by the step's positions
  /// and the write into the layer's cache; its attend() then takes query_out, and no key and value.
  /// The session sets num_tokens, num_heads, num_kv_heads, head_size, dtype, cache and slots.
  /// Positions are the step's unless `call` has some, as it must with mrope_section. A layer that
  /// shares a cache has queries alone. Asynchronous on queue(). Throws kInvalidArgument outside of
  /// a step, for a layer that has been prepared or attended in this one, for a cache or slots in
  /// `call`, and what prepare_qkv() throws.
  void prepare_qkv(std::int32_t layer, const PrepareQKV& call);

  /// Attention::forward() of a layer over the current step: stores the rows' keys and values in the
  /// cache, then attends; tensors are [rows, heads, head_size]. Call it once for each layer, in any
  /// order but for a layer that shares a cache, which comes after the one that stores in it. After
  /// the last one the step's tokens count as computed, and blocks that they fill are published,
  /// unless explicit_commit leaves that to commit(). Asynchronous on queue(). Throws
  /// kInvalidArgument outside of a step, for a layer that has been attended in this one or shares
  /// the cache of one that has not, for a null key or value unless the layer shares a cache or
  /// prepare_qkv() has stored them, and what forward() throws; then it has not been attended.
  void attend(std::int32_t layer, const AttentionTensors& tensors,
              const ForwardOptions& options = {});

  /// Runs a recurrent layer over the current step: `run` enqueues its operations on queue(), over
  /// the states that it is given, and keeps nothing. Call it once for each such layer, in any order
  /// with attend(). States before the step are kept until it counts, so what throws, `run`
  /// included, leaves the layer as it was. Throws kInvalidArgument outside of a step, for a layer
  /// that has already run in this one, and what copying of states throws.
  void recur(std::int32_t layer, const std::function<void(const RecurrentStep&)>& run);

  /// With explicit_commit: the step counts, as it otherwise does after its last attend(). Throws
  /// kInvalidArgument without explicit_commit and unless every layer has been attended in a step
  /// that does not count yet.
  void commit();

  /// Settles the drafts of requests' last steps, once these count: those of the paths join their
  /// requests' tokens, and their keys and values move to where they would be without the others,
  /// which are dropped; one launch moves what all requests accept in layers of one shape. What the
  /// model gives after the last draft of a path is the next step's new token. Asynchronous on
  /// queue(). Throws kInvalidArgument for unknown or repeated requests, for requests without drafts
  /// or in a step that does not count yet, and for other paths; then no request has changed. If the
  /// driver or the host's memory fails while tokens move, all requests of the call are evicted.
  void accept(std::span<const Accepted> requests);
  /// The same.
  void accept(std::initializer_list<Accepted> requests) {
    accept(std::span(requests.begin(), requests.size()));
  }
  /// The same for one request.
  void accept(RequestId id, std::span<const std::int32_t> path) {
    accept({Accepted{id, {path.begin(), path.end()}}});
  }
  /// The same for one request.
  void accept(RequestId id, std::initializer_list<std::int32_t> path) {
    accept(id, std::span(path.begin(), path.size()));
  }

 private:
  /// The blocks of a request in each group of layers, in the order of its tokens; -1 where the
  /// group holds none.
  using BlockTables = std::vector<std::vector<std::int32_t>>;
  class Pools;
  class Prepared;
  class States;
  /// Where a request's states are: slots of the pool, -1 = there is none.
  struct StateSlots {
    std::int32_t state = -1;
    std::int32_t conv = -1;   ///< of convolutions, whose window begins at row `window`
    std::int32_t window = 0;  ///< drafts that were accepted of the last step
  };
  struct Request {
    std::vector<std::int32_t> tokens = {};
    BlockTables blocks = {};
    /// Outside of a step `blocks` are those of these tokens, then of the drafts.
    std::int32_t num_computed = 0;
    std::uint64_t cache_salt = 0;
    std::vector<std::int32_t> drafts = {};   ///< of the current step or a former one
    std::vector<std::int32_t> parents = {};  ///< [drafts], those of a chain, too
    StateSlots states = {};                  ///< after the computed tokens
    StateSlots from = {};                    ///< what the current step begins with
    /// [1 + drafts]: slots of states after the current step's tokens and each of its drafts; of a
    /// step that counts only those after drafts, until accept().
    std::vector<std::int32_t> next_states = {};
  };
  /// What becomes of a request of the current step.
  struct Advance {
    RequestId id = 0;
    std::size_t num_tokens_before = 0;    ///< that it has again if the step is given up
    std::int32_t num_computed_after = 0;  ///< if all layers are attended
  };
  /// A request in a step that is being made.
  struct Scheduled {
    Request* request = nullptr;  ///< its tokens are the new ones already
    BlockTables blocks = {};
    std::int32_t num_computed = 0;
    std::int32_t end = 0;      ///< of its tokens that the step computes
    std::int32_t seq_len = 0;  ///< with the drafts, which follow
    bool has_tree = false;     ///< they are no chain
    std::span<const std::array<std::int32_t, 2>> spans = {};  ///< the caller's
    StateSlots from = {};
    std::vector<std::int32_t> next_states = {};
  };
  /// Caches of one shape, which one call copies, of layers that share blocks.
  struct LayerCaches {
    std::size_t group = 0;  ///< of pools_
    std::vector<KVCache> caches = {};
  };
  struct Lack {
    std::size_t num_blocks = 0;
    std::vector<std::int32_t*> replaced = {};  ///< entries of block tables, included in num_blocks
  };
  struct Moves;
  class Attempt;
  const Request& request(RequestId id) const;
  void check_no_drafts(std::string_view call, RequestId id) const;
  void check_not_in_step(std::string_view call, RequestId id) const;
  static void drop_drafts(Request& request) noexcept;
  void drop_blocks(Request& request);
  RequestId insert(Request request);
  std::vector<std::unique_ptr<Attention>> make_layers();
  std::vector<LayerCaches> make_caches();
  std::unique_ptr<States> make_states();
  std::unique_ptr<Pools> make_pools() const;
  std::vector<Scheduled> schedule(std::span<const StepRequest> requests, Attempt& attempt);
  void share_known(Scheduled& part, Attempt& attempt) const;
  StateSlots known_state(std::span<const std::int32_t> tokens, const BlockTables& known) const;
  std::int32_t end_at_state(const Scheduled& part) const;
  void check_drafts_of_states(const StepRequest& wanted, const Scheduled& part,
                              std::int64_t left) const;
  void take_states(std::span<Scheduled> scheduled, Attempt& attempt) const;
  void take_drafts(const StepRequest& wanted, Scheduled& part) const;
  void check_tree(const StepRequest& wanted, const Scheduled& part) const;
  void list_rows(std::span<const Scheduled> scheduled);
  void check_spans(const StepRequest& wanted) const;
  Lack count_lack(std::span<Scheduled> scheduled, std::size_t group) const;
  std::vector<BlockPair> take_blocks(std::span<Scheduled> scheduled, std::size_t group,
                                     const Lack& lack, Attempt& attempt) const;
  BlockTables block_tables(std::span<const Scheduled> scheduled) const;
  void build(std::span<const Scheduled> scheduled);
  void check_turn(std::int32_t index, const AttentionTensors& tensors) const;
  bool all_have_run() const;
  void complete_step();
  void give_up_step();
  void set_computed(Request& request, std::int32_t num_computed);
  void check_path(const Accepted& accepted) const;
  Moves moves_of(std::span<const Accepted> requests, std::size_t group) const;
  void move_drafts(std::span<const Accepted> requests);
  void copy_blocks(std::size_t group, std::span<const BlockPair> pairs) const;

  std::shared_ptr<Context> context_;
  Queue queue_;
  SessionConfig config_;
  LayerRegistry registry_;
  std::vector<std::unique_ptr<Attention>> layers_;
  std::vector<AttentionGroup> groups_;  ///< of layers that run one plan
  std::vector<std::size_t> group_of_;   ///< [layers]
  std::vector<LayerCaches> caches_;
  std::unique_ptr<States> states_;  ///< null without recurrent layers
  std::unique_ptr<Pools> pools_;    ///< takes the host's memory only after the device had enough
  std::map<RequestId, Request> requests_;
  RequestId next_id_ = 0;
  Step step_;
  std::vector<const AttentionMetadata*> metadata_;  ///< [groups_]: of step_
  /// Of the step that does not count yet: its requests, and which layers have been attended; of
  /// both none outside of a step.
  std::vector<Advance> advancing_;
  std::vector<bool> attended_;
  std::unique_ptr<Prepared> prepared_;  ///< the same of prepare_qkv()
  std::vector<bool> recurred_;          ///< [recurrent layers], of the step if there is one
};

}  // namespace clattn
