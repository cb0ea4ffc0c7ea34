#include "cli/common/models.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "cli/common/error.hpp"
#include "cli/common/text.hpp"

namespace clattn::cli {
namespace {

// name, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim (or hidden size /
// heads where the card has none). Windows and soft caps are not part of the shape.
constexpr ModelShape kModels[] = {
    {"llama-2-7b", 32, 32, 32, 128},   {"llama-3-8b", 32, 32, 8, 128},
    {"llama-3-70b", 80, 64, 8, 128},   {"llama-3.1-405b", 126, 128, 8, 128},
    {"llama-3.2-1b", 16, 32, 8, 64},   {"llama-3.2-3b", 28, 24, 8, 128},
    {"mistral-7b", 32, 32, 8, 128},    {"mixtral-8x7b", 32, 32, 8, 128},
    {"qwen2.5-0.5b", 24, 14, 2, 64},   {"qwen2.5-7b", 28, 28, 4, 128},
    {"qwen2.5-72b", 80, 64, 8, 128},   {"qwen3-0.6b", 28, 16, 8, 128},
    {"qwen3-8b", 36, 32, 8, 128},      {"qwen3-32b", 64, 64, 8, 128},
    {"qwen3-30b-a3b", 48, 32, 4, 128}, {"gemma-2-2b", 26, 8, 4, 256},
    {"gemma-2-9b", 42, 16, 8, 256},    {"phi-3-mini", 32, 32, 32, 96},
    {"phi-4", 40, 40, 10, 128},        {"gpt-oss-20b", 24, 64, 8, 64},
    {"gpt-oss-120b", 36, 64, 8, 64},
};

}  // namespace

std::span<const ModelShape> model_shapes() {
  return kModels;
}

const ModelShape& find_model(std::string_view name) {
  const auto* const found = std::ranges::find(kModels, name, &ModelShape::name);
  if (found != std::end(kModels)) return *found;
  throw_invalid("--model: '{}' is unknown; one of {}", name,
                fmt::join(names_of(kModels, &ModelShape::name), ", "));
}

}  // namespace clattn::cli
