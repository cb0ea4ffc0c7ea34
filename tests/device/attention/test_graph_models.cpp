#include <gtest/gtest.h>

#include <clattn/attn_utils.hpp>
#include <clattn/clattn.hpp>
#include <clattn/graph.hpp>
#include <clattn/mla.hpp>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"
#include "oracle/oracle.hpp"

/// Recorded steps of models whose layers belong to several KV cache groups: one state a group, one
/// graph over all layers. A replay has the bits of the eager step, and those are right.
namespace test_graph_models {

using attention_test::all_contexts;
using clattn::Attention;
using clattn::AttentionType;
using clattn::CommonAttentionMetadata;
using layer_test::Device;

constexpr std::int32_t kHeads = 4, kKVHeads = 2, kDims = 64, kPage = 16, kBlocks = 40;
constexpr std::int32_t kSize = 4, kMostKeys = 9 * kPage;
constexpr std::size_t kRow = std::size_t{kHeads} * kDims;

clattn::AttentionOptions options_of(std::string prefix, std::int32_t window,
                                    AttentionType type = AttentionType::kDecoder) {
  clattn::AttentionOptions options;
  options.config.num_heads = kHeads;
  options.config.head_size = kDims;
  options.config.num_kv_heads = kKVHeads;
  options.prefix = std::move(prefix);
  options.config.dtype = clattn::DType::kF32;
  options.config.block_size = kPage;
  options.config.sliding_window = window;
  options.config.attn_type = type;
  return options;
}

clattn::BuilderOptions builder_options() {
  clattn::BuilderOptions options;
  options.limits = {.max_num_reqs = kSize,
                    .max_num_batched_tokens = kSize,
                    .max_model_len = kMostKeys,
                    .num_blocks = kBlocks};
  options.num_splits = 2;  // partial results, whose memory all groups share
  options.workspace = std::make_shared<clattn::AttentionWorkspace>();
  return options;
}

/// A decode step as one group sees it: keys of any number in [fewest, kMostKeys], pages of its own.
struct GroupStep {
  std::vector<std::int32_t> starts{0}, lens, table;
  CommonAttentionMetadata batch;

  GroupStep(std::mt19937& random, std::int32_t num_reqs, std::int32_t fewest) {
    std::vector<std::int32_t> pages(kBlocks);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    table.assign(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(num_reqs) * 9);
    std::uniform_int_distribution<std::int32_t> length(fewest, kMostKeys);
    for (std::int32_t r = 0; r < num_reqs; ++r) {
      starts.push_back(r + 1);
      lens.push_back(r == 0 ? kMostKeys : length(random));  // the table's last page too
    }
    if (num_reqs > 1) lens[1] = fewest;
    batch = CommonAttentionMetadata::of(starts, lens, table);
  }
  GroupStep(const GroupStep&) = delete;
};

struct Group {
  std::vector<Attention*> layers;
  std::unique_ptr<clattn::AttentionMetadataBuilder> eager;
  clattn::AttentionState state;

  Group(const std::shared_ptr<clattn::Context>& context, const clattn::AttentionConfig& config,
        const clattn::BuilderOptions& options, std::vector<Attention*> members)
      : layers(std::move(members)),
        eager(layers[0]->get_attn_backend()->make_builder(context, config, options)),
        state(context, *layers[0]->get_attn_backend(), config, options) {}
  bool crosses() const { return layers[0]->config().attn_type == AttentionType::kEncoderDecoder; }
};

/// Layers run in the order of groups; each takes the output of the one before as its query.
class Model {
 public:
  Model(const std::shared_ptr<clattn::Context>& context, std::vector<Group>& groups)
      : device_(context), groups_(groups) {
    const std::size_t kv = std::size_t{kSize} * kKVHeads * kDims;
    query_ = device_.upload(layer_test::random_values(kSize * kRow, 1));
    key_ = device_.upload(layer_test::random_values(kv, 2));
    value_ = device_.upload(layer_test::random_values(kv, 3));
    for (const Group& group : groups_) {
      for (const Attention* layer : group.layers) {
        contents_.push_back(
            layer_test::random_values(layer->kv_cache()->buffer.size_bytes() / sizeof(float), 10));
        outs_.push_back(context->allocate(kSize * kRow * sizeof(float)));
      }
    }
  }

