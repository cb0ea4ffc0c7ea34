// Attention of CLAttn's backend in ggml, compared with double precision; where the backend hands an
// op on, its bits with those of ggml's CPU backend. Caches and queries lie in memory as in
// llama.cpp unless a case says otherwise.
// usage: compare (with GGML_BACKEND_PATH and CLATTN_GGML_MIN_KEYS=0)
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cases.hpp"
#include "exact.hpp"

namespace {

constexpr double kMostError = 1e-11;  // f32 arithmetic; ggml's own tests allow 5e-4
struct Contexts {
  std::vector<std::unique_ptr<ggml_context, decltype(&ggml_free)>> contexts;
  std::vector<std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>> buffers;

  ggml_context* add() {
    contexts.emplace_back(
        ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}),
        &ggml_free);
    return contexts.back().get();
  }
  void allocate(ggml_context* context) {
    buffers.emplace_back(
        ggml_backend_alloc_ctx_tensors_from_buft(context, ggml_backend_cpu_buffer_type()),
        &ggml_backend_buffer_free);
  }
};

/// The op's tensors; `keys` cells of a cache that has more.
struct Tensors {
  ggml_tensor *query, *key, *value, *mask = nullptr, *sinks = nullptr;
};

Tensors make_tensors(const Case& c, Contexts& memory, ggml_context* views) {
  const int cells = c.keys + 256;
  ggml_context* const first = memory.add();
  ggml_context* const second = c.two_buffers ? memory.add() : first;
  const auto cache = [&](ggml_context* context) {
    return ggml_new_tensor_3d(context, c.type, c.head_size * c.kv_heads, cells, c.streams);
  };
  Tensors t{};
  ggml_tensor* const v_first = c.values_first ? cache(second) : nullptr;
  ggml_tensor* const k = cache(first);
  ggml_tensor* const v = c.values_first ? v_first : cache(second);
  const int width = c.head_size * c.heads * (c.fused ? 3 : 1);
  ggml_tensor* const q = ggml_new_tensor_2d(first, GGML_TYPE_F32, width, c.rows * c.streams);
  if (c.mask) t.mask = ggml_new_tensor_4d(first, GGML_TYPE_F16, c.keys, c.rows, 1, c.streams);
  if (c.sinks) t.sinks = ggml_new_tensor_1d(first, GGML_TYPE_F32, c.heads);
  memory.allocate(first);
  if (c.two_buffers) memory.allocate(second);

  const auto heads_of = [&](ggml_tensor* x) {
    const std::size_t size = ggml_row_size(c.type, c.head_size);
    const std::size_t all = ggml_row_size(c.type, c.head_size * c.kv_heads);
    if (c.by_head)
      return ggml_view_4d(views, x, c.head_size, c.keys, c.kv_heads, c.streams, size, cells * size,
                          cells * all, 0);
    return ggml_permute(views,
                        ggml_view_4d(views, x, c.head_size, c.kv_heads, c.keys, c.streams, size,
                                     all, cells * all, 0),
                        0, 2, 1, 3);
  };
  t.key = heads_of(k);
  t.value = heads_of(v);
  const std::size_t head = sizeof(float) * c.head_size;
  if (c.by_head)
    t.query = ggml_view_4d(views, q, c.head_size, c.rows, c.heads, c.streams, head, c.rows * head,
                           c.heads * c.rows * head, 0);
  else
    t.query = ggml_permute(views,
                           ggml_view_4d(views, q, c.head_size, c.heads, c.rows, c.streams, head,
                                        width * sizeof(float), c.rows * width * sizeof(float), 0),
                           0, 2, 1, 3);
  return t;
}

void fill(ggml_tensor* tensor, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(ggml_nelements(tensor));
  for (float& value : values) value = normal(random);
  if (tensor->type == GGML_TYPE_F32)
    std::memcpy(tensor->data, values.data(), ggml_nbytes(tensor));
  else
    ggml_quantize_chunk(tensor->type, values.data(), tensor->data, 0, ggml_nrows(tensor),
                        tensor->ne[0], nullptr);
}

void write_mask(const Case& c, const Mask& mask, ggml_tensor* tensor) {
  auto* to = static_cast<ggml_fp16_t*>(tensor->data);
  for (int stream = 0; stream < c.streams; ++stream)
    for (int row = 0; row < c.rows; ++row)
      for (int key = 0; key < c.keys; ++key) *to++ = ggml_fp32_to_fp16(mask(stream, row, key));
}

