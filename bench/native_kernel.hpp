// A decode of one hand-written kernel of AVX-512 (or AVX2) and OpenMP; native_decode.cpp measures
// it.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace clattn::native {

#ifdef __AVX512F__
inline constexpr int kWidth = 16;
#else
inline constexpr int kWidth = 8;
#endif
using Vec = float __attribute__((vector_size(kWidth * sizeof(float))));
using IntVec = std::int32_t __attribute__((vector_size(kWidth * sizeof(float))));
using Half = std::uint16_t;

inline constexpr int kHeads = 32, kKvHeads = 8, kGroup = kHeads / kKvHeads, kDim = 128, kPage = 16;
inline constexpr int kVecs = kDim / kWidth;  // vectors of a key
inline constexpr std::size_t kRun =
    std::size_t{kPage} * kDim;  // elements of a page and head: K or V
inline constexpr std::size_t kLine = 64 / sizeof(Half);

inline Vec load_half(const Half* from) {
#ifdef __AVX512F__
  // By a full mask: the plain intrinsic of GCC 12 warns of its own header.
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}

/// Lane i is a[i] + a[i ^ Step] where i has no bit Step, else b[i] + b[i ^ Step].
template <int Step, int... I>
Vec fold(Vec a, Vec b, std::integer_sequence<int, I...> /*lanes*/) {
  return __builtin_shufflevector(a, b, ((I & Step) != 0 ? I + kWidth : I)...) +
         __builtin_shufflevector(a, b, ((I & Step) != 0 ? (I ^ Step) + kWidth : I ^ Step)...);
}

/// Lane i is the sum of the lanes of sums[i].
template <int Step = 1>
Vec add_lanes(Vec* sums) {
  for (int i = 0; i < kWidth / Step / 2; ++i) {
    sums[i] = fold<Step>(sums[2 * i], sums[2 * i + 1], std::make_integer_sequence<int, kWidth>());
  }
  if constexpr (Step * 2 < kWidth) {
    return add_lanes<Step * 2>(sums);
  } else {
    return sums[0];
  }
}

template <int... I>
float max_lane(Vec x, std::integer_sequence<int, I...> /*lanes*/) {
  const auto fold_max = [](Vec a, Vec b) { return a > b ? a : b; };
  if constexpr (kWidth == 16) x = fold_max(x, __builtin_shufflevector(x, x, (I ^ (kWidth / 2))...));
  x = fold_max(x, __builtin_shufflevector(x, x, (I ^ 4)...));
  x = fold_max(x, __builtin_shufflevector(x, x, (I ^ 2)...));
  return fold_max(x, __builtin_shufflevector(x, x, (I ^ 1)...))[0];
}

/// 2^x for x <= 0: rounded to a whole number that goes to the exponent, a polynomial for the rest.
inline Vec exp2_of(Vec x) {
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to whole numbers
  x = x > -126.0F ? x : Vec{} - 126.0F;
  const Vec whole = (x + kMagic) - kMagic;
  const Vec rest = x - whole;
  Vec result = rest * 0.00133335581F + 0.00961812910F;
  result = result * rest + 0.0555041087F;
  result = result * rest + 0.240226507F;
  result = result * rest + 0.693147181F;
  result = result * rest + 1.0F;
  const IntVec exponent = __builtin_convertvector(whole, IntVec) << 23;
  return (Vec)((IntVec)result + exponent);  // NOLINT: the language's way to keep the bits
}

/// Pages as HND: [page][K, V][head][token][dim].
struct Problem {
  int requests, context;
  std::vector<std::int32_t> pages = {};  // [requests][pages_of()]
  std::vector<float> query = {};         // [requests][kHeads][kDim]
  std::vector<Half> cache = {};

  int pages_of() const { return (context + kPage - 1) / kPage; }
  const Half* keys(int request, int head, int page) const {
    const int at = std::min(page, pages_of() - 1);
    const auto row = static_cast<std::size_t>(request) * static_cast<std::size_t>(pages_of());
    const auto block = static_cast<std::size_t>(pages[row + static_cast<std::size_t>(at)]);
    return cache.data() + (block * 2 * kKvHeads + static_cast<std::size_t>(head)) * kRun;
  }
  static const Half* values_of(const Half* keys) { return keys + kKvHeads * kRun; }
};

/// What one KV head of one request has gathered.
struct State {
  Vec out[kGroup][kVecs] = {};
  Vec sum[kGroup] = {};
  float max[kGroup] = {};
  Vec query[kGroup][kVecs] = {};  // times scale * log2 e
};

