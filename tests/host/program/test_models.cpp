// The models that commands know by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>

#include "program/common/models.hpp"
#include "support/error_text.hpp"

namespace {

using clattn::cli::BenchShape;
using clattn::cli::Model;
using clattn::cli::model_named;
using clattn::cli::models;

std::string_view has_no_rows(const Model& model) {
  return model.rows.empty() ? "has no rows" : "";
}

TEST(Models, EachStandsOnceWithALayerOfItsOwn) {
  std::set<std::string> names;
  for (const Model& model : models()) {
    EXPECT_TRUE(names.insert(model.layer.name).second) << model.layer.name << " stands twice";
    EXPECT_GT(model.layer.config.num_heads, 0);
    if (model.rows.empty()) continue;
    // What rows add is no part of the model.
    EXPECT_TRUE(std::ranges::any_of(model.rows, &std::string::empty, &BenchShape::options))
        << model.layer.name << " has no row without options of its own";
  }
  for (const char* name : {"llama-3-8b", "gpt-oss-20b", "deepseek-v3", "qwen3-8b", "phi-3-mini"})
    EXPECT_TRUE(names.contains(name)) << name;
}

TEST(Models, AreFoundByNameWithTheirOptions) {
  EXPECT_EQ(model_named("gpt-oss-20b", has_no_rows).layer.config.sinks.size(), 64U);
  EXPECT_TRUE(model_named("deepseek-v3").layer.config.use_mla);
  const clattn::cli::BenchModel& hybrid = model_named("qwen3.5-9b", has_no_rows).layer;
  EXPECT_EQ(hybrid.config.head_size, 256);
  EXPECT_EQ(hybrid.delta_net.channels(), 8192);
  EXPECT_FALSE(model_named("llama-3-8b").layer.delta_net.exists());
  EXPECT_EQ(model_named("qwen3-30b-a3b").layer.config.num_kv_heads, 4);
}

TEST(Models, ARefusalSaysWhyAndWhatIsLegal) {
  const auto refusal = [](const char* name) {
    return test::error_text([&] { model_named(name, has_no_rows, {"all"}); });
  };
  EXPECT_EQ(refusal("gpt-9").find("--model: 'gpt-9' is unknown; one of all, aims, "), 0U);
  const std::string of_known = refusal("qwen3-8b");
  EXPECT_EQ(of_known.find("--model: 'qwen3-8b' has no rows; one of all, aims, "), 0U) << of_known;
  EXPECT_EQ(of_known.find("phi-4"), std::string::npos) << "the command does not take it";
}

}  // namespace
