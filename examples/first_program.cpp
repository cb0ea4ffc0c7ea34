#include <clattn/clattn.hpp>
#include <cstdio>
using namespace clattn;

int main() {  // Two requests decode one token each over a paged KV cache of 4 pages.
  AttentionConfig config{.num_heads = 8, .num_kv_heads = 2, .head_size = 64, .dtype = DType::kF32};
  const auto context = Context::create();  // Once: any device, a backend, its kernels, a cache.
  const auto queue = context->create_queue();
  const auto& backend = get_attn_backend(config, &context->capabilities());
  const auto impl = backend.make_impl(context, config);
  const auto builder = backend.make_builder(context, config);
  const auto cache = make_kv_cache(*context, queue, backend, config, 4);
  const std::vector<int> starts{0, 1, 2}, seq_lens{1, 20}, pages{3, 0, 1, 0};  // Every step.
  const auto& step = builder->build(queue, CommonAttentionMetadata::of(starts, seq_lens, pages));
  std::vector<float> result(2 * 8 * 64, 1.0F);  // [tokens, heads, head_size]
  const auto ones = context->allocate(4096), out = context->allocate(4096);
  queue.write(ones, std::as_bytes(std::span(result)));
  impl->write_kv_cache(queue, {ones.handle()}, {ones.handle()}, cache, step);  // Every layer.
  impl->forward(queue, {.query = {ones.handle()}, .output = {out.handle()}}, cache, step);
  queue.read(out, std::as_writable_bytes(std::span(result)));
  std::printf("%.4f %.4f\n", result.front(), result.back());  // e^8 / (e^8 + 19) = 0.9937
}
