#include <gtest/gtest.h>

#include <clattn/attn_utils.hpp>
#include <clattn/clattn.hpp>
#include <clattn/compat/virtual_batches.hpp>
#include <clattn/compat/vllm_layer.hpp>
#include <clattn/registry.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"
#include "oracle/oracle.hpp"
#include "support/error_text.hpp"
#include "support/fake_backend.hpp"

namespace test_layer {

using attention_test::all_contexts;
using clattn::Attention;
using clattn::AttentionOptions;
using clattn::DType;
using clattn::ErrorCode;
using layer_test::Device;
using layer_test::kShape;
using layer_test::layer_options;
using layer_test::Step;
using test::error_text;

constexpr std::int32_t kHeads = kShape.num_heads, kDims = kShape.head_size,
                       kPage = kShape.block_size;

/// Makes a layer that must be refused.
std::string refused(clattn::LayerRegistry& layers, const AttentionOptions& options,
                    ErrorCode code = ErrorCode::kInvalidArgument) {
  return error_text([&] { const Attention layer(all_contexts().at(0), layers, options); }, code);
}

// A2.1: defaults of the constructor, and who wins.
TEST(Layer, ResolvesItsOptionsAsVLLMDoes) {
  const auto& context = all_contexts().at(0);
  clattn::LayerRegistry layers;
  AttentionOptions options;
  options.config.num_heads = kHeads;
  options.config.head_size = kDims;
  options.config.scale = 0.125F;
  const Attention plain(context, layers, options);
  EXPECT_EQ(plain.config().num_kv_heads, kHeads);
  EXPECT_EQ(plain.config().block_size, 16);
  EXPECT_EQ(plain.config().kv_cache_dtype, std::nullopt);
  EXPECT_EQ(plain.config().sliding_window, 0);
  EXPECT_EQ(clattn::extra_repr(plain),
            "head_size=64, num_heads=4, num_kv_heads=4, scale=0.125, backend=FLASHINFER");
  EXPECT_EQ(plain.get_attn_backend()->name(), "FLASHINFER");
  EXPECT_FALSE(plain.has_sink());
  EXPECT_EQ(plain.kv_cache(), nullptr);
  EXPECT_FALSE(plain.scales());
  EXPECT_EQ(error_text([&] { clattn::process_weights_after_loading(plain, DType::kBF16); }),
            "act_dtype is bf16, legal: the layer's dtype, f16");
  clattn::process_weights_after_loading(plain, DType::kF16);

  options.prefix = "layers.1";
  options.config.block_size = 32;
  options.config.sliding_window = 100;
  options.config.sinks = {0, 0, 0, 0};
  const Attention windowed(context, layers, options);
  EXPECT_EQ(windowed.config().sliding_window, 100);
  EXPECT_EQ(windowed.config().block_size, 32);
  EXPECT_TRUE(windowed.has_sink());
  options.prefix = "layers.2";
  options.config.sliding_window = 7;
  EXPECT_EQ(Attention(context, layers, options).config().sliding_window, 7);
  options.config.sliding_window = 0;
  EXPECT_EQ(Attention(context, layers, options).config().sliding_window, 0);
  EXPECT_EQ(layers.layers().size(), 2U);  // those two are gone again
}

// A2.1: and the others reach the kernels' configuration as they are.
TEST(Layer, A2_1_EveryOptionReachesTheConfiguration) {
  const auto& context = all_contexts().at(0);
  clattn::LayerRegistry layers;
  AttentionOptions options = layer_options("layers.0");
  options.config.num_heads = 4;
  options.config.num_kv_heads = 2;
  options.config.alibi_slopes = {1, 2, 3, 4};
  options.config.logits_soft_cap = 30;
  options.config.attention_chunk_size = 64;
  options.config.custom_mask = options.config.output_fp8 = true;
  options.attn_backend = clattn::find_attn_backend("FLASHINFER");
  const Attention layer(context, layers, options);
  EXPECT_EQ(layer.layer_name(), "layers.0");
  EXPECT_EQ(layer.get_attn_backend(), options.attn_backend);
  EXPECT_EQ(layer.config().num_kv_heads, 2);
  EXPECT_EQ(layer.config().alibi_slopes, options.config.alibi_slopes);
  EXPECT_EQ(layer.config().logits_soft_cap, 30);
  EXPECT_EQ(layer.config().attention_chunk_size, 64);
  EXPECT_TRUE(layer.config().custom_mask);
  EXPECT_TRUE(layer.config().output_fp8);
  options = layer_options("layers.1");
  options.config.attn_type = clattn::AttentionType::kEncoderOnly;
  EXPECT_EQ(Attention(context, layers, options).config().attn_type,
            clattn::AttentionType::kEncoderOnly);
  options = {.config = {.num_heads = 4, .head_size = 64 + 64, .use_mla = true},
             .prefix = "layers.2"};
  const Attention latent(context, layers, options);
  EXPECT_TRUE(latent.config().use_mla);
  EXPECT_EQ(latent.config().num_kv_heads, 1);
  EXPECT_EQ(latent.config().rope_dim, 64);
  EXPECT_EQ(latent.config().output_head_size(), 64);
}

TEST(Layer, RefusesWithVLLMsWords) {
  clattn::LayerRegistry layers;
  AttentionOptions options = layer_options("layers.0");
  options.config.num_kv_heads = 3;
  EXPECT_EQ(refused(layers, options), "num_heads (4) is not divisible by num_kv_heads (3)");
  options = layer_options("layers.0");
  options.config.kv_cache_dtype = DType::kFp8E5M2;
  options.fp8_checkpoint = true;
  EXPECT_EQ(refused(layers, options), "fp8_e5m2 kv-cache is not supported with fp8 checkpoints.");
  const Attention layer(all_contexts().at(0), layers, layer_options("layers.0"));
  EXPECT_EQ(refused(layers, layer_options("layers.0")), "Duplicate layer name: layers.0");
  options = layer_options("layers.1");
  options.config.use_mla = true;
  options.attn_backend = layer.get_attn_backend();
  EXPECT_EQ(refused(layers, options, ErrorCode::kUnsupported),
            "backend FLASHINFER does not support this configuration: MLA not supported");
  options = layer_options("layers.1");
  options.config.is_attention_free = true;
  EXPECT_NE(refused(layers, options, ErrorCode::kUnsupported).find("NO_ATTENTION"),
            std::string::npos);
  EXPECT_EQ(layers.layers().size(), 1U);
}

// A2.2
TEST(Layer, SharingTargetsAreCheckedWithVLLMsWords) {
  clattn::LayerRegistry layers;
  const Attention first(all_contexts().at(0), layers, layer_options("layers.0"));
  const auto share = [&](const std::string& target,
                         const std::function<void(AttentionOptions&)>& change) {
    AttentionOptions options = layer_options("layers.3");
    options.kv_sharing_target_layer_name = target;
    change(options);
    return refused(layers, options);
  };
  const auto as_is = [](AttentionOptions&) {};
  const auto text = [](const std::string& target, const std::string& why) {
    return "Specified KV sharing target layer for layers.3 is not valid: target layer " + target +
           " " + why;
  };
  EXPECT_EQ(share("layers.3", as_is), text("layers.3", "cannot be the same as the current layer."));
  EXPECT_EQ(share("layers.5", as_is), text("layers.5", "must come before the current layer."));
  EXPECT_EQ(share("layers.2", as_is),
            text("layers.2", "is not a valid Attention layer in the model."));
  EXPECT_EQ(share("layers.0",
                  [](AttentionOptions& o) {
                    o.config.attn_type = clattn::AttentionType::kEncoderDecoder;
                  }),
            text("layers.0", "must be the same type as the current layer (encoder_decoder)."));
  EXPECT_NE(share("layers.0", [](AttentionOptions& o) { o.config.num_kv_heads = 4; })
                .find("must have KV heads"),
            std::string::npos);
}

/// Takes heads of 64 by what a device reports, but its kernels fail to be made.
class Misfit final : public test::FakeBackend {
 public:
  explicit Misfit(ErrorCode code, cl_int cl_code = CL_SUCCESS)
      : FakeBackend("MISFIT"), code_(code), cl_code_(cl_code) {}
  std::shared_ptr<const clattn::AttentionImpl> make_impl(
      std::shared_ptr<clattn::Context>, const clattn::AttentionConfig&) const override {
    throw clattn::Error(code_, kWhy, cl_code_);
  }
  static constexpr const char* kWhy = "no prefill kernel fits this device";

