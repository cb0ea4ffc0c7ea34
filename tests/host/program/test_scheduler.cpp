#include <gtest/gtest.h>

#include <clattn/error.hpp>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "program/replay/scheduler.hpp"

namespace {

using clattn::cli::ScheduledStep;
using clattn::cli::Scheduler;
using clattn::cli::SchedulerLimits;
using clattn::cli::Trace;

Trace make_trace(std::vector<clattn::cli::TraceRequest> requests) {
  Trace trace;
  trace.source = "t";
  trace.requests = std::move(requests);
  return trace;
}

TEST(Scheduler, ChunksAPromptThenDecodes) {
  const Trace trace = make_trace({{0, 10, 3, {}}});
  Scheduler scheduler({.max_num_batched_tokens = 4, .block_size = 4, .num_blocks = 8}, trace);
  scheduler.arrive(0);
  const std::int32_t expected[][2] = {{0, 4}, {4, 4}, {8, 2}, {10, 1}, {11, 1}};
  for (const auto& [computed, fresh] : expected) {
    ASSERT_FALSE(scheduler.done());
    const ScheduledStep& step = scheduler.schedule();
    ASSERT_EQ(step.requests.size(), 1U);
    EXPECT_EQ(step.requests[0].num_computed, computed);
    EXPECT_EQ(step.requests[0].num_new, fresh);
    EXPECT_EQ(step.requests[0].decode, computed >= 10);
    EXPECT_EQ(step.num_decode_tokens, computed >= 10 ? 1 : 0);
    scheduler.complete();
  }
  EXPECT_TRUE(scheduler.done());
  EXPECT_EQ(scheduler.blocks().num_used(), 0);
  EXPECT_EQ(scheduler.blocks().peak_used(), 3);  // 12 tokens, the last output is never stored
}

TEST(Scheduler, KeepsTheSequenceAndTokenBudgets) {
  const Trace trace = make_trace({{0, 5, 2, {}}, {0, 5, 2, {}}, {0, 5, 2, {}}});
  Scheduler scheduler(
      {.max_num_seqs = 2, .max_num_batched_tokens = 8, .block_size = 4, .num_blocks = 64}, trace);
  scheduler.arrive(0);
  const ScheduledStep& step = scheduler.schedule();
  ASSERT_EQ(step.requests.size(), 2U);
  EXPECT_EQ(step.requests[0].num_new, 5);
  EXPECT_EQ(step.requests[1].num_new, 3);
  scheduler.complete();
  scheduler.schedule();
  EXPECT_EQ(step.requests.size(), 2U);
  EXPECT_TRUE(step.requests[0].decode);
  EXPECT_EQ(step.requests[1].num_new, 2);
  EXPECT_EQ(step.num_tokens, 3);
}

TEST(Scheduler, ArrivalsWaitForTheirTime) {
  const Trace trace = make_trace({{0, 4, 1, {}}, {2.5, 4, 1, {}}});
  Scheduler scheduler({.block_size = 4, .num_blocks = 8}, trace);
  EXPECT_TRUE(scheduler.idle());
  scheduler.arrive(0);
  EXPECT_EQ(scheduler.schedule().requests.size(), 1U);
  scheduler.complete();
  EXPECT_TRUE(scheduler.idle());
  EXPECT_FALSE(scheduler.done());
  EXPECT_EQ(scheduler.next_arrival_s(), 2.5);
  scheduler.arrive(2.4);
  EXPECT_TRUE(scheduler.idle());
  scheduler.arrive(2.5);
  EXPECT_FALSE(scheduler.idle());
  EXPECT_EQ(scheduler.next_arrival_s(), std::nullopt);
}

TEST(Scheduler, EqualHashIdsShareBlocks) {
  Trace trace = make_trace({{0, 16, 1, {1, 2}}, {0, 16, 1, {1, 3}}, {0, 16, 1, {4, 2}}});
  trace.hash_block_tokens = 8;
  Scheduler scheduler({.block_size = 4, .num_blocks = 64}, trace);
  scheduler.arrive(0);
  const ScheduledStep& step = scheduler.schedule();
  ASSERT_EQ(step.requests.size(), 3U);
  EXPECT_EQ(step.num_prefix_hit_tokens, 8);
  EXPECT_EQ(step.requests[1].num_computed, 8);
  EXPECT_EQ(step.requests[1].num_new, 8);
  const auto& first = step.requests[0].request->blocks;
  const auto& second = step.requests[1].request->blocks;
  EXPECT_EQ(first[0], second[0]);
  EXPECT_EQ(first[1], second[1]);
  EXPECT_NE(first[2], second[2]);
  // Id 2 after another prefix is another content.
  EXPECT_EQ(step.requests[2].num_computed, 0);
  EXPECT_EQ(scheduler.blocks().num_used(), 4 + 2 + 4);
}

TEST(Scheduler, LastTokenIsAlwaysComputed) {
  Trace trace = make_trace({{0, 16, 1, {1, 2}}, {1, 16, 1, {1, 2}}});
  trace.hash_block_tokens = 8;
  Scheduler scheduler({.block_size = 4, .num_blocks = 64}, trace);
  scheduler.arrive(0);
  scheduler.schedule();
  scheduler.complete();
  scheduler.arrive(1);
  const ScheduledStep& step = scheduler.schedule();
  ASSERT_EQ(step.requests.size(), 1U);
  EXPECT_EQ(step.requests[0].num_computed, 12);
  EXPECT_EQ(step.requests[0].num_new, 4);
}

TEST(Scheduler, BlocksWithoutIdsAreNeverShared) {
  const Trace trace = make_trace({{0, 16, 1, {}}, {0, 16, 1, {}}});
  Scheduler scheduler({.block_size = 4, .num_blocks = 64}, trace);
  scheduler.arrive(0);
  EXPECT_EQ(scheduler.schedule().num_prefix_hit_tokens, 0);
}

TEST(Scheduler, PreemptsTheYoungestAndFindsItsBlocksAgain) {
  // Two prompts fill five of six blocks; the first to cross a block border takes the sixth, the
  // other's need evicts the younger request.
  const Trace trace = make_trace({{0, 12, 8, {}}, {0, 8, 8, {}}});
  Scheduler scheduler({.block_size = 4, .num_blocks = 6}, trace);
  scheduler.arrive(0);
  int preemptions = 0;
  std::int64_t hits = 0;
  for (int steps = 0; !scheduler.done(); ++steps) {
    ASSERT_LT(steps, 100);
    const ScheduledStep& step = scheduler.schedule();
    ASSERT_FALSE(step.requests.empty());
    if (step.num_preemptions > 0) {
      EXPECT_EQ(step.requests.size(), 1U);
      EXPECT_EQ(step.requests[0].request->id, 0);
    }
    preemptions += step.num_preemptions;
    hits += step.num_prefix_hit_tokens;
    scheduler.complete();
  }
  EXPECT_GE(preemptions, 1);
  EXPECT_GE(hits, 4);
  EXPECT_EQ(scheduler.blocks().num_used(), 0);
}

TEST(Scheduler, EachThatRunsHasAPageOfStatesOfItsOwn) {
  std::vector<clattn::cli::TraceRequest> requests;
  for (int i = 0; i < 20; ++i) requests.push_back({0, 4 + i, 3 + i % 4, {1, 2}});
  Trace trace = make_trace(requests);
  trace.hash_block_tokens = 4;
  Scheduler scheduler({.max_num_seqs = 3,
                       .max_num_batched_tokens = 16,
                       .block_size = 4,
                       .num_blocks = 12,
                       .share_prefixes = false},
                      trace);
  scheduler.arrive(0);
  int preemptions = 0;
  std::map<std::int32_t, std::int32_t> pages;  // by requests
  for (int steps = 0; !scheduler.done(); ++steps) {
    ASSERT_LT(steps, 1000);
    const ScheduledStep& step = scheduler.schedule();
    EXPECT_EQ(step.num_prefix_hit_tokens, 0);
    preemptions += step.num_preemptions;
    std::set<std::int32_t> used;
    for (const auto& [request, computed, fresh, decode] : step.requests) {
      EXPECT_TRUE(used.insert(request->state_page).second);
      EXPECT_TRUE(request->state_page >= 0 && request->state_page < 3) << request->state_page;
      // Where its state is does not change until it begins anew.
      EXPECT_TRUE(computed == 0 || pages[request->id] == request->state_page);
      pages[request->id] = request->state_page;
    }
    scheduler.complete();
  }
  EXPECT_GT(preemptions, 0);
}

TEST(Scheduler, RefusesARequestThatCannotFit) {
  const Trace trace = make_trace({{0, 4, 1, {}}, {0, 30, 4, {}}});
  Scheduler fits({.block_size = 4, .num_blocks = 9}, trace);
  try {
    Scheduler refused({.block_size = 4, .num_blocks = 8}, trace);
    FAIL() << "accepted";
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), clattn::ErrorCode::kInvalidArgument);
    EXPECT_EQ(std::string(error.what()).find("t: request 1 (30 + 4 tokens) needs 9 blocks of 4"),
              0U)
        << error.what();
  }
}

