#pragma once

#include <gtest/gtest.h>

#include <clattn/session.hpp>
#include <clattn/session_states.hpp>
#include <cmath>
#include <stdexcept>

#include "device/attention_case.hpp"
#include "device/session_client.hpp"
#include "oracle/recurrent.hpp"

// Sessions of hybrid models: two gated delta nets beside a layer of attention.

namespace session_test {

inline constexpr std::int32_t kBlock = layer_test::kShape.block_size;
inline constexpr std::int32_t kHeads = 2, kSize = 16, kWidth = 4, kDrafts = 3;
inline constexpr std::int32_t kChannels = (2 + kHeads) * kSize;  // one key head

/// The layers, and slots for a few requests. A state is kept every two blocks.
inline clattn::RecurrentLayers delta_nets(std::int32_t num_slots) {
  const clattn::KVCacheSpec spec{.kind = clattn::KVCacheKind::kMamba,
                                 .block_size = 2 * kBlock,
                                 .states = clattn::gated_delta_net_state_shape(
                                     1, kHeads, kSize, kSize, kWidth, kDrafts, clattn::DType::kF32),
                                 .mamba_cache_mode = clattn::MambaCacheMode::kAlign,
                                 .num_speculative_blocks = kDrafts};
  return {{spec, spec}, num_slots};
}

inline clattn::SessionConfig hybrid_config(std::int32_t num_slots = 16) {
  clattn::SessionConfig config;
  config.layers = {layer_test::layer_options("")};
  config.num_blocks = 12;
  config.recurrent = std::make_shared<clattn::RecurrentLayers>(delta_nets(num_slots));
  return config;
}

/// A client with gated delta nets, whose projections of a token depend on all tokens before it, as
/// those of attention do.
class Hybrid {
 public:
  explicit Hybrid(clattn::SessionConfig config = hybrid_config())
      : device_(attention_test::all_contexts().at(0)), client(device_.context, std::move(config)) {
    device_.queue = client.session.queue();  // where a step's lists and copies of states go
    client.before_attention = [this](std::span<const Client::Sequence> sequences) {
      for (std::int32_t layer = 0; layer < client.session.num_recurrent_layers(); ++layer)
        outputs.push_back(recur(layer, sequences));
    };
  }

  /// A layer over the step's rows; expects what the oracle says.
  std::vector<float> recur(std::int32_t layer, std::span<const Client::Sequence> sequences) {
    std::vector<float> x, a, b;
    std::int64_t rows = 0;
    for (const auto& [tokens, num_rows] : sequences) {
      rows += num_rows;
      for (std::size_t i = tokens.size() - static_cast<std::size_t>(num_rows); i < tokens.size();
           ++i) {
        append(x, row(layer, 0, kChannels, std::span(tokens).first(i + 1)));
        append(a, row(layer, 1, kHeads, std::span(tokens).first(i + 1)));
        append(b, row(layer, 2, kHeads, std::span(tokens).first(i + 1)));
      }
    }
    const clattn::Buffer inputs = device_.upload(x), of_a = device_.upload(a),
                         of_b = device_.upload(b), mixed = device_.upload(x);
    const clattn::Buffer out =
        device_.upload(std::vector<float>(static_cast<std::size_t>(rows * kHeads * kSize)));
    clattn::CausalConv1d conv{.x = {inputs.handle()}, .out = {mixed.handle()}};
    conv.weight = device_.upload(row(layer, 3, kChannels * kWidth, {}));
    conv.channels = kChannels;
    conv.width = kWidth;
    conv.dtype = conv.weight_dtype = clattn::DType::kF32;
    clattn::GatedDeltaRule rule{.query = {mixed.handle(), 0, kChannels},
                                .key = {mixed.handle(), kSize, kChannels},
                                .value = {mixed.handle(), 2 * kSize, kChannels},
                                .out = {out.handle()},
                                .a = {of_a.handle()},
                                .b = {of_b.handle()}};
    rule.A_log = device_.upload(row(layer, 4, kHeads, {}));
    rule.num_v_heads = kHeads;
    rule.head_k_dim = rule.head_v_dim = kSize;
    rule.dtype = clattn::DType::kF32;
    client.session.recur(layer, [&](const clattn::RecurrentStep& step) {
      clattn::causal_conv1d_fn(*device_.context, device_.queue, conv, step.conv_states,
                               step.conv_metadata);
      if (fails) throw std::runtime_error("between two operations");
      const auto call =
          layer == 0 ? clattn::chunk_gated_delta_rule : clattn::fused_recurrent_gated_delta_rule;
      call(*device_.context, device_.queue, rule, step.states, step.metadata, nullptr);
    });
    std::vector<float> found = device_.download(out);
    expect_truth(layer, sequences, device_.download(mixed), found);
    return found;
  }

