#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/block_pool.hpp>
#include <clattn/device.hpp>
#include <clattn/session.hpp>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"
#include "device/session_client.hpp"
#include "support/counting_new.hpp"
#include "support/error_text.hpp"

namespace test_session_drafts {

using clattn::RequestId;
using clattn::Session;
using clattn::SessionConfig;
using clattn::StepRequest;
using session_test::Client;
using session_test::counting;
using session_test::small_config;
using session_test::Tokens;
using test::error_text;

constexpr std::int32_t kBlock = layer_test::kShape.block_size;

/// As small_config(), whose second layer has a window: two groups, each with a plan.
SessionConfig tree_config() {
  SessionConfig config = small_config();
  for (clattn::AttentionOptions& layer : config.layers) layer.config.use_trees = true;
  return config;
}

/// Requests that become shorter, and drafts: chains by small_config(), trees by tree_config().
class SessionDrafts : public testing::TestWithParam<std::size_t> {
 protected:
  Client client(SessionConfig config = small_config()) const {
    return {attention_test::all_contexts().at(GetParam()), std::move(config)};
  }
};

/// Six nodes, the first of them the newest token.
StepRequest tree_of(RequestId id) {
  return {.id = id,
          .new_tokens = {500},
          .drafts = {501, 502, 503, 504, 505},
          .draft_parents = {-1, -1, 0, 1, 1}};
}
StepRequest chain_of(RequestId id, std::int32_t count) {
  return {.id = id, .new_tokens = {500}, .drafts = counting(501, count)};
}

Tokens tokens_of(const Session& session, RequestId id) {
  const auto tokens = session.tokens(id);
  return {tokens.begin(), tokens.end()};
}
Tokens blocks_of(const Session& session, RequestId id) {
  const auto blocks = session.block_table(id);
  return {blocks.begin(), blocks.end()};
}
Tokens joined(Tokens one, const Tokens& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

/// All keys and values of a request's computed tokens in the caches of both layers, by blocks.
std::vector<float> stored(const Session& session, const Tokens& blocks, std::int32_t num_tokens) {
  std::vector<float> found;
  for (std::int32_t l = 0; l < session.num_layers(); ++l) {
    const clattn::KVCache& cache = *session.layer(l).kv_cache();
    std::vector<float> all(cache.buffer.size_bytes() / sizeof(float));
    session.queue().read(cache.buffer, std::as_writable_bytes(std::span(all)));
    for (std::int32_t i = 0; i < num_tokens; ++i) {
      const std::int32_t block = blocks.at(static_cast<std::size_t>(i / kBlock));
      for (std::int32_t head = 0; head < cache.num_kv_heads; ++head) {
        for (const std::int64_t at :
             {cache.key_at(block, i % kBlock, head, 0), cache.value_at(block, i % kBlock, head, 0)})
          found.insert(found.end(), all.begin() + at, all.begin() + at + cache.head_size);
      }
    }
  }
  return found;
}
std::vector<float> stored(const Session& session, RequestId id) {
  return stored(session, blocks_of(session, id), session.num_computed_tokens(id));
}

/// Steps on with a token and compares with a session that computed the same tokens in order.
void expect_as_in_order(Client& client, Client& other, RequestId id, const Tokens& prompt) {
  const Session& session = client.session;
  const RequestId twin = other.session.add(prompt);
  other.run({{twin}});
  const Tokens tokens = tokens_of(session, id);
  other.run({{twin, {tokens.begin() + std::ssize(prompt), tokens.end()}}});
  EXPECT_EQ(stored(session, id), stored(other.session, twin));
  EXPECT_EQ(client.run({{id, {7}}}).at(id), other.run({{twin, {7}}}).at(twin));
}

TEST_P(SessionDrafts, ShortenedRequestsGoOnAndLeaveWhatIsPublished) {
  Client client = this->client(), other = this->client();
  Session& session = client.session;
  const Tokens prompt = counting(0, 2 * kBlock + 5);
  const RequestId id = session.add(prompt);
  client.run({{id}});
  const Tokens blocks = blocks_of(session, id);
  session.truncate(id, kBlock + 4);
  EXPECT_EQ(tokens_of(session, id), counting(0, kBlock + 4));
  EXPECT_EQ(session.num_computed_tokens(id), kBlock + 4);
  EXPECT_EQ(blocks_of(session, id), Tokens(blocks.begin(), blocks.begin() + 2));
  EXPECT_EQ(session.blocks().num_used(), 2);
  client.run({{id, {500}}});
  EXPECT_NE(session.block_table(id)[1], blocks[1]);  // which is published
  EXPECT_EQ(session.blocks().find_prefix(prompt), Tokens(blocks.begin(), blocks.begin() + 2));
  expect_as_in_order(client, other, id, counting(0, kBlock + 4));
  // What it had is found again, and so is computed no second time.
  session.truncate(id, kBlock);
  EXPECT_EQ(session.blocks().num_used(), 1);
  EXPECT_EQ(client.run({{id, counting(kBlock, kBlock + 5)}}).at(id).size(), 2U * 5 * 4 * 64);
  EXPECT_EQ(session.block_table(id)[1], blocks[1]);
}

TEST_P(SessionDrafts, ShortenedRequestsLeaveWhatForksHold) {
  Client client = this->client();
  Session& session = client.session;
  const RequestId id = session.add(counting(0, 3 * kBlock - 4));
  client.run({{id}});
  const RequestId fork = session.fork(id);
  const std::vector<float> before = stored(session, fork);
  session.truncate(id, 2 * kBlock + 3);  // in a block that both hold
  EXPECT_EQ(session.blocks().num_used(), 3);
  client.run({{id, counting(500, 7)}});
  EXPECT_EQ(stored(session, fork), before);
  session.truncate(id, 5);
  client.run({{id, {1}}, {fork, {2}}});
  EXPECT_EQ(session.blocks().num_used(), 1 + 3);
  session.finish(fork);
  session.truncate(id, 1);
  client.run({{id, {3}}});
  session.finish(id);
  EXPECT_EQ(session.blocks().num_used(), 0);
}

TEST_P(SessionDrafts, TokensThatAreNotComputedMayBeTakenBack) {
  Client client = this->client();
  Session& session = client.session;
  const RequestId id = session.add(counting(0, 40));
  client.run({{id, {}, 20}});
  session.truncate(id, 40);
  session.truncate(id, 30);
  EXPECT_EQ(session.num_computed_tokens(id), 20);
  client.run({{id}});
  session.evict(id);
  session.truncate(id, 10);
  client.run({{id}});
}

TEST_P(SessionDrafts, ChainsAreAcceptedInFullInPartAndNotAtAll) {
  const Tokens prompt = counting(0, kBlock + 4);
  for (const std::int32_t accepted : {20, 3, 0}) {
    Client client = this->client(), other = this->client();
    Session& session = client.session;
    const RequestId id = session.add(prompt);
    client.run({{id}});
    client.run({chain_of(id, 20)});
    EXPECT_EQ(tokens_of(session, id), joined(prompt, {500}));
    EXPECT_EQ(session.blocks().num_used(), 3);
    EXPECT_EQ(session.blocks().find_prefix(joined(prompt, counting(500, 21))).size(), 1U);
    session.accept(id, counting(0, accepted));
    EXPECT_EQ(tokens_of(session, id), joined(prompt, counting(500, accepted + 1)));
    EXPECT_EQ(session.num_computed_tokens(id), kBlock + 5 + accepted);
    const std::size_t blocks = accepted == 20 ? 3 : 2;
    EXPECT_EQ(session.block_table(id).size(), blocks);
    // What was accepted is found by others now, and nothing else.
    EXPECT_EQ(session.blocks().find_prefix(joined(prompt, counting(500, 21))).size(), blocks - 1);
    expect_as_in_order(client, other, id, prompt);
  }
}

// Of six nodes 0, 2 and 5, behind rejected ones, and other paths.
TEST_P(SessionDrafts, P39_AcceptedPathsAreTheBitsOfACacheWrittenInOrder) {
  const std::vector<std::pair<Tokens, Tokens>> paths = {
      {{1, 4}, {502, 505}}, {{0, 2}, {501, 503}}, {{1}, {502}}, {{}, {}}};
  for (const std::int32_t length : {20, 2 * kBlock - 3})
    for (const auto& [path, accepted] : paths) {
      Client client = this->client(tree_config()), other = this->client(tree_config());
      Session& session = client.session;
      const Tokens prompt = counting(0, length);
      const RequestId id = session.add(prompt);
      client.run({{id}});
      const RequestId fork = session.fork(id);
      const std::vector<float> before = stored(session, fork);
      client.run({tree_of(id)});
      session.accept(id, path);
      EXPECT_EQ(tokens_of(session, id), joined(joined(prompt, {500}), accepted));
      EXPECT_EQ(stored(session, fork), before);
      expect_as_in_order(client, other, id, prompt);
      client.run({{fork, {9}}});
    }
}

// Steps of any mixture, judged by the oracle.
TEST_P(SessionDrafts, DraftsStandBesideDecodesAndPrompts) {
  Client client = this->client(tree_config());
  Session& session = client.session;
  const RequestId tree = session.add(counting(0, 18)), chain = session.add(counting(100, 30)),
                  plain = session.add(counting(200, 5)), prompt = session.add(counting(300, 40)),
                  guess = session.add(counting(400, 9));
  client.run({{tree}, {chain}, {plain}});
  const StepRequest guessed{.id = guess, .drafts = {1, 2, 3}, .draft_parents = {-1, 0, -1}};
  const clattn::Step& step =
      session.step({{plain, {7}}, tree_of(tree), {prompt, {}, 25}, chain_of(chain, 4), guessed});
  EXPECT_EQ(step.num_drafts, (Tokens{0, 5, 0, 4, 3}));
  EXPECT_EQ(step.last_row(1), 1);
  EXPECT_EQ(step.last_row(4), step.num_tokens() - 4);
  EXPECT_EQ(step.seq_lens, (Tokens{6, 24, 25, 35, 12}));
  client.run({{plain, {7}}, tree_of(tree), {prompt, {}, 25}, chain_of(chain, 4), guessed});
  session.accept({{chain, {0, 1}}, {guess, {0, 1}}, {tree, {1}}});
  EXPECT_EQ(tokens_of(session, guess), joined(counting(400, 9), {1, 2}));
  client.run({chain_of(guess, 2), {tree, {8}}, {prompt}, {plain, {3}}, {chain, {4}}});
}

TEST_P(SessionDrafts, ManySpeculativeStepsGiveTheirRequestsTokens) {
  SessionConfig config = tree_config();
  config.builder.decode_threshold = 6;
  Client client = this->client(config);
  Session& session = client.session;
  const std::vector<RequestId> ids = {session.add({1, 2}), session.add(counting(50, 21))};
  client.run({{ids[0]}, {ids[1]}});
  const std::vector<float> before = stored(session, ids[0]);
  session.warm_up();
  EXPECT_EQ(stored(session, ids[0]), before);
  const std::vector<Tokens> paths = {{0, 2}, {}, {1, 3}, {1}, {1, 4}};
  for (std::size_t round = 0; round < 10; ++round) {
    client.run({tree_of(ids[1]), tree_of(ids[0])});
    session.accept(ids[0], paths[round % 5]);
    session.accept(ids[1], paths[(round + 2) % 5]);
  }
  EXPECT_EQ(session.num_computed_tokens(ids[0]), 2 + 10 + 14);
  EXPECT_EQ(session.num_computed_tokens(ids[1]), 21 + 10 + 14);
  for (const RequestId id : ids) session.finish(id);
  EXPECT_EQ(session.blocks().num_used(), 0);
}

TEST_P(SessionDrafts, DraftsOfStepsThatDoNotCountAreGone) {
  Client client = this->client();
  Session& session = client.session;
  const RequestId id = session.add(counting(0, 20)), other = session.add(counting(100, 20));
  client.run({{id}, {other}});
  const std::vector<StepRequest> batch = {chain_of(id, 20), chain_of(other, 20)};
  const auto given_up = [&] {
    EXPECT_EQ(tokens_of(session, id), counting(0, 20));
    EXPECT_EQ(session.blocks().num_used(), 4);
  };
  client.attend(0, batch, session.step(batch));
  EXPECT_NE(error_text([&] { session.step({{9}}); }), "");
  given_up();
  EXPECT_NE(error_text([&] { session.accept(id, {}); }), "");
  // Evicted and finished in the middle of a step, and after it.
  const clattn::Step& step = session.step(batch);
  session.evict(id);
  for (std::int32_t l = 0; l < 2; ++l) client.attend(l, batch, step);
  EXPECT_EQ(session.num_computed_tokens(id), 0);
  EXPECT_EQ(error_text([&] { session.accept(id, {}); }),
            "accept: request 0 has no drafts, legal: after a step with some");
  session.finish(other);
  EXPECT_EQ(session.blocks().num_used(), 0);
  client.run({chain_of(id, 3)});
  session.evict(id);
  client.run({{id, {5}}});
  EXPECT_EQ(session.num_computed_tokens(id), 23);
}

// Whatever fails on the way, the same call settles the drafts after it.
TEST_P(SessionDrafts, PathsAreAcceptedAsAWholeOrNotAtAll) {
  for (const bool failing : {false, true}) {  // first all kernels are built
    Client client = this->client(tree_config()), other = this->client(tree_config());
    Session& session = client.session;
    const Tokens prompt = counting(0, 2 * kBlock - 3);
    const RequestId id = session.add(prompt);
    client.run({{id}});
    client.run({tree_of(id)});
    const auto accept = [&] {
      try {
        session.accept(id, {1, 4});
      } catch (const std::exception&) {
        EXPECT_EQ(tokens_of(session, id), joined(prompt, {500}));
        EXPECT_EQ(session.num_computed_tokens(id), 2 * kBlock - 2);
        throw;
      }
    };
    if (failing) {
      const clattn::detail::CapturePause paused;  // captures allocate
      EXPECT_GT(test::fail_each_allocation(accept), 0U);
    } else {
      accept();
    }
    expect_as_in_order(client, other, id, prompt);
  }
}

// Keys of the layers move one after the other: if some have and others have not, none count.
TEST_P(SessionDrafts, SeveralRequestsAreSettledTogetherOrNotAtAll) {
  SessionConfig config = tree_config();
  config.layers[1].config.num_kv_heads = 4;  // caches of two shapes, which take two launches
  Client client = this->client(config), other = this->client(config);
  Session& session = client.session;
  const Tokens prompts[] = {counting(0, 2 * kBlock - 3), counting(100, 5)};
  const RequestId ids[] = {session.add(prompts[0]), session.add(prompts[1])};
  client.run({{ids[0]}, {ids[1]}});
  session.warm_up();
  const auto draft = [&](const Tokens& newest) {
    std::vector<StepRequest> batch = {tree_of(ids[0]), tree_of(ids[1])};
    for (StepRequest& part : batch) part.new_tokens = newest;
    client.run(batch);
  };
  draft({500});
  std::int32_t evictions = 0;
  const auto accept = [&] {
    try {
      session.accept({{ids[0], {1, 4}}, {ids[1], {0, 2}}});
    } catch (const std::bad_alloc&) {
      for (std::size_t i = 0; i < 2; ++i)
        EXPECT_EQ(tokens_of(session, ids[i]), joined(prompts[i], {500}));
      const bool evicted = session.num_computed_tokens(ids[0]) == 0;
      EXPECT_EQ(session.num_computed_tokens(ids[1]), evicted ? 0 : 6);
      if (evicted) draft({});
      evictions += evicted ? 1 : 0;
      throw;
    }
  };
  {
    const clattn::detail::CapturePause paused;  // captures allocate
    EXPECT_GT(test::fail_each_allocation(accept), 0U);
  }
  EXPECT_GT(evictions, 0);
  EXPECT_EQ(tokens_of(session, ids[1]), joined(prompts[1], {500, 501, 503}));
  for (std::size_t i = 0; i < 2; ++i) expect_as_in_order(client, other, ids[i], prompts[i]);
}

TEST_P(SessionDrafts, NamesWhatItRefuses) {
  Client client = this->client(), trees = this->client(tree_config());
  Session& session = client.session;
  const RequestId id = session.add(counting(0, 5));
  client.run({{id}});
  const auto refused = [](Session& of, const StepRequest& part) {
    return error_text([&] { of.step({part}); });
  };
  EXPECT_EQ(error_text([&] { session.accept(id, {}); }),
            "accept: request 0 has no drafts, legal: after a step with some");
  EXPECT_EQ(error_text([&] { session.truncate(id, 6); }),
            "truncate: request 0: length is 6, legal: 1 … 5 (its tokens)");
  EXPECT_EQ(error_text([&] { session.truncate(id, 0); }),
            "truncate: request 0: length is 0, legal: 1 … 5 (its tokens)");
  EXPECT_EQ(error_text([&] { session.truncate(9, 1); }).find("Session: request 9 does not"), 0U);
  EXPECT_EQ(error_text([&] { session.accept(9, {}); }).find("Session: request 9 does not"), 0U);
  EXPECT_EQ(refused(session, {.id = id, .drafts = {1}}),
            "step: request 0: new_tokens is empty, legal: at least 1, since its 5 tokens are "
            "computed");
  EXPECT_EQ(refused(session, {.id = id, .new_tokens = {1}, .drafts = {1}, .draft_parents = {0, 1}}),
            "step: request 0: draft_parents holds 2 elements, legal: 1 (drafts), or none");
  EXPECT_EQ(refused(session, {.id = id, .new_tokens = {1}, .draft_parents = {0}}),
            "step: request 0: draft_parents holds 1 elements, legal: 0 (drafts), or none");
  EXPECT_EQ(refused(session, {.id = id, .new_tokens = {1, 2}, .max_tokens = 1, .drafts = {3}}),
            "step: request 0: max_tokens is 1, legal with drafts: >= 2 (its tokens that are not "
            "computed)");
  EXPECT_EQ(refused(session, {.id = id, .new_tokens = {1}, .drafts = {1}, .draft_parents = {0}}),
            "step: request 0: draft_parents[0] is 0, legal: -1 … -1");
  EXPECT_EQ(
      refused(session, {.id = id, .new_tokens = {1}, .drafts = {1, 2}, .draft_parents = {-1, -2}}),
      "step: request 0: draft_parents[1] is -2, legal: -1 … 0");
  EXPECT_EQ(refused(session, tree_of(id)),
            "step: request 0: its drafts are a tree, legal in layer 0 without use_trees: a chain");
  EXPECT_EQ(tokens_of(session, id), counting(0, 5));

  StepRequest large{.id = trees.session.add({1}), .drafts = counting(0, 256)};
  large.draft_parents.assign(256, -1);
  EXPECT_EQ(refused(trees.session, large),
            "step: request 0: its drafts are a tree and it has 257 rows, legal: at most 256");
  large.draft_parents.clear();
  EXPECT_EQ(
      error_text([&] { trees.session.step({large}); }, clattn::ErrorCode::kOutOfBlocks),
      "Session: the step needs 17 more blocks, 16 of 16 are free; evict() or finish() a request");
}

TEST_P(SessionDrafts, NamesWhatMustBeSettledFirst) {
  Client client = this->client(tree_config());
  Session& session = client.session;
  const RequestId id = session.add(counting(0, 5));
  client.run({{id}});
  const std::vector<StepRequest> batch = {tree_of(id)};
  const clattn::Step& step = session.step(batch);
  const std::string unsettled = ": request 0 has 5 drafts, legal: none, as after accept()";
  const auto refused_path = [&](const Tokens& path) {
    return error_text([&] { session.accept(id, path); });
  };
  const std::string in_step =
      ": request 0 is in a step that does not count yet, legal: one that is in none";
  EXPECT_EQ(error_text([&] { session.fork(id); }), "fork" + unsettled);
  EXPECT_EQ(error_text([&] { session.truncate(id, 1); }), "truncate" + unsettled);
  EXPECT_EQ(refused_path({0}), "accept" + in_step);
  for (std::int32_t l = 0; l < 2; ++l) client.attend(l, batch, step);
  EXPECT_EQ(error_text([&] { session.fork(id); }), "fork" + unsettled);
  EXPECT_EQ(error_text([&] { session.truncate(id, 1); }), "truncate" + unsettled);
  EXPECT_EQ(error_text([&] { session.step({{id, {1}}}); }), "step" + unsettled);
  const std::string children = "legal: one of its 5 drafts whose parent is ";
  EXPECT_EQ(refused_path({2}), "accept: request 0: path[0] is 2, " + children + "-1");
  EXPECT_EQ(refused_path({1, 2}), "accept: request 0: path[1] is 2, " + children + "1");
  EXPECT_EQ(refused_path({1, 1}), "accept: request 0: path[1] is 1, " + children + "1");
  EXPECT_EQ(refused_path({1, 4, 3}), "accept: request 0: path[2] is 3, " + children + "4");
  EXPECT_EQ(refused_path({5}), "accept: request 0: path[0] is 5, " + children + "-1");
  EXPECT_EQ(refused_path({-1}), "accept: request 0: path[0] is -1, " + children + "-1");
  EXPECT_EQ(error_text([&] {
              session.accept({{id, {1, 4}}, {id, {}}});
            }),
            "accept: request 0 is repeated, legal: once");
  EXPECT_NE(error_text([&] { session.accept({{id, {1, 4}}, {9, {}}}); }), "");
  EXPECT_EQ(session.num_computed_tokens(id), 6);
  session.accept(id, {1, 4});
  EXPECT_EQ(session.num_computed_tokens(id), 8);
  EXPECT_EQ(refused_path({}), "accept: request 0 has no drafts, legal: after a step with some");
  session.step({{id, {1}}});
  EXPECT_EQ(error_text([&] { session.truncate(id, 1); }), "truncate" + in_step);
}

INSTANTIATE_TEST_SUITE_P(Devices, SessionDrafts,
                         testing::Range(std::size_t{0}, clattn::list_devices().size()));

}  // namespace test_session_drafts
