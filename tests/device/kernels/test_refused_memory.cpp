#include <gtest/gtest.h>

#include <clattn/plugin.hpp>
#include <functional>
#include <thread>
#include <vector>

#include "device/small_call.hpp"
#include "kernels/step/paged_builder.hpp"
#include "support/error_text.hpp"
#include "support/plugin.hpp"

// Misuse of memory and builders that the host can see.
namespace test_refused_memory {

using clattn::AttentionTensors;
using clattn::TensorRef;
using small_test::Batch;
using small_test::Call;
using small_test::kRow;
using test::error_text;

constexpr auto kWidth = static_cast<std::int64_t>(kRow);

/// Outputs over what else the call has, for a batch of two tokens.
void expect_overlaps_refused(const Call& call) {
  const Batch batch({0, 2}, {2}, {5});
  const auto& metadata = call.builder->build(call.queue, batch.metadata);
  const clattn::Buffer all = call.upload(std::vector<float>(20 * kRow, 1));
  const auto rows = [&](std::int64_t element, std::int64_t stride = 0) {
    return TensorRef{all.handle(), element, stride};
  };
  const auto text = [&](const AttentionTensors& tensors) {
    return error_text([&] { call.impl->forward(call.queue, tensors, call.cache, metadata); });
  };
  const auto legal = rows(4 * kWidth);
  const TensorRef key{call.key.handle()}, value{call.value.handle()};
  const char* const over_query = "output: it overlaps query, legal: memory of its own";
  for (const std::int64_t at : {0L, 1L, kWidth, 2 * kWidth - 1})
    EXPECT_EQ(text({.query = rows(4 * kWidth), .output = rows(4 * kWidth + at)}), over_query) << at;
  EXPECT_EQ(text({.query = rows(4 * kWidth), .output = rows(2 * kWidth + 1)}), over_query);
  EXPECT_EQ(text({.query = rows(0), .key = legal, .value = value, .output = legal}),
            "output: it overlaps key, legal: memory of its own");
  EXPECT_EQ(text({.query = rows(0), .key = key, .value = legal, .output = rows(5 * kWidth)}),
            "output: it overlaps value, legal: memory of its own");
  EXPECT_EQ(text({.query = {call.query.handle()}, .output = rows(2), .lse = all.handle()}),
            "output: it overlaps lse, legal: memory of its own");
  EXPECT_EQ(text({.query = rows(1), .output = {call.out.handle()}, .lse = all.handle()}),
            "lse: it overlaps query, legal: memory of its own");
  // Behind each other, and as columns of one matrix.
  EXPECT_EQ(text({.query = rows(2 * kWidth), .output = legal}), "no error");
  EXPECT_EQ(text({.query = rows(6 * kWidth), .output = legal}), "no error");
  const std::int64_t stride = 4 * kWidth;
  const AttentionTensors columns{.query = rows(0, stride),
                                 .key = rows(kWidth, stride),
                                 .value = rows(2 * kWidth, stride),
                                 .output = rows(3 * kWidth, stride)};
  EXPECT_EQ(text(columns), "no error");
  AttentionTensors shifted = columns;
  shifted.output.offset -= 1;
  EXPECT_EQ(text(shifted), "output: it overlaps value, legal: memory of its own");
  shifted.output.offset += 2;  // its end lies in the next row's query
  EXPECT_EQ(text(shifted), "output: it overlaps query, legal: memory of its own");
  call.queue.finish();
}

TEST(RefusedMemory, OutputsThatOverlapOtherTensors) {
  for (const auto& context : small_test::all_contexts()) expect_overlaps_refused(Call(context));
}

TEST(RefusedMemory, OutputsOfPluginsThatOverlapOtherTensors) {
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(test::plugin_path("none"));
  const auto& context = small_test::all_contexts().at(0);
  expect_overlaps_refused(Call(context, small_test::config(), Call::builder_options(),
                               std::string(plugin.backend()->name())));
}

TEST(RefusedMemory, AnEncodersOutputOverItsKeys) {
  const auto& context = small_test::all_contexts().at(0);
  clattn::AttentionConfig config = small_test::config();
  config.attn_type = clattn::AttentionType::kEncoderOnly;
  const layer_test::Device device(context);
  const auto backend = get_attn_backend(config, &context->capabilities());
  const auto builder = backend->make_builder(context, config);
  const Batch batch({0, 2}, {2}, {});
  const clattn::Buffer a = device.upload(std::vector<float>(8 * kRow)),
                       b = device.upload(std::vector<float>(8 * kRow));
  EXPECT_EQ(error_text([&] {
              backend->make_impl(context, config)
                  ->forward_encoder(device.queue,
                                    {.query = {b.handle()},
                                     .key = {a.handle()},
                                     .value = {b.handle()},
                                     .output = {a.handle(), kWidth}},
                                    builder->build(device.queue, batch.metadata));
            }),
            "output: it overlaps key, legal: memory of its own");
}

TEST(RefusedMemory, BuffersOfAnotherContext) {
  const Call call(small_test::all_contexts().at(0)), other(clattn::Context::create());
  ASSERT_NE(call.context->handle(), other.context->handle());
  const Batch batch({0, 2}, {2}, {5});
  const auto& metadata = call.builder->build(call.queue, batch.metadata);
  AttentionTensors legal = call.tensors();
  legal.key = {call.key.handle()};
  legal.value = {call.value.handle()};
  const clattn::Buffer lse = call.context->allocate(64);
  legal.lse = lse.handle();
  const auto text = [&](const AttentionTensors& tensors, const clattn::KVCache& cache) {
    return error_text([&] { call.impl->forward(call.queue, tensors, cache, metadata); });
  };
  const auto foreign = [&](const char* name, TensorRef AttentionTensors::*tensor) {
    AttentionTensors tensors = legal;
    (tensors.*tensor).buffer = other.query.handle();
    const std::string want =
        std::string(name) + ": a buffer of another context, legal: of the layer's";
    EXPECT_EQ(text(tensors, call.cache), want);
    EXPECT_EQ(text(tensors, call.cache), want);  // a refusal is not remembered
  };
  EXPECT_EQ(text(legal, call.cache), "no error");
  foreign("query", &AttentionTensors::query);
  foreign("key", &AttentionTensors::key);
  foreign("value", &AttentionTensors::value);
  foreign("output", &AttentionTensors::output);
  EXPECT_EQ(text(legal, other.cache),
            "kv_cache: a buffer of another context, legal: of the layer's");
  EXPECT_EQ(error_text([&] {
              call.impl->write_kv_cache(call.queue, legal.key, legal.value, other.cache, metadata);
            }),
            "kv_cache: a buffer of another context, legal: of the layer's");
  call.queue.finish();
}

// Drivers give the handles of freed buffers away again, to whichever context asks next.
TEST(RefusedMemory, BuffersOfAnotherContextByHandlesThatWereFreed) {
  const Call call(small_test::all_contexts().at(0));
  const auto other = clattn::Context::create();
  const Batch batch({0, 2}, {2}, {5});
  const auto& metadata = call.builder->build(call.queue, batch.metadata);
  const auto text = [&](const clattn::Buffer& query) {
    AttentionTensors tensors = call.tensors();
    tensors.query.buffer = query.handle();
    return error_text([&] { call.impl->forward(call.queue, tensors, call.cache, metadata); });
  };
  for (int i = 0; i < 20; ++i) {
    {
      const clattn::Buffer own = call.context->allocate(call.query.size_bytes());
      call.queue.fill(own, 0, 0, own.size_bytes());
      EXPECT_EQ(text(own), "no error");
      call.queue.finish();
    }
    EXPECT_EQ(text(other->allocate(call.query.size_bytes())),
              "query: a buffer of another context, legal: of the layer's");
  }
}

/// What a split rule, which build() asks in its midst, does next.
std::function<void()>& amidst_build() {
  static std::function<void()> work;
  return work;
}

TEST(RefusedMemory, ABuilderInTwoThreads) {
  namespace detail = clattn::detail;
  const auto& context = small_test::all_contexts().at(0);
  const auto config = small_test::config();
  const clattn::Queue queue = context->create_queue();
  detail::PagedMetadataBuilder<clattn::AttentionMetadata> builder(
      context,
      detail::attention_kernels(context->runtime(), detail::kernel_shape(config),
                                config.kernel_family),
      {.window = {},
       .split = [](const detail::KernelShape&, const clattn::CommonAttentionMetadata&,
                   const detail::BatchSummary&, detail::PlannerConfig&) { amidst_build()(); }},
      {});
  const Batch batch({0, 1}, {9}, {1, 2, 3});
  std::string second;
  amidst_build() = [&] {
    std::thread([&] {
      second = error_text([&] { builder.build(queue, batch.metadata, nullptr, {}); });
    }).join();
  };
  const auto& metadata = builder.build(queue, batch.metadata, nullptr, {});
  EXPECT_EQ(second, "build: another thread is in a call of this builder, legal: one at a time");
  EXPECT_NE(metadata.step()->kernels, nullptr);  // the first one's is whole
  amidst_build() = [] {};
  builder.build(queue, batch.metadata, nullptr, {});  // and so is the builder
  queue.finish();
}

}  // namespace test_refused_memory
