#include <clattn/clattn.hpp>
#include <cstdio>
using namespace clattn;

int main() {  // One step, a prompt of two tokens, in a model of two layers with one head of 8.
  const AttentionOptions layer{.config = {.num_heads = 1, .head_size = 8, .dtype = DType::kF32}};
  Session session({.layers = {layer, layer}, .num_blocks = 64});  // On the best device.
  session.step({{session.add({101, 7})}});  // Begins a step of one request: two token ids.
  std::vector<float> rows(3 * 8);    // What a model would project: queries, keys and the first
  rows.insert(rows.end(), 8, 1.0F);  // token's value are zeros, the second token's value is ones.
  const auto in = session.context()->allocate(rows.size() * sizeof(float));
  const auto out = session.context()->allocate(in.size_bytes() / 2);
  session.queue().write(in, std::as_bytes(std::span(rows)));
  for (int i = 0; i < session.num_layers(); ++i)  // Each layer's query, key, value and output.
    session.attend(i, {{in.handle()}, {in.handle()}, {in.handle(), 16}, {out.handle()}});
  session.queue().read(out, std::as_writable_bytes(std::span(rows).first(16)));
  std::printf("%.1f %.1f\n", rows.front(), rows[8]);  // 0.0 0.5: each token's mean of the values
}