/// Cells that no row of their stream sees, and those behind all keys, become NaN.
void spoil(const Case& c, ggml_tensor* cache) {
  auto* const cells = static_cast<ggml_fp16_t*>(cache->data);
  const std::int64_t size = cache->ne[0];
  for (int stream = 0; stream < c.streams; ++stream) {
    for (int key = 0; key < cache->ne[1]; ++key) {
      bool seen = false;
      for (int row = 0; row < c.rows; ++row)
        seen = seen || (key < c.keys && c.mask(stream, row, key) == 0);
      if (!seen)
        std::fill_n(cells + (stream * cache->ne[1] + key) * size, size, ggml_fp32_to_fp16(NAN));
    }
  }
}

ggml_backend_reg_t registry() {
  return ggml_backend_reg_by_name("CLAttn");
}

long num_computed() {
  using Count = long();
  return reinterpret_cast<Count*>(
      ggml_backend_reg_get_proc_address(registry(), "ggml_clattn_num_computed"))();
}

/// Computes the op by a backend, and returns its bytes.
std::vector<std::byte> compute(ggml_backend_t backend, ggml_cgraph* graph, ggml_tensor* op) {
  std::memset(op->data, 0xFF, ggml_nbytes(op));
  if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) return {};
  const auto* const bytes = static_cast<const std::byte*>(op->data);
  return {bytes, bytes + ggml_nbytes(op)};
}

/// What is wrong with the case's results; empty = nothing.
std::string failure(const Case& c, ggml_backend_t clattn, ggml_backend_t cpu) {
  Contexts memory;
  ggml_context* const views = memory.add();
  const Tensors t = make_tensors(c, memory, views);
  const exact::Parameters parameters{1 / std::sqrt(c.head_size), c.max_bias, c.soft_cap};
  ggml_tensor* const op =
      ggml_flash_attn_ext(views, t.query, t.key, t.value, t.mask,
                          static_cast<float>(parameters.scale), c.max_bias, c.soft_cap);
  if (t.sinks != nullptr) ggml_flash_attn_ext_add_sinks(op, t.sinks);
  memory.allocate(views);
  ggml_cgraph* const graph = ggml_new_graph(views);
  ggml_build_forward_expand(graph, op);
  std::mt19937 random(1);
  for (ggml_tensor* root : {t.query->view_src, t.key->view_src, t.value->view_src, t.sinks})
    if (root != nullptr) fill(root, random);
  for (ggml_tensor* cache : {t.key->view_src, t.value->view_src})
    if (c.hidden_nan) spoil(c, cache);

  for (const Mask& mask : {c.mask, c.second_mask}) {
    if (&mask != &c.mask && !mask) break;
    if (mask) write_mask(c, mask, t.mask);
    const long before = num_computed();
    const std::vector<std::byte> result = compute(clattn, graph, op);
    if (result.empty()) return "the backend failed";
    const bool computed = num_computed() > before;
    if (computed != c.computed) return computed ? "was computed" : "was handed on";
    if (!computed) {
      if (result != compute(cpu, graph, op)) return "other bits than ggml's";
      continue;
    }
    const double error = exact::normalised_error(*op, parameters);
    if (!(error <= kMostError)) return "normalised error " + std::to_string(error);
  }
  return {};
}

}  // namespace

int main() {
  ggml_backend_load_all();
  if (registry() == nullptr) {
    std::puts("compare: no CLAttn, GGML_BACKEND_PATH names it");
    return 1;
  }
  ggml_backend_t const clattn = ggml_backend_init_by_name("CLAttn", nullptr);
  ggml_backend_t const cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  int failures = 0;
  for (const Case& c : cases()) {
    const std::string wrong = failure(c, clattn, cpu);
    std::printf("%-60s %s\n", c.name, wrong.empty() ? "passed" : wrong.c_str());
    failures += wrong.empty() ? 0 : 1;
  }
  ggml_backend_free(clattn);
  ggml_backend_free(cpu);
  std::printf("compare: %d of %zu cases failed\n", failures, cases().size());
  return failures == 0 ? 0 : 1;
}
