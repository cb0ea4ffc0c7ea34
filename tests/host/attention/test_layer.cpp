#include <gtest/gtest.h>

#include <array>
#include <clattn/clattn.hpp>
#include <clattn/kv_scales.hpp>
#include <string>
#include <vector>

namespace {

using clattn::DType;
using clattn::KVScales;

std::string refusal(const clattn::LoadedKVScales& loaded) {
  try {
    clattn::load_kv_scales(loaded, DType::kFp8E4M3);
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), clattn::ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

// A2.3: every case of both, none and one.
TEST(LoadKVScales, KAndVFollowTheCheckpoint) {
  struct Row {
    float k, v;
    DType cache;
    float want_k, want_v;
    std::size_t warnings;
  };
  constexpr Row kRows[] = {
      {0.5F, 0.25F, DType::kFp8E4M3, 0.5F, 0.25F, 0},  // both
      {-1, -1, DType::kFp8E4M3, 1, 1, 1},              // none: 1, with a warning for e4m3
      {-1, -1, DType::kFp8E5M2, 1, 1, 0},              //
      {0.5F, -1, DType::kFp8E4M3, 0.5F, 0.5F, 0},      // one: duplicated
      {-1, 0.25F, DType::kInt8, 0.25F, 0.25F, 0},      //
      {0.5F, 0.25F, DType::kF16, 1, 1, 0},             // nothing to scale
  };
  for (const Row& row : kRows) {
    const KVScales scales = clattn::load_kv_scales(
        {.k_scale = std::span(&row.k, 1), .v_scale = std::span(&row.v, 1)}, row.cache);
    EXPECT_EQ(scales.k_scale, row.want_k);
    EXPECT_EQ(scales.v_scale, row.want_v);
    EXPECT_EQ(scales.warnings.size(), row.warnings);
    EXPECT_EQ(scales.q_scale, 1);
    EXPECT_EQ(scales.prob_scale, 1);
  }
}

TEST(LoadKVScales, AutoForcesOne) {
  const float half = 0.5F;
  const std::span one(&half, 1);
  EXPECT_EQ(clattn::load_kv_scales({one, one, {}, {}}, std::nullopt), KVScales{});
}

// A9.11: q gets its own scale or 1, never K's, and no warning says otherwise.
TEST(LoadKVScales, QAndProbabilitiesAreTheirOwnOrOne) {
  const std::array<float, 3> values = {0.5F, 3, -1};
  const auto one = [&](std::size_t i) { return std::span(values).subspan(i, 1); };
  const KVScales own = clattn::load_kv_scales({one(0), one(0), one(1), one(1)}, DType::kFp8E4M3);
  EXPECT_EQ(own, (KVScales{0.5F, 0.5F, 3, 3, {}}));
  const KVScales sentinel = clattn::load_kv_scales({one(0), one(0), one(2), {}}, DType::kFp8E4M3);
  EXPECT_EQ(sentinel, (KVScales{0.5F, 0.5F, 1, 1, {}}));
}

// A2.3: where the cache's bytes mean half as much, what was loaded is doubled; defaults are not.
TEST(LoadKVScales, A2_3_FnuzDoublesWhatWasLoaded) {
  const std::array<float, 3> values = {0.5F, 3, -1};
  const auto one = [&](std::size_t i) { return std::span(values).subspan(i, 1); };
  const auto load = [](std::span<const float> k, std::span<const float> v, std::span<const float> q,
                       std::span<const float> prob) {
    return clattn::load_kv_scales({k, v, q, prob, true}, DType::kFp8E4M3);
  };
  EXPECT_EQ(load(one(0), one(1), one(1), one(0)), (KVScales{1, 6, 6, 1, {}}));
  EXPECT_EQ(load(one(2), one(1), {}, one(2)), (KVScales{6, 6, 1, 1, {}}));
  EXPECT_EQ(load(one(2), {}, {}, {}).k_scale, 1);
  EXPECT_EQ(clattn::load_kv_scales({one(0), one(0), {}, {}, true}, std::nullopt), KVScales{});
}

TEST(LoadKVScales, OnlyPerTensorNumbersAreTaken) {
  const std::array<float, 2> two = {1, 2};
  EXPECT_EQ(refusal({two, {}, {}, {}}),
            "Only support per-tensor scaling factor for fp8 KV cache: k_scale has 2 values");
  const float zero = 0;
  EXPECT_EQ(refusal({{}, std::span(&zero, 1), {}, {}}),
            "v_scale is 0, legal: finite numbers > 0, or < 0 for not loaded");
}

TEST(LayerNames, HaveOneIndex) {
  EXPECT_EQ(clattn::extract_layer_index("model.layers.31.self_attn.attn"), 31);
  EXPECT_EQ(clattn::extract_layer_index("7"), 7);
  for (const char* name : {"", "attn", "a.1.b.2", "layer3"}) {
    try {
      clattn::extract_layer_index(name);
      ADD_FAILURE() << name;
    } catch (const clattn::Error& error) {
      EXPECT_EQ(std::string(error.what()),
                "layer name " + std::string(name) + " should only contain one integer");
    }
  }
}

}  // namespace