 private:
  layer_test::Device device_;
  /// What convolutions gave, by layer and by the tokens up to a row's own.
  std::map<std::pair<std::int32_t, Tokens>, std::vector<float>> mixed_;

  static void append(std::vector<float>& all, const std::vector<float>& more) {
    all.insert(all.end(), more.begin(), more.end());
  }
  static std::vector<float> row(std::int32_t layer, int tensor, std::int32_t size,
                                std::span<const std::int32_t> tokens) {
    auto seed = static_cast<std::uint32_t>(layer * 5 + tensor + 100);
    for (const std::int32_t token : tokens)
      seed = seed * 1664525U + static_cast<std::uint32_t>(token) + 1013904223U;
    return layer_test::random_values(static_cast<std::size_t>(size), seed);
  }
  static void append(std::vector<double>& all, const std::vector<float>& more) {
    all.insert(all.end(), more.begin(), more.end());
  }

  /// Whole sequences, from their first token on. The rule's truth begins with what convolutions
  /// gave, which is judged by itself.
  void expect_truth(std::int32_t layer, std::span<const Client::Sequence> sequences,
                    const std::vector<float>& mixed, const std::vector<float>& found) {
    std::size_t next = 0;  // row of the step
    for (const auto& [tokens, num_rows] : sequences) {
      const auto length = static_cast<std::int32_t>(tokens.size());
      const std::size_t first = tokens.size() - static_cast<std::size_t>(num_rows);
      oracle::CausalConvCase conv;
      conv.requests = {{0, length}, {0}, 1, {0}, {}};
      conv.channels = kChannels;
      conv.width = kWidth;
      conv.state_rows = kWidth - 1;
      append(conv.weight, row(layer, 3, kChannels * kWidth, {}));
      conv.states.resize((kWidth - 1) * kChannels);
      oracle::DeltaRuleCase rule;
      rule.requests = conv.requests;
      rule.num_k_heads = 1;
      rule.num_v_heads = kHeads;
      rule.head_k_dim = rule.head_v_dim = kSize;
      rule.scale = 1 / std::sqrt(double(kSize));
      rule.states.resize(std::size_t{kHeads} * kSize * kSize);
      const std::vector<float> a_log = row(layer, 4, kHeads, {});
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const auto seen = std::span(tokens).first(i + 1);
        append(conv.x, row(layer, 0, kChannels, seen));
        const std::vector<float> a = row(layer, 1, kHeads, seen), b = row(layer, 2, kHeads, seen);
        for (std::size_t h = 0; h < kHeads; ++h) {
          rule.g.push_back(oracle::delta_rule_decay(a[h], a_log[h], 0));
          rule.beta.push_back(oracle::sigmoid(b[h]));
        }
        std::vector<float>& kept = mixed_[{layer, Tokens(seen.begin(), seen.end())}];
        if (i >= first) {
          const auto from = mixed.begin() + static_cast<std::ptrdiff_t>(next++ * kChannels);
          kept.assign(from, from + kChannels);
        }
        ASSERT_EQ(kept.size(), std::size_t{kChannels}) << "token " << i << " was never computed";
        append(rule.query, {kept.begin(), kept.begin() + kSize});
        append(rule.key, {kept.begin() + kSize, kept.begin() + 2 * kSize});
        append(rule.value, {kept.begin() + 2 * kSize, kept.end()});
      }
      const auto judged = [&](oracle::JudgedTensor exact, const std::vector<float>& rows,
                              std::size_t width, double sigmas) {
        for (std::vector<double>* part : {&exact.exact, &exact.sigma, &exact.floor})
          part->erase(part->begin(), part->begin() + static_cast<std::ptrdiff_t>(first * width));
        const auto end = rows.begin() + static_cast<std::ptrdiff_t>(next * width);
        return oracle::judge(exact, {end - static_cast<std::ptrdiff_t>(exact.exact.size()), end},
                             sigmas);
      };
      EXPECT_LE(
          judged(oracle::causal_conv(conv, oracle::Element::kF32).out, mixed, kChannels, 1).worst,
          1)
          << "convolution " << layer << ", " << length << " tokens";
      EXPECT_LE(judged(oracle::delta_rule(rule, {}).out, found, std::size_t{kHeads} * kSize,
                       oracle::kOutSigmas)
                    .worst,
                1)
          << "layer " << layer << ", " << length << " tokens, the last " << num_rows;
    }
  }

 public:
  Client client;
  bool fails = false;
  std::vector<std::vector<float>> outputs = {};  ///< of all layers and steps
};

}  // namespace session_test
