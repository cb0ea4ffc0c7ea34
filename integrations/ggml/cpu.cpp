#include "cpu.hpp"

#include <memory>

namespace ggml_clattn {

namespace {

ggml_backend_dev_t cpu_device() {
  return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

void apply_num_threads(ggml_backend_t backend, int num_threads) {
  const ggml_backend_reg_t registry =
      ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
  void* const function = ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads");
  if (function != nullptr)
    reinterpret_cast<ggml_backend_set_n_threads_t>(function)(backend, num_threads);
}

}  // namespace

Cpu::~Cpu() {
  if (backend_ != nullptr) ggml_backend_free(backend_);
}

void Cpu::set_num_threads(int num_threads) {
  num_threads_ = num_threads;
  if (backend_ != nullptr) apply_num_threads(backend_, num_threads);
}

ggml_status Cpu::compute(ggml_tensor* node) {
  if (backend_ == nullptr) {
    backend_ = ggml_backend_dev_init(cpu_device(), nullptr);
    if (backend_ == nullptr) return GGML_STATUS_FAILED;
    if (num_threads_ > 0) apply_num_threads(backend_, num_threads_);
  }
  const ggml_init_params memory = {
      .mem_size = ggml_graph_overhead_custom(1, false), .mem_buffer = nullptr, .no_alloc = true};
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> context(ggml_init(memory), &ggml_free);
  if (!context) return GGML_STATUS_ALLOC_FAILED;
  ggml_cgraph* const graph = ggml_new_graph_custom(context.get(), 1, false);
  ggml_graph_add_node(graph, node);
  return ggml_backend_graph_compute(backend_, graph);
}

bool cpu_supports(const ggml_tensor* op) {
  const ggml_backend_dev_t device = cpu_device();
  return device != nullptr && ggml_backend_dev_supports_op(device, op);
}

}  // namespace ggml_clattn
