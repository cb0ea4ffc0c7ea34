// Layers of unlike shapes in one session, and blocks that windows leave.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/block_pool.hpp>
#include <clattn/device.hpp>
#include <clattn/session.hpp>
#include <random>
#include <vector>

#include "device/attention_case.hpp"
#include "device/session_client.hpp"
#include "support/error_text.hpp"

namespace test_session_windows {

using clattn::BlockPool;
using clattn::RequestId;
using clattn::Session;
using clattn::SessionConfig;
using clattn::StepRequest;
using session_test::Client;
using session_test::counting;
using session_test::Tokens;
using test::error_text;

constexpr std::int32_t kBlock = layer_test::kShape.block_size, kWindow = 20;

/// Three layers, of which the second and the third have other heads; the second has a window.
SessionConfig mixed_config() {
  SessionConfig config;
  config.layers.assign(3, layer_test::layer_options(""));
  config.layers[1].config.num_heads = 6;
  config.layers[1].config.num_kv_heads = 3;
  config.layers[1].config.head_size = 96;
  config.layers[1].config.sliding_window = kWindow;
  config.layers[2].config.num_heads = 2;
  config.layers[2].config.num_kv_heads = 1;
  config.num_blocks = 64;
  config.builder.limits.max_num_reqs = 3;
  config.builder.limits.max_num_batched_tokens = 64;
  return config;
}
/// Blocks of the layer with a window: a step of 64 tokens, and 3 requests that reach 2 blocks and
/// hold a block that is partly full, a part of a window and a copy.
constexpr std::int32_t kWindowBlocks = 64 / kBlock + 3 * (2 + 3);

class SessionWindows : public testing::TestWithParam<std::size_t> {
 protected:
  Client client(SessionConfig config = mixed_config()) const {
    return {attention_test::all_contexts().at(GetParam()), std::move(config)};
  }
};

const BlockPool& window_pool(const Session& session) {
  const auto all = session.window_blocks();
  EXPECT_EQ(all.size(), 1U);
  EXPECT_EQ(all.at(0).window, kWindow);
  return *all.at(0).blocks;
}

/// The prompt in steps of 40 tokens.
RequestId add_in_chunks(Client& client, const Tokens& prompt, std::uint64_t salt = 0) {
  const RequestId id = client.session.add(prompt, salt);
  while (client.session.num_computed_tokens(id) < std::ssize(prompt))
    client.run({{.id = id, .max_tokens = 40}});
  return id;
}

TEST_P(SessionWindows, LayersOfUnlikeHeadsShareASession) {
  SessionConfig config = mixed_config();
  config.layers[1].config.sliding_window = 0;
  Client client = this->client(config);
  Session& session = client.session;
  EXPECT_TRUE(session.window_blocks().empty());
  const RequestId id = session.add(counting(0, 50));
  client.run({{id}});
  const RequestId fork = session.fork(id);
  client.run({{fork, {3}}, {id, {4}}});  // copies the block of all layers
  client.run({{.id = id, .new_tokens = {5}, .drafts = {6, 7}}});
  session.accept(id, {0});
  client.run({{id, {8}}, {fork, {9}}});
  EXPECT_EQ(session.num_computed_tokens(session.add(counting(0, 50))), 48);
}

/// Prompts, forks, drafts and decodes through all layers.
void serve(Client& client) {
  const RequestId id = add_in_chunks(client, counting(0, 70));
  const RequestId fork = client.session.fork(id);
  client.run({{fork, {3}}, {id, {4}}});  // copies the block of all layers
  client.run({{.id = id, .new_tokens = {5}, .drafts = {6, 7}}});
  client.session.accept(id, {0});
  client.run({{id, {8}}, {fork, {9}}});
}

std::vector<std::int64_t> free_blocks(const Session& session) {
  return {session.blocks().num_free(), window_pool(session).num_free()};
}

TEST_P(SessionWindows, BlocksNeededAreThoseThatAStepTakes) {
  Client client = this->client();
  Session& session = client.session;
  const auto expect_taken = [&](const std::vector<StepRequest>& requests,
                                const std::vector<std::int64_t>& want) {
    const std::vector<std::int64_t> before = free_blocks(session);
    EXPECT_EQ(session.blocks_needed(requests), want);
    EXPECT_EQ(free_blocks(session), before);
    session.step(requests);
    const std::vector<std::int64_t> after = free_blocks(session);
    EXPECT_EQ(before[0] - after[0], want[0]);
    EXPECT_EQ(before[1] - after[1], want[1]);
    EXPECT_EQ(
        error_text([&] { (void)session.blocks_needed(requests); }),
        fmt::format("blocks_needed: called in a step of {} requests, legal: before step(), or "
                    "once the last step counts",
                    requests.size()));
    client.run(requests);  // gives that step up
  };
  const RequestId id = session.add(counting(0, 40)), other = session.add(counting(500, 10));
  expect_taken({{.id = id, .max_tokens = 30}, {.id = other}}, {3, 3});
  expect_taken({{.id = id}}, {1, 1});
  const RequestId fork = session.fork(id);
  expect_taken({{id, {7}}, {fork, {8}}}, {1, 1});  // a block of its own for one of them
  expect_taken({{.id = other, .new_tokens = {1}, .drafts = counting(2, 8)}}, {1, 1});
  session.finish(id);  // its first blocks can be found, and are free
  session.finish(fork);
  const RequestId again = session.add(counting(0, 16));
  expect_taken({{.id = again, .new_tokens = counting(16, 30)}}, {3, 3});  // two are found
  EXPECT_EQ(error_text([&] { (void)session.blocks_needed(std::vector<StepRequest>{{99}}); }),
            "Session: request 99 does not exist, legal: one of add() or fork() that has not "
            "finished");
}

TEST_P(SessionWindows, BlocksNeededSayWhetherAStepFits) {
  SessionConfig config = mixed_config();
  config.num_blocks = 4;
  config.prefix_caching = false;
  Client client = this->client(config);
  Session& session = client.session;
  const RequestId first = session.add(counting(0, 2 * kBlock)),
                  second = session.add(counting(100, 3 * kBlock));
  client.run({{first}});
  EXPECT_EQ(session.blocks_needed(std::vector<StepRequest>{{second}})[0], 3);
  EXPECT_EQ(session.blocks().num_free(), 2);
  EXPECT_EQ(
      error_text([&] { session.step({{second}}); }, clattn::ErrorCode::kOutOfBlocks),
      "Session: the step needs 3 more blocks, 2 of 4 are free; evict() or finish() a request");
  session.evict(first);
  client.run({{second}});
}

// Layers that see all keys by heads of 512 beside windows of 256, as Gemma 4 has them.
TEST_P(SessionWindows, FullLayersHaveLargerHeads) {
  SessionConfig config = mixed_config();
  config.layers[0].config.head_size = 512;
  config.layers[1].config.head_size = 256;
  config.layers.pop_back();
  Client client = this->client(config);
  serve(client);
}

// Keys of 192 with values of 128 under windows and sinks, as MiMo has them.
TEST_P(SessionWindows, ValuesHaveFewerElementsThanKeys) {
  SessionConfig config = mixed_config();
  for (clattn::AttentionOptions& layer : config.layers) {
    layer.config.num_heads = 4;
    layer.config.num_kv_heads = 2;
    layer.config.head_size = 192;
    layer.config.head_size_v = 128;
  }
  config.layers[1].config.sinks = {0.5F, 2.0F, -1.0F, 0.0F};
  config.layers.pop_back();
  Client client = this->client(config);
  serve(client);
  EXPECT_EQ(client.session.layer(0).kv_cache()->value_size(), 128);
}

TEST_P(SessionWindows, LatentLayersShareASessionWithOthers) {
  SessionConfig config = mixed_config();
  config.layers[2].config.num_kv_heads = 0;
  config.layers[2].config.head_size = 64 + 16;
  config.layers[2].config.rope_dim = 16;
  config.layers[2].config.use_mla = true;
  Client forked = client(config), plain = client(config);
  for (Client* each : {&forked, &plain}) each->run({{each->session.add(counting(0, 40))}});
  const RequestId twin = forked.session.fork(0);
  EXPECT_EQ(forked.run({{twin, {3}}}).at(twin), plain.run({{0, {3}}}).at(0));
}

TEST_P(SessionWindows, BlocksThatTheWindowLeavesAreGivenUp) {
  Client client = this->client();
  Session& session = client.session;
  EXPECT_EQ(session.blocks().num_blocks(), 64);
  EXPECT_EQ(window_pool(session).num_blocks(), kWindowBlocks);
  const RequestId id = add_in_chunks(client, counting(0, 500));
  EXPECT_EQ(session.blocks().num_used(), 32);
  for (std::int32_t i = 0; i < 40; ++i) {
    client.run({{id, {i}}});
    // The next row sees the last 19 tokens: blocks of 16 hold them two or three at a time.
    const std::int32_t computed = session.num_computed_tokens(id);
    const std::int32_t first = (computed - kWindow + 1) / kBlock;
    EXPECT_EQ(window_pool(session).num_used(), (computed + kBlock - 1) / kBlock - first);
  }
  const RequestId fork = session.fork(id);
  client.run({{fork, {1}}, {id, {2}}});
  session.finish(id);
  client.run({{fork, {3}}});
  session.finish(fork);
  EXPECT_EQ(session.blocks().num_used(), 0);
  EXPECT_EQ(window_pool(session).num_used(), 0);
}

TEST_P(SessionWindows, PrefixesAreFoundByTheirLastWindow) {
  Client client = this->client();
  Session& session = client.session;
  const RequestId id = add_in_chunks(client, counting(0, 100));
  // Whose first blocks the window has left, but nobody has taken.
  const RequestId twin = session.add(counting(0, 100));
  EXPECT_EQ(session.num_computed_tokens(twin), 96);
  EXPECT_EQ(window_pool(session).reference_count(0), 0);
  client.run({{twin}});
  session.finish(id);
  session.finish(twin);
  // Others take the blocks of the window, which hold what only the full layers still have.
  const RequestId other = add_in_chunks(client, counting(1000, 600));
  session.finish(other);
  const RequestId late = session.add(counting(0, 100));
  EXPECT_EQ(session.blocks().find_prefix(counting(0, 100)).size(), 6U);
  EXPECT_EQ(session.num_computed_tokens(late), 0);
  client.run({{.id = late, .max_tokens = 40}});
  client.run({{.id = late}});
  const RequestId again = session.add(counting(0, 90));
  EXPECT_EQ(session.num_computed_tokens(again), 80);
  client.run({{again}});
}

TEST_P(SessionWindows, ARequestTakesOverWhatAnotherHasComputed) {
  Client client = this->client();
  Session& session = client.session;
  const RequestId first = session.add(counting(0, 200)), second = session.add(counting(0, 200));
  client.run({{.id = second, .max_tokens = kBlock}});
  while (session.num_computed_tokens(first) < 200) client.run({{.id = first, .max_tokens = 40}});
  client.run({{second}});  // all but 8 tokens are known
  EXPECT_EQ(session.num_computed_tokens(second), 200);
  session.finish(first);
  session.finish(second);
  EXPECT_EQ(session.blocks().num_used(), 0);
  EXPECT_EQ(window_pool(session).num_used(), 0);
}

TEST_P(SessionWindows, ShortenedRequestsComputeAgainWhatTheWindowHasLeft) {
  Client client = this->client();
  Session& session = client.session;
  const RequestId id = add_in_chunks(client, counting(0, 100));
  session.truncate(id, 99);  // the window reaches as far
  EXPECT_EQ(session.num_computed_tokens(id), 99);
  client.run({{id, {7}}});
  session.truncate(id, 60);
  EXPECT_EQ(session.num_computed_tokens(id), 0);
  client.run({{id, {8}}});
  EXPECT_EQ(session.num_computed_tokens(id), 61);
  session.finish(id);
  EXPECT_EQ(session.blocks().num_used(), 0);
  EXPECT_EQ(window_pool(session).num_used(), 0);
}

TEST_P(SessionWindows, BytesAreSharedBetweenTheGroups) {
  SessionConfig config = mixed_config();
  const std::size_t full = 2 * kBlock * (2 + 1) * 64 * sizeof(float);
  const std::size_t window = 2 * kBlock * 3 * 96 * sizeof(float);
  config.num_blocks = 0;
  config.cache_bytes = 30 * full + kWindowBlocks * window + full - 1;
  const Session session(attention_test::all_contexts().at(GetParam()), {}, config);
  EXPECT_EQ(session.blocks().num_blocks(), 30);
  EXPECT_EQ(window_pool(session).num_blocks(), kWindowBlocks);
  // Where windows save nothing, all layers share one table.
  config.cache_bytes = 10 * (full + window);
  const Session small(attention_test::all_contexts().at(GetParam()), {}, config);
  EXPECT_EQ(small.blocks().num_blocks(), 10);
  EXPECT_TRUE(small.window_blocks().empty());
}

TEST_P(SessionWindows, StepsWithoutRoomInAWindowForgetNoPrefix) {
  SessionConfig config = mixed_config();
  config.num_blocks = 6 * 3 + 6;
  Client client = this->client(config);
  Session& session = client.session;
  const Tokens prompt = counting(0, 3 * kBlock);
  client.run({{session.add(prompt)}});
  session.finish(0);
  for (std::int32_t i = 1; i <= 6; ++i)
    client.run({{session.add(counting(1000 * i, 2 * kBlock + 1))}});
  ASSERT_EQ(window_pool(session).num_free(), kWindowBlocks - 6 * 3);
  const RequestId last = session.add(counting(9000, 4 * kBlock));
  ASSERT_EQ(session.blocks().num_free(), 6);  // 3 of them can be found
  EXPECT_NE(test::error_text([&] { session.step({{last}}); }, clattn::ErrorCode::kOutOfBlocks)
                .find("needs 4 more blocks of layers with a window, 1 of 19"),
            std::string::npos);
  EXPECT_EQ(session.blocks().find_prefix(prompt).size(), 3U);
}

TEST_P(SessionWindows, LayersWithoutAFullOneKeepAll) {
  SessionConfig config = mixed_config();
  for (auto& layer : config.layers) layer.config.sliding_window = kWindow;
  const Session session(attention_test::all_contexts().at(GetParam()), {}, config);
  EXPECT_TRUE(session.window_blocks().empty());
}

// Random requests that come, fork, shrink, guess, go and are evicted.
TEST_P(SessionWindows, RandomTrafficIsTheOracles) {
  SessionConfig config = mixed_config();
  config.layers.resize(2);
  config.num_blocks = kWindowBlocks + 1;
  Client client = this->client(config);
  Session& session = client.session;
  std::mt19937 random(20261130);
  const auto below = [&](std::size_t n) { return static_cast<std::int32_t>(random() % n); };
  std::vector<RequestId> live;
  int refused = 0, known = 0;
  for (int round = 0; round < 120; ++round) {
    while (live.size() < 4 || below(3) == 0) {
      live.push_back(session.add(counting(below(2), 1 + below(90))));
      known += session.num_computed_tokens(live.back()) > 0 ? 1 : 0;
    }
    if (below(4) == 0) live.push_back(session.fork(live[random() % live.size()]));
    if (below(3) == 0) {
      const RequestId id = live[random() % live.size()];
      session.truncate(id, 1 + below(session.tokens(id).size()));
    }
    std::ranges::shuffle(live, random);
    std::vector<StepRequest> step;
    for (const RequestId id : std::vector(live.begin(), live.begin() + 3))
      step.push_back({id, counting(below(3), 1 + below(2)), 1 + below(20)});
    const std::size_t left = session.tokens(step[0].id).size() + step[0].new_tokens.size() -
                             static_cast<std::size_t>(session.num_computed_tokens(step[0].id));
    if (left < 20) {
      step[0].max_tokens = 20;
      step[0].drafts = counting(below(9), 1 + below(3));
    }
    try {
      client.run(step);
      if (!step[0].drafts.empty())
        session.accept(step[0].id, counting(0, below(step[0].drafts.size() + 1)));
    } catch (const clattn::Error& error) {
      ASSERT_EQ(error.code(), clattn::ErrorCode::kOutOfBlocks) << error.what();
      ++refused;
      session.evict(live.back());
    }
    if (below(3) == 0 || live.size() > 8) {
      session.finish(live.back());
      live.pop_back();
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(known, 0);
  for (const RequestId id : live) session.finish(id);
  EXPECT_EQ(session.blocks().num_used(), 0);
  EXPECT_EQ(window_pool(session).num_used(), 0);
}

INSTANTIATE_TEST_SUITE_P(Devices, SessionWindows,
                         testing::Range(std::size_t{0}, clattn::list_devices().size()));

}  // namespace test_session_windows
