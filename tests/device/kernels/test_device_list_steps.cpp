// Steps whose lists only the device knows: what they are until it says them, what it may not say,
// recorded ones, and those that also take query lengths from it.
#include <gtest/gtest.h>

#include <clattn/cache_ops.hpp>
#include <clattn/graph.hpp>
#include <cmath>
#include <string>
#include <vector>

#include "device/cache_ops_support.hpp"
#include "device/small_call.hpp"
#include "support/error_text.hpp"

namespace test_device_list_steps {

using clattn::Direction;
using small_test::Batch;
using small_test::Call;
using small_test::kRow;
using test::error_text;
using Ints = std::vector<std::int32_t>;
using Bytes = std::vector<std::uint8_t>;
using Words = std::vector<std::uint32_t>;

constexpr std::size_t kTokens = 4;  // of the batches below

template <typename T>
clattn::Buffer on_device(const Call& call, const std::vector<T>& values) {
  return cache_ops_test::upload(*call.context, call.queue, values);
}

clattn::AttentionConfig listing(std::int32_t window = 5) {
  clattn::AttentionConfig config = small_test::config();
  config.use_directions = config.use_trees = config.use_first_keys = true;
  config.sliding_window = window;
  return config;
}

clattn::BuilderOptions options(bool directions, bool trees) {
  clattn::BuilderOptions made = Call::builder_options();
  made.device_directions = directions;
  made.device_trees = trees;
  return made;
}

/// Three queries of 11 keys, or fewer, and one of 7.
struct TwoRequests : Batch {
  Ints tree_start_loc, tree_parents, first_keys;
  std::vector<Direction> direction;
  explicit TwoRequests(std::int32_t queries = 3)
      : Batch({0, queries, queries + 1}, {11, 7}, {7, 3, 9, 5, 8, 0}) {}
  TwoRequests& with_tree(Ints tree_starts, Ints parents) {
    tree_start_loc = std::move(tree_starts);
    tree_parents = std::move(parents);
    metadata.tree_start_loc = tree_start_loc;
    metadata.tree_parents = tree_parents;
    return *this;
  }
  TwoRequests& with_directions(std::vector<Direction> directions) {
    direction = std::move(directions);
    metadata.direction = direction;
    return *this;
  }
};

/// What the layer makes of a batch by a plan of the host.
std::vector<float> eager(const Call& call, const Batch& batch, std::size_t tokens = kTokens) {
  const auto builder =
      call.backend->make_builder(call.context, call.impl->config(), Call::builder_options());
  call.forward(builder->build(call.queue, batch.metadata));
  return call.rows(tokens);
}

void expect_near(const std::vector<float>& got, const std::vector<float>& wanted,
                 std::size_t first_row = 0, std::size_t end_row = kTokens) {
  for (std::size_t i = first_row * kRow; i < end_row * kRow; ++i)
    ASSERT_NEAR(got[i], wanted[i], 1e-5) << "row " << i / kRow;
}

TEST(DeviceListSteps, TheHostsCountUntilTheyCome) {
  for (const auto& context : small_test::all_contexts()) {
    const Call call(context, listing(), options(true, false));
    TwoRequests batch;
    for (const bool causal : {true, false}) {
      batch.metadata.causal = causal;
      const std::vector<float> wanted = eager(call, batch);
      call.forward(call.builder->build(call.queue, batch.metadata));
      expect_near(call.rows(kTokens), wanted);
    }
    batch.metadata.causal.reset();
    const Call growing(context, listing(), options(false, true));
    const std::vector<float> chain = eager(growing, batch);
    batch.with_tree({0, 5, 5}, {});
    growing.forward(growing.builder->build(growing.queue, batch.metadata));
    expect_near(growing.rows(kTokens), chain);
  }
}

TEST(DeviceListSteps, OnesMayFollowOthers) {
  for (const auto& context : small_test::all_contexts()) {
    const Call call(context, listing(), options(true, false));
    const TwoRequests batch;
    const auto& metadata = call.builder->build(call.queue, batch.metadata);
    clattn::DeviceErrors errors(*context, call.queue);
    for (const Direction first : {Direction::kCanvas, Direction::kBothWays, Direction::kCausal}) {
      TwoRequests by_host;
      by_host.with_directions({first, Direction::kBothWays});
      const std::vector<float> wanted = eager(call, by_host);
      clattn::update_lists(
          call.queue, metadata,
          {.direction = on_device(call, Bytes{static_cast<std::uint8_t>(first), 0})}, errors);
      call.forward(metadata);
      expect_near(call.rows(kTokens), wanted);
    }
    errors.check(call.queue);
  }
}

TEST(DeviceListSteps, WrongDirectionsAreReportedAndSeeNothing) {
  for (const auto& context : small_test::all_contexts()) {
    const Call call(context, listing(), options(true, false));
    const TwoRequests batch;
    const std::vector<float> causal = eager(call, batch);
    const auto& metadata = call.builder->build(call.queue, batch.metadata);
    clattn::DeviceErrors errors(*context, call.queue);
    clattn::update_lists(call.queue, metadata, {.direction = on_device(call, Bytes{3, 1})}, errors);
    call.forward(metadata);
    expect_near(call.rows(kTokens), std::vector<float>(kTokens * kRow), 0, 3);
    expect_near(call.rows(kTokens), causal, 3, 4);
    EXPECT_EQ(error_text([&] { errors.check(call.queue); }),
              "update_lists: request 0 was left out: its direction is none of 0 (both ways), 1 "
              "(causal), 2 (canvas)");
  }
}

/// A step of two requests, of which the first may have a tree of up to five nodes.
struct Growing {
  Call call;
  TwoRequests batch;
  const clattn::AttentionMetadata* metadata;
  clattn::DeviceErrors errors;
  explicit Growing(const std::shared_ptr<clattn::Context>& context, std::int32_t first_key = 0)
      : call(context, listing(), options(false, true)), errors(*context, call.queue) {
    batch.with_tree({0, 5, 5}, {});
    batch.first_keys = {first_key, 0};
    batch.metadata.first_keys = batch.first_keys;
    metadata = &call.builder->build(call.queue, batch.metadata);
  }
  std::vector<float> rows(Ints sizes, const Words& bits) {
    clattn::update_lists(call.queue, *metadata,
                         {.direction = {},
                          .tree_sizes = on_device(call, sizes),
                          .tree_bits = on_device(call, bits),
                          .tree_bits_stride = std::ssize(bits) / 4},
                         errors);
    call.forward(*metadata);
    return call.rows(kTokens);
  }
};

TEST(DeviceListSteps, WrongTreesAreReportedAndSeeNothing) {
  const std::string reason =
      "was left out: its tree has fewer nodes than it has query tokens, more than tree_start_loc "
      "or its seq_len allows, or its first or kept keys";
  for (const auto& context : small_test::all_contexts()) {
    for (const std::int32_t nodes : {-1, 2, 6}) {
      Growing growing(context);
      const std::vector<float> chain = eager(growing.call, TwoRequests());
      const std::vector<float> got = growing.rows({nodes, 0}, {1, 3, 5, 0});
      expect_near(got, std::vector<float>(kTokens * kRow), 0, 3);
      expect_near(got, chain, 3, 4);
      EXPECT_EQ(error_text([&] { growing.errors.check(growing.call.queue); }),
                "update_lists: request 0 " + reason);
    }
    Growing none(context);
    none.rows({3, 1}, {1, 3, 5, 1});
    EXPECT_EQ(error_text([&] { none.errors.check(none.call.queue); }),
              "update_lists: request 1 " + reason);
  }
}

TEST(DeviceListSteps, WrongBitsAreReportedAndMended) {
  for (const auto& context : small_test::all_contexts()) {
    TwoRequests by_host;
    by_host.with_tree({0, 3, 3}, {-1, 0, 0});
    for (const Words& bits : {Words{1, 1, 5, 0}, Words{1, 3, 13, 0}, Words{0, 3, 5, 0}}) {
      Growing growing(context);
      const std::vector<float> wanted = eager(growing.call, by_host);
      expect_near(growing.rows({3, 0}, bits), wanted);
      EXPECT_EQ(error_text([&] { growing.errors.check(growing.call.queue); }),
                "update_lists: request 0 is not what was meant: the tree_bits of a row do not hold "
                "its own node, or hold later ones");
    }
    Growing right(context);
    const std::vector<float> wanted = eager(right.call, by_host);
    // Of wider rows only the words of the tree count.
    expect_near(right.rows({3, 0}, {1, ~0U, 3, ~0U, 5, ~0U, 0, ~0U}), wanted);
    right.errors.check(right.call.queue);
  }
}

TEST(DeviceListSteps, ReplaysReadThemAnew) {
  for (const auto& context : small_test::all_contexts()) {
    clattn::BuilderOptions recordable = options(true, false);
    recordable.graph_batch_size = 2;
    recordable.decode_threshold = 2;
    const Call call(context, listing(), recordable);
    const TwoRequests batch(2);
    const clattn::Buffer direction = on_device(call, Bytes{1, 1});
    clattn::DeviceErrors errors(*context, call.queue);
    const auto& metadata = call.builder->build(call.queue, batch.metadata);
    clattn::Graph graph;
    {
      clattn::GraphCapture capture(call.queue);
      clattn::update_lists(call.queue, metadata, {.direction = direction}, errors);
      call.forward(metadata);
      graph = capture.end();
    }
    for (const Direction first : {Direction::kCanvas, Direction::kBothWays, Direction::kCausal}) {
      TwoRequests by_host(2);
      by_host.with_directions({first, Direction::kCausal});
      const std::vector<float> wanted = eager(call, by_host, 3);
      const Bytes given = {static_cast<std::uint8_t>(first), 1};
      call.queue.write(direction, std::as_bytes(std::span(given)));
      call.queue.write(call.out, std::vector<std::byte>(call.out.size_bytes()));
      graph.replay(call.queue);
      expect_near(call.rows(3), wanted, 0, 3);
    }
    errors.check(call.queue);
  }
}

// The device gives three tokens to the first request, or to the second.
TEST(DeviceListSteps, WithQueryLengthsOfTheDevice) {
  for (const auto& context : small_test::all_contexts()) {
    clattn::AttentionConfig config = listing();
    config.use_trees = false;
    clattn::BuilderOptions varying = options(true, false);
    varying.device_seq_lens = varying.device_query_lens = true;
    varying.decode_threshold = 3;
    const Call call(context, config, varying);
    Batch bounds({0, 2, 4}, {12, 12}, {7, 3, 9, 5, 8, 0});
    const Ints first_keys = {2, 0};
    bounds.metadata.first_keys = first_keys;
    const auto& metadata = call.builder->build(call.queue, bounds.metadata);
    clattn::DeviceErrors errors(*context, call.queue);
    for (const Ints& starts : {Ints{0, 3, 4}, Ints{0, 1, 4}, Ints{0, 0, 3}}) {
      for (const Direction value : {Direction::kBothWays, Direction::kCausal, Direction::kCanvas}) {
        Batch exact(starts, {11, 9}, {7, 3, 9, 5, 8, 0});
        const std::vector<Direction> direction(2, value);
        const Bytes given(2, static_cast<std::uint8_t>(value));
        exact.metadata.direction = direction;
        exact.metadata.first_keys = first_keys;
        const std::vector<float> wanted = eager(call, exact);
        call.queue.write(call.out, std::vector<std::byte>(call.out.size_bytes()));
        clattn::update_query_lens(call.queue, metadata,
                                  {on_device(call, starts), on_device(call, Ints{11, 9})}, errors);
        clattn::update_lists(call.queue, metadata, {.direction = on_device(call, given)}, errors);
        call.forward(metadata);
        expect_near(call.rows(kTokens), wanted, 0, static_cast<std::size_t>(starts.back()));
      }
    }
    errors.check(call.queue);
  }
}

TEST(DeviceListSteps, OptionsThatDoNotFitAreRefused) {
  const auto& context = small_test::all_contexts().at(0);
  const auto refusal = [&](const clattn::AttentionConfig& config,
                           const clattn::BuilderOptions& made) {
    const auto backend = get_attn_backend(config, &context->capabilities());
    return error_text([&] { backend->make_builder(context, config, made); },
                      clattn::ErrorCode::kUnsupported);
  };
  EXPECT_EQ(refusal(small_test::config(), options(true, false)),
            "device_directions: true, legal without use_directions: false");
  EXPECT_EQ(refusal(small_test::config(), options(false, true)),
            "device_trees: true, legal without use_trees: false");
  EXPECT_EQ(refusal(listing(), options(true, true)),
            "device_trees: true, legal with device_directions: false");
  clattn::AttentionConfig encoder = listing();
  encoder.use_trees = false;
  encoder.attn_type = clattn::AttentionType::kEncoderOnly;
  encoder.block_size = 0;
  EXPECT_EQ(refusal(encoder, options(true, false)),
            "device_directions: true, legal with attn_type encoder_only: false");
  clattn::BuilderOptions varying = options(false, false);
  varying.device_seq_lens = varying.device_query_lens = true;
  EXPECT_EQ(refusal(listing(), varying), "device_query_lens: true, legal with use_trees: false");
}

TEST(DeviceListSteps, BatchesThatSayWhatTheDeviceKnowsAreRefused) {
  const auto& context = small_test::all_contexts().at(0);
  const auto refusal = [&](const clattn::BuilderOptions& made, const Batch& batch,
                           clattn::ErrorCode code = clattn::ErrorCode::kInvalidArgument) {
    clattn::AttentionConfig config = listing();
    config.use_spans = true;
    const Call call(context, config, made);
    return error_text([&] { call.builder->build(call.queue, batch.metadata); }, code);
  };
  TwoRequests directed;
  directed.with_directions({Direction::kCausal, Direction::kCausal});
  EXPECT_EQ(refusal(options(true, false), directed),
            "direction holds 2 elements, legal with device_directions: none (the device says "
            "them)");
  TwoRequests tree;
  tree.with_tree({0, 3, 3}, {-1, 0, 0});
  EXPECT_EQ(refusal(options(false, true), tree),
            "tree_parents holds 3 elements, legal with device_trees: none (the device says them)");
  EXPECT_EQ(refusal(options(true, false), tree),
            "request 0: it has a tree, legal with device_directions: none");
  tree.with_tree({0, 2, 2}, {});
  EXPECT_EQ(refusal(options(false, true), tree),
            "request 0: its tree has 2 nodes, legal: 3 … 11 (its query tokens … at most 256 and "
            "seq_lens), or none");
  TwoRequests spanned;
  const Ints starts = {0, 1, 1}, spans = {8, 11};
  spanned.metadata.span_start_loc = starts;
  spanned.metadata.spans = spans;
  clattn::BuilderOptions by_lengths = options(false, false);
  by_lengths.device_seq_lens = true;
  EXPECT_EQ(refusal(by_lengths, spanned, clattn::ErrorCode::kUnsupported),
            "spans holds 2 elements, legal with device_seq_lens and use_spans: none (only the "
            "device knows where the rows stand)");
}

TEST(DeviceListSteps, CallsThatDoNotFitAreRefused) {
  const auto& context = small_test::all_contexts().at(0);
  const Call call(context, listing(), options(true, false)), plain(context);
  Growing growing(context);
  const auto& metadata = call.builder->build(call.queue, TwoRequests().metadata);
  const clattn::Buffer one = on_device(call, Bytes{1}), two = on_device(call, Bytes{1, 1});
  const auto answer = [&](const clattn::AttentionMetadata& step, const clattn::DeviceLists& lists) {
    return error_text([&] { clattn::update_lists(call.queue, step, lists, growing.errors); });
  };
  EXPECT_EQ(answer(plain.builder->build(plain.queue, TwoRequests().metadata), {.direction = two}),
            "update_lists: attn_metadata: its lists are on the host, legal: metadata of a builder "
            "with device_directions or device_trees");
  EXPECT_EQ(answer(metadata, {}),
            "update_lists: direction is missing, legal with device_directions: a buffer");
  EXPECT_EQ(answer(metadata, {.direction = two, .tree_sizes = two}),
            "update_lists: tree_sizes is given, legal without device_trees: none");
  EXPECT_EQ(answer(metadata, {.direction = two, .tree_bits_stride = 1}),
            "update_lists: tree_bits_stride is 1, legal without tree_bits: 0");
  EXPECT_EQ(answer(metadata, {.direction = one}),
            "update_lists: direction holds 1 bytes, legal: at least 2 (2 elements of 1)");
  EXPECT_EQ(answer(metadata, {.direction = clattn::Buffer::adopt(metadata.slot_mapping_buffer())}),
            "update_lists: direction lies in the step's metadata, legal: memory of its own");
  const clattn::Buffer sizes = on_device(call, Ints{3, 0}), bits = on_device(call, Words{1, 3, 5});
  EXPECT_EQ(answer(*growing.metadata, {.direction = two, .tree_sizes = sizes, .tree_bits = bits}),
            "update_lists: direction is given, legal without device_directions: none");
  EXPECT_EQ(answer(*growing.metadata, {.tree_sizes = sizes}),
            "update_lists: tree_bits is missing, legal with device_trees: a buffer");
  EXPECT_EQ(answer(*growing.metadata, {.tree_sizes = sizes, .tree_bits = bits}),
            "update_lists: tree_bits_stride is 0, legal: 1 … 2147483647 (words of the largest "
            "tree)");
  EXPECT_EQ(
      answer(*growing.metadata, {.tree_sizes = sizes, .tree_bits = bits, .tree_bits_stride = 1}),
      "update_lists: tree_bits holds 12 bytes, legal: at least 16 (4 elements of 4)");
}

}  // namespace test_device_list_steps
