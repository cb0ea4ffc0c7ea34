// Sessions of hybrid models: two gated delta nets beside a layer of attention.
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/block_pool.hpp>
#include <clattn/session.hpp>
#include <random>

#include "device/hybrid_client.hpp"
#include "support/counting_new.hpp"
#include "support/error_text.hpp"

namespace test_session_recurrent {

using clattn::RecurrentStep;
using clattn::RequestId;
using clattn::Session;
using clattn::SessionConfig;
using session_test::counting;
using session_test::delta_nets;
using session_test::Hybrid;
using session_test::hybrid_config;
using session_test::kBlock;
using session_test::kDrafts;
using test::error_text;

// Requests that come, fork, go, become shorter, are evicted and speculate, on caches that are too
// small for them.
TEST(SessionStates, RandomTrafficIsTheOracles) {
  Hybrid hybrid;
  Session& session = hybrid.client.session;
  std::mt19937 random(20261130);
  const auto below = [&](std::size_t n) { return static_cast<std::int32_t>(random() % n); };
  std::vector<RequestId> live;
  int refused = 0, found = 0, speculated = 0;
  for (int round = 0; round < 45; ++round) {
    while (live.size() < 3 || below(3) == 0) {
      const std::int32_t length = below(2) == 0 ? 1 + below(30) : 36 + below(24);
      live.push_back(session.add(counting(below(2), length)));
      if (session.num_computed_tokens(live.back()) > 0) ++found;
    }
    if (below(4) == 0) live.push_back(session.fork(live[random() % live.size()]));
    std::ranges::shuffle(live, random);
    if (below(6) == 0) session.truncate(live[0], 1 + below(session.tokens(live[0]).size()));
    std::vector<clattn::StepRequest> step;
    for (const RequestId id : std::vector(live.begin(), live.begin() + 3)) {
      const std::int32_t computed = session.num_computed_tokens(id);
      step.push_back({id, counting(below(3), 1 + below(2)), 1 + below(60)});
      if (computed > 0 && computed == std::ssize(session.tokens(id)) && below(3) != 0) {
        step.back() = {id, {below(3)}};
        step.back().drafts = counting(below(3), below(kDrafts + 1));
      }
    }
    try {
      hybrid.client.run(step);
      for (const clattn::StepRequest& part : step) {
        if (part.drafts.empty()) continue;
        const auto path = counting(0, below(part.drafts.size() + 1));
        session.accept(part.id, path);
        if (!path.empty()) ++speculated;
      }
    } catch (const clattn::Error& error) {
      ASSERT_EQ(error.code(), clattn::ErrorCode::kOutOfBlocks) << error.what();
      ++refused;
      session.evict(live.back());
    }
    if (below(3) == 0 || live.size() > 6) {
      session.finish(live.back());
      live.pop_back();
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(found, 0);
  EXPECT_GT(speculated, 5);
  for (const RequestId id : live) session.finish(id);
  EXPECT_EQ(session.blocks().num_used(), 0);
  EXPECT_EQ(session.state_slots()->num_used(), 0);
}

TEST(SessionStates, PrefixesAreFoundWhereAStateIsKept) {
  Hybrid hybrid;
  Session& session = hybrid.client.session;
  const RequestId id = session.add(counting(0, 3 * kBlock + 5));
  hybrid.client.run({{id}});
  EXPECT_EQ(session.num_computed_tokens(id), 2 * kBlock);  // a step ends where a state is kept
  hybrid.client.run({{id}});
  EXPECT_EQ(session.num_computed_tokens(id), 3 * kBlock + 5);
  EXPECT_EQ(session.blocks().find_prefix(counting(0, 60)).size(), 3U);
  const RequestId other = session.add(counting(0, 60));
  EXPECT_EQ(session.num_computed_tokens(other), 2 * kBlock);  // not 3
  EXPECT_EQ(session.state_slots()->num_used(), 2);
  hybrid.client.run({{other}});
  session.evict(id);  // and comes back to the kept state
  hybrid.client.run({{id, {1}}});
  EXPECT_EQ(session.num_computed_tokens(id), 3 * kBlock + 6);
  session.truncate(id, 2 * kBlock + 3);
  EXPECT_EQ(session.num_computed_tokens(id), 0);
  EXPECT_EQ(session.state_slots()->num_used(), 1);
  hybrid.client.run({{id, {7}}});
  EXPECT_EQ(session.block_table(id)[1], session.block_table(other)[1]);
}

TEST(SessionStates, StepsThatAreGivenUpLeaveStates) {
  Hybrid hybrid, twin;
  Session& session = hybrid.client.session;
  const RequestId id = session.add(counting(0, 20));
  ASSERT_EQ(twin.client.session.add(counting(0, 20)), id);
  hybrid.client.run({{id}});
  twin.client.run({{id}});
  const RequestId fork = session.fork(id);
  EXPECT_EQ(session.state_slots()->num_used(), 1);  // both have it
  clattn::StepRequest drafts{id, {1}};
  drafts.drafts = {2, 3};
  for (const clattn::StepRequest& given_up : {clattn::StepRequest{id, {5, 6}}, drafts}) {
    hybrid.fails = true;
    EXPECT_THROW(hybrid.client.run({given_up}), std::runtime_error);
    hybrid.fails = false;
    session.finish(session.add({1}));
    EXPECT_EQ(session.num_computed_tokens(id), 20);
  }
  for (Hybrid* each : {&hybrid, &twin}) {
    each->outputs.clear();
    each->client.run({drafts});
    each->client.session.accept(id, {0});
    each->client.run({{id, {9}}});
  }
  EXPECT_EQ(hybrid.outputs, twin.outputs);
  session.evict(id);
  hybrid.client.run({{fork, {4}}});
  EXPECT_EQ(session.state_slots()->num_used(), 1);
}

/// Requests of a session, and what it has of slots.
std::vector<std::int64_t> known(const Session& session, const std::vector<RequestId>& ids) {
  std::vector<std::int64_t> all = {session.blocks().num_used(), session.state_slots()->num_used()};
  for (const RequestId id : ids) {
    all.push_back(session.num_computed_tokens(id));
    all.push_back(std::ssize(session.tokens(id)));
  }
  return all;
}

TEST(SessionStates, FailedAllocationsAndTooFewSlotsLeaveEverythingAsItWas) {
  Hybrid hybrid(hybrid_config(6));
  Session& session = hybrid.client.session;
  const RequestId id = session.add(counting(0, 40));
  hybrid.client.run({{id}});
  hybrid.client.run({{id, {1}}});
  const RequestId first = session.fork(id);  // builds the kernel that copies blocks
  hybrid.client.run({{first, {2}}});
  session.finish(first);
  const std::vector<RequestId> ids = {id, session.fork(id)};
  const std::vector<std::int64_t> before = known(session, ids);
  std::vector<clattn::StepRequest> batch = {{ids[0], {2}}, {ids[1], {3, 4}}};
  batch[0].drafts = {5, 6};
  const auto checked = [&](const auto& call) {
    return [&, call] {
      try {
        call();
      } catch (const std::exception&) {
        EXPECT_EQ(known(session, ids), before);
        throw;
      }
    };
  };
  {
    const clattn::detail::CapturePause paused;  // captures allocate
    RequestId added = -1;
    const auto add = checked([&] { added = session.add(counting(0, 40)); });
    EXPECT_GT(test::fail_each_allocation(add), 0U);
    session.finish(added);
    EXPECT_GT(test::fail_each_allocation(checked([&] { session.step(batch); })), 0U);
  }
  batch[0].drafts = {5, 6, 7};  // five slots, beside the one that both have
  hybrid.client.run(batch);
  session.accept(id, {0, 1});
  EXPECT_EQ(session.state_slots()->num_used(), 3);
  batch = {{ids[0], {2}}, {ids[1], {3}}};
  batch[0].drafts = batch[1].drafts = {5};
  EXPECT_EQ(error_text([&] { session.step(batch); }, clattn::ErrorCode::kOutOfBlocks),
            "Session: the step needs 4 more slots of states, 3 of 6 are free; evict() or finish() "
            "a request");
  batch[1].drafts.clear();
  hybrid.client.run(batch);
}

TEST(SessionStates, NamesWhatItRefuses) {
  const auto& context = attention_test::all_contexts().at(0);
  const auto refused = [&](const auto& change) {
    clattn::RecurrentLayers given = delta_nets(4);
    change(given);
    SessionConfig config = hybrid_config();
    config.recurrent = std::make_shared<clattn::RecurrentLayers>(given);
    return error_text([&] { const Session session(context, {}, config); });
  };
  EXPECT_EQ(refused([](auto& given) { given.layers.clear(); }),
            "Session: recurrent: layers is empty, legal: one for each recurrent layer");
  EXPECT_EQ(refused([](auto& given) { given.num_slots = 1; }),
            "Session: recurrent: num_slots is 1, legal: 2 … 2147483646");
  EXPECT_EQ(refused([](auto& given) { given.layers[1].block_size = 24; }),
            "Session: recurrent: layers[1]: block_size is 24, legal: 32, as of layers[0]");
  EXPECT_EQ(refused([](auto& given) { given.layers[0].block_size = 24; }),
            "Session: recurrent: layers[0]: block_size is 24, legal: multiples of 16, the layers'");
  EXPECT_EQ(
      refused([](auto& given) { given.layers[0].mamba_cache_mode = clattn::MambaCacheMode::kAll; }),
      "Session: recurrent: layers[0]: mamba_cache_mode is all, legal: none, align");
  EXPECT_EQ(refused([](auto& given) {
              given.layers[0].states.pop_back();
              given.layers[0].states[0].shape = {3};
            }),
            "Session: recurrent: layers[0]: states have 1 dimensions, legal: 2 (convolution), 3 "
            "(state), or both in this order");

  Hybrid hybrid;
  Session& session = hybrid.client.session;
  const RequestId id = session.add({1, 2});
  const auto nothing = [](const RecurrentStep&) {};
  EXPECT_EQ(error_text([&] { session.recur(0, nothing); }),
            "recur: layer is 0 outside of a step, legal: after step(), each layer once");
  clattn::StepRequest drafts{id};
  drafts.drafts = {3};
  EXPECT_EQ(error_text([&] { session.step({drafts}); }),
            "step: request 0: drafts follow 2 tokens that are not computed, 0 are; legal with "
            "recurrent layers: 1 of at least 2");
  drafts.drafts = {3, 4, 5, 6};
  EXPECT_EQ(error_text([&] { session.step({drafts}); }),
            "step: request 0: drafts holds 4 elements, legal: at most 3 (num_speculative_blocks of "
            "the recurrent layers)");
  session.step({{id}});
  EXPECT_EQ(error_text([&] { session.recur(2, nothing); }), "recur: layer is 2, legal: 0 … 1");
  session.recur(1, nothing);
  EXPECT_EQ(error_text([&] { session.recur(1, nothing); }),
            "recur: layer is 1 for the second time, legal: each layer once a step");
  Session plain(context, {}, session_test::small_config());
  EXPECT_EQ(plain.state_slots(), nullptr);
  EXPECT_EQ(error_text([&] { plain.recur(0, nothing); }),
            "recur: layer is 0, legal: none in a session without recurrent layers");
}

}  // namespace test_session_recurrent
