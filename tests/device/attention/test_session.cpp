#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/block_pool.hpp>
#include <clattn/device.hpp>
#include <clattn/session.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"
#include "device/session_client.hpp"
#include "support/error_text.hpp"

namespace test_session {

using clattn::ErrorCode;
using clattn::RequestId;
using clattn::Session;
using clattn::SessionConfig;
using session_test::Client;
using session_test::counting;
using session_test::Rows;
using session_test::small_config;
using session_test::Tokens;
using test::error_text;

constexpr std::int32_t kBlock = layer_test::kShape.block_size;

class SessionOnDevice : public testing::TestWithParam<std::size_t> {
 protected:
  Client client(SessionConfig config) const {
    return {attention_test::all_contexts().at(GetParam()), std::move(config)};
  }
  Client client() const { return client(small_config()); }
};

/// What may not change when a step is refused.
struct Snapshot {
  explicit Snapshot(const Session& session, const std::vector<RequestId>& ids)
      : num_free(session.blocks().num_free()) {
    for (const RequestId id : ids) {
      tokens.emplace_back(session.tokens(id).begin(), session.tokens(id).end());
      blocks.emplace_back(session.block_table(id).begin(), session.block_table(id).end());
      computed.push_back(session.num_computed_tokens(id));
    }
  }
  bool operator==(const Snapshot&) const = default;