  void record() {
    const clattn::Queue other = device_.context->create_queue();
    std::vector<const clattn::AttentionMetadata*> metadata;
    for (Group& group : groups_) {
      const auto capturing = group.state.graph_capture(kSize);
      metadata.push_back(&group.state.graph_capture_get_metadata_for_batch(other, kSize));
    }
    clattn::GraphCapture capture(device_.queue);
    launch(metadata);
    graph_ = capture.end();
    other.finish();
  }

  void expect_replay_equals_eager_and_truth(const std::vector<CommonAttentionMetadata>& batches) {
    std::vector<const clattn::AttentionMetadata*> metadata;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      metadata.push_back(&groups_[g].eager->build(device_.queue, batches[g]));
    }
    reset();
    launch(metadata);
    const auto eager = outcome();
    reset();
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      ASSERT_EQ(groups_[g].state.begin_forward(device_.queue, batches[g]).graph_batch_size, kSize);
    }
    graph_.replay(device_.queue);
    EXPECT_EQ(outcome(), eager);
    expect_truth(batches);
  }

 private:
  void reset() {
    std::size_t i = 0;
    for (const Group& group : groups_) {
      for (const Attention* layer : group.layers) {
        device_.queue.write(layer->kv_cache()->buffer, std::as_bytes(std::span(contents_[i])));
        device_.queue.fill(outs_[i], 0x12345678, 0, outs_[i].size_bytes());
        ++i;
      }
    }
  }

  void launch(const std::vector<const clattn::AttentionMetadata*>& metadata) {
    std::size_t i = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (Attention* layer : groups_[g].layers) {
        clattn::AttentionTensors tensors{
            .query = {i == 0 ? query_.handle() : outs_[i - 1].handle()},
            .output = {outs_[i].handle()}};
        if (!groups_[g].crosses()) {  // the encoder's keys are there already
          tensors.key = {key_.handle()};
          tensors.value = {value_.handle()};
        }
        layer->forward(device_.queue, tensors, metadata[g], {.num_rows = kSize});
        ++i;
      }
    }
  }

  /// Outputs and caches of all layers.
  std::vector<std::vector<float>> outcome() const {
    std::vector<std::vector<float>> all;
    for (const clattn::Buffer& out : outs_) all.push_back(device_.download(out));
    for (const Group& group : groups_) {
      for (const Attention* layer : group.layers)
        all.push_back(device_.download(layer->kv_cache()->buffer));
    }
    return all;
  }

  void expect_truth(const std::vector<CommonAttentionMetadata>& batches) const {
    std::size_t i = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (const Attention* layer : groups_[g].layers) {
        expect_layer_truth(*layer, batches[g], i == 0 ? query_ : outs_[i - 1], outs_[i]);
        ++i;
      }
    }
  }

  void expect_layer_truth(const Attention& layer, const CommonAttentionMetadata& batch,
                          const clattn::Buffer& query, const clattn::Buffer& out) const {
    oracle::AttentionCase truth;
    truth.num_heads = kHeads;
    truth.num_kv_heads = kKVHeads;
    truth.head_size = kDims;
    truth.block_size = kPage;
    truth.scale = 1.0 / std::sqrt(double{kDims});
    truth.causal = layer.config().attn_type == AttentionType::kDecoder;
    truth.query_start_loc.assign(batch.query_start_loc.begin(), batch.query_start_loc.end());
    truth.seq_lens.assign(batch.seq_lens.begin(), batch.seq_lens.end());
    truth.block_table.assign(batch.block_table.begin(), batch.block_table.end());
    truth.max_blocks = batch.block_table_stride;
    if (layer.config().sliding_window > 0) {
      truth.window_left = layer.config().sliding_window - 1;
      truth.window_right = truth.window_left;
    }
    const std::vector<float> rows = device_.download(query);
    const auto tokens = static_cast<std::size_t>(batch.num_actual_tokens);
    truth.query.assign(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(tokens * kRow));
    logical(*layer.kv_cache(), layer.kv_cache()->k_offset, truth.key_cache);
    logical(*layer.kv_cache(), layer.kv_cache()->v_offset, truth.value_cache);
    const oracle::AttentionResult want = oracle::attention(truth, oracle::Element::kF32);
    const std::vector<float> got = device_.download(out);
    constexpr double kFloor = 2e-6;  // f32 sums of values of size about 1
    for (std::size_t e = 0; e < tokens * kRow; ++e) {
      ASSERT_LE(std::abs(got[e] - want.out[e]), 2 * want.bound[e] + kFloor)
          << layer.layer_name() << ", element " << e;
    }
    for (std::size_t e = tokens * kRow; e < got.size(); ++e) {
      ASSERT_EQ(got[e], 0.0F) << layer.layer_name() << ", padding, element " << e;
    }
  }

  void logical(const clattn::KVCache& cache, std::int64_t offset, std::vector<double>& to) const {
    const std::vector<float> memory = device_.download(cache.buffer);
    for (std::int64_t block = 0; block < cache.num_blocks; ++block) {
      for (std::int64_t token = 0; token < kPage; ++token) {
        for (std::int64_t head = 0; head < kKVHeads; ++head) {
          const std::int64_t at = offset + block * cache.block_stride + token * cache.token_stride +
                                  head * cache.head_stride;
          const auto first = memory.begin() + at;
          to.insert(to.end(), first, first + kDims);
        }
      }
    }
  }

  Device device_;
  std::vector<Group>& groups_;
  clattn::Buffer query_, key_, value_;
  std::vector<std::vector<float>> contents_;  // of each layer's cache before a step
  std::vector<clattn::Buffer> outs_;
  clattn::Graph graph_;
};

