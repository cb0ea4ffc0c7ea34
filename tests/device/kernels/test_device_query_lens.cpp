#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "device/step_model.hpp"
#include "support/error_text.hpp"

/// Steps with decodes whose numbers of query tokens only the device knows
/// (BuilderOptions::device_query_lens).
namespace test_device_query_lens {

using clattn::SplitPolicy;
using step_model::Form;
using step_model::Model;
using step_model::Rows;
using test::error_text;
using Lens = std::vector<std::int32_t>;

class DeviceQueryLens : public testing::TestWithParam<Form> {
 protected:
  const clattn::AttentionConfig config_ = step_model::config_of(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Forms, DeviceQueryLens, testing::ValuesIn(step_model::kForms),
                         step_model::form_name);

/// What a host says of a step, and what devices may make of it.
struct Step {
  std::int32_t threshold;
  Lens contexts, host;
  std::vector<Lens> devices;
};
const Step kSteps[] = {
    // Two decodes, alone and in front of a prefill.
    {6, {20, 5}, {3, 3}, {{4, 2}, {6, 0}, {0, 6}, {1, 2}, {0, 0}, {3, 3}}},
    {6, {40, 700, 9}, {3, 3, 10}, {{4, 2, 10}, {6, 0, 10}, {0, 6, 10}}},
    // Prefills among decodes: rows are shared out on each side of them.
    {4,
     {700, 31, 0, 12, 300, 16},
     {2, 2, 37, 0, 1, 3},
     {{4, 0, 37, 1, 2, 1}, {0, 4, 37, 4, 0, 0}, {3, 1, 37, 0, 0, 2}}},
    // Several tiles of a request.
    {40, {600, 3, 64}, {20, 20, 20}, {{40, 5, 15}, {20, 0, 40}, {1, 1, 1}}},
};

struct Cuts {
  std::int32_t num_splits;
  SplitPolicy policy;
  bool fast;
};
constexpr Cuts kCuts[] = {{0, SplitPolicy::kBalanced, false},
                          {5, SplitPolicy::kBalanced, false},
                          {0, SplitPolicy::kDeterministic, false},
                          {0, SplitPolicy::kBalanced, true}};

/// The host's rows, with lengths that hold whatever the device may say.
Rows bounds_of(const Step& step) {
  Rows host(step.host, step.contexts);
  for (std::size_t r = 0; r < host.lens.size(); ++r)
    if (step.host[r] <= step.threshold) host.lens[r] = step.contexts[r] + step.threshold;
  return host;
}

TEST_P(DeviceQueryLens, Case40_RowsAreThoseOfTheDevice) {
  for (const auto& context : attention_test::all_contexts()) {
    for (const Step& step : kSteps) {
      const Rows host = bounds_of(step);
      Model model(context, config_, step.contexts, host.starts.back());
      clattn::DeviceErrors errors(*context, model.queue);
      for (const Cuts& cuts : kCuts) {
        clattn::BuilderOptions options = model.options(step.threshold);
        options.num_splits = cuts.num_splits;
        options.split_policy = cuts.policy;
        const auto builder = model.backend.make_builder(context, config_, options);
        const auto& metadata =
            builder->build(model.queue, model.batch(host), nullptr, {.fast_build = cuts.fast});
        for (const Lens& given : step.devices) {
          const Rows device(given, step.contexts);
          model.refill();
          model.give(metadata, device, errors);
          model.launch(metadata);
          model.expect(device, fmt::format("{} of {}, {} splits", fmt::join(given, ","),
                                           fmt::join(step.host, ","), cuts.num_splits));
        }
      }
      errors.check(model.queue);
    }
  }
}

TEST_P(DeviceQueryLens, OfTheHostCountUntilTheyCome) {
  const auto& context = attention_test::all_contexts().at(0);
  for (const Step& step : kSteps) {
    const Rows host = bounds_of(step);
    // The bounds are the lengths, whose keys must be there.
    Lens contexts = host.lens;
    for (std::size_t r = 0; r < contexts.size(); ++r) contexts[r] -= step.host[r];
    Model model(context, config_, contexts, host.starts.back());
    const auto builder =
        model.backend.make_builder(context, config_, model.options(step.threshold));
    model.refill();
    model.launch(builder->build(model.queue, model.batch(host)));
    model.expect(host, fmt::format("host's {}", fmt::join(step.host, ",")));
  }
}

// One request is left out; the others are right, and nothing is written for it.
TEST_P(DeviceQueryLens, WrongOnesAreReportedAndWriteNothing) {
  const Lens contexts = {30, 20, 10}, lens = {2, 2, 9};
  struct Wrong {
    Lens starts, extra;  // tokens beyond context and query
    std::vector<std::size_t> left_out;
    std::string reason;
  };
  const std::string rows =
      "its query tokens are more than decode_threshold or its seq_len bound, or lie outside the "
      "rows that the batch gives it and the decodes next to it, or, in a prefill, are not the "
      "batch's";
  const std::string length =
      "its seq_len is less than its query tokens, or more than the bound that the step was planned "
      "with";
  const Wrong wrongs[] = {{{0, 4, 4, 13}, {0, 0, 0}, {0}, "request 0 was left out: " + rows},
                          {{0, 2, 5, 13}, {0, 0, 0}, {1, 2}, "request 1 was left out: " + rows},
                          {{0, 1, 4, 13}, {4, 0, 0}, {0}, "request 0 was left out: " + length},
                          {{0, 1, 4, 13}, {0, -21, 0}, {1}, "request 1 was left out: " + length}};
  for (const auto& context : attention_test::all_contexts()) {
    const Rows host = bounds_of({3, contexts, lens, {}});
    Model model(context, config_, contexts, host.starts.back());
    const auto builder = model.backend.make_builder(context, config_, model.options(3));
    const auto& metadata = builder->build(model.queue, model.batch(host));
    clattn::DeviceErrors errors(*context, model.queue);
    for (const Wrong& wrong : wrongs) {
      Rows device(lens, contexts);
      device.starts = wrong.starts;
      for (std::size_t r = 0; r < lens.size(); ++r)
        device.lens[r] = contexts[r] + device.starts[r + 1] - device.starts[r] + wrong.extra[r];
      model.refill();
      model.give(metadata, device, errors);
      model.launch(metadata);
      EXPECT_EQ(error_text([&] { errors.check(model.queue); }),
                "update_query_lens: " + wrong.reason);
      model.expect(device, wrong.reason, wrong.left_out);
    }
  }
}

// Its tile has no partial rows of its own, and stands in front of decodes that are split.
TEST_P(DeviceQueryLens, APrefillThatIsLeftOutTouchesNoOther) {
  const Lens contexts = {0, 700, 300}, lens = {37, 2, 2};
  for (const auto& context : attention_test::all_contexts()) {
    const Rows host = bounds_of({3, contexts, lens, {}});
    Model model(context, config_, contexts, host.starts.back());
    clattn::DeviceErrors errors(*context, model.queue);
    for (const std::int32_t splits : {1, 5}) {
      clattn::BuilderOptions options = model.options(3);
      options.num_splits = splits;
      const auto builder = model.backend.make_builder(context, config_, options);
      const auto& metadata = builder->build(model.queue, model.batch(host));
      Rows device(lens, contexts);
      device.lens[0] += 1;  // above its bound
      model.refill();
      model.give(metadata, device, errors);
      model.launch(metadata);
      EXPECT_NE(error_text([&] { errors.check(model.queue); }).find("request 0 was left out"),
                std::string::npos);
      model.expect(device, fmt::format("{} splits", splits), {0});
    }
  }
}

TEST_P(DeviceQueryLens, NoRequestsAreNoError) {
  const auto& context = attention_test::all_contexts().at(0);
  Model model(context, config_, {20}, 4);
  const auto builder = model.backend.make_builder(context, config_, model.options(3));
  const Rows none({}, {});
  clattn::DeviceErrors errors(*context, model.queue);
  const auto& metadata = builder->build(model.queue, model.batch(none));
  model.refill();
  model.give(metadata, none, errors);
  model.launch(metadata);
  errors.check(model.queue);
  model.expect(none, "no requests");
}

// A graph reads rows and lengths that stand on the device by then; rows behind them are padding.
TEST_P(DeviceQueryLens, Case40_ReplaysReadThemAnew) {
  constexpr std::int32_t kSize = 4, kThreshold = 6;
  const Lens contexts = {30, 300, 0, 15};
  for (const auto& context : attention_test::all_contexts()) {
    for (const auto mode : {clattn::ReplayMode::kLaunchList, clattn::ReplayMode::kAuto}) {
      Model model(context, config_, contexts, kSize * kThreshold);
      clattn::AttentionState state(context, model.backend, config_, model.options(kThreshold));
      const clattn::Buffer starts = context->allocate((kSize + 1) * 4);
      const clattn::Buffer lens = context->allocate(kSize * 4);
      clattn::DeviceErrors errors(*context, model.queue);
      model.refill();
      clattn::Graph graph;
      {
        const auto capturing = state.graph_capture(kSize);
        const auto& metadata = state.graph_capture_get_metadata_for_batch(model.queue, kSize);
        model.queue.finish();
        clattn::GraphCapture capture(model.queue, mode);
        clattn::update_query_lens(model.queue, metadata, {starts, lens}, errors);
        model.launch(metadata);
        graph = capture.end();
      }
      const auto replay = [&](const Lens& host_lens, const std::vector<Lens>& given) {
        const Lens own(contexts.begin(), contexts.begin() + std::ssize(host_lens));
        const Rows host = bounds_of({kThreshold, own, host_lens, {}});
        clattn::CommonAttentionMetadata batch = model.batch(host);
        state.prepare_graph_input_buffers(model.queue, kSize, batch);
        for (const Lens& query_lens : given) {
          const Rows device(query_lens, own);
          Rows padded = device;
          padded.starts.resize(kSize + 1, device.starts.back());
          padded.lens.resize(kSize);
          model.queue.write(starts, std::as_bytes(std::span(padded.starts)));
          model.queue.write(lens, std::as_bytes(std::span(padded.lens)));
          model.refill();
          graph.replay(model.queue);
          model.expect(device, fmt::format("replay of {}", fmt::join(query_lens, ",")));
        }
      };
      replay({3, 3, 6, 1}, {{4, 2, 6, 1}, {6, 6, 0, 1}, {0, 0, 0, 0}, {1, 1, 1, 1}});
      replay({3, 3}, {{0, 6}, {6, 0}, {2, 1}});
      replay({2, 2, 2, 2}, {{0, 6, 2, 0}});
      errors.check(model.queue);
    }
  }
}

TEST(DeviceQueryLensSteps, OtherMetadataAndOptionsAreRefused) {
  const auto& context = attention_test::all_contexts().at(0);
  const clattn::AttentionConfig config = step_model::config_of(step_model::kForms[0]);
  const Rows rows({1, 1}, {8, 8});
  const Model model(context, config, {8, 8}, 2);
  clattn::BuilderOptions options = model.options(1);
  const auto builder = model.backend.make_builder(context, config, options);
  options.device_query_lens = false;
  const auto other = model.backend.make_builder(context, config, options);
  const auto& metadata = builder->build(model.queue, model.batch(rows));
  const auto& by_lens = other->build(model.queue, model.batch(rows));
  clattn::DeviceErrors errors(*context, model.queue);
  const clattn::Buffer two = context->allocate(8), three = context->allocate(12);
  const auto update = [&](const clattn::AttentionMetadata& made,
                          const clattn::DeviceQueryLengths& lengths) {
    return error_text([&] { clattn::update_query_lens(model.queue, made, lengths, errors); });
  };
  EXPECT_EQ(update(by_lens, {three, two}),
            "update_query_lens: attn_metadata: its query lengths are on the host, legal: metadata "
            "of a builder with device_query_lens");
  EXPECT_EQ(update(metadata, {two, two}),
            "update_query_lens: query_start_loc holds 8 bytes, legal: at least 12 (3 elements of "
            "4)");
  EXPECT_EQ(update(metadata, {three, {}}),
            "update_query_lens: seq_lens holds 0 bytes, legal: at least 8 (2 elements of 4)");
  EXPECT_EQ(update(metadata, {three, two, two}),
            "update_query_lens: slot_mapping holds 8 bytes, legal: at least 16 (2 elements of 8)");
  EXPECT_EQ(
      update(metadata, {clattn::Buffer::adopt(metadata.slot_mapping_buffer()), two}),
      "update_query_lens: query_start_loc lies in the step's metadata, legal: memory of its own");
  EXPECT_EQ(
      error_text([&] { clattn::update_seq_lens(model.queue, metadata, {two}, errors); }),
      "update_seq_lens: attn_metadata: its query lengths are on the device, too, legal: metadata "
      "of a builder without device_query_lens, or update_query_lens()");

  options.device_query_lens = true;
  options.device_seq_lens = false;
  EXPECT_EQ(error_text([&] { model.backend.make_builder(context, config, options); }),
            "device_query_lens: true, legal without device_seq_lens: false");
  options.device_seq_lens = true;
  options.limits.max_num_reqs = 1 << 20;
  options.decode_threshold = 1 << 10;
  const std::string refusal =
      error_text([&] { model.backend.make_builder(context, config, options); },
                 clattn::ErrorCode::kUnsupported);
  EXPECT_TRUE(refusal.starts_with(
      "device_query_lens: true, legal with max_num_reqs 1048576 and decode_threshold 1024: false "
      "(they need 1073741824 partial rows, the device has room for "))
      << refusal;
}

}  // namespace test_device_query_lens
