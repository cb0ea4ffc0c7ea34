#pragma once

#include <clattn/block_pool.hpp>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "program/replay/trace.hpp"

namespace clattn::cli {

struct SchedulerLimits {
  std::int32_t max_num_seqs = 32;              ///< requests that run at once
  std::int32_t max_num_batched_tokens = 2048;  ///< tokens of a step; longer prompts are chunked
  std::int32_t block_size = 16;
  std::int32_t num_blocks = 0;
  bool share_prefixes = true;  ///< requests that begin alike share blocks
};

/// A request on its way through the engine.
struct Request {
  std::int32_t id = 0;
  const TraceRequest* trace = nullptr;
  std::int32_t num_generated = 0;  ///< tokens sampled so far
  std::int32_t num_computed = 0;   ///< tokens whose keys and values are in the cache
  std::vector<std::int32_t> blocks{};
  std::int32_t state_page = -1;          ///< of recurrent layers, below max_num_seqs; while it runs
  std::vector<std::int32_t> contents{};  ///< a number for what each token is; once admitted

  std::int32_t num_tokens() const { return trace->prompt_tokens + num_generated; }
};

/// One request's share of a step: tokens [num_computed, num_computed + num_new).
struct ScheduledRequest {
  const Request* request = nullptr;
  std::int32_t num_computed = 0;
  std::int32_t num_new = 0;
  bool decode = false;  ///< its one token is the one sampled last
};

struct ScheduledStep {
  std::vector<ScheduledRequest> requests{};
  std::int32_t num_tokens = 0;
  std::int32_t num_decode_tokens = 0;
  std::int32_t num_preemptions = 0;
  std::int64_t num_prefix_hit_tokens = 0;  ///< found in the cache by requests admitted in this step
};

/// Tokens that a request leaves in the cache: its last output token is sampled, never computed.
std::int32_t cached_tokens(const TraceRequest& request);
/// Blocks that a request needs at its end.
std::int64_t blocks_needed(const TraceRequest& request, std::int32_t block_size);

/// Continuous batching. Running requests go on first, in the order of their admission; what is left
/// of the token budget admits waiting ones. Prompts longer than the budget are chunked. When blocks
/// run out, the youngest running request gives up its own and starts over later.
class Scheduler {
 public:
  /// Throws kInvalidArgument naming the first request that could never fit. `trace` must outlive
  /// it.
  Scheduler(const SchedulerLimits& limits, const Trace& trace);

  bool done() const { return num_finished_ == requests_.size(); }
  bool idle() const { return running_.empty() && waiting_.empty(); }
  std::size_t num_finished() const { return num_finished_; }
  std::size_t num_running() const { return running_.size(); }
  std::size_t num_waiting() const { return waiting_.size(); }
  const BlockPool& blocks() const { return blocks_; }

  /// When the next request arrives that is not here yet; nothing when all came.
  std::optional<double> next_arrival_s() const;
  /// Lets in what has arrived by `now_s`.
  void arrive(double now_s);
  /// The next step: never empty unless idle(). Valid until the next call. Blocks are held and named
  /// from here on, so that a request of the same step may already share what the step writes.
  const ScheduledStep& schedule();
  /// Takes the step as executed: tokens are sampled, finished requests leave.
  void complete();

 private:
  void name_contents(Request& request);
  void reuse_prefix(Request& request);
  bool hold_blocks(Request& request, std::int32_t num_tokens);
  void release_blocks(Request& request);
  void preempt_youngest();
  void add(Request& request, std::int32_t num_new);
  void schedule_running();
  void schedule_waiting();
  std::int32_t next_chunk(const Request& request) const;

  SchedulerLimits limits_;
  double hash_block_tokens_;
  std::vector<Request> requests_;
  std::size_t num_arrived_ = 0;
  std::size_t num_finished_ = 0;
  std::deque<Request*> waiting_;
  std::vector<Request*> running_;  // oldest first
  BlockPool blocks_;
  std::vector<std::int32_t> free_state_pages_;
  std::unordered_map<std::int64_t, std::int32_t> number_of_;  // by the trace's hash id
  ScheduledStep step_;
};

}  // namespace clattn::cli