/// Sums [head][token] of a tile's keys; asks for the lines of the tile after it meanwhile.
inline void score(const State& state, const Half* keys, const Half* next, Vec (*sums)[kWidth]) {
  constexpr int kTokens = 4;
  for (int token = 0; token < kWidth; token += kTokens) {
    Vec sum[kGroup][kTokens] = {};
    for (int d = 0; d < kVecs; ++d) {
      // Of kWidth tokens K and V each, in as many steps as these loops have.
      constexpr int kLines = kWidth * kDim / static_cast<int>(kLine) / (kWidth / kTokens * kVecs);
      for (int i = 0; i < kLines; ++i) {
        const Half* line =
            next + static_cast<std::size_t>((token / kTokens * kVecs + d) * kLines + i) * kLine;
        __builtin_prefetch(line, 0, 2);
        __builtin_prefetch(Problem::values_of(line), 0, 2);
      }
      Vec key[kTokens];
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) key[t] = load_half(keys + (token + t) * kDim + d * kWidth);
#pragma GCC unroll 8
      for (int h = 0; h < kGroup; ++h) {
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) sum[h][t] += state.query[h][d] * key[t];
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kGroup; ++h) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) sums[h][token + t] = sum[h][t];
    }
  }
}

/// Weights of a tile's tokens, and the state rescaled where its maximum grew.
inline Vec weigh(State& state, int head, Vec scores) {
  const float highest = max_lane(scores, std::make_integer_sequence<int, kWidth>());
  if (highest > state.max[head]) {
    const float factor = std::exp2(state.max[head] - highest);
    for (Vec& out : state.out[head]) out *= factor;
    state.sum[head] *= factor;
    state.max[head] = highest;
  }
  const Vec weights = exp2_of(scores - state.max[head]);
  state.sum[head] += weights;
  return weights;
}

inline void add_values(State& state, const Half* values, const Vec* weights) {
  constexpr int kChunk = 2;
  for (int d = 0; d < kVecs; d += kChunk) {
    Vec sum[kGroup][kChunk];
#pragma GCC unroll 8
    for (int h = 0; h < kGroup; ++h) {
#pragma GCC unroll 8
      for (int c = 0; c < kChunk; ++c) sum[h][c] = state.out[h][d + c];
    }
    for (int token = 0; token < kWidth; ++token) {
#pragma GCC unroll 8
      for (int c = 0; c < kChunk; ++c) {
        const Vec value = load_half(values + token * kDim + (d + c) * kWidth);
#pragma GCC unroll 8
        for (int h = 0; h < kGroup; ++h) sum[h][c] += weights[h][token] * value;
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kGroup; ++h) {
#pragma GCC unroll 8
      for (int c = 0; c < kChunk; ++c) state.out[h][d + c] = sum[h][c];
    }
  }
}

inline void attend(const Problem& problem, int request, int kv_head, float* out) {
  State state;
  const float scale = 1.4426950408889634F / std::sqrt(static_cast<float>(kDim));
  const std::size_t row =
      (static_cast<std::size_t>(request) * kHeads + static_cast<std::size_t>(kv_head * kGroup)) *
      kDim;
  std::memcpy(state.query, problem.query.data() + row, sizeof state.query);
  for (auto& head : state.query) {
    for (Vec& part : head) part *= scale;
  }
  std::fill_n(state.max, kGroup, -1e30F);
  for (int first = 0; first < problem.context; first += kWidth) {
    const auto tile = [&](int token) {
      return problem.keys(request, kv_head, token / kPage) + token % kPage * kDim;
    };
    const Half* keys = tile(first);
    Vec sums[kGroup][kWidth];
    score(state, keys, tile(first + kWidth), sums);
    Vec weights[kGroup];
    for (int h = 0; h < kGroup; ++h) {
      Vec scores = add_lanes(sums[h]);
      for (int i = problem.context - first; i < kWidth; ++i) scores[i] = -1e30F;
      weights[h] = weigh(state, h, scores);
    }
    add_values(state, Problem::values_of(keys), weights);
  }
  for (int h = 0; h < kGroup; ++h) {
    float sum = 0;
    for (int i = 0; i < kWidth; ++i) sum += state.sum[h][i];
    for (Vec& part : state.out[h]) part /= sum;
  }
  std::memcpy(out + row, state.out, sizeof state.out);
}

inline void decode(const Problem& problem, float* out) {
#pragma omp parallel for schedule(dynamic)
  for (int item = 0; item < problem.requests * kKvHeads; ++item) {
    attend(problem, item / kKvHeads, item % kKvHeads, out);
  }
}

/// Every byte of the same pages, in the same order and with the same prefetches, and nothing else.
inline std::uint64_t read_pages(const Problem& problem) {
  std::uint64_t total = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : total)
  for (int item = 0; item < problem.requests * kKvHeads; ++item) {
    IntVec sum = {};
    for (int page = 0; page < problem.pages_of(); ++page) {
      const Half* next = problem.keys(item / kKvHeads, item % kKvHeads, page + 1);
      const Half* keys = problem.keys(item / kKvHeads, item % kKvHeads, page);
      for (std::size_t at = 0; at < kRun; at += kLine) {
        __builtin_prefetch(next + at, 0, 2);
        __builtin_prefetch(Problem::values_of(next + at), 0, 2);
        for (std::size_t i = 0; i < kLine; i += 2 * kWidth) {
          IntVec key, value;
          std::memcpy(&key, keys + at + i, sizeof key);
          std::memcpy(&value, Problem::values_of(keys + at + i), sizeof value);
          sum += key ^ value;
        }
      }
    }
    for (int i = 0; i < kWidth; ++i) total += static_cast<std::uint32_t>(sum[i]);
  }
  return total;
}

}  // namespace clattn::native
