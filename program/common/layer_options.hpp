#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "program/common/elements.hpp"
#include "program/common/models.hpp"

namespace clattn::cli {

/// The options of commands that work on one layer: a model, and what replaces parts of it.
struct LayerOptions {
  std::string model = "llama-3-8b";
  std::optional<std::int32_t> heads, kv_heads, head_size, block_size;
  std::string dtype, kv_dtype;  ///< empty = the model's

  /// In a group "Model" of the command's help. `cache_names`: what --kv-dtype takes.
  void add_to(CLI::App& command, std::int32_t most_block_size,
              std::span<const std::string_view> cache_names = kCacheTypeNames);
  /// The layer, and the layout that its model asks for. Throws kInvalidArgument naming the option.
  BenchModel layer(WhyNot* why_not = nullptr) const;
  /// The model's name, or that the shape is another.
  std::string name() const;
};

}  // namespace clattn::cli
