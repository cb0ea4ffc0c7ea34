#include <clattn/clattn.hpp>
#include <cstdio>
using namespace clattn;

int main() {  // Two requests decode one token each over a paged KV cache of 4 pages of 16 tokens.
  AttentionConfig config{
      .num_heads = 8, .num_kv_heads = 2, .head_size = 64, .block_size = 16, .dtype = DType::kF32};
  // Once: the best device (or create("gpu"), "cpu", "0:1", part of a name), kernels, a cache.
  const auto context = Context::create();
  const auto queue = context->create_queue();
  const auto backend = get_attn_backend(config, &context->capabilities());
  const auto impl = backend->make_impl(context, config);
  const auto builder = backend->make_builder(context, config);
  const auto cache = make_kv_cache(*context, queue, *backend, config, 4);
  // Every step: each request's first row of the query; its tokens in the cache, the new ones
  // included; its pages, 2 per request.
  const std::vector<int> starts{0, 1, 2}, seq_lens{1, 20}, pages{3, 0, 1, 0};
  const auto& step = builder->build(queue, CommonAttentionMetadata::of(starts, seq_lens, pages));
  std::vector<float> ones(2 * 8 * 64, 1.0F), result(ones.size());  // [tokens, heads, head_size]
  const auto in = context->allocate(2 * 8 * 64 * sizeof(float));
  const auto out = context->allocate(in.size_bytes());
  queue.write(in, std::as_bytes(std::span(ones)));
  impl->write_kv_cache(queue, {in.handle()}, {in.handle()}, cache, step);  // Every layer.
  impl->forward(queue, {.query = {in.handle()}, .output = {out.handle()}}, cache, step);
  queue.read(out, std::as_writable_bytes(std::span(result)));
  std::printf("%.4f %.4f\n", result.front(), result.back());  // e^8 / (e^8 + 19) = 0.9937
}
