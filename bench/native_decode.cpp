// The peer of decode on CPUs: one hand-written kernel of AVX-512 (or AVX2) and OpenMP, beside the
// library's and a loop that only reads, on equal pages, in turns. Outputs are compared.
//
//   cmake --preset release -DCLATTN_BUILD_NATIVE_PEER=ON
//   cmake --build build/release --target clattn_native_decode
//   build/release/bench/clattn_native_decode [REQUESTS [CONTEXT [ROUNDS]]]    16 4096 15 without
//
// 32 query and 8 KV heads of 128, f16 keys and values as HND, pages of 16 tokens in random order,
// f32 queries. A round is 20 ms of calls that are waited for one by one. OMP_WAIT_POLICY=passive
// lets the peer's threads sleep between calls, as PoCL's do.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "native_kernel.hpp"

namespace clattn::native {
namespace {

/// Milliseconds of one call, of at least `least` milliseconds of calls one behind the other.
double milliseconds(const std::function<void()>& work, double least) {
  const auto start = std::chrono::steady_clock::now();
  for (int calls = 1;; ++calls) {
    work();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (took.count() >= least) return took.count() / calls;
  }
}

struct Times {
  std::vector<double> rounds;
  double least() const { return *std::min_element(rounds.begin(), rounds.end()); }
  double median() const {
    std::vector<double> sorted = rounds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

int positive(const char* text, const char* name) {
  char* end = nullptr;
  const auto value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < 1 || value > 1000000) {
    throw std::invalid_argument(std::string(name) + ": '" + text + "', legal: 1 to 1000000");
  }
  return static_cast<int>(value);
}

Problem make_problem(int requests, int context) {
  Problem problem{.requests = requests, .context = context};
  problem.pages.resize(static_cast<std::size_t>(requests) *
                       static_cast<std::size_t>(problem.pages_of()));
  std::iota(problem.pages.begin(), problem.pages.end(), 0);
  std::mt19937 random(7);
  std::shuffle(problem.pages.begin(), problem.pages.end(), random);
  std::normal_distribution<float> normal;
  problem.query.resize(static_cast<std::size_t>(requests) * kHeads * kDim);
  for (float& element : problem.query) element = normal(random);
  problem.cache.resize(problem.pages.size() * 2 * kKvHeads * kRun);
  // Halves of magnitude 2^-8 to 2: any ten mantissa bits, exponents 7 to 15.
  for (Half& element : problem.cache) {
    const auto bits = static_cast<std::uint32_t>(random());
    element = static_cast<Half>((bits & 0x83FFU) | (7 + (bits >> 16) % 9) << 10);
  }
  return problem;
}

/// The library over a copy of the same bytes.
class Ours {
 public:
  explicit Ours(const Problem& problem) {
    const AttentionConfig config{.num_heads = kHeads,
                                 .num_kv_heads = kKvHeads,
                                 .head_size = kDim,
                                 .block_size = kPage,
                                 .dtype = DType::kF32,
                                 .kv_cache_dtype = DType::kF16};
    const auto& backend = *get_attn_backend(config, &context_->capabilities());
    impl_ = backend.make_impl(context_, config);
    builder_ = backend.make_builder(context_, config);
    cache_ = make_kv_cache(*context_, queue_, backend, config,
                           static_cast<std::int64_t>(problem.pages.size()), KVCacheLayout::kHND);
    queue_.write(cache_.buffer, std::as_bytes(std::span(problem.cache)));
    const auto rows = static_cast<std::size_t>(problem.requests);
    std::vector<int> starts(rows + 1);
    std::iota(starts.begin(), starts.end(), 0);
    const std::vector<int> seq_lens(rows, problem.context);
    step_ = &builder_->build(queue_, CommonAttentionMetadata::of(starts, seq_lens, problem.pages));
    query_ = context_->allocate(problem.query.size() * sizeof(float));
    out_ = context_->allocate(problem.query.size() * sizeof(float));
    queue_.write(query_, std::as_bytes(std::span(problem.query)));
  }

  void decode() const {
    impl_->forward(queue_, {.query = {query_.handle()}, .output = {out_.handle()}}, cache_, *step_);
    queue_.finish();
  }
  void read(std::vector<float>& out) const {
    queue_.read(out_, std::as_writable_bytes(std::span(out)));
  }
  const std::string& device() const { return context_->capabilities().name; }

 private:
  std::shared_ptr<Context> context_ = Context::create("cpu");
  Queue queue_ = context_->create_queue();
  std::shared_ptr<const AttentionImpl> impl_;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  KVCache cache_;
  const AttentionMetadata* step_ = nullptr;
  Buffer query_, out_;
};

/// Prints what three works took: the library, the peer, reading alone.
void report(const Problem& problem, const Times (&times)[3]) {
  constexpr const char* kNames[] = {"clattn", "native", "reading"};
  const double gigabytes = 2e-9 * problem.requests * problem.context * kKvHeads * kDim *
                           static_cast<double>(sizeof(Half));
  for (int i = 0; i < 3; ++i) {
    std::printf("%-8s least %9.3f ms, median %9.3f ms, %5.1f GB/s at best\n", kNames[i],
                times[i].least(), times[i].median(), gigabytes / (times[i].least() * 1e-3));
  }
  const auto ratios = [&](int i) {
    return std::pair(times[i].least() / times[0].least(), times[i].median() / times[0].median());
  };
  std::printf("clattn is %.2f times as fast as native by the least times, %.2f by the medians\n",
              ratios(1).first, ratios(1).second);
  std::printf("clattn is %.2f times as fast as reading alone, %.2f by the medians\n",
              ratios(2).first, ratios(2).second);
}

int run(std::span<char*> arguments) {
  const auto argument = [&](std::size_t at, const char* name, int otherwise) {
    return arguments.size() > at ? positive(arguments[at], name) : otherwise;
  };
  const int requests = argument(1, "REQUESTS", 16), context = argument(2, "CONTEXT", 4096);
  const int rounds = argument(3, "ROUNDS", 15);
  const Problem problem = make_problem(requests, context);
  const Ours ours(problem);
  std::vector<float> native(problem.query.size()), result(native.size());
  std::uint64_t sum = 0;  // printed, so that the reading is not left out
  const std::function<void()> works[] = {[&] { ours.decode(); },
                                         [&] { decode(problem, native.data()); },
                                         [&] { sum += read_pages(problem); }};
  Times times[3];
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < 3; ++i) {
      milliseconds(works[i], 10);  // Until the threads of the work before sleep.
      times[i].rounds.push_back(milliseconds(works[i], 20));
    }
  }
  ours.read(result);
  bool right = true;  // also false of NaN
  for (std::size_t i = 0; i < result.size(); ++i) right &= std::abs(result[i] - native[i]) < 1e-4F;
  std::printf("%s; OpenMP, %d threads, vectors of %d; %d x %d, %d rounds (%llx)\n",
              ours.device().c_str(), omp_get_max_threads(), kWidth, requests, context, rounds,
              static_cast<unsigned long long>(sum));
  report(problem, times);
  std::printf("the outputs %s\n", right ? "agree within 1e-4" : "differ: WRONG");
  return right ? 0 : 1;
}

}  // namespace
}  // namespace clattn::native

int main(int argc, char** argv) {
  try {
    return clattn::native::run(std::span(argv, static_cast<std::size_t>(argc)));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "native_decode: %s\n", error.what());
    return 2;
  }
}
