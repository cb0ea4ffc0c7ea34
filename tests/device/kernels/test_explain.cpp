#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <clattn/explain.hpp>
#include <clattn/log.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"

namespace test_explain {

using attention_test::all_contexts;
using clattn::Candidate;
using clattn::LogLevel;

clattn::AttentionOptions options_of(std::int32_t num_heads, std::int32_t num_kv_heads,
                                    std::int32_t head_size) {
  auto options = layer_test::layer_options("layers.0");
  options.config.num_heads = num_heads;
  options.config.num_kv_heads = num_kv_heads;
  options.config.head_size = head_size;
  return options;
}

/// Collects the library's messages while it lives.
class Messages {
 public:
  explicit Messages(LogLevel level) {
    clattn::set_log(level, [this](LogLevel, std::string_view text) { texts_.emplace_back(text); });
  }
  ~Messages() { clattn::set_log(LogLevel::kOff); }
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  /// How many hold a text.
  std::ptrdiff_t count(std::string_view part) const {
    return std::ranges::count_if(
        texts_, [&](const std::string& text) { return text.find(part) != std::string::npos; });
  }

 private:
  std::vector<std::string> texts_;
};

// Every kernel that runs is a chosen candidate, and whatever is not chosen has a reason.
TEST(Explain, NamesWhatRunsAndWhyNothingElseDoes) {
  for (const auto& context : all_contexts()) {
    clattn::LayerRegistry layers;
    const clattn::Attention layer(context, layers, layer_test::layer_options("layers.0"));
    const std::vector<Candidate> candidates = layer.explain();
    std::vector<std::string> chosen, running = {std::string(layer.get_attn_backend()->name())};
    for (const Candidate& candidate : candidates) {
      if (candidate.chosen) chosen.push_back(candidate.name);
      EXPECT_NE(candidate.chosen, !candidate.reason.empty() && candidate.reason != "tuned")
          << candidate.role << " " << candidate.name << ": " << candidate.reason;
    }
    for (const auto& kernel : layer.impl().kernels()) running.push_back(kernel.name);
    std::ranges::sort(chosen);
    std::ranges::sort(running);
    EXPECT_EQ(chosen, running);
    EXPECT_NE(clattn::to_string(candidates).find("chosen"), std::string::npos);
    EXPECT_GT(candidates.size(), running.size()) << "nothing was turned down";
  }
}

TEST(Explain, SaysWhichSizesAKernelDoesNotTake) {
  const auto& context = all_contexts().front();
  clattn::LayerRegistry layers;
  // 25 query heads a KV head are more than a decode tile has rows.
  const clattn::Attention layer(context, layers, options_of(50, 2, layer_test::kShape.head_size));
  const auto candidates = layer.explain();
  EXPECT_TRUE(std::ranges::any_of(candidates, [](const Candidate& candidate) {
    return candidate.role == "decode" &&
           candidate.reason.find("rows for 25 query heads a KV head") != std::string::npos;
  })) << clattn::to_string(candidates);
}

// A shape that no other test uses is named once, whatever the number of its layers.
TEST(Log, NamesTheChoiceOncePerShape) {
  const auto& context = all_contexts().front();
  auto options = options_of(6, 3, 40);
  Messages messages(LogLevel::kDebug);
  clattn::LayerRegistry layers;
  const clattn::Attention first(context, layers, options);
  options.prefix = "layers.1";
  const clattn::Attention second(context, layers, options);
  EXPECT_EQ(messages.count("6/3 heads of 40, f32 over f32"), 1);
  EXPECT_EQ(messages.count("considered:"), 1);
}

TEST(Log, IsQuietUntilAsked) {
  const auto& context = all_contexts().front();
  Messages messages(LogLevel::kOff);
  clattn::LayerRegistry layers;
  const clattn::Attention layer(context, layers, options_of(9, 3, 56));
  EXPECT_EQ(messages.count(""), 0);
}

TEST(Log, TracesEveryLaunch) {
  const auto& context = all_contexts().front();
  const layer_test::Device device(context);
  clattn::LayerRegistry layers;
  clattn::Attention layer(context, layers, layer_test::layer_options("layers.0"));
  layer.bind_kv_cache(
      clattn::make_kv_cache(*context, device.queue, *layer.get_attn_backend(), layer.config(), 4));
  layer_test::Step step(layer_test::kShape, 1);
  step.add_request(1, 0, {0});
  const auto builder = layer.get_attn_backend()->make_builder(context, layer.config());
  const auto& metadata = builder->build(device.queue, step.batch());
  Messages messages(LogLevel::kTrace);
  static_cast<void>(step.run(device, layer, &metadata));
  EXPECT_EQ(messages.count("groups"), 1) << "a decode of one request";
}

}  // namespace test_explain
