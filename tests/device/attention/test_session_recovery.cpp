#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/block_pool.hpp>
#include <clattn/device.hpp>
#include <clattn/session.hpp>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"
#include "device/session_client.hpp"
#include "support/counting_new.hpp"
#include "support/error_text.hpp"

namespace test_session_recovery {

using clattn::ErrorCode;
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

/// Sessions when something fails, and what they must not share.
class SessionRecovery : public testing::TestWithParam<std::size_t> {
 protected:
  const std::shared_ptr<clattn::Context>& context() const {
    return attention_test::all_contexts().at(GetParam());
  }
  Client client(SessionConfig config = small_config()) const {
    return {context(), std::move(config)};
  }
};

/// Everything that is known of some requests and of the pool.
struct State {
  State(const Session& session, const std::vector<RequestId>& ids)
      : num_used(session.blocks().num_used()) {
    for (const RequestId id : ids) {
      tokens.emplace_back(session.tokens(id).begin(), session.tokens(id).end());
      blocks.emplace_back(session.block_table(id).begin(), session.block_table(id).end());
      computed.push_back(session.num_computed_tokens(id));
    }
  }
  bool operator==(const State&) const = default;

  std::int32_t num_used;
  std::vector<Tokens> tokens, blocks;
  Tokens computed;
};

/// Makes each allocation of `call` fail. Afterwards requests and pool are as they were, and no
/// request is there that nobody knows.
template <typename Call>
void expect_all_or_nothing(Session& session, const std::vector<RequestId>& ids, const Call& call) {
  const clattn::detail::CapturePause paused;  // captures allocate
  const State before(session, ids);
  const auto checked = [&] {
    try {
      call();
    } catch (const std::exception&) {
      EXPECT_EQ(State(session, ids), before);
      const RequestId probe = session.fork(ids[0]);
      EXPECT_TRUE(std::ranges::equal(session.tokens(probe), before.tokens[0]));
      session.finish(probe);
      EXPECT_EQ(State(session, ids), before);
      throw;
    }
  };
  EXPECT_GT(test::fail_each_allocation(checked), 0U);
}

/// Builds all kernels that steps and forks launch. Else allocations would fail in the driver's
/// compiler, too: PoCL's then keeps a lock for which it waits when the program is released.
void build_kernels(Client client) {
  const RequestId root = client.session.add(counting(0, 40));
  client.run({{root}});
  const RequestId forked = client.session.fork(root);
  client.run({{root, {1}}, {forked, {2}}});
}

TEST_P(SessionRecovery, FailedAllocationsLeaveEverythingAsItWas) {
  build_kernels(this->client());
  Client client = this->client();
  Session& session = client.session;
  const Tokens prompt = counting(0, 40);
  const RequestId root = session.add(prompt);
  client.run({{root}});
  const std::vector<RequestId> ids = {root, session.fork(root), session.fork(root)};
  RequestId added = -1, forked = -1;
  expect_all_or_nothing(session, ids, [&] { added = session.add(prompt); });
  expect_all_or_nothing(session, ids, [&] { forked = session.fork(root); });
  EXPECT_EQ(session.num_computed_tokens(added), 2 * kBlock);
  session.finish(added);
  session.finish(forked);
  // Two copies, and tokens that others have computed.
  const RequestId late = session.add(counting(300, 20));
  session.evict(root);
  std::vector<RequestId> all = ids;
  all.push_back(late);
  const std::vector<StepRequest> batch = {
      {root, {1, 2, 3}}, {ids[1], {4}}, {ids[2], {5}}, {late, {6}}};
  client.run({{session.add(counting(300, 40))}});
  expect_all_or_nothing(session, all, [&] { session.step(batch); });
  client.run(batch);
  for (std::size_t i = 0; i < all.size(); ++i)
    EXPECT_EQ(session.tokens(all[i]).back(), i == 0 ? 3 : std::int32_t(i) + 3);
}

TEST_P(SessionRecovery, LastLayerCompletesAllRequestsOrNone) {
  Client client = this->client();
  Session& session = client.session;
  const std::vector<RequestId> ids = {session.add(counting(0, 40)), session.add(counting(100, 40))};
  client.run({{ids[0], {}, 8}, {ids[1], {}, 8}});
  const std::vector<StepRequest> batch = {{ids[0]}, {ids[1]}};
  const layer_test::Device device(context());
  const clattn::Buffer in = device.upload(std::vector<float>(64 * 4 * 64));
  const clattn::Buffer out = device.upload(std::vector<float>(64 * 4 * 64));
  const clattn::AttentionTensors tensors{.query = {in.handle()},
                                         .key = {in.handle()},
                                         .value = {in.handle()},
                                         .output = {out.handle()}};
  session.step(batch);
  session.attend(0, tensors);
  const State before(session, ids);
  const clattn::detail::CapturePause paused;  // captures allocate
  test::fail_each_allocation([&] {
    try {
      session.attend(1, tensors);
    } catch (const std::exception&) {
      EXPECT_EQ(State(session, ids), before);
      throw;
    }
  });
  session.queue().finish();
  for (const RequestId id : ids) {
    EXPECT_EQ(session.num_computed_tokens(id), 40);
    EXPECT_EQ(session.blocks().find_prefix(session.tokens(id)).size(), 2U);
  }
}

// A loop that tries a batch again after whatever was thrown on its way.
TEST_P(SessionRecovery, BatchesThatAreTriedAgainCountOnce) {
  Client calm = client(), shaken = client();
  for (Client* each : {&calm, &shaken}) {
    each->session.add(counting(0, 40));
    each->session.add(counting(100, 20));
  }
  const std::vector<std::vector<StepRequest>> batches = {
      {{0, {}, 20}, {1}}, {{0}, {1, {7}}}, {{1, {8, 9}}, {0, {5}}}, {{0, {6}}, {1, {3}}}};
  for (const std::vector<StepRequest>& batch : batches) {
    const State before(shaken.session, {0, 1});
    for (std::int32_t layers = 0; layers < 2; ++layers) {
      const clattn::Step& step = shaken.session.step(batch);
      for (std::int32_t l = 0; l < layers; ++l) shaken.attend(l, batch, step);
      EXPECT_NE(error_text([&] { shaken.session.step({{9}}); }), "");  // gives it up, too
      EXPECT_EQ(State(shaken.session, {0, 1}), before);
      shaken.session.step(batch);
    }
    EXPECT_EQ(shaken.run(batch), calm.run(batch));
    EXPECT_EQ(State(shaken.session, {0, 1}).tokens, State(calm.session, {0, 1}).tokens);
  }
}

// A model whose layers are those of two sessions, and which throws between their last attend()s.
TEST_P(SessionRecovery, SessionsInLockstepCountAStepTogether) {
  SessionConfig config = small_config();
  config.explicit_commit = true;
  Client first = client(config), second = client(config), calm = client();
  Client* const both[] = {&first, &second};
  for (Client* each : {&first, &second, &calm}) {
    each->session.add(counting(0, 40));
    each->session.add(counting(100, 20));
  }
  const std::vector<std::vector<StepRequest>> batches = {
      {{0, {}, 20}, {1}}, {{0}, {1, {7}}}, {{1, {8, 9}}, {0, {5}}}};
  for (const std::vector<StepRequest>& batch : batches) {
    const State before(first.session, {0, 1});
    const auto attend_all = [&](Client& client) {
      const clattn::Step& step = client.session.step(batch);
      for (std::int32_t l = 0; l < 2; ++l) client.attend(l, batch, step);
    };
    attend_all(first);  // and the model throws
    EXPECT_EQ(error_text([&] { first.session.step({{9}}); }).find("request 9"), 9U);
    EXPECT_EQ(State(first.session, {0, 1}), before);
    for (Client* each : both) attend_all(*each);
    for (Client* each : both) each->session.commit();
    calm.run(batch);
    const State wanted(calm.session, {0, 1});
    for (Client* each : both) {
      const State got(each->session, {0, 1});
      EXPECT_EQ(got.tokens, wanted.tokens);
      EXPECT_EQ(got.computed, wanted.computed);
      EXPECT_EQ(got.num_used, wanted.num_used);
    }
  }
}

TEST_P(SessionRecovery, CommitsOnlyWhatIsToBeCommitted) {
  Client client = this->client();
  EXPECT_EQ(error_text([&] { client.session.commit(); }),
            "commit: explicit_commit is false, legal: a session made with it");
  SessionConfig config = small_config();
  config.explicit_commit = true;
  Client other = this->client(config);
  Session& session = other.session;
  const std::string none =
      "commit: 0 of 2 layers have been attended, legal: all of them, once a step";
  EXPECT_EQ(error_text([&] { session.commit(); }), none);
  const std::vector<StepRequest> batch = {{session.add(counting(0, 20))}};
  const clattn::Step& step = session.step(batch);
  EXPECT_EQ(error_text([&] { session.commit(); }), none);
  other.attend(1, batch, step);
  EXPECT_EQ(error_text([&] { session.commit(); }),
            "commit: 1 of 2 layers have been attended, legal: all of them, once a step");
  other.attend(0, batch, step);
  EXPECT_EQ(session.num_computed_tokens(0), 0);
  EXPECT_TRUE(session.blocks().find_prefix(session.tokens(0)).empty());
  session.commit();
  EXPECT_EQ(session.num_computed_tokens(0), 20);
  EXPECT_EQ(session.blocks().find_prefix(session.tokens(0)).size(), 1U);
  EXPECT_EQ(error_text([&] { session.commit(); }), none);
}

// Evicting a request does not say whether the step goes on.
TEST_P(SessionRecovery, RequestsEvictedInAStepKeepItsTokensIfItIsCompleted) {
  Client client = this->client();
  Session& session = client.session;
  session.add(counting(0, 20));
  session.add(counting(100, 20));
  client.run({{0}, {1}});
  const std::vector<StepRequest> batch = {{0, {1}}, {1, {2}}};
  session.step(batch);
  session.evict(0);
  client.run(batch);
  EXPECT_EQ(session.tokens(0).size(), 21U);
  const clattn::Step& step = session.step(batch);
  session.evict(0);
  for (std::int32_t l = 0; l < 2; ++l) client.attend(l, batch, step);
  EXPECT_EQ(session.tokens(0).size(), 22U);
  EXPECT_EQ(session.num_computed_tokens(0), 0);
  EXPECT_EQ(session.num_computed_tokens(1), 22);
}

TEST_P(SessionRecovery, GivenUpStepsLeaveNoBlocks) {
  Client client = this->client();
  Session& session = client.session;
  const Tokens prompt = counting(0, 4 * kBlock - 1);
  const RequestId first = session.add(prompt), second = session.add(prompt);
  session.step({{first, {}, kBlock}, {second}});
  client.run({{first}});
  EXPECT_EQ(session.blocks().num_used(), 4);
  EXPECT_EQ(session.step({{second}}).num_tokens(), kBlock - 1);  // the others are found
}

TEST_P(SessionRecovery, StepsBeyondALimitForgetNoPrefix) {
  struct Limit {
    std::string name;
    std::int32_t clattn::BatchLimits::*field;
    std::int32_t value;
  };
  for (const Limit& limit :
       {Limit{"max_num_batched_tokens", &clattn::BatchLimits::max_num_batched_tokens, 64},
        Limit{"max_model_len", &clattn::BatchLimits::max_model_len, 100},
        Limit{"max_num_reqs", &clattn::BatchLimits::max_num_reqs, 1}}) {
    SessionConfig config = small_config();
    config.builder.limits.*limit.field = limit.value;
    Client client = this->client(config);
    Session& session = client.session;
    const Tokens prompt = counting(0, 3 * kBlock);
    client.run({{session.add(prompt)}});
    session.finish(0);
    const std::vector<StepRequest> batch = {{session.add(counting(1000, 15 * kBlock))},
                                            {session.add(counting(2000, 1))}};
    EXPECT_NE(error_text([&] { session.step(batch); }).find(limit.name), std::string::npos);
    EXPECT_EQ(session.blocks().find_prefix(prompt).size(), 3U) << limit.name;
  }
}

TEST_P(SessionRecovery, SaltsPartEqualPrompts) {
  Client client = this->client();
  Session& session = client.session;
  const Tokens prompt = counting(0, 40);
  const RequestId first = session.add(prompt, 1), early = session.add(prompt, 2);
  client.run({{first}});
  EXPECT_EQ(session.num_computed_tokens(session.add(prompt)), 0);
  EXPECT_EQ(session.num_computed_tokens(session.add(prompt, 1)), 2 * kBlock);
  EXPECT_EQ(session.step({{early}}).num_tokens(), 40);
  const RequestId twin = session.fork(first);
  session.evict(twin);
  EXPECT_EQ(session.step({{twin}}).num_tokens(), 40 - 2 * kBlock);
}

TEST_P(SessionRecovery, LayersWithMasksShareNoPrefix) {
  SessionConfig config = small_config();
  config.layers[1].config.custom_mask = true;
  Client client = this->client(config);
  Session& session = client.session;
  const Tokens prompt = counting(0, 40);
  const std::vector<StepRequest> batch = {{session.add(prompt)}};
  const clattn::Buffer mask = context()->allocate(40 * 40);
  session.queue().fill(mask, 0x01010101, 0, 40 * 40);
  const clattn::Step& step = session.step(batch);
  client.attend(0, batch, step);
  client.attend(1, batch, step, {.custom_mask = mask.handle(), .custom_mask_stride = 40});
  EXPECT_EQ(session.num_computed_tokens(0), 40);
  EXPECT_EQ(session.num_computed_tokens(session.add(prompt)), 0);
}

// A fork that lags behind its origin holds a block that the origin fills and publishes.
TEST_P(SessionRecovery, ForksDoNotWriteIntoPublishedBlocks) {
  Client client = this->client();
  Session& session = client.session;
  const RequestId root = session.add(counting(0, 5));
  client.run({{root}});
  const std::vector<StepRequest> rest = {{root, counting(5, kBlock - 5)}};
  const clattn::Step& step = session.step(rest);
  const RequestId twin = session.fork(root);
  for (std::int32_t l = 0; l < 2; ++l) client.attend(l, rest, step);
  session.finish(root);
  const std::int32_t published = session.block_table(twin)[0];
  EXPECT_TRUE(session.blocks().is_published(published));
  client.run({{twin}});
  EXPECT_NE(session.block_table(twin)[0], published);
  EXPECT_EQ(session.blocks().reference_count(published), 0);
}

TEST_P(SessionRecovery, NamesWhatItRefuses) {
  EXPECT_EQ(error_text([] { const Session session(nullptr, {}, small_config()); }),
            "Session: context is null, legal: Context::create()");
  SessionConfig config = small_config();
  config.num_blocks = clattn::BlockPool::kMaxBlocks;  // 200 GB in the pool, if it came first
  EXPECT_NE(
      error_text([&] { const Session session(context(), {}, config); }, ErrorCode::kUnsupported)
          .find("in one allocation"),
      std::string::npos);
  config = small_config();
  config.layers.push_back(config.layers[0]);
  config.layers[2].kv_sharing_target_layer_name = "layers.0";
  Session session(context(), {}, config);
  session.step({{session.add({1})}});
  const layer_test::Device device(context());
  const clattn::Buffer some = device.upload(std::vector<float>(4 * 64));
  const clattn::Buffer output = device.upload(std::vector<float>(4 * 64));
  clattn::AttentionTensors tensors{.query = {some.handle()}, .output = {output.handle()}};
  EXPECT_EQ(error_text([&] { session.attend(2, tensors); }),
            "attend: layer is 2, which shares the cache of layer 0, legal: after that one");
  EXPECT_EQ(error_text([&] { session.attend(1, tensors); }),
            "attend: layer 1: key is null, legal: the step's rows");
  tensors.key = tensors.query;
  EXPECT_EQ(error_text([&] { session.attend(0, tensors); }),
            "attend: layer 0: value is null, legal: the step's rows");
  tensors.value = tensors.query;
  session.attend(0, tensors);
  session.attend(1, tensors);
  EXPECT_EQ(session.num_computed_tokens(0), 0);
  session.attend(2, {.query = tensors.query, .output = tensors.output});
  EXPECT_EQ(session.num_computed_tokens(0), 1);
}

INSTANTIATE_TEST_SUITE_P(Devices, SessionRecovery,
                         testing::Range(std::size_t{0}, clattn::list_devices().size()));

}  // namespace test_session_recovery