 private:
  ErrorCode code_;
  cl_int cl_code_;
};

// A8: a layer that is told no backend passes over one whose kernels do not fit its device, or do
// not build there, for the next that takes it. Any other failure is one: it must not silently make
// layers slower.
TEST(Layer, A8_KernelsThatDoNotBuildGiveWayToTheNextBackend) {
  clattn::LayerRegistry layers;
  AttentionOptions options = layer_options("layers.0");
  options.config.head_size = 64;
  clattn::register_backend(std::make_shared<Misfit>(ErrorCode::kUnsupported), 0);
  const Attention layer(all_contexts().at(0), layers, options);
  EXPECT_EQ(layer.get_attn_backend()->name(), "FLASHINFER");
  options.prefix = "layers.1";
  options.attn_backend = clattn::list_attn_backends()[0];
  EXPECT_EQ(refused(layers, options, ErrorCode::kUnsupported), Misfit::kWhy);
  options.attn_backend = nullptr;
  options.config.head_size = 12;
  EXPECT_NE(
      refused(layers, options, ErrorCode::kUnsupported)
          .find("Reasons: MISFIT: only heads of 64 | other backends: FLASHINFER: head_size 12"),
      std::string::npos);
  clattn::unregister_backend("MISFIT");
  options.config.head_size = 64;
  for (const cl_int status : {CL_OUT_OF_RESOURCES, CL_SUCCESS}) {
    clattn::register_backend(std::make_shared<Misfit>(ErrorCode::kOpenCL, status), 0);
    EXPECT_EQ(refused(layers, options, ErrorCode::kOpenCL), Misfit::kWhy) << status;
    clattn::unregister_backend("MISFIT");
  }
  clattn::register_backend(std::make_shared<Misfit>(ErrorCode::kOpenCL, CL_BUILD_PROGRAM_FAILURE),
                           0);
  const auto context =
      clattn::Context::adopt(all_contexts().at(0)->handle(), all_contexts().at(0)->device());
  const Attention other(context, layers, options);
  EXPECT_EQ(other.get_attn_backend()->name(), "FLASHINFER");
  EXPECT_EQ(context->build_failures(),
            std::vector<std::string>{std::string("MISFIT: ") + Misfit::kWhy});
  clattn::unregister_backend("MISFIT");
}

/// A cache of NaN, so that what a layer does not write gives itself away.
clattn::KVCache poisoned_cache(const Device& device, const Attention& layer,
                               std::int64_t num_blocks) {
  const clattn::AttentionConfig& c = layer.config();
  const clattn::KVCacheSpec spec{.block_size = c.block_size,
                                 .num_kv_heads = c.num_kv_heads,
                                 .head_size = c.head_size,
                                 .dtype = c.cache_dtype()};
  const clattn::Buffer raw =
      device.context->allocate(static_cast<std::size_t>(num_blocks) * spec.page_size_bytes());
  device.queue.fill(raw, 0xFFFFFFFFU, 0, raw.size_bytes());
  const auto& backend = *layer.get_attn_backend();
  return reshape_kv_cache(raw, spec, backend,
                          backend.preferred_layout(device.context->capabilities()));
}

/// Two prompts, of 5 and 20 tokens, over pages in no order.
Step two_prompts(std::uint32_t seed) {
  Step step(kShape, seed);
  step.add_request(5, 0, {2, 99});
  step.add_request(20, 0, {0, 1});
  return step;
}

// A2.1: writes the cache, attends, and leaves padding rows zero and nothing else touched.
TEST(Layer, ForwardIsTheOraclesAndZeroesPaddingRows) {
  for (const auto& context : all_contexts()) {
    const Device device(context);
    clattn::LayerRegistry layers;
    Attention layer(context, layers, layer_options("layers.0"));
    layer.bind_kv_cache(poisoned_cache(device, layer, 3));
    Step step = two_prompts(1);
    const auto builder = layer.get_attn_backend()->make_builder(context, layer.config());
    const auto& metadata = builder->build(device.queue, step.batch());
    for (const std::int64_t gap : {0, 8}) {
      const auto out = step.run(device, layer, &metadata, {.padding_rows = 3, .row_gap = gap});
      step.expect_truth(out);
      EXPECT_EQ(out.padding, std::vector<float>(3 * kHeads * kDims, 0.0F));
      EXPECT_TRUE(out.rest_untouched);
    }
    EXPECT_EQ(error_text([&] {
                static_cast<void>(step.run(device, layer, &metadata, {.padding_rows = -1}));
              }),
              "num_rows is 24, legal: 0, or at least the batch's 25 tokens");
    device.queue.finish();
  }
}

// A2.1, with an output that is also written as fp8: the padding rows of that one are zeroed too.
TEST(Layer, ZeroesPaddingRowsOfTheFp8Output) {
  constexpr std::size_t kRow = std::size_t{kHeads} * kDims, kPadding = 3, kGuard = 16;
  for (const auto& context : all_contexts()) {
    const Device device(context);
    clattn::LayerRegistry layers;
    AttentionOptions options = layer_options("layers.0");
    options.config.output_fp8 = true;
    Attention layer(context, layers, options);
    Step step = two_prompts(1);
    const auto builder = layer.get_attn_backend()->make_builder(context, layer.config());
    const auto& metadata = builder->build(device.queue, step.batch());
    const std::size_t tokens = step.tokens() * kRow, end = tokens + kPadding * kRow;
    const clattn::Buffer scale = device.upload({0.5F});
    const std::vector<std::byte> before(end + kGuard, std::byte{0xA5});
    const clattn::Buffer fp8 = context->allocate(before.size());
    const layer_test::RunOptions padded{
        .padding_rows = kPadding,
        .forward = {.output_fp8 = fp8.handle(), .output_scale = scale.handle()}};
    for (const bool profiling : {true, false}) {
      if (!profiling) layer.bind_kv_cache(poisoned_cache(device, layer, 3));
      device.queue.write(fp8, before);
      const auto out = step.run(device, layer, profiling ? nullptr : &metadata, padded);
      std::vector<std::byte> after(before.size()), want = before;
      device.queue.read(fp8, after);
      for (std::size_t i = 0; i < end; ++i) {
        const double value = i < tokens ? out.out[i] / 0.5 : 0.0;
        want[i] = std::byte(oracle::encode(oracle::Element::kFp8E4M3, value));
      }
      EXPECT_EQ(after, want) << (profiling ? "profiling" : "");
      if (!profiling) step.expect_truth(out);
    }
    EXPECT_NE(error_text([&] {
                layer_test::RunOptions short_of_a_row = padded;
                short_of_a_row.padding_rows = kPadding + 1;
                static_cast<void>(step.run(device, layer, &metadata, short_of_a_row));
              }).find("output_fp8: its 29 rows end at element 7424, legal: the buffer's 7184"),
              std::string::npos);
  }
}

// A1.7: chunked-local attention by rebatching, through a builder that knows nothing of it. The
// chunks' short tails stand behind longer requests.
TEST(Layer, VirtualBatchesRunOnAnOrdinaryBuilder) {
  constexpr std::int32_t kChunk = 2 * kPage;
  for (const auto& context : all_contexts()) {
    const Device device(context);
    clattn::LayerRegistry layers;
    Attention layer(context, layers, layer_options("layers.0"));
    layer.bind_kv_cache(poisoned_cache(device, layer, 6));
    Step step(kShape, 11);
    step.add_request(33, 0, {2, 5, 1});
    step.add_request(1, 0, {0, 99, 99});
    step.add_request(32, 0, {3, 4, 99});
    step.set_chunk(kChunk);
    const auto local = make_local_attention_virtual_batches(kChunk, step.batch(), kPage);
    const auto builder = layer.get_attn_backend()->make_builder(context, layer.config());
    const auto& metadata = builder->build(device.queue, local.metadata());
    EXPECT_EQ(metadata.split(), (clattn::BatchSplit{2, 2, 2, 64}));
    step.expect_truth(step.run(device, layer, &metadata));
    device.queue.finish();
  }
}

// M4: prompts before decodes, and mixed with them; every row of the output is its own token's.
TEST(Layer, M4_RequestsMayStandInAnyOrder) {
  const std::vector<std::vector<std::int32_t>> orders = {
      {20, 5, 1, 1}, {5, 1, 20, 1}, {1, 20, 1, 5}};
  for (const auto& context : all_contexts()) {
    const Device device(context);
    clattn::LayerRegistry layers;
    Attention layer(context, layers, layer_options("layers.0"));
    layer.bind_kv_cache(poisoned_cache(device, layer, 5));
    const auto builder = layer.get_attn_backend()->make_builder(context, layer.config());
    for (const auto& query_lens : orders) {
      Step step(kShape, 12);
      std::int32_t page = 0;
      for (const std::int32_t query_len : query_lens) {
        step.add_request(query_len, 0, {page, query_len > kPage ? page + 1 : 99});
        page += query_len > kPage ? 2 : 1;
      }
      const auto& metadata = builder->build(device.queue, step.batch());
      EXPECT_EQ(metadata.split(), (clattn::BatchSplit{2, 2, 2, 25}));
      step.expect_truth(step.run(device, layer, &metadata));
    }
    device.queue.finish();
  }
}

TEST(Layer, F3_ProfilesWithoutMetadataAndRefusesABatchWithoutACache) {
  const Device device(all_contexts().at(0));
  clattn::LayerRegistry layers;
  Attention layer(device.context, layers, layer_options("layers.0"));
  Step step = two_prompts(2);
  const auto builder = layer.get_attn_backend()->make_builder(device.context, layer.config());
  const auto& metadata = builder->build(device.queue, step.batch());
  const std::vector<double> zeros(step.tokens() * kHeads * kDims, 0.0);
  EXPECT_EQ(step.run(device, layer, nullptr).out, zeros);
  const clattn::Buffer rows = device.upload(std::vector<float>(step.tokens() * kHeads * kDims));
  const clattn::AttentionTensors tensors{.query = {rows.handle()}, .output = {rows.handle()}};
  EXPECT_EQ(error_text([&] { layer.forward(device.queue, tensors, nullptr); }),
            "num_rows is 0, legal without attn_metadata (a profiling run): the rows of the output, "
            "which are zeroed");
  // Neither a cache nor keys of its own.
  EXPECT_EQ(
      error_text([&] { step.run(device, layer, &metadata, {.omit_key_and_value = true}); }),
      "layer layers.0: no cache is bound, legal: bind_kv_cache() first, a batch's own key and "
      "value, or null attn_metadata (a profiling run)");
  layer.bind_kv_cache(poisoned_cache(device, layer, 3));
  EXPECT_EQ(step.run(device, layer, nullptr).out, zeros);
  device.queue.finish();
}

// M5: as long as no cache is bound, tokens attend to the call's own keys, as they will later.
TEST(Layer, M5_WithoutACacheTokensAttendToTheirOwnKeys) {
  for (const auto& context : all_contexts()) {
    const Device device(context);
    clattn::LayerRegistry layers;
    for (const bool chunked : {false, true}) {
      AttentionOptions options = layer_options(chunked ? "layers.1" : "layers.0");
      Step step = two_prompts(7);
      if (chunked) {
        options.config.attention_chunk_size = 2 * kPage;
        step.set_chunk(2 * kPage);
      } else {
        options.config.sliding_window = 6;
        step.set_window(6);
      }
      // Of an 8-bit cache: it is not there yet, so nothing is rounded.
      options.config.kv_cache_dtype = DType::kFp8E4M3;
      Attention layer(context, layers, options);
      const auto builder = layer.get_attn_backend()->make_builder(context, layer.config());
      for (const bool causal : {true, false}) {
        if (chunked && !causal) continue;
        auto batch = step.batch();
        batch.causal = causal;
        const auto& metadata = builder->build(device.queue, batch);
        const auto out = step.run(device, layer, &metadata, {.padding_rows = 2, .row_gap = 8});
        step.expect_truth(out, causal);
        EXPECT_EQ(out.padding, std::vector<float>(2 * kHeads * kDims, 0.0F));
        EXPECT_TRUE(out.rest_untouched);
      }
      Step later(kShape, 1);
      later.add_request(1, 4, {0});
      const auto& computed = builder->build(device.queue, later.batch());
      EXPECT_EQ(error_text([&] { static_cast<void>(later.run(device, layer, &computed)); }),
                "layer " + options.prefix +
                    ": no kv_cache is bound, but request 0 has 4 computed tokens, which only a "
                    "cache could hold; legal: 0");
    }
    device.queue.finish();
  }
}

// M7: the first step of cross attention stores the encoder's keys, later ones bring none. Without a
// cache its queries attend to the keys that they came with.
TEST(Layer, M7_CrossAttentionsFirstStepStoresTheEncodersKeys) {
  const std::vector<std::int32_t> key_starts = {0, 7, 27}, key_lens = {7, 20}, starts = {0, 1, 4},
                                  table = {2, 99, 0, 1};
  constexpr std::size_t kKVRow = 2 * 64, kQueryRow = 4 * 64;
  const std::vector<float> key = layer_test::random_values(27 * kKVRow, 1),
                           value = layer_test::random_values(27 * kKVRow, 2),
                           query = layer_test::random_values(4 * kQueryRow, 3);
  // The encoder's tokens as a batch of their own have the slots.
  std::vector<std::int64_t> slots(27);
  compute_slot_mapping(clattn::CommonAttentionMetadata::of(key_starts, key_lens, table), kPage,
                       slots);
  auto batch = clattn::CommonAttentionMetadata::of(starts, key_lens, table);
  oracle::AttentionCase truth;
  truth.num_heads = kHeads;
  truth.num_kv_heads = kShape.num_kv_heads;
  truth.head_size = kDims;
  truth.scale = 0.125;
  truth.causal = false;
  truth.query_start_loc = starts;
  truth.seq_lens = key_lens;
  truth.key_start_loc = key_starts;
  truth.query.assign(query.begin(), query.end());
  truth.key_cache.assign(key.begin(), key.end());
  truth.value_cache.assign(value.begin(), value.end());
  const oracle::AttentionResult want = oracle::attention(truth, oracle::Element::kF32);
  for (const auto& context : all_contexts()) {
    const Device device(context);
    clattn::LayerRegistry layers;
    AttentionOptions options = layer_options("layers.0.encoder_attn");
    options.config.attn_type = clattn::AttentionType::kEncoderDecoder;
    Attention layer(context, layers, options);
    const auto builder = layer.get_attn_backend()->make_builder(context, layer.config());
    const clattn::Buffer keys = device.upload(key), values = device.upload(value),
                         queries = device.upload(query);
    for (const char* when : {"without a cache", "first step", "later step"}) {
      const bool later = when == std::string_view("later step");
      if (when == std::string_view("first step"))
        layer.bind_kv_cache(poisoned_cache(device, layer, 3));
      batch.slot_mapping = later ? std::span<const std::int64_t>() : slots;
      const clattn::Buffer out = device.upload(std::vector<float>(query.size(), 7.0F));
      clattn::AttentionTensors tensors{.query = {queries.handle()}, .output = {out.handle()}};
      if (!later) {
        tensors.key = {keys.handle()};
        tensors.value = {values.handle()};
      }
      const auto& metadata = builder->build(device.queue, batch);
      EXPECT_EQ(metadata.slot_mapping().size(), later ? 0U : 27U);
      layer.forward(device.queue, tensors, &metadata);
      const std::vector<float> got = device.download(out);
      for (std::size_t i = 0; i < got.size(); ++i)
        ASSERT_LE(std::abs(got[i] - want.out[i]), 2 * want.bound[i] + 2e-6) << when << " " << i;
    }
    device.queue.finish();
  }
}

// A2.2: reads the target's cache, stores nothing.
// N queries over fewer keys: the last one stands at the last key, as in a decoder, and those at
// positions below 0 see what of their window reaches the keys.
TEST(Layer, CrossAttentionsWindowCountsFromTheLastKey) {
  const Device device(all_contexts().at(0));
  constexpr std::size_t kQueries = 4, kKeys = 2;
  clattn::AttentionConfig config{.num_heads = 1, .num_kv_heads = 1, .head_size = kDims};
  config.block_size = 0;
  config.dtype = DType::kF32;
  config.sliding_window = 2;
  config.attn_type = clattn::AttentionType::kEncoderDecoder;
  const auto backend = clattn::get_attn_backend(config, &device.context->capabilities());
  const auto impl = backend->make_impl(device.context, config);
  const auto builder = backend->make_builder(device.context, config);
  const std::vector<std::int32_t> starts = {0, kQueries}, lens = {kKeys};
  auto batch = clattn::CommonAttentionMetadata::of(starts, lens, {});
  const std::vector<std::int32_t> key_starts = {0, kKeys};
  batch.key_start_loc = key_starts;
  std::vector<float> values(kKeys * kDims);
  for (std::size_t j = 0; j < kKeys; ++j) values[j * kDims + j] = 1;  // key j's is 1 in dim j
  const clattn::Buffer zeros = device.upload(std::vector<float>(kQueries * kDims));
  const clattn::Buffer value = device.upload(values);
  const clattn::Buffer out = device.upload(std::vector<float>(kQueries * kDims, -1));
  const clattn::Buffer lse = device.upload(std::vector<float>(kQueries, -1));
  impl->forward_encoder(device.queue,
                        {.query = {zeros.handle()},
                         .key = {zeros.handle()},
                         .value = {value.handle()},
                         .output = {out.handle()},
                         .lse = lse.handle()},
                        builder->build(device.queue, batch));
  const std::vector<float> got = device.download(out), sums = device.download(lse);
  const float seen[kQueries][kKeys] = {{0, 0}, {1, 0}, {0.5F, 0.5F}, {0.5F, 0.5F}};
  const float want[kQueries] = {-HUGE_VALF, 0, std::log(2.0F), std::log(2.0F)};
  for (std::size_t i = 0; i < kQueries; ++i) {
    for (std::size_t d = 0; d < kDims; ++d)
      EXPECT_FLOAT_EQ(got[i * kDims + d], d < kKeys ? seen[i][d] : 0) << i << ", " << d;
    EXPECT_FLOAT_EQ(sums[i], want[i]) << i;
  }
}

TEST(Layer, ASharingLayerAttendsToItsTargetsCache) {
  for (const auto& context : all_contexts()) {
    const Device device(context);
    clattn::LayerRegistry layers;
    Attention owner(context, layers, layer_options("layers.0"));
    AttentionOptions options = layer_options("layers.1");
    options.kv_sharing_target_layer_name = "layers.0";
    options.config.fp8_products = true;
    Attention sharer(context, layers, options);
    EXPECT_FALSE(sharer.config().fp8_products);  // the cache's scale of queries is its target's
    owner.bind_kv_cache(poisoned_cache(device, owner, 3));
    EXPECT_TRUE(sharer.shares_kv_cache());
    EXPECT_FALSE(owner.shares_kv_cache());
    EXPECT_EQ(sharer.kv_cache(), owner.kv_cache());
    EXPECT_NE(error_text([&] { sharer.bind_kv_cache({}); }).find("bind that layer's"),
              std::string::npos);
    Step step = two_prompts(3);
    const auto builder = owner.get_attn_backend()->make_builder(context, owner.config());
    const auto& metadata = builder->build(device.queue, step.batch());
    step.expect_truth(step.run(device, owner, &metadata));
    step.new_query(4);
    step.expect_truth(step.run(device, sharer, &metadata, {.poison_key_and_value = true}));
    step.expect_truth(step.run(device, sharer, &metadata, {.omit_key_and_value = true}));
    device.queue.finish();
  }
}

TEST(Layer, KeyAndValueComeTogether) {
  const Device device(all_contexts().at(0));
  clattn::LayerRegistry layers;
  Attention layer(device.context, layers, layer_options("layers.0"));
  const clattn::Buffer some = device.context->allocate(4096);
  EXPECT_EQ(error_text([&] {
              layer.forward(
                  device.queue,
                  {.query = {some.handle()}, .key = {some.handle()}, .output = {some.handle()}},
                  nullptr);
            }),
            "key, value: only one of them is given, legal: both or none");
}

}  // namespace test_layer