// A2.7 over two groups with pages of their own: full layers and windowed ones.
TEST(GraphModel, AHybridModelIsOneGraph) {
  for (const auto& context : all_contexts()) {
    clattn::LayerRegistry layers;
    Attention full(context, layers, options_of("layers.0", 0));
    Attention windowed(context, layers, options_of("layers.1", 40));
    Attention narrow(context, layers, options_of("layers.2", 8));
    clattn::KVCacheConfig config;
    config.num_blocks = kBlocks;
    const auto specs = get_kv_cache_spec(layers);
    config.groups = {{{"layers.0"}, specs.at("layers.0")},
                     {{"layers.1", "layers.2"}, specs.at("layers.1")}};
    for (const auto& [name, spec] : specs) {
      config.tensors.push_back({kBlocks * spec.page_size_bytes(), {name}});
    }
    const clattn::BuilderOptions options = builder_options();
    const auto made = init_attn_backend(config, layers, context, options);
    const clattn::Queue queue = context->create_queue();
    init_kv_cache(config, layers, made, *context, queue);
    EXPECT_EQ(made[1].config.sliding_window, 40);  // the widest of its layers
    std::vector<Group> groups;
    groups.emplace_back(context, made[0].config, options, std::vector{&full});
    groups.emplace_back(context, made[1].config, options, std::vector{&windowed, &narrow});
    Model model(context, groups);
    model.record();
    std::mt19937 random(5);
    for (const std::int32_t num_reqs : {4, 1, 3, 0, 2}) {
      const GroupStep one(random, num_reqs, 1);
      GroupStep two(random, num_reqs, 1);
      two.batch.seq_lens = one.lens;  // the same requests, other pages
      model.expect_replay_equals_eager_and_truth({one.batch, two.batch});
    }
  }
}

