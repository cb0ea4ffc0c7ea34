// What a GEMM library makes of a device: CLBlast's f32 products in sizes of a layer's projections,
// with their results checked. `clattn bench` measures the ceiling of attention's own products.
//   build/release/bench/clattn_gemm_ceiling        CLATTN_DEVICE chooses the device
#include <benchmark/benchmark.h>

#include <clattn/clattn.hpp>
#include <clattn/device.hpp>

#include <clblast.h>

#include <vector>

namespace {

bool all_right = true;

/// A of ones, B[k][n] = n % 7, so C[m][n] = k * (n % 7) exactly.
void gemm(benchmark::State& state) {
  const auto m = static_cast<std::size_t>(state.range(0));
  const auto n = static_cast<std::size_t>(state.range(1));
  const auto k = static_cast<std::size_t>(state.range(2));
  const auto context = clattn::Context::create();
  const clattn::Queue queue = context->create_queue();
  cl_command_queue raw = queue;
  std::vector<float> a(m * k, 1.0F), b(k * n), c(m * n);
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % n % 7);
  const auto upload = [&](const std::vector<float>& values) {
    clattn::Buffer buffer = context->allocate(values.size() * sizeof(float));
    queue.write(buffer, std::as_bytes(std::span(values)));
    return buffer;
  };
  const clattn::Buffer a_device = upload(a), b_device = upload(b), c_device = upload(c);
  const auto multiply = [&] {
    return clblast::Gemm<float>(clblast::Layout::kRowMajor, clblast::Transpose::kNo,
                                clblast::Transpose::kNo, m, n, k, 1, a_device.handle(), 0, k,
                                b_device.handle(), 0, n, 0, c_device.handle(), 0, n,
                                &raw) == clblast::StatusCode::kSuccess;
  };
  bool right = multiply();  // compiles
  queue.finish();
  for ([[maybe_unused]] auto round : state) {
    right = multiply() && right;
    queue.finish();
  }
  queue.read(c_device, std::as_writable_bytes(std::span(c)));
  for (std::size_t i = 0; i < c.size(); ++i)
    right = right && c[i] == static_cast<float>(k * (i % n % 7));
  if (!right) state.SkipWithError("CLBlast failed, or its result is wrong");
  all_right = all_right && right;
  state.counters["FLOP/s"] = benchmark::Counter(
      2 * static_cast<double>(m * n * k) * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
  state.SetLabel(context->capabilities().name);
}

}  // namespace

BENCHMARK(gemm)
    ->ArgNames({"tokens", "columns", "depth"})
    ->Args({8, 4096, 4096})
    ->Args({256, 1024, 1024})
    ->Args({1024, 4096, 1024})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return all_right ? 0 : 1;
}
