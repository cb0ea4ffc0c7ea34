// An engine in 60 lines: a model of Llama's shape continues two prompts that begin alike. Session
// keeps caches, blocks and metadata, CLBlast multiplies, the reference in double precision judges.
#include <algorithm>
#include <clattn/session.hpp>
#include <cstdio>

#include "ops.hpp"

using namespace clattn;
using namespace engine;

/// The likeliest next token of each request of the step.
Tokens forward(Session& session, const Step& step, const Ops& ops, const DeviceWeights& weights) {
  const Tensor x = ops.embed(weights.at("embedding"), step.token_ids);
  const Buffer positions = ops.upload(step.positions);
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto w = [&](const char* name) { return weights.at(std::to_string(layer) + name); };
    const Tensor qkv = ops.product(ops.rms_norm(x, w(".norm_1")), w(".qkv"));
    ops.rope(qkv, positions);
    const Tensor attended = ops.allocate(x.rows, kQueryWidth);
    session.attend(layer, {.query = {qkv.handle(), 0, kQKVWidth},
                           .key = {qkv.handle(), kQueryWidth, kQKVWidth},
                           .value = {qkv.handle(), kQueryWidth + kKVWidth, kQKVWidth},
                           .output = {attended.handle()}});
    ops.add_product(attended, w(".out"), x);
    const Tensor gate_up = ops.product(ops.rms_norm(x, w(".norm_2")), w(".gate_up"));
    ops.add_product(ops.silu_mul(gate_up), w(".down"), x);
  }
  const Tensor logits = ops.product(ops.rms_norm(x, weights.at("norm")), weights.at("head"));
  const std::vector<float> values = ops.download(logits);
  Tokens next;
  for (std::size_t i = 0; i < step.seq_lens.size(); ++i) {
    const auto row = values.begin() + step.last_row(i) * kVocabulary;
    next.push_back(static_cast<int>(std::max_element(row, row + kVocabulary) - row));
  }
  return next;
}

int main() {
  const Weights weights = random_weights(1);
  const AttentionOptions layer{.config = {.num_heads = kHeads,
                                          .num_kv_heads = kKVHeads,
                                          .head_size = kHeadSize,
                                          .dtype = DType::kF32}};
  Session session({.layers = std::vector(kLayers, layer), .cache_bytes = 1 << 20});
  const Ops ops(session.context(), session.queue());
  const DeviceWeights uploaded = ops.upload(weights);
  const Tokens prompts[] = {random_prompt(45, 0), random_prompt(40, 5)};  // 35 tokens are alike
  Tokens added[2];
  std::vector<StepRequest> batch = {{session.add(prompts[0])}};
  while (added[1].size() < 20) {
    const Tokens next = forward(session, session.step(batch), ops, uploaded);
    if (batch.size() == 1) batch.push_back({session.add(prompts[1])});  // joins at the next step
    for (std::size_t i = 0; i < next.size(); ++i) {
      added[i].push_back(next[i]);
      batch[i].new_tokens = {next[i]};
    }
  }
  const bool shared = session.block_table(batch[0].id)[1] == session.block_table(batch[1].id)[1];
  std::printf("the prompts share their first blocks: %s\n", shared ? "yes" : "no");
  return judge(weights, prompts, added) && shared ? 0 : 1;
}
