#include "device/session_client.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "oracle/oracle.hpp"

namespace session_test {

using clattn::Step;
using clattn::StepRequest;

namespace {

constexpr int kQuery = 0, kKey = 1, kValue = 2, kOutput = 3;

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

}  // namespace

clattn::SessionConfig small_config() {
  clattn::SessionConfig config;
  config.layers = {layer_test::layer_options(""), layer_test::layer_options("")};
  config.layers[1].config.sliding_window = 20;
  config.num_blocks = 16;
  return config;
}

Tokens counting(std::int32_t first, std::int32_t count) {
  Tokens tokens(index(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::size_t Client::row_size(std::int32_t layer, int tensor) const {
  const clattn::AttentionConfig& config = session.layer(layer).config();
  const std::int32_t of_output = config.output_head_size();
  if (tensor == kQuery) return index(config.num_heads) * index(config.head_size);
  if (tensor == kOutput) return index(config.num_heads) * index(of_output);
  if (config.use_mla) return index(tensor == kKey ? of_output : config.rope_dim);
  return index(config.num_kv_heads) * index(tensor == kKey ? config.head_size : of_output);
}

std::vector<float> Client::row(std::int32_t layer, int tensor,
                               std::span<const std::int32_t> tokens) const {
  auto seed = static_cast<std::uint32_t>(layer * 3 + tensor + 1);
  for (const std::int32_t token : tokens)
    seed = seed * 1664525U + static_cast<std::uint32_t>(token) + 1013904223U;
  return layer_test::random_values(row_size(layer, tensor), seed);
}

/// In the order of their rows.
std::vector<Client::Sequence> Client::sequences(const std::vector<StepRequest>& requests,
                                                const Step& step) const {
  std::vector<Sequence> found;
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const auto tokens = session.tokens(requests[r].id);
    const std::int32_t drafts = step.num_drafts[r], end = step.seq_lens[r] - drafts;
    found.push_back(
        {{tokens.begin(), tokens.begin() + end}, step.last_row(r) + 1 - step.query_start_loc[r]});
    const std::size_t first = found.size();
    for (std::size_t draft = 0; draft < index(drafts); ++draft) {
      const auto& parents = requests[r].draft_parents;
      const std::size_t parent = parents.empty() ? draft : index(parents[draft] + 1);
      found.push_back({found[first - 1 + parent].tokens, 1});
      found.back().tokens.push_back(requests[r].drafts[draft]);
    }
  }
  return found;
}

std::vector<float> Client::attend(std::int32_t layer, const std::vector<StepRequest>& requests,
                                  const Step& step, const clattn::ForwardOptions& options) {
  std::vector<float> tensors[3];
  for (const auto& [tokens, num_rows] : sequences(requests, step)) {
    for (std::size_t i = tokens.size() - index(num_rows); i < tokens.size(); ++i) {
      for (const int tensor : {kQuery, kKey, kValue}) {
        const std::vector<float> values = row(layer, tensor, std::span(tokens).first(i + 1));
        tensors[tensor].insert(tensors[tensor].end(), values.begin(), values.end());
      }
    }
  }
  const clattn::Buffer query = device_.upload(tensors[kQuery]), key = device_.upload(tensors[kKey]),
                       value = device_.upload(tensors[kValue]);
  const clattn::Buffer output =
      device_.upload(std::vector<float>(index(step.num_tokens()) * row_size(layer, kOutput)));
  session.attend(layer,
                 {.query = {query.handle()},
                  .key = {key.handle()},
                  .value = {value.handle()},
                  .output = {output.handle()}},
                 options);
  return device_.download(output);
}

void Client::expect_truth(std::int32_t layer, const std::vector<StepRequest>& requests,
                          const Step& step, const std::vector<float>& output) const {
  const clattn::AttentionConfig& config = session.layer(layer).config();
  oracle::AttentionCase truth;
  truth.num_heads = config.num_heads;
  truth.num_kv_heads = config.num_kv_heads;
  truth.head_size = config.head_size;
  truth.scale = 1.0 / std::sqrt(double(config.head_size));
  if (config.sliding_window > 0) truth.window_left = config.sliding_window - 1;
  truth.query_start_loc = truth.key_start_loc = {0};
  for (const float sink : config.sinks) truth.sinks.push_back(sink);
  const std::size_t head = index(config.head_size), kept = index(config.output_head_size());
  // The oracle knows heads of one size: zeros follow smaller values.
  const auto append = [&](std::vector<double>& all, int tensor, std::span<const int> tokens) {
    const std::size_t width = tensor == kValue ? kept : head;
    const std::vector<float> given = row(layer, tensor, tokens);
    for (std::size_t i = 0; i < given.size(); ++i) {
      all.push_back(given[i]);
      if (i % width + 1 == width) all.resize(all.size() + head - width);
    }
  };
  for (const auto& [tokens, num_rows] : sequences(requests, step)) {
    const std::size_t first = tokens.size() - index(num_rows);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto seen = std::span(tokens).first(i + 1);
      append(truth.key_cache, kKey, seen);
      append(truth.value_cache, kValue, seen);
      if (i >= first) append(truth.query, kQuery, seen);
    }
    truth.query_start_loc.push_back(truth.query_start_loc.back() + num_rows);
    truth.seq_lens.push_back(static_cast<std::int32_t>(tokens.size()));
    truth.key_start_loc.push_back(truth.key_start_loc.back() + truth.seq_lens.back());
  }
  truth.span_cut = static_cast<oracle::SpanCut>(config.span_rule);
  for (std::size_t r = 0; config.use_spans && r < requests.size(); ++r)
    for (const auto& [first, end] : requests[r].spans)
      truth.spans.push_back({static_cast<std::int32_t>(r), first, end});
  const oracle::AttentionResult want = oracle::attention(truth, oracle::Element::kF32);
  ASSERT_EQ(output.size() / kept, want.out.size() / head);
  constexpr double kFloor = 2e-6;  // f32 sums of values of size about 1
  for (std::size_t i = 0; i < output.size(); ++i) {
    const std::size_t at = i / kept * head + i % kept;
    ASSERT_LE(std::abs(output[i] - want.out[at]), want.allowed(at, false) + kFloor)
        << "layer " << layer << ", element " << i;
  }
}

std::map<clattn::RequestId, Rows> Client::run(const std::vector<StepRequest>& requests) {
  const Step& step = session.step(requests);
  std::map<clattn::RequestId, Rows> rows;
  if (before_attention) before_attention(sequences(requests, step));
  for (std::int32_t layer = 0; layer < session.num_layers(); ++layer) {
    const std::vector<float> output = attend(layer, requests, step);
    if (!session.layer(layer).config().use_mla) expect_truth(layer, requests, step, output);
    const auto width = static_cast<std::ptrdiff_t>(row_size(layer, kOutput));
    for (std::size_t r = 0; r < requests.size(); ++r) {
      Rows& own = rows[requests[r].id];
      own.insert(own.end(), output.begin() + step.query_start_loc[r] * width,
                 output.begin() + step.query_start_loc[r + 1] * width);
    }
  }
  for (std::size_t r = 0; r < requests.size(); ++r)
    EXPECT_EQ(session.num_computed_tokens(requests[r].id), step.seq_lens[r] - step.num_drafts[r]);
  std::size_t next = 0;
  for (const auto& [tokens, num_rows] : sequences(requests, step)) {
    for (std::size_t i = tokens.size() - index(num_rows); i < tokens.size(); ++i, ++next) {
      EXPECT_EQ(step.positions.at(next), static_cast<std::int32_t>(i));
      EXPECT_EQ(step.token_ids.at(next), tokens[i]);
    }
  }
  EXPECT_EQ(next, index(step.num_tokens()));
  return rows;
}

}  // namespace session_test