  std::int32_t num_free;
  std::vector<Tokens> tokens, blocks;
  Tokens computed;
};

Tokens first_blocks(const Session& session, RequestId id, std::size_t count) {
  const auto blocks = session.block_table(id).first(count);
  return {blocks.begin(), blocks.end()};
}

TEST_P(SessionOnDevice, PromptsChunksAndDecodesInAnyOrderAreTheOracles) {
  Client one = client(), other = client();
  std::vector<std::vector<clattn::StepRequest>> steps;
  for (Client* each : {&one, &other}) {
    EXPECT_EQ(each->session.add(counting(0, 5)), 0);
    EXPECT_EQ(each->session.add(counting(100, 40)), 1);
    EXPECT_EQ(each->session.add(counting(200, 70)), 2);
  }
  steps.push_back({{0}, {1}, {2, {}, 30}});
  steps.push_back({{2, {}, 33}, {1, {7}}, {0, {8, 9}}});
  steps.push_back({{1, {5}}, {2, {6}}, {0, {7}}});
  steps.push_back({{0, {1}}, {2, {2}}});
  for (const auto& step : steps) {
    const auto rows = one.run(step);
    EXPECT_EQ(other.run({step.rbegin(), step.rend()}), rows);
  }
  EXPECT_EQ(one.session.num_computed_tokens(2), 72);
  EXPECT_EQ(one.session.blocks().num_used(), 1 + 3 + 5);
}

TEST_P(SessionOnDevice, SharedPrefixesGiveTheBitsOfUnsharedOnes) {
  SessionConfig unshared = small_config();
  unshared.prefix_caching = false;
  Client with = client(), without = client(unshared);
  const Tokens prompt = counting(0, 40);
  Tokens similar = counting(0, 50);
  similar[45] = 7;
  for (Client* each : {&with, &without}) each->run({{each->session.add(prompt)}});

  const RequestId id = with.session.add(similar);
  EXPECT_EQ(with.session.num_computed_tokens(id), 2 * kBlock);
  EXPECT_EQ(first_blocks(with.session, id, 2), first_blocks(with.session, 0, 2));
  EXPECT_EQ(with.session.blocks().num_used(), 3);
  EXPECT_EQ(without.session.add(similar), id);
  EXPECT_EQ(without.session.num_computed_tokens(id), 0);
  without.run({{id, {}, 2 * kBlock}});
  EXPECT_EQ(with.run({{id}}), without.run({{id}}));
  EXPECT_EQ(with.run({{0, {1}}, {id, {2}}}), without.run({{0, {1}}, {id, {2}}}));
  EXPECT_EQ(with.session.blocks().num_used(), 5);
  EXPECT_EQ(without.session.blocks().num_used(), 7);
}

// Of a prompt that is all there the last token is computed; a request that came too early for what
// is there now finds it at its first step.
TEST_P(SessionOnDevice, WhatIsKnownIsFoundAtTheFirstStepToo) {
  Client client = this->client();
  const Tokens prompt = counting(0, 2 * kBlock);
  const RequestId first = client.session.add(prompt), second = client.session.add(prompt);
  client.run({{first}});
  EXPECT_EQ(client.session.num_computed_tokens(second), 0);
  const auto rows = client.run({{second}});
  EXPECT_EQ(rows.at(second).size(), 2U * kBlock * 4 * 64);  // of one block in both layers
  EXPECT_EQ(first_blocks(client.session, second, 1), first_blocks(client.session, first, 1));
  EXPECT_NE(client.session.block_table(second)[1], client.session.block_table(first)[1]);
}

// A verifier of drafts reads a row of every token, whoever computed them before.
TEST_P(SessionOnDevice, EveryRowIsComputedIfTheCallerWantsIt) {
  Client client = this->client();
  Session& session = client.session;
  const Tokens prompt = counting(0, kBlock), drafts = counting(500, 2 * kBlock + 1);
  const RequestId first = session.add(prompt), second = session.add(prompt);
  client.run({{first}, {second}});
  const auto rows = client.run({{first, drafts}});
  EXPECT_EQ(session.step({{second, drafts}}).num_tokens(), 1);  // the others are found
  const clattn::StepRequest every{.id = second, .new_tokens = drafts, .compute_every_row = true};
  EXPECT_EQ(client.run({every}).at(second), rows.at(first));
  EXPECT_NE(session.block_table(second)[1], session.block_table(first)[1]);
  // Nor does it find what was its own; in chunks, too.
  session.evict(second);
  clattn::StepRequest chunk{.id = second, .max_tokens = kBlock, .compute_every_row = true};
  EXPECT_EQ(session.step({chunk}).num_tokens(), kBlock);
  client.run({chunk});
  client.run({chunk});
  EXPECT_EQ(session.num_computed_tokens(second), 2 * kBlock);
}

TEST_P(SessionOnDevice, ForksShareTheirBlocksUntilTheyWrite) {
  Client client = this->client();
  const RequestId root = client.session.add(counting(0, 20));
  client.run({{root}});
  const RequestId left = client.session.fork(root), right = client.session.fork(root);
  EXPECT_EQ(client.session.blocks().num_used(), 2);
  client.run({{left, {1}}, {root, {2}}});  // two leave the second block
  EXPECT_EQ(client.session.blocks().num_used(), 4);
  EXPECT_EQ(client.session.blocks().reference_count(client.session.block_table(root)[0]), 3);
  client.run({{right, {3}}});  // the last one keeps it
  EXPECT_EQ(client.session.blocks().num_used(), 4);
  client.run({{root, {4}}, {left, {5}}, {right, {6}}});
  client.session.finish(root);
  client.session.finish(left);
  EXPECT_EQ(client.session.blocks().num_used(), 2);
  client.run({{right, counting(0, 20)}});
  client.session.finish(right);
  EXPECT_EQ(client.session.blocks().num_used(), 0);
}

TEST_P(SessionOnDevice, OutOfBlocksLeavesEverythingAsItWas) {
  SessionConfig config = small_config();
  config.num_blocks = 5;
  Client client = this->client(config);
  Session& session = client.session;
  const RequestId big = session.add(counting(0, 40));
  client.run({{big}});
  const RequestId twin = session.fork(big), fresh = session.add(counting(500, 33));
  session.evict(big);
  const std::vector<RequestId> all = {big, twin, fresh};
  const Snapshot before(session, all);
  // Two shared and one copied block, and three more.
  EXPECT_EQ(
      error_text(
          [&] {
            session.step({{big, {1}}, {twin, {2}}, {fresh, {3}}});
          },
          ErrorCode::kOutOfBlocks),
      "Session: the step needs 4 more blocks, 2 of 5 are free; evict() or finish() a request");
  EXPECT_EQ(Snapshot(session, all), before);
  EXPECT_EQ(error_text([&] { session.attend(0, {}); }),
            "attend: layer is 0 outside of a step, legal: after step(), each layer once");
  client.run({{big, {1}}, {twin, {2}}});
  session.evict(big);
  session.finish(twin);
  client.run({{fresh, {3}}});
  EXPECT_EQ(session.blocks().num_free(), 2);
}

TEST_P(SessionOnDevice, RefusedBatchesLeaveEverythingAsItWas) {
  SessionConfig config = small_config();
  config.builder.limits.max_num_batched_tokens = 30;
  Client client = this->client(config);
  const RequestId id = client.session.add(counting(0, 31));
  const Snapshot before(client.session, {id});
  EXPECT_NE(error_text([&] {
              client.session.step({{id, {1}}});
            }).find("max_num_batched_tokens"),
            std::string::npos);
  EXPECT_EQ(Snapshot(client.session, {id}), before);
  client.run({{id, {1}, 30}});
  client.run({{id}});
}

TEST_P(SessionOnDevice, EvictedRequestsComeBackAndFindWhatIsLeft) {
  Client client = this->client();
  const RequestId id = client.session.add(counting(0, 40));
  client.run({{id}});
  client.session.evict(id);
  EXPECT_EQ(client.session.blocks().num_used(), 0);
  EXPECT_EQ(client.session.num_computed_tokens(id), 0);
  EXPECT_EQ(client.session.tokens(id).size(), 40U);
  EXPECT_EQ(client.run({{id, {9}}}).at(id).size(), 2U * 9 * 4 * 64);  // tokens 32 to 40
  const RequestId other = client.session.add(counting(900, 15 * kBlock));
  client.session.evict(id);
  client.run({{other}});  // leaves one block, the beginning
  client.session.finish(other);
  EXPECT_EQ(client.run({{id, {10}}}).at(id).size(), 2U * (42 - kBlock) * 4 * 64);
}

TEST_P(SessionOnDevice, StepsThatAreGivenUpDoNotCount) {
  Client client = this->client();
  Session& session = client.session;
  const RequestId id = session.add(counting(0, 40)), other = session.add(counting(100, 20));
  const std::vector<clattn::StepRequest> both = {{id}, {other}};
  client.attend(0, both, session.step(both));
  EXPECT_EQ(session.num_computed_tokens(id), 0);
  EXPECT_EQ(session.add(counting(0, 40)), 2);
  EXPECT_EQ(session.num_computed_tokens(2), 0);  // nothing was published
  session.finish(2);
  client.run({{id, {}, 20}, {other}});
  EXPECT_EQ(session.blocks().num_used(), 2 + 2);  // not those of 40 tokens

  // Requests that leave in the middle of a step, and one that is forked there.
  const std::vector<clattn::StepRequest> three = {{id}, {other, {1}}, {session.add({1, 2, 3})}};
  const clattn::Step& step = session.step(three);
  session.evict(id);
  const RequestId twin = session.fork(other);
  client.attend(1, three, step);
  client.attend(0, three, step);
  session.finish(three[2].id);
  EXPECT_EQ(session.num_computed_tokens(id), 0);
  EXPECT_EQ(session.num_computed_tokens(other), 21);
  EXPECT_EQ(session.num_computed_tokens(twin), 20);
  client.run({{twin, {5}}, {id}, {other, {2}}});
}

TEST_P(SessionOnDevice, LatentForksAndSharedCaches) {
  SessionConfig config = small_config();
  for (clattn::AttentionOptions& layer : config.layers) {
    layer.config.num_kv_heads = 0;
    layer.config.head_size = 64 + 16;
    layer.config.rope_dim = 16;
    layer.config.use_mla = true;
    layer.config.sliding_window = 0;
  }
  Client forked = client(config), plain = client(config);
  for (Client* each : {&forked, &plain}) each->run({{each->session.add(counting(0, 20))}});
  const RequestId twin = forked.session.fork(0);
  EXPECT_EQ(forked.run({{twin, {3}}}).at(twin), plain.run({{0, {3}}}).at(0));
  // And chains of drafts.
  forked.run({{.id = twin, .new_tokens = {5}, .drafts = {6, 7, 8}}});
  forked.session.accept(twin, {0, 1});
  plain.run({{0, {5, 6, 7}}});
  EXPECT_EQ(forked.run({{twin, {9}}}).at(twin), plain.run({{0, {9}}}).at(0));
}

TEST_P(SessionOnDevice, LayersMayShareACache) {
  SessionConfig config = small_config();
  config.layers[0].prefix = "model.layers.0.attn";
  config.layers.push_back(config.layers[0]);
  config.layers[2].prefix = "model.layers.2.attn";
  config.layers[2].kv_sharing_target_layer_name = "model.layers.0.attn";
  config.num_blocks = 0;
  config.cache_bytes = 2 * 9 * kBlock * 2 * 2 * 64 * sizeof(float) + 1;  // of two layers
  Session session(attention_test::all_contexts().at(GetParam()), {}, config);
  EXPECT_EQ(session.blocks().num_blocks(), 9);
  EXPECT_EQ(session.layer(2).kv_cache()->buffer.handle(),
            session.layer(0).kv_cache()->buffer.handle());
  EXPECT_EQ(session.layer(1).layer_name(), "layers.1");
}

TEST_P(SessionOnDevice, WarmingUpTellsItsProgressAndLeavesNothing) {
  Client client = this->client();
  std::vector<std::pair<int, int>> told;
  const auto tell = [&](int done, int total) { told.emplace_back(done, total); };
  client.session.warm_up(tell);
  EXPECT_EQ(told, (std::vector<std::pair<int, int>>{{0, 2}, {1, 2}, {2, 2}}));
  told.clear();
  SessionConfig config = small_config();
  config.progress = tell;
  const Session other(attention_test::all_contexts().at(GetParam()), {}, config);
  EXPECT_EQ(told, (std::vector<std::pair<int, int>>{{0, 2}, {1, 2}, {2, 2}}));
  EXPECT_EQ(client.session.blocks().peak_used(), 0);
  client.run({{client.session.add(counting(0, 40))}});
  client.session.finish(0);
  client.session.warm_up();  // keeps what is published
  EXPECT_EQ(client.session.blocks().find_prefix(counting(0, 40)).size(), 2U);
  EXPECT_EQ(client.session.add(counting(0, 40)), 1);
  client.run({{1}});
}

// Random requests that come, fork, go and are evicted on a cache that is too small for them.
TEST_P(SessionOnDevice, RandomTrafficIsTheOracles) {
  SessionConfig config = small_config();
  config.num_blocks = 12;
  Client client = this->client(config);
  Session& session = client.session;
  std::mt19937 random(20261125);
  const auto below = [&](std::size_t n) { return static_cast<std::int32_t>(random() % n); };
  std::vector<RequestId> live;
  int refused = 0;
  for (int round = 0; round < 60; ++round) {
    while (live.size() < 3 || below(3) == 0)
      live.push_back(session.add(counting(below(2), 1 + below(50))));
    if (below(4) == 0) live.push_back(session.fork(live[random() % live.size()]));
    std::ranges::shuffle(live, random);
    std::vector<clattn::StepRequest> step;
    for (const RequestId id : std::vector(live.begin(), live.begin() + 3))
      step.push_back({id, counting(below(3), 1 + below(2)), 1 + below(40)});
    try {
      client.run(step);
    } catch (const clattn::Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::kOutOfBlocks) << error.what();
      ++refused;
      session.evict(live.back());
    }
    if (below(3) == 0 || live.size() > 6) {
      session.finish(live.back());
      live.pop_back();
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(refused, 0);
  for (const RequestId id : live) session.finish(id);
  EXPECT_EQ(session.blocks().num_used(), 0);
}

TEST_P(SessionOnDevice, NamesWhatItRefuses) {
  const auto& context = attention_test::all_contexts().at(GetParam());
  const auto refused = [&](const SessionConfig& config) {
    return error_text([&] { const Session session(context, {}, config); });
  };
  EXPECT_EQ(refused({}), "Session: layers is empty, legal: one for each layer");
  SessionConfig config = small_config();
  config.builder.graph_batch_size = 4;
  EXPECT_EQ(refused(config), "Session: builder.graph_batch_size is 4, legal: 0");
  config = small_config();
  config.num_blocks = 0;
  config.cache_bytes = 1000;
  EXPECT_EQ(refused(config),
            "Session: num_blocks is 0 and cache_bytes 1000, legal: 1 to 2147483646 blocks; a "
            "block takes 32768 bytes over all layers");
  Session session(context, {}, small_config());
  EXPECT_EQ(error_text([&] { session.add(Tokens{}); }),
            "Session: the prompt has 0 tokens, legal: at least 1");
  EXPECT_EQ(error_text([&] { session.evict(3); }),
            "Session: request 3 does not exist, legal: one of add() or fork() that has not "
            "finished");
  const RequestId id = session.add({1});
  EXPECT_EQ(error_text([&] {
              session.step({{id}, {id}});
            }),
            "step: request 0 is repeated, legal: once");
  EXPECT_EQ(error_text([&] {
              session.step({{id, {}, 0}});
            }),
            "step: request 0: max_tokens is 0, legal: >= 1");
  EXPECT_EQ(error_text([&] { session.attend(2, {}); }), "Session: layer is 2, legal: 0 … 1");
  config = small_config();
  config.layers[1].config.block_size = 32;
  EXPECT_EQ(refused(config),
            "KVCacheGroupSpec: layer 'layers.1' has block_size 32, legal: spec's 16");
}

INSTANTIATE_TEST_SUITE_P(Devices, SessionOnDevice,
                         testing::Range(std::size_t{0}, clattn::list_devices().size()));

}  // namespace test_session
