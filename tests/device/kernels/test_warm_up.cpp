// What warm_up() leaves for the first step: nothing to build, and no kernel's first launch.
#include <gtest/gtest.h>

#include <clattn/attn_utils.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <clattn/compat/vllm_layer.hpp>
#include <clattn/graph.hpp>
#include <memory>
#include <vector>

#include "device/attention_case.hpp"
#include "opencl/runtime.hpp"
#include "support/error_text.hpp"

namespace test_warm_up {

using clattn::AttentionOptions;
using clattn::CommonAttentionMetadata;
using clattn::DType;

constexpr std::int32_t kPage = 16, kBlocks = 80, kMostTokens = 700;

/// What is left to the driver: programs, and kernels that were never launched.
std::uint64_t work_of_drivers(const clattn::Context& context) {
  const clattn::detail::BuildCounts counts = context.runtime().build_counts();
  return counts.from_source + counts.from_cache + clattn::detail::first_launch_count();
}

/// A context of its own, whose kernels nobody has launched, with one layer and its cache.
struct Model {
  std::shared_ptr<clattn::Context> context;
  clattn::Queue queue;
  clattn::LayerRegistry registry;
  clattn::Attention layer;
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
  clattn::Buffer rows, out;

  Model(const clattn::Context& like, const AttentionOptions& options)
      : context(clattn::Context::adopt(like.handle(), like.device())),
        queue(context->create_queue()),
        layer(context, registry, options),
        rows(context->allocate(std::size_t{kMostTokens} * 8 * 576 * sizeof(float))),
        out(context->allocate(rows.size_bytes())) {
    clattn::BuilderOptions with;
    with.limits.num_blocks = kBlocks;
    with.num_splits = 3;  // so that merges are launched where kernels do not join
    builder = layer.get_attn_backend()->make_builder(context, layer.config(), with);
    layer.bind_kv_cache(
        clattn::make_kv_cache(*context, queue, *layer.get_attn_backend(), layer.config(), kBlocks));
    queue.fill(rows, 0, 0, rows.size_bytes());
  }

