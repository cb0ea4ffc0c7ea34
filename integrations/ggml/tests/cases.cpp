#include "cases.hpp"

#include <cmath>
#include <random>

namespace {

constexpr float kHidden = -INFINITY;

/// Row i sees the keys up to its own; the last three cells are unused, in stream s as many more as
/// 37 s.
Mask causal(int rows, int keys, int window = 1 << 30) {
  return [=](int stream, int row, int key) {
    const int own = keys - 3 - 37 * stream - rows + row;
    return key <= own && key > own - window ? 0 : kHidden;
  };
}

/// Cells of several sequences take turns; consecutive rows belong to one, and the first 40 cells to
/// all of them.
Mask unified(int sequences, int rows, int keys) {
  return [=](int, int row, int key) {
    const int each = rows / sequences;
    const int own = keys - (each - row % each) * sequences + row / each;
    const bool same = key % sequences == own % sequences || key < 40;
    return key <= own && same ? 0 : kHidden;
  };
}

/// Sequences one after the other, each with a part of the cells that begins inside a page.
Mask side_by_side(int sequences, int rows, int keys) {
  return [=](int, int row, int key) {
    const int sequence = row / (rows / sequences);
    const int length = keys / sequences - 5;
    const int own = sequence * length + length - rows / sequences + row % (rows / sequences);
    return key >= sequence * length && key <= own ? 0 : kHidden;
  };
}

Mask distances(int rows, int keys, float shift = 0) {
  return [=](int, int row, int key) {
    const int own = keys - rows + row;
    return key <= own ? static_cast<float>(key - own) + shift : kHidden;
  };
}

Mask every_third() {
  return [](int, int row, int key) { return key % 3 == row % 3 ? 0 : kHidden; };
}

float random_value(int, int, int) {
  static std::mt19937 random(2);
  return std::uniform_real_distribution<float>(-1, 1)(random);
}

std::vector<Case> shapes() {
  return {
      {.name = "decode", .keys = 1024, .mask = causal(1, 1024)},
      {.name = "decode without a mask", .keys = 1024},
      {.name = "a step after a step", .mask = causal(1, 512), .second_mask = causal(1, 509)},
      {.name = "a prompt, then another mask at the same place",
       .rows = 4,
       .mask = causal(4, 512),
       .second_mask = every_third()},
      {.name = "prompt", .rows = 33, .mask = causal(33, 512)},
      {.name = "prompt, fused queries", .rows = 33, .mask = causal(33, 512), .fused = true},
      {.name = "prompt, heads outside tokens",
       .rows = 33,
       .mask = causal(33, 512),
       .by_head = true},
      {.name = "prompt, values first", .rows = 9, .mask = causal(9, 512), .values_first = true},
      {.name = "prompt in f32", .rows = 9, .type = GGML_TYPE_F32, .mask = causal(9, 512)},
      {.name = "prompt in bf16", .rows = 9, .type = GGML_TYPE_BF16, .mask = causal(9, 512)},
      {.name = "heads of 128", .rows = 3, .head_size = 128, .mask = causal(3, 512)},
      {.name = "heads of 40", .rows = 3, .head_size = 40, .mask = causal(3, 512)},
      {.name = "heads of 256", .rows = 3, .head_size = 256, .mask = causal(3, 512)},
      {.name = "heads without groups", .rows = 3, .kv_heads = 8, .mask = causal(3, 512)},
      {.name = "three streams, decode", .streams = 3, .mask = causal(1, 512)},
      {.name = "three streams, drafts", .rows = 5, .streams = 3, .mask = causal(5, 512)},
      {.name = "three streams, heads outside tokens",
       .rows = 5,
       .streams = 3,
       .mask = causal(5, 512),
       .by_head = true},
  };
}

std::vector<Case> masks() {
  const Mask nothing = [](int, int row, int key) { return row % 2 == 0 || key > 8 ? kHidden : 0; };
  return {
      {.name = "unified cache, decode of 4 sequences", .rows = 4, .mask = unified(4, 4, 512)},
      {.name = "unified cache, 8 rows of each of 3", .rows = 24, .mask = unified(3, 24, 512)},
      {.name = "unified cache, sequences side by side",
       .rows = 12,
       .keys = 1024,
       .mask = side_by_side(3, 12, 1024),
       .hidden_nan = true},
      {.name = "window, decode", .keys = 1024, .mask = causal(1, 1024, 100), .hidden_nan = true},
      {.name = "window, prompt", .rows = 70, .keys = 1024, .mask = causal(70, 1024, 100)},
      {.name = "sinks", .rows = 5, .mask = causal(5, 512), .sinks = true},
      {.name = "soft cap", .rows = 5, .mask = causal(5, 512), .soft_cap = 30},
      {.name = "window, sinks and soft cap",
       .rows = 20,
       .mask = causal(20, 512, 130),
       .soft_cap = 10,
       .sinks = true},
      {.name = "ALiBi", .rows = 8, .mask = distances(8, 512), .max_bias = 8},
      {.name = "ALiBi, 12 heads, decode", .heads = 12, .mask = distances(1, 512), .max_bias = 8},
      {.name = "ALiBi, distances from elsewhere",
       .rows = 8,
       .mask = distances(8, 512, 5),
       .max_bias = 8},
      {.name = "ALiBi's bias over zeros", .rows = 8, .mask = causal(8, 512), .max_bias = 8},
      {.name = "ALiBi with sinks",
       .rows = 8,
       .mask = distances(8, 512),
       .max_bias = 8,
       .sinks = true,
       .computed = false},
      {.name = "distances without a bias", .mask = distances(1, 512), .computed = false},
      {.name = "every third key", .rows = 8, .mask = every_third()},
      {.name = "rows that see nothing", .rows = 8, .mask = nothing},
      {.name = "rows that see nothing, sinks", .rows = 8, .mask = nothing, .sinks = true},
      {.name = "every key for every row", .rows = 20},
      {.name = "more rows than keys", .rows = 75, .keys = 17},
      {.name = "more rows than keys, masked", .rows = 75, .keys = 17, .mask = every_third()},
      {.name = "keys that are not whole pages", .rows = 6, .keys = 113, .mask = causal(6, 113)},
      {.name = "unused cells without numbers",
       .rows = 6,
       .mask = causal(6, 512),
       .hidden_nan = true},
      {.name = "masks of other values", .rows = 4, .mask = random_value, .computed = false},
      {.name = "keys and values in two buffers",
       .mask = causal(1, 512),
       .two_buffers = true,
       .computed = false},
      {.name = "q8_0", .type = GGML_TYPE_Q8_0, .mask = causal(1, 512), .computed = false},
      {.name = "q4_0",
       .rows = 9,
       .type = GGML_TYPE_Q4_0,
       .mask = causal(9, 512),
       .computed = false},
      {.name = "heads of 36", .head_size = 36, .mask = causal(1, 512), .computed = false},
      {.name = "heads of 520", .head_size = 520, .mask = causal(1, 512), .computed = false},
  };
}

}  // namespace

std::vector<Case> cases() {
  std::vector<Case> all = shapes();
  for (const Case& each : masks()) all.push_back(each);
  return all;
}
