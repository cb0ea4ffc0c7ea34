#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace clattn::cli {

/// The attention shape of a public model, as its config.json on the model card states it.
struct ModelShape {
  std::string_view name;
  std::int32_t num_layers = 0;
  std::int32_t num_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_size = 0;
};

std::span<const ModelShape> model_shapes();

/// Throws kInvalidArgument listing the known names.
const ModelShape& find_model(std::string_view name);

}  // namespace clattn::cli
