#include "cli/replay/scheduler.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cli/common/error.hpp"

namespace clattn::cli {

std::int32_t cached_tokens(const TraceRequest& request) {
  return request.prompt_tokens + request.output_tokens - 1;
}

std::int64_t blocks_needed(const TraceRequest& request, std::int32_t block_size) {
  return (std::int64_t{cached_tokens(request)} + block_size - 1) / block_size;
}

Scheduler::Scheduler(const SchedulerLimits& limits, const Trace& trace)
    : limits_(limits), hash_block_tokens_(trace.hash_block_tokens), blocks_(limits.num_blocks) {
  requests_.reserve(trace.requests.size());
  for (const TraceRequest& request : trace.requests) {
    const auto id = static_cast<std::int32_t>(requests_.size());
    const std::int64_t needed = blocks_needed(request, limits.block_size);
    throw_invalid_if(needed > limits.num_blocks,
                     "{}: request {} ({} + {} tokens) needs {} blocks of {} tokens, the "
                     "cache has {}: raise --num-blocks or --kv-memory, or shorten requests "
                     "with --length-scale",
                     trace.source, id, request.prompt_tokens, request.output_tokens, needed,
                     limits.block_size, limits.num_blocks);
    requests_.push_back({.id = id, .trace = &request});
  }
  running_.reserve(to_size(limits.max_num_seqs));
}

std::optional<double> Scheduler::next_arrival_s() const {
  if (num_arrived_ == requests_.size()) return {};
  return requests_[num_arrived_].trace->arrival_s;
}

void Scheduler::arrive(double now_s) {
  while (num_arrived_ < requests_.size() && requests_[num_arrived_].trace->arrival_s <= now_s) {
    waiting_.push_back(&requests_[num_arrived_++]);
  }
}

BlockHash Scheduler::block_hash(Request& request, std::size_t index) {
  const std::vector<std::int64_t>& ids = request.trace->hash_ids;
  const auto block_size = to_size(limits_.block_size);
  while (request.hashes.size() <= index) {
    const std::size_t begin = request.hashes.size() * block_size;
    const std::size_t end = begin + block_size;
    BlockHash hash = request.hashes.empty() ? 0 : request.hashes.back();
    if (ids.empty() || end > to_size(request.trace->prompt_tokens)) {
      // Content without a shared name is the request's own; it finds it again after a preemption.
      hash = mix64(hash ^ mix64(~static_cast<std::uint64_t>(request.id)));
    } else {
      const auto id_of = [&](std::size_t position) {
        const double place = static_cast<double>(position) / hash_block_tokens_;
        return std::min(static_cast<std::size_t>(place), ids.size() - 1);
      };
      for (std::size_t i = id_of(begin); i <= id_of(end - 1); ++i) {
        hash = mix64(hash ^ mix64(static_cast<std::uint64_t>(ids[i])));
      }
    }
    request.hashes.push_back(hash);
  }
  return request.hashes[index];
}

void Scheduler::reuse_prefix(Request& request) {
  // The last token is always computed: its query is what samples the next one.
  const std::int32_t most = (request.num_tokens() - 1) / limits_.block_size;
  for (std::int32_t i = 0; i < most; ++i) {
    const auto block = blocks_.find(block_hash(request, to_size(i)));
    if (!block) break;
    blocks_.share(*block);
    request.blocks.push_back(*block);
  }
  request.num_computed = static_cast<std::int32_t>(request.blocks.size()) * limits_.block_size;
}

bool Scheduler::hold_blocks(Request& request, std::int32_t num_tokens) {
  const std::int32_t needed = (num_tokens + limits_.block_size - 1) / limits_.block_size;
  const std::int32_t missing = needed - static_cast<std::int32_t>(request.blocks.size());
  if (missing > blocks_.num_free()) return false;
  for (std::int32_t i = 0; i < missing; ++i) request.blocks.push_back(*blocks_.allocate());
  return true;
}

void Scheduler::release_blocks(Request& request) {
  // The tail first: it is then reused first, and the shareable head of the prompt lives longest.
  for (; !request.blocks.empty(); request.blocks.pop_back()) {
    blocks_.release(request.blocks.back());
  }
  request.num_computed = 0;
}

void Scheduler::preempt_youngest() {
  Request& victim = *running_.back();
  running_.pop_back();
  release_blocks(victim);
  waiting_.push_front(&victim);
  ++step_.num_preemptions;
}

std::int32_t Scheduler::next_chunk(const Request& request) const {
  return std::min(request.num_tokens() - request.num_computed,
                  limits_.max_num_batched_tokens - step_.num_tokens);
}

void Scheduler::add(Request& request, std::int32_t num_new) {
  const bool decode = request.num_generated > 0 && request.num_computed == request.num_tokens() - 1;
  step_.requests.push_back({&request, request.num_computed, num_new, decode});
  step_.num_tokens += num_new;
  step_.num_decode_tokens += decode ? 1 : 0;
  const std::int32_t first_full = request.num_computed / limits_.block_size;
  const std::int32_t end_full = (request.num_computed + num_new) / limits_.block_size;
  for (auto i = to_size(first_full); i < to_size(end_full); ++i) {
    blocks_.publish(request.blocks[i], block_hash(request, i));
  }
}

void Scheduler::schedule_running() {
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Request& request = *running_[i];
    const std::int32_t chunk = next_chunk(request);
    if (chunk == 0) return;
    // Victims come from the end, so none of them is in the step yet; the last may be this one.
    while (!hold_blocks(request, request.num_computed + chunk)) {
      preempt_youngest();
      if (i == running_.size()) return;
    }
    add(request, chunk);
  }
}

void Scheduler::schedule_waiting() {
  const auto most = to_size(limits_.max_num_seqs);
  while (!waiting_.empty() && running_.size() < most &&
         step_.num_tokens < limits_.max_num_batched_tokens) {
    Request& request = *waiting_.front();
    reuse_prefix(request);
    const std::int32_t chunk = next_chunk(request);
    if (!hold_blocks(request, request.num_computed + chunk)) {
      release_blocks(request);
      return;
    }
    step_.num_prefix_hit_tokens += request.num_computed;
    waiting_.pop_front();
    running_.push_back(&request);
    add(request, chunk);
  }
}

const ScheduledStep& Scheduler::schedule() {
  step_.requests.clear();
  step_ = {.requests = std::move(step_.requests)};
  schedule_running();
  if (step_.num_preemptions == 0) schedule_waiting();
  return step_;
}

void Scheduler::complete() {
  for (const ScheduledRequest& scheduled : step_.requests) {
    Request& request = requests_[to_size(scheduled.request->id)];
    request.num_computed += scheduled.num_new;
    if (request.num_computed < request.num_tokens()) continue;
    if (++request.num_generated < request.trace->output_tokens) continue;
    release_blocks(request);
    std::erase(running_, &request);
    ++num_finished_;
  }
}

}  // namespace clattn::cli
