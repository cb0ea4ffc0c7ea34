// What a captured batch says of its requests beyond lengths: directions, spans, first and kept
// keys.

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "robustness/attention_model.hpp"
#include "robustness/capture.hpp"

namespace test_capture_lists {

namespace fs = std::filesystem;

AttentionModel mixed() {
  return AttentionModel::paged({{1, 21}, {1, 6}, {5, 9}});
}

/// Files that a captured call has beside those of any.
Names lists_of(const RoundTrip& trip) {
  Names lists;
  for (const std::string& name : names_in(trip.calls() / "0000-attention")) {
    if (name == "direction.npy" || name.ends_with("_keys.npy") || name.starts_with("span"))
      lists.push_back(name);
  }
  return lists;
}

TEST(Capture, DirectionsSpansFirstAndKeptKeys) {
  AttentionModel model = mixed();
  model.add("\"window_left\": 4, \"window_right\": 2");
  model.set_directions({oracle::Looks::kBack, oracle::Looks::kBothWays, oracle::Looks::kCanvas});
  const RoundTrip directed(model.image);
  EXPECT_EQ(lists_of(directed), Names{"direction.npy"});
  const fs::path place = directed.calls() / "0000-attention";
  EXPECT_EQ(read_bytes(place / "case.json").find("causal"), std::string::npos);

  model.add("\"span_rule\": \"clip_both\"");
  model.set_spans({{0, 3, 21}, {2, 4, 6}, {2, 6, 30}});
  model.set_first_keys({20, 0, 3});
  model.set_keep_keys({0, 1, 5});
  const RoundTrip all(model.image);
  EXPECT_EQ(lists_of(all), (Names{"direction.npy", "first_keys.npy", "keep_keys.npy",
                                  "span_start_loc.npy", "spans.npy"}));
  const fs::path other = all.calls() / "0000-attention";
  for (const std::string& name : lists_of(all))
    EXPECT_EQ(npy_data(read_bytes(other / name)), npy_data(model.image.files[name])) << name;

  AttentionModel own_keys = AttentionModel::encoder("encoder_only", {{7, 7}, {1, 1}, {12, 12}});
  own_keys.set_spans({{2, 3, 9}});
  own_keys.set_directions({oracle::Looks::kBothWays, oracle::Looks::kBack, oracle::Looks::kBack});
  EXPECT_EQ(lists_of(RoundTrip(own_keys.image)),
            (Names{"direction.npy", "span_start_loc.npy", "spans.npy"}));
}

TEST(Capture, SpansThatTheLayerDoesNotLookAtAreNoneOfItsCase) {
  AttentionModel model = mixed();
  model.set_spans({{2, 4, 9}});
  model.add("\"use_spans\": false");
  EXPECT_EQ(lists_of(RoundTrip(model.image)), Names{});
}

}  // namespace test_capture_lists