/// What a cache that keeps every write would hold: slot -> (request whose content it is, position).
/// Shared prefixes have the content of their ids.
using Content = std::pair<std::vector<std::int64_t>, std::int32_t>;

Content content_of(const clattn::cli::Request& request, std::int32_t position, double hash_tokens) {
  const auto& ids = request.trace->hash_ids;
  if (position >= request.trace->prompt_tokens || ids.empty()) return {{~request.id}, position};
  const auto last = std::min(static_cast<std::size_t>(position / hash_tokens), ids.size() - 1);
  return {{ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(last) + 1}, position};
}

// Random traffic: every step within its limits, every token computed in order, and every cached
// position that a request relies on holds that request's content at that time.
TEST(Scheduler, RandomTrafficReadsItsOwnContent) {
  std::mt19937 random(7);
  int preemptions = 0;
  std::int64_t hits = 0;
  for (int round = 0; round < 40; ++round) {
    std::vector<clattn::cli::TraceRequest> requests;
    for (int i = 0; i < 40; ++i) {
      const auto prompt = static_cast<std::int32_t>(1 + random() % 60);
      std::vector<std::int64_t> ids;
      for (std::int32_t p = 0; round % 4 != 0 && p < prompt; p += 10) ids.push_back(random() % 2);
      requests.push_back({i * 0.5, prompt, static_cast<std::int32_t>(1 + random() % 20), ids});
    }
    Trace trace = make_trace(std::move(requests));
    trace.hash_block_tokens = 10;
    const SchedulerLimits limits{
        .max_num_seqs = 1 + static_cast<std::int32_t>(random() % 8),
        .max_num_batched_tokens = 1 + static_cast<std::int32_t>(random() % 50),
        .block_size = 1 + static_cast<std::int32_t>(random() % 7),
        .num_blocks = 80 + static_cast<std::int32_t>(random() % 40)};
    Scheduler scheduler(limits, trace);
    std::map<std::int64_t, Content> slots;
    double now = 0;
    for (int steps = 0; !scheduler.done(); ++steps, now += 0.3) {
      ASSERT_LT(steps, 20000);
      if (scheduler.idle()) now = std::max(now, scheduler.next_arrival_s().value_or(now));
      scheduler.arrive(now);
      const ScheduledStep& step = scheduler.schedule();
      ASSERT_FALSE(step.requests.empty());
      ASSERT_LE(step.num_tokens, limits.max_num_batched_tokens);
      ASSERT_LE(step.requests.size(), static_cast<std::size_t>(limits.max_num_seqs));
      preemptions += step.num_preemptions;
      hits += step.num_prefix_hit_tokens;
      const auto slot_of = [&](const clattn::cli::Request& request, std::int32_t position) {
        const auto block = static_cast<std::size_t>(position / limits.block_size);
        return std::int64_t{request.blocks.at(block)} * limits.block_size +
               position % limits.block_size;
      };
      std::int32_t tokens = 0;
      std::set<std::int64_t> written;
      for (const auto& scheduled : step.requests) {
        ASSERT_GT(scheduled.num_new, 0);
        tokens += scheduled.num_new;
        for (std::int32_t p = 0; p < scheduled.num_new; ++p) {
          const std::int32_t position = scheduled.num_computed + p;
          const std::int64_t slot = slot_of(*scheduled.request, position);
          ASSERT_TRUE(written.insert(slot).second) << "two tokens of a step in one slot";
          slots[slot] = content_of(*scheduled.request, position, 10);
        }
      }
      ASSERT_EQ(tokens, step.num_tokens);
      for (const auto& scheduled : step.requests) {
        const std::int32_t end = scheduled.num_computed + scheduled.num_new;
        for (std::int32_t position = 0; position < end; ++position) {
          ASSERT_EQ(slots.at(slot_of(*scheduled.request, position)),
                    content_of(*scheduled.request, position, 10));
        }
      }
      scheduler.complete();
    }
    EXPECT_EQ(scheduler.blocks().num_used(), 0);
    EXPECT_EQ(scheduler.num_finished(), trace.requests.size());
  }
  EXPECT_GT(preemptions, 0);
  EXPECT_GT(hits, 0);
}

}  // namespace
