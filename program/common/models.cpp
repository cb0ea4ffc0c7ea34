#include "program/common/models.hpp"

#include <fmt/ranges.h>

#include <utility>

#include "program/common/built_in.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

/// The attention shape of a public model, as its config.json on the model card states it: heads, KV
/// heads, and head_dim or, where the card has none, hidden size / heads. Windows and soft caps are
/// not part of it.
struct PublicModel {
  const char* name;
  std::int32_t num_heads, num_kv_heads, head_size;
};
constexpr PublicModel kPublicModels[] = {
    {"llama-2-7b", 32, 32, 128}, {"llama-3.1-405b", 128, 8, 128}, {"llama-3.2-3b", 24, 8, 128},
    {"mistral-7b", 32, 8, 128},  {"mixtral-8x7b", 32, 8, 128},    {"qwen2.5-0.5b", 14, 2, 64},
    {"qwen2.5-7b", 28, 4, 128},  {"qwen2.5-72b", 64, 8, 128},     {"qwen3-0.6b", 16, 8, 128},
    {"qwen3-8b", 32, 8, 128},    {"qwen3-30b-a3b", 32, 4, 128},   {"gemma-2-2b", 8, 4, 256},
    {"phi-3-mini", 32, 32, 96},  {"phi-4", 40, 10, 128},          {"gpt-oss-120b", 64, 8, 64},
};

std::vector<Model> read_models() {
  std::vector<Model> models;
  for (const TextFile& file : shape_files()) {
    for (BenchShape& row : parse_shapes(file.text, file.name)) {
      if (models.empty() || models.back().layer.name != row.model.name)
        models.push_back({.layer = row.model});
      if (row.options.empty()) models.back().layer = row.model;
      models.back().rows.push_back(std::move(row));
    }
  }
  for (const auto& [name, num_heads, num_kv_heads, head_size] : kPublicModels) {
    models.push_back({.layer = {.name = name,
                                .config = {.num_heads = num_heads,
                                           .num_kv_heads = num_kv_heads,
                                           .head_size = head_size}}});
  }
  return models;
}

}  // namespace

const std::vector<Model>& models() {
  static const std::vector<Model> models = read_models();
  return models;
}

const Model& model_named(const std::string& name, WhyNot* why_not,
                         std::vector<std::string> others) {
  std::string_view wrong = "is unknown";
  for (const Model& model : models()) {
    const std::string_view why = why_not == nullptr ? "" : why_not(model);
    if (model.layer.name == name && why.empty()) return model;
    if (model.layer.name == name) wrong = why;
    if (why.empty()) others.push_back(model.layer.name);
  }
  throw_invalid("--model: '{}' {}; one of {}", name, wrong, fmt::join(others, ", "));
}

}  // namespace clattn::cli
