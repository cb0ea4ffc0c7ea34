#pragma once

#include <cstddef>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

/// A small model of Llama's shape with random weights.
namespace engine {

inline constexpr int kLayers = 3, kVocabulary = 128, kHidden = 64, kInner = 128;
inline constexpr int kHeads = 4, kKVHeads = 2, kHeadSize = 16;
inline constexpr int kQueryWidth = kHeads * kHeadSize, kKVWidth = kKVHeads * kHeadSize;
inline constexpr int kQKVWidth = kQueryWidth + 2 * kKVWidth;  // of a row: query, key, value
inline constexpr float kNormEpsilon = 1e-5F, kRopeBase = 10000;

using Tokens = std::vector<int>;

/// Row-major.
struct Matrix {
  int rows = 0, cols = 0;
  std::vector<float> values = {};
};

/// As in a checkpoint, by name: embedding [vocabulary, hidden], head [hidden, vocabulary], norm [1,
/// hidden], and of each layer "N.": qkv, out, gate_up (gate, then up), down, norm_1, norm_2.
/// Activations are rows; a projection is row * matrix.
using Weights = std::map<std::string, Matrix>;

/// Weights in [mean - spread, mean + spread), the same in every language that has the generator.
inline Weights random_weights(unsigned seed) {
  std::mt19937 random(seed);
  const auto matrix = [&](int rows, int cols, double mean, double spread) {
    Matrix made{rows, cols, std::vector<float>(static_cast<std::size_t>(rows * cols))};
    for (float& value : made.values)
      value = static_cast<float>(mean + spread * (static_cast<double>(random()) * 0x1p-31 - 1));
    return made;
  };
  Weights weights;
  weights["embedding"] = matrix(kVocabulary, kHidden, 0, 1.7);
  weights["head"] = matrix(kHidden, kVocabulary, 0, 0.9);
  weights["norm"] = matrix(1, kHidden, 1, 0.2);
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string name = std::to_string(layer) + ".";
    weights[name + "qkv"] = matrix(kHidden, kQKVWidth, 0, 0.35);
    weights[name + "out"] = matrix(kQueryWidth, kHidden, 0, 0.5);
    weights[name + "gate_up"] = matrix(kHidden, 2 * kInner, 0, 0.25);
    weights[name + "down"] = matrix(kInner, kHidden, 0, 0.25);
    weights[name + "norm_1"] = matrix(1, kHidden, 1, 0.2);
    weights[name + "norm_2"] = matrix(1, kHidden, 1, 0.2);
  }
  return weights;
}

/// `count` tokens of which the last `own` are of this prompt alone: the others are the first ones
/// of every prompt.
inline Tokens random_prompt(int count, int own) {
  std::mt19937 random(2);
  Tokens prompt;
  for (int i = 0; i < count; ++i)
    prompt.push_back(static_cast<int>((random() + (i < count - own ? 0 : 1)) % kVocabulary));
  return prompt;
}

/// Whether the continuations are the tokens that the model adds to the prompts, each the likeliest
/// after all before it, in double precision and without a cache (reference.cpp). Prints them, and
/// what is wrong.
bool judge(const Weights& weights, std::span<const Tokens> prompts,
           std::span<const Tokens> continuations);

}  // namespace engine
