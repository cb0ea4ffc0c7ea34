// The decode step of step.c by the C++ API. Prints the bits of the output, a hexadecimal number for
// each element.
#include <bit>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <cstdio>
#include <span>
#include <vector>

using namespace clattn;

namespace {

constexpr std::size_t kTokens = 2, kHeads = 8, kKVHeads = 2, kHeadSize = 64;

Buffer upload(const Context& context, const Queue& queue, std::uint32_t seed, std::size_t heads) {
  std::vector<float> values(kTokens * heads * kHeadSize);
  for (float& value : values) {
    value = static_cast<float>((seed++ * 2654435761U) >> 8) / 16777216.0F - 0.5F;
  }
  Buffer buffer = context.allocate(values.size() * sizeof(float));
  queue.write(buffer, std::as_bytes(std::span(values)));
  return buffer;
}

}  // namespace

int main() {
  AttentionConfig config;
  config.num_heads = kHeads;
  config.num_kv_heads = kKVHeads;
  config.head_size = kHeadSize;
  config.dtype = DType::kF32;
  const auto context = Context::create();
  const auto queue = context->create_queue();
  const auto backend = get_attn_backend(config, &context->capabilities());
  const auto impl = backend->make_impl(context, config);
  const auto builder = backend->make_builder(context, config);
  const auto cache = make_kv_cache(*context, queue, *backend, config, 4);

  const std::vector<int> starts{0, 1, 2}, seq_lens{1, 20}, pages{3, 0, 1, 0};
  const auto& step = builder->build(queue, CommonAttentionMetadata::of(starts, seq_lens, pages));
  const Buffer query = upload(*context, queue, 0, kHeads);
  const Buffer key = upload(*context, queue, 10000, kKVHeads);
  const Buffer value = upload(*context, queue, 20000, kKVHeads);
  const Buffer output = upload(*context, queue, 30000, kHeads);
  impl->write_kv_cache(queue, {key.handle()}, {value.handle()}, cache, step);
  impl->forward(queue, {.query = {query.handle()}, .output = {output.handle()}}, cache, step);

  std::vector<float> result(kTokens * kHeads * kHeadSize);
  queue.read(output, std::as_writable_bytes(std::span(result)));
  for (const float element : result) std::printf("%08x\n", std::bit_cast<std::uint32_t>(element));
}