// A2.7 with encoder_seq_lens and cross_block_tables: what a step's cross attention reads is a batch
// of its own, in which the queries are not among the keys.
TEST(GraphModel, AnEncoderDecoderModelIsOneGraph) {
  for (const auto& context : all_contexts()) {
    clattn::LayerRegistry layers;
    Attention self(context, layers, options_of("decoder.layers.0.self_attn", 0));
    Attention cross(context, layers,
                    options_of("decoder.layers.0.encoder_attn", 0, AttentionType::kEncoderDecoder));
    const clattn::Queue queue = context->create_queue();
    for (Attention* layer : {&self, &cross}) {
      layer->bind_kv_cache(
          make_kv_cache(*context, queue, *layer->get_attn_backend(), layer->config(), kBlocks));
    }
    const clattn::BuilderOptions options = builder_options();
    std::vector<Group> groups;
    groups.emplace_back(context, self.config(), options, std::vector{&self});
    groups.emplace_back(context, cross.config(), options, std::vector{&cross});
    Model model(context, groups);
    model.record();
    std::mt19937 random(6);
    for (const std::int32_t num_reqs : {3, 4, 1, 0, 2}) {
      const GroupStep decoder(random, num_reqs, 1);
      GroupStep encoder(random, num_reqs, 0);  // also one without a key
      if (num_reqs % 2 == 0) encoder.batch.causal = false;
      model.expect_replay_equals_eager_and_truth({decoder.batch, encoder.batch});
    }
  }
}

// A state takes builders of any origin.
TEST(GraphModel, AnMLALayerIsRecorded) {
  const auto& context = all_contexts().front();
  const Device device(context);
  clattn::MLAConfig config;
  config.num_heads = 2;
  config.kv_lora_rank = 16;
  config.rope_dim = 8;
  config.block_size = kPage;
  config.dtype = clattn::DType::kF32;
  const std::size_t width = 24, out_row = 32;
  const clattn::MLACache cache{
      .buffer = device.upload(layer_test::random_values(std::size_t{kBlocks} * kPage * width, 1)),
      .dtype = config.dtype,
      .num_blocks = kBlocks,
      .block_size = kPage,
      .kv_lora_rank = 16,
      .rope_dim = 8,
      .scale = {}};
  const clattn::Buffer query = device.upload(layer_test::random_values(kSize * 2 * width, 2));
  const clattn::Buffer out = device.upload(std::vector<float>(kSize * out_row));
  const auto impl = make_mla_impl(*context, config);
  clattn::AttentionState state(
      [&](const clattn::BuilderOptions& options) {
        return make_mla_builder(context, config, options);
      },
      builder_options());
  const auto launch = [&](const clattn::AttentionMetadata& metadata) {
    impl->forward(device.queue, {.query = {query.handle()}, .output = {out.handle()}}, cache,
                  metadata);
  };
  clattn::Graph graph;
  {
    const auto capturing = state.graph_capture(kSize);
    const clattn::Queue other = context->create_queue();
    const auto& metadata = state.graph_capture_get_metadata_for_batch(other, kSize);
    clattn::GraphCapture capture(device.queue);
    launch(metadata);
    graph = capture.end();
    other.finish();
  }
  const auto eager = make_mla_builder(context, config, builder_options());
  std::mt19937 random(7);
  for (const std::int32_t num_reqs : {2, 4, 0, 3}) {
    const GroupStep step(random, num_reqs, 1);
    device.queue.fill(out, 0x12345678, 0, out.size_bytes());
    launch(eager->build(device.queue, step.batch));
    const std::vector<float> want = device.download(out);
    device.queue.fill(out, 0x12345678, 0, out.size_bytes());
    ASSERT_EQ(state.begin_forward(device.queue, step.batch).graph_batch_size, kSize);
    graph.replay(device.queue);
    EXPECT_EQ(device.download(out), want) << num_reqs;
  }
}

}  // namespace test_graph_models
