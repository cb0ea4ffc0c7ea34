// Spans of a session's steps: tokens of an image that see one another.
#include <gtest/gtest.h>

#include <clattn/block_pool.hpp>
#include <clattn/device.hpp>
#include <clattn/session.hpp>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/session_client.hpp"
#include "support/error_text.hpp"

namespace test_session_spans {

using clattn::SessionConfig;
using clattn::SpanRule;
using session_test::Client;
using session_test::counting;
using session_test::small_config;
using test::error_text;

/// Layers as a model of images and text has them: a window that cuts spans, one that does not,
/// none, and a layer that takes no notice of spans.
SessionConfig spans_config() {
  SessionConfig config = small_config();
  config.layers = std::vector(4, config.layers[1]);
  for (std::size_t layer = 0; layer < 3; ++layer) config.layers[layer].config.use_spans = true;
  config.layers[0].config.span_rule = SpanRule::kClipLeft;
  config.layers[2].config.sliding_window = 0;
  return config;
}

class SessionSpans : public testing::TestWithParam<std::size_t> {
 protected:
  Client client(SessionConfig config) const {
    return {attention_test::all_contexts().at(GetParam()), std::move(config)};
  }
};

TEST_P(SessionSpans, EachLayerSeesThemByItsOwnRule) {
  Client client = this->client(spans_config());
  const clattn::RequestId image = client.session.add(counting(0, 80)),
                          text = client.session.add(counting(100, 30));
  // At the beginning, longer than the window, and one in the prompt's second chunk.
  client.run({{.id = image, .max_tokens = 50, .spans = {{0, 5}, {9, 40}}}, {.id = text}});
  client.run({{.id = text, .new_tokens = {1}}, {.id = image, .spans = {{51, 79}}}});
  client.run({{.id = image, .new_tokens = {2}}, {.id = text, .new_tokens = {3}}});
  // A conversation goes on with another image.
  client.run({{.id = text, .new_tokens = counting(200, 12), .spans = {{33, 41}}}});
}

TEST_P(SessionSpans, AStepWithoutAnyHasTheBitsOfPlainLayers) {
  SessionConfig plain = spans_config();
  for (auto& layer : plain.layers) layer.config.use_spans = false;
  for (auto& layer : plain.layers) layer.config.span_rule = SpanRule::kWhole;
  Client with = client(spans_config()), without = client(plain);
  const auto id = with.session.add(counting(0, 40));
  EXPECT_EQ(without.session.add(counting(0, 40)), id);
  EXPECT_EQ(with.run({{id}}), without.run({{id}}));
}

TEST_P(SessionSpans, RefusedOnesLeaveTheRequestAsItWas) {
  Client plain = client(small_config()), with = client(spans_config());
  const auto id = plain.session.add(counting(0, 9));
  EXPECT_EQ(error_text([&] {
              plain.session.step({{.id = id, .spans = {{0, 4}}}});
            }),
            "step: request 0: spans has 1 elements, legal where no layer has use_spans: none");
  plain.run({{id}});
  EXPECT_EQ(with.session.add(counting(0, 9)), id);
  EXPECT_NE(error_text([&] {
              with.session.step({{.id = id, .spans = {{0, 4}, {3, 6}}}});
            }).find("request 0: spans[1] is 3"),
            std::string::npos);
  EXPECT_EQ(with.session.blocks().num_used(), 0);
  with.run({{.id = id, .spans = {{0, 4}, {4, 6}}}});
}

INSTANTIATE_TEST_SUITE_P(Devices, SessionSpans,
                         testing::Range(std::size_t{0}, clattn::list_devices().size()));

}  // namespace test_session_spans
