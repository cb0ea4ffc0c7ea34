#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <clattn/attention.hpp>
#include <clattn/error.hpp>
#include <cstdint>
#include <string>
#include <type_traits>

namespace clattn::cli {

/// Refuses what is not a number of type T in [low, high], in one line with the legal range.
template <typename T>
CLI::Validator number_in(T low, T high) {
  const auto check = [low, high](std::string& text) -> std::string {
    T value{};
    const bool fits = CLI::detail::lexical_cast(text, value) && value >= low && value <= high;
    if (fits) return {};
    return fmt::format("'{}' is not legal: {} {} to {}", text,
                       std::is_integral_v<T> ? "an integer" : "a number", low, high);
  };
  return {check, fmt::format("{}..{}", low, high)};
}

/// The model shape that several commands take as options; llama-3-8b unless said otherwise.
struct ShapeOptions {
  std::int32_t num_heads = 32, num_kv_heads = 8, head_size = 128, block_size = 16;
  std::string dtype = "f16", kv_cache_dtype = "auto";

  void add_to(CLI::App& command) {
    command.add_option("--heads", num_heads, "Query heads")->check(CLI::Range(1, 65536));
    command.add_option("--kv-heads", num_kv_heads, "Key/value heads")->check(CLI::Range(1, 65536));
    command.add_option("--head-size", head_size, "Head size")->check(CLI::Range(1, 65536));
    command.add_option("--block-size", block_size, "Tokens a cache page")
        ->check(CLI::Range(1, 1 << 24));
    command.add_option("--dtype", dtype, "f32, f16 or bf16");
    command.add_option("--kv-dtype", kv_cache_dtype,
                       "auto, f32, f16, bf16, fp8_e4m3, fp8_e5m2 or int8");
  }

  /// Throws kInvalidArgument naming the option.
  AttentionConfig config() const {
    if (num_heads % num_kv_heads != 0) {
      throw Error(ErrorCode::kInvalidArgument, "--heads: " + std::to_string(num_heads) +
                                                   " is not a multiple of --kv-heads " +
                                                   std::to_string(num_kv_heads));
    }
    AttentionConfig config;
    config.num_heads = num_heads;
    config.num_kv_heads = num_kv_heads;
    config.head_size = head_size;
    config.block_size = block_size;
    config.dtype = parse_dtype(dtype);
    config.kv_cache_dtype = parse_kv_cache_dtype(kv_cache_dtype);
    return config;
  }
};

}  // namespace clattn::cli
