#include <gtest/gtest.h>

#include <clattn/prepare_qkv.hpp>
#include <clattn/session.hpp>
#include <cmath>
#include <random>

#include "device/cache_ops_support.hpp"
#include "device/counting_buffers.hpp"
#include "device/session_client.hpp"

namespace test_session_prepare {

using cache_ops_test::download;
using cache_ops_test::upload;
using clattn::Buffer;
using session_test::counting;
using test::error_text;

constexpr std::int64_t kQueries = 4 * 64, kKeys = 2 * 64, kRow = kQueries + 2 * kKeys;
constexpr int kPositions = 16;

/// A session whose rows are prepared by it or, with `apart`, by the free function.
struct Prepared {
  Prepared(const std::shared_ptr<clattn::Context>& context, bool apart)
      : is_apart(apart), session(context, {}, session_test::small_config()) {
    std::vector<float> turns;
    for (int i = 0; i < kPositions * 64; ++i) {
      const double turn = i / 64 / std::pow(100.0, i % 32 / 32.0);
      turns.push_back(static_cast<float>(i % 64 < 32 ? std::cos(turn) : std::sin(turn)));
    }
    rope.cos_sin_cache = upload(*context, session.queue(), turns);
  }

  /// The outputs of both layers.
  std::vector<float> run(const clattn::StepRequest& request) {
    const clattn::Step& step = session.step({request});
    const clattn::Context& context = *session.context();
    std::mt19937 random(static_cast<std::uint32_t>(step.positions.front()));
    std::normal_distribution<float> normal;
    std::vector<float> rows(static_cast<std::size_t>(step.num_tokens() * kRow));
    for (float& x : rows) x = normal(random);
    std::vector<float> results;
    for (const std::int32_t layer : {0, 1}) {
      const Buffer fused = upload(context, session.queue(), rows);
      const Buffer out = upload(context, session.queue(), rows);
      clattn::PrepareQKV call;
      call.query = call.query_out = {fused.handle(), 0, kRow};
      call.key = {fused.handle(), kQueries, kRow};
      const clattn::TensorRef value{fused.handle(), kQueries + kKeys, kRow};
      call.norm = clattn::HeadNorm();
      call.rope = rope;
      clattn::AttentionTensors tensors{.query = call.query, .output = {out.handle()}};
      if (is_apart) {
        call.num_tokens = step.num_tokens();
        call.num_heads = 4;
        call.num_kv_heads = 2;
        call.head_size = 64;
        call.dtype = clattn::DType::kF32;
        call.positions = upload(context, session.queue(), step.positions);
        call.position_bits = 32;
        tensors.key = call.key_out = call.key;
        tensors.value = value;
        clattn::prepare_qkv(context, session.queue(), call);
      } else {
        call.value = value;
        const std::size_t writes = test::num_writes();
        session.prepare_qkv(layer, call);
        // The first layer's call uploads the positions.
        EXPECT_EQ(test::num_writes() - writes, layer == 0 ? 1U : 0U);
        EXPECT_NE(error_text([&] { session.prepare_qkv(layer, call); }).find("prepared already"),
                  std::string::npos);
        clattn::AttentionTensors twice = tensors;
        twice.key = twice.value = value;
        EXPECT_NE(error_text([&] { session.attend(layer, twice); }).find("which stored it: none"),
                  std::string::npos);
      }
      session.attend(layer, tensors);
      const auto output = download<float>(session.queue(), out);
      results.insert(results.end(), output.begin(), output.begin() + step.num_tokens() * kQueries);
    }
    return results;
  }

  bool is_apart;
  clattn::Session session;
  clattn::RotaryEmbedding rope;
};

TEST(SessionPrepare, GivesTheBitsOfPreparationAndStoreApart) {
  for (const auto& context : cache_ops_test::all_contexts()) {
    Prepared fused(context, false), apart(context, true);
    for (Prepared* each : {&fused, &apart}) each->session.add(counting(0, 5));
    EXPECT_NE(error_text([&] { fused.session.prepare_qkv(0, {}); }).find("outside of a step"),
              std::string::npos);
    EXPECT_EQ(fused.run({0}), apart.run({0}));
    EXPECT_EQ(fused.run({0, {7}}), apart.run({0, {7}}));
    EXPECT_EQ(fused.session.num_computed_tokens(0), 6);
  }
}

}  // namespace test_session_prepare
