#include "program/replay/scheduler.hpp"

#include <algorithm>
#include <numeric>

#include "program/common/error.hpp"

namespace clattn::cli {

std::int32_t cached_tokens(const TraceRequest& request) {
  return request.prompt_tokens + request.output_tokens - 1;
}

std::int64_t blocks_needed(const TraceRequest& request, std::int32_t block_size) {
  return ceil_div(cached_tokens(request), block_size);
}

Scheduler::Scheduler(const SchedulerLimits& limits, const Trace& trace)
    : limits_(limits),
      hash_block_tokens_(trace.hash_block_tokens),
      blocks_(limits.num_blocks, limits.block_size) {
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
  free_state_pages_.resize(to_size(limits.max_num_seqs));
  std::iota(free_state_pages_.rbegin(), free_state_pages_.rend(), 0);
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

/// Tokens of one hash id are alike; those without a shared name are the request's own, which finds
/// them again after a preemption.
void Scheduler::name_contents(Request& request) {
  const TraceRequest& trace = *request.trace;
  request.contents.assign(to_size(trace.prompt_tokens + trace.output_tokens), -1 - request.id);
  if (trace.hash_ids.empty()) return;
  for (std::size_t i = 0; i < to_size(trace.prompt_tokens); ++i) {
    const double place = static_cast<double>(i) / hash_block_tokens_;
    const std::size_t id = std::min(static_cast<std::size_t>(place), trace.hash_ids.size() - 1);
    const auto number = static_cast<std::int32_t>(number_of_.size());
    request.contents[i] = number_of_.emplace(trace.hash_ids[id], number).first->second;
  }
}

void Scheduler::reuse_prefix(Request& request) {
  if (request.contents.empty()) name_contents(request);
  if (!limits_.share_prefixes) return;
  // The last token is always computed: its query is what samples the next one.
  const auto known = to_size(request.num_tokens() - 1);
  request.blocks = blocks_.find_prefix(std::span(request.contents).first(known));
  blocks_.share(request.blocks);
  request.num_computed = static_cast<std::int32_t>(request.blocks.size()) * limits_.block_size;
}

bool Scheduler::hold_blocks(Request& request, std::int32_t num_tokens) {
  const std::int32_t needed = ceil_div(num_tokens, limits_.block_size);
  const std::int32_t missing = needed - static_cast<std::int32_t>(request.blocks.size());
  if (missing > blocks_.num_free()) return false;
  const std::vector<std::int32_t> fresh = blocks_.allocate(std::max(missing, 0));
  request.blocks.insert(request.blocks.end(), fresh.begin(), fresh.end());
  return true;
}

void Scheduler::release_blocks(Request& request) {
  blocks_.release(request.blocks);
  request.blocks.clear();
  request.num_computed = 0;
  if (request.state_page >= 0) free_state_pages_.push_back(request.state_page);
  request.state_page = -1;
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
  const auto named = std::span(request.contents).first(to_size(request.num_computed + num_new));
  blocks_.publish(named, request.blocks);
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
    request.state_page = free_state_pages_.back();
    free_state_pages_.pop_back();
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
    request.contents = {};
    std::erase(running_, &request);
    ++num_finished_;
  }
}

}  // namespace clattn::cli
