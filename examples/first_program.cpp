// One decode step: two requests attend over a paged KV cache, on whatever OpenCL device is here.
#include <clattn/clattn.hpp>
#include <cstdio>
#include <vector>

int main() {
  // Once: a device, the backend for a layer's shape, its kernels, a zeroed cache of 4 pages.
  const auto context = clattn::Context::create();
  const auto queue = context->create_queue();
  const auto& device = context->capabilities();
  const clattn::AttentionConfig config{
      .num_heads = 8, .num_kv_heads = 2, .head_size = 64, .dtype = clattn::DType::kF32};
  const auto& backend = clattn::get_attn_backend(config, &device);
  const auto impl = backend.make_impl(context, config);
  const auto builder = backend.make_builder(context, config);
  const clattn::KVCacheSpec spec{.num_kv_heads = 2, .head_size = 64, .dtype = config.dtype};
  const auto raw = clattn::allocate_kv_cache(
      *context, queue, {4, {{4 * spec.page_size_bytes(), {"layer"}}}, {{{"layer"}, spec}}});
  const auto cache =
      clattn::reshape_kv_cache(raw.at("layer"), spec, backend, backend.preferred_layout(device));

  // Every step: one new token each for request 0, its 1st (page 3), and for request 1, its 20th
  // (pages 1 and 0).
  const std::vector<std::int32_t> query_start_loc{0, 1, 2}, seq_lens{1, 20}, pages{3, 0, 1, 0};
  clattn::CommonAttentionMetadata batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.num_reqs = batch.num_actual_tokens = 2;
  batch.block_table = pages;
  batch.block_table_stride = 2;
  const auto& metadata = builder->build(queue, batch);

  // Every layer: store the new keys and values, attend. Here all of q, k and v is 1.0f.
  std::vector<float> result(2 * 8 * 64);  // [tokens, heads, head_size]
  const auto ones = context->allocate(result.size() * sizeof(float));
  const auto output = context->allocate(ones.size_bytes());
  queue.fill(ones, 0x3F800000, 0, ones.size_bytes());
  impl->write_kv_cache(queue, {ones.handle()}, {ones.handle()}, cache, metadata);
  impl->forward(queue, {ones.handle()}, cache, metadata, {output.handle()});

  // Request 0 sees its own value, 1. Request 1 sees 19 zero keys too: e^8 / (e^8 + 19) = 0.9937.
  queue.read(output, std::as_writable_bytes(std::span(result)));
  std::printf("%s: %.4f %.4f\n", device.name.c_str(), result.front(), result.back());
}
