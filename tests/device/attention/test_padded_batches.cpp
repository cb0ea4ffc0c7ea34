// Batches with rows behind their tokens, and steps of draft models.
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <clattn/explain.hpp>
#include <limits>
#include <memory>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"

namespace test_padded_batches {

using attention_test::all_contexts;
using clattn::Attention;
using layer_test::Device;
using layer_test::kShape;
using layer_test::Step;

Step three_requests() {
  Step step(kShape, 5);
  step.add_request(1, 0, {5, 99, 99});
  step.add_request(40, 0, {0, 2, 1});
  step.add_request(3, 0, {4, 99, 99});
  return step;
}

/// A layer of its own over six pages.
struct Padded {
  Padded(const std::shared_ptr<clattn::Context>& context, clattn::KernelFamily family)
      : device(context), layer(context, layers, of_family(family)) {
    layer.bind_kv_cache(
        make_kv_cache(*context, device.queue, *layer.get_attn_backend(), layer.config(), 6));
    clattn::BuilderOptions options;
    options.limits = {.max_num_reqs = 4, .max_num_batched_tokens = 44, .max_model_len = 96};
    builder = layer.get_attn_backend()->make_builder(context, layer.config(), options);
  }
  static clattn::AttentionOptions of_family(clattn::KernelFamily family) {
    clattn::AttentionOptions options = layer_test::layer_options("layers.0");
    options.config.kernel_family = family;
    return options;
  }

  Device device;
  clattn::LayerRegistry layers;
  Attention layer;
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
};

// The tensors end with the last request's row, and slots of padding are nonsense: whoever looks at
// either is refused or stores too much.
TEST(PaddedBatches, S5_NothingIsReadOrWrittenForPadding) {
  for (const auto& context : all_contexts()) {
    for (const auto family : {clattn::KernelFamily::kAuto, clattn::KernelFamily::kGpu}) {
      Padded padded(context, family);
      const Device& device = padded.device;
      const Step step = three_requests();
      std::vector<std::int64_t> slots(step.tokens());
      compute_slot_mapping(step.batch(), kShape.block_size, slots);
      slots.resize(200, std::numeric_limits<std::int64_t>::max());
      for (const bool slots_given : {false, true}) {
        clattn::CommonAttentionMetadata batch = step.batch();
        batch.num_actual_tokens = 200;  // above the limits, which leave padding out
        if (slots_given) batch.slot_mapping = slots;
        const auto& metadata = padded.builder->build(device.queue, batch);
        EXPECT_EQ(metadata.num_actual_tokens(), 44);
        EXPECT_EQ(metadata.split(), (clattn::BatchSplit{1, 2, 1, 43}));
        EXPECT_EQ(metadata.slot_mapping().size(), 44U);
        const auto output = step.run(device, padded.layer, &metadata);
        step.expect_truth(output);
        EXPECT_TRUE(output.rest_untouched);
        const auto stored = device.download(padded.layer.kv_cache()->buffer);
        EXPECT_EQ(std::ranges::count_if(stored, [](float x) { return x != 0; }),
                  2 * 44 * kShape.num_kv_heads * kShape.head_size);
      }
      device.queue.finish();
    }
  }
}

// A1.1: what few layers use is planned in one walk, without partial results.
TEST(PaddedBatches, S5_ADraftModelsStepIsAFastBuild) {
  for (const auto& context : all_contexts()) {
    Padded padded(context, clattn::KernelFamily::kAuto);
    const Step step = three_requests();
    const auto& metadata = padded.builder->build_for_drafting(padded.device.queue, step.batch());
    for (const auto& launch : planned_launches(metadata)) EXPECT_EQ(launch.split_tiles, 0);
    step.expect_truth(step.run(padded.device, padded.layer, &metadata));
    padded.device.queue.finish();
  }
}

}  // namespace test_padded_batches