  /// One step of requests with these query tokens, over 64 keys more, padded by a row.
  void step(const std::vector<std::int32_t>& query_lens) {
    std::vector<std::int32_t> starts{0}, lens, table;
    for (const std::int32_t tokens : query_lens) {
      starts.push_back(starts.back() + tokens);
      lens.push_back(tokens + 64);
      for (std::int32_t p = 0; p < kMostTokens / kPage + 8; ++p) table.push_back(p);
    }
    const auto& metadata = builder->build(queue, CommonAttentionMetadata::of(starts, lens, table));
    const clattn::AttentionTensors tensors{.query = {rows.handle()},
                                           .key = {rows.handle()},
                                           .value = {rows.handle()},
                                           .output = {out.handle()}};
    layer.forward(queue, tensors, &metadata, {.num_rows = starts.back() + 1});
    queue.finish();
  }
};

AttentionOptions layer_options() {
  AttentionOptions options;
  options.config.num_heads = 8;
  options.config.num_kv_heads = 2;
  options.config.head_size = 64;
  options.prefix = "layers.0.attn";
  options.config.block_size = kPage;
  return options;
}

/// The layers that differ in which kernels they launch.
std::vector<AttentionOptions> all_options() {
  std::vector<AttentionOptions> all{layer_options()};
  all.push_back(layer_options());
  all.back().config.kv_cache_dtype = DType::kFp8E4M3;
  all.back().calculate_kv_scales = true;
  all.push_back(layer_options());
  all.back().config.sinks.assign(8, 1.0F);
  all.back().config.sliding_window = 100;
  all.push_back(layer_options());
  all.back().config.kernel_family = clattn::KernelFamily::kGpu;
  all.push_back(layer_options());
  all.back().config.use_mla = true;
  all.back().config.num_kv_heads = 1;
  all.back().config.head_size = 576;
  all.push_back(all.back());
  all.back().config.kv_cache_dtype = DType::kInt8;
  all.back().calculate_kv_scales = true;
  return all;
}

void expect_warm(const clattn::Context& like, const AttentionOptions& options) {
  Model model(like, options);
  const std::uint64_t cold = work_of_drivers(*model.context);
  model.layer.warm_up(model.queue);
  const std::uint64_t warm = work_of_drivers(*model.context);
  EXPECT_GT(warm, cold) << clattn::extra_repr(model.layer);
  const std::vector<std::vector<std::int32_t>> steps = {{1, 1, 1}, {300}, {1, 1, 5, 20, 300},
                                                        {2},       {17},  {kMostTokens - 1}};
  for (const auto& step : steps) {
    model.step(step);
    EXPECT_EQ(work_of_drivers(*model.context), warm)
        << clattn::extra_repr(model.layer) << " first request " << step.front();
  }
}

TEST(WarmUp, TheFirstStepsBuildAndLaunchNothingNew) {
  for (const auto& like : attention_test::all_contexts()) {
    for (const AttentionOptions& options : all_options()) expect_warm(*like, options);
  }
}

// Layers without a cache, and those that take more tensors than a step's.
TEST(WarmUp, EveryKindOfLayerHasIt) {
  clattn::AttentionConfig encoder = attention_test::small_config(), masked = encoder;
  encoder.attn_type = clattn::AttentionType::kEncoder;
  masked.custom_mask = true;
  masked.output_fp8 = true;
  masked.alibi_slopes.assign(static_cast<std::size_t>(masked.num_heads), 0.5F);
  for (const auto& like : attention_test::all_contexts()) {
    for (const clattn::AttentionConfig& config : {encoder, masked}) {
      const auto context = clattn::Context::adopt(like->handle(), like->device());
      const auto& backend = *clattn::get_attn_backend(config, &context->capabilities());
      const auto impl = backend.make_impl(context, config);
      const std::uint64_t cold = work_of_drivers(*context);
      impl->warm_up(context->create_queue());
      EXPECT_GT(work_of_drivers(*context), cold);
    }
  }
}

// Of a builder whose steps take their lengths from the device; of others it does nothing.
TEST(WarmUp, TheFirstLengthsFromTheDeviceLaunchNothingNew) {
  for (const auto& like : attention_test::all_contexts()) {
    Model model(*like, layer_options());
    const clattn::AttentionBackend& backend = *model.layer.get_attn_backend();
    model.builder->warm_up(model.queue);
    clattn::BuilderOptions options;
    options.device_seq_lens = true;
    const auto builder = backend.make_builder(model.context, model.layer.config(), options);
    const std::uint64_t cold = work_of_drivers(*model.context);
    builder->warm_up(model.queue);
    const std::uint64_t warm = work_of_drivers(*model.context);
    EXPECT_EQ(warm, cold + 1);
    const std::vector<std::int32_t> starts = {0, 1}, lens = {20}, table = {3, 4};
    const auto& metadata =
        builder->build(model.queue, CommonAttentionMetadata::of(starts, lens, table));
    clattn::DeviceErrors errors(*model.context, model.queue);
    clattn::update_seq_lens(model.queue, metadata, {model.rows}, errors);
    EXPECT_EQ(work_of_drivers(*model.context), warm);
  }
}

// The counts above count: without it the first steps launch kernels for the first time.
TEST(WarmUp, WithoutItTheFirstStepDoes) {
  for (const auto& like : attention_test::all_contexts()) {
    Model model(*like, layer_options());
    const std::uint64_t cold = work_of_drivers(*model.context);
    model.step({1});
    EXPECT_GT(work_of_drivers(*model.context), cold);
  }
}

// Scales that the first batch decides, and a cache, are what they were.
TEST(WarmUp, NothingOfTheLayersIsTouched) {
  for (const auto& like : attention_test::all_contexts()) {
    Model model(*like, all_options().at(1));
    const clattn::Buffer& cache = model.layer.kv_cache()->buffer;
    model.queue.fill(cache, 0x31323334, 0, cache.size_bytes());
    std::vector<std::byte> before(cache.size_bytes()), after(before);
    std::vector<std::byte> scales(model.layer.scales().size_bytes()), scales_after(scales);
    model.queue.read(cache, before);
    model.queue.read(model.layer.scales(), scales);
    model.layer.warm_up(model.queue);
    model.queue.read(cache, after);
    model.queue.read(model.layer.scales(), scales_after);
    EXPECT_EQ(before, after);
    EXPECT_EQ(scales, scales_after);
  }
}

TEST(WarmUp, IsRefusedWhileItsQueueIsRecorded) {
  const auto& like = attention_test::all_contexts().front();
  Model model(*like, layer_options());
  const clattn::GraphCapture capture(model.queue);
  EXPECT_THROW(model.layer.warm_up(model.queue), clattn::Error);
}

}  // namespace test_warm_up
