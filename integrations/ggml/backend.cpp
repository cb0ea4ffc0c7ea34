// What ggml loads (GGML_BACKEND_PATH): a registry of one device, whose backend computes
// FLASH_ATTN_EXT in the host's memory. Everything else stays with ggml's other backends.
#include <ggml-backend-impl.h>

#include <clattn/version.h>
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "attention.hpp"
#include "cpu.hpp"

namespace ggml_clattn {
namespace {

/// Versions of ggml whose interfaces are these. It numbers its interface, but changes it within one
/// number, too.
constexpr std::array<std::string_view, 2> kTestedVersions = {"0.20.2", "0.25.3"};
static_assert(GGML_BACKEND_API_VERSION == 2 &&
                  offsetof(ggml_backend_i, graph_compute) == 12 * sizeof(void*),
              "the headers are those of another ggml than the tested ones");

/// Made by ggml_backend_init() and never ended: ggml keeps what it was given until the process
/// ends.
Attention* attention = nullptr;

struct Backend {
  Cpu cpu;
};

Backend& backend_of(ggml_backend_t backend) {
  return *static_cast<Backend*>(backend->context);
}

bool is_attention(const ggml_tensor* op) {
  return std::string_view(ggml_op_name(op->op)) == "FLASH_ATTN_EXT";
}

/// Ops that only describe memory. Names, because the numbers differ from version to version.
bool computes_nothing(const ggml_tensor* op) {
  constexpr std::array<std::string_view, 5> kNames = {"NONE", "RESHAPE", "VIEW", "PERMUTE",
                                                      "TRANSPOSE"};
  return std::ranges::find(kNames, std::string_view(ggml_op_name(op->op))) != kNames.end();
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) {
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    ggml_tensor* const node = ggml_graph_node(graph, i);
    if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0 || computes_nothing(node)) continue;
    if (!is_attention(node)) return GGML_STATUS_FAILED;
    const ggml_status status = attention->compute(node, backend_of(backend).cpu);
    if (status != GGML_STATUS_SUCCESS) return status;
  }
  return GGML_STATUS_SUCCESS;
}

void free_backend(ggml_backend_t backend) {
  delete static_cast<Backend*>(backend->context);
  delete backend;
}

void set_num_threads(ggml_backend_t backend, int num_threads) {
  backend_of(backend).cpu.set_num_threads(num_threads);
}

constexpr char kName[] = "CLAttn";

ggml_backend_t init_backend(ggml_backend_dev_t device, const char*) {
  static ggml_guid guid = {0x63, 0x6c, 0x61, 0x74, 0x74, 0x6e, 0x2d, 0x66,
                           0x6c, 0x61, 0x73, 0x68, 0x2d, 0x65, 0x78, 0x74};
  ggml_backend_i calls = {};
  calls.get_name = [](ggml_backend_t) { return kName; };
  calls.free = free_backend;
  calls.graph_compute = compute;
  return new ggml_backend{.guid = &guid, .iface = calls, .device = device, .context = new Backend};
}

const char* description(ggml_backend_dev_t) {
  static const std::string text =
      "CLAttn " CLATTN_VERSION " on " + attention->engine().device_name();
  return text.c_str();
}

/// llama.cpp gives a layer's attention to an integrated GPU of its own accord, to an accelerator
/// only with -fa on.
enum ggml_backend_dev_type type(ggml_backend_dev_t) {
  return attention->settings().accelerator ? GGML_BACKEND_DEVICE_TYPE_ACCEL
                                           : GGML_BACKEND_DEVICE_TYPE_IGPU;
}

/// None of its own: ggml counts the host's.
void memory(ggml_backend_dev_t, std::size_t* free, std::size_t* total) {
  *free = 0;
  *total = 0;
}

void properties(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = kName;
  props->description = description(device);
  props->type = type(device);
  props->caps.buffer_from_host_ptr = true;  // else weights are not mapped from their file
  props->caps.mmap_support = true;
}

ggml_backend_dev_t device_at(ggml_backend_reg_t registry, std::size_t) {
  static ggml_backend_device device = [&] {
    ggml_backend_device_i calls = {};
    calls.get_name = [](ggml_backend_dev_t) { return kName; };
    calls.get_description = description;
    calls.get_memory = memory;
    calls.get_type = type;
    calls.get_props = properties;
    calls.init_backend = init_backend;
    calls.get_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
    calls.buffer_from_host_ptr = [](ggml_backend_dev_t, void* memory, std::size_t size_bytes,
                                    std::size_t) {
      return ggml_backend_cpu_buffer_from_ptr(memory, size_bytes);
    };
    calls.supports_op = [](ggml_backend_dev_t, const ggml_tensor* op) {
      return computes_nothing(op) || (is_attention(op) && attention->takes(op));
    };
    calls.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t buffers) {
      return ggml_backend_buft_is_host(buffers);
    };
    return ggml_backend_device{.iface = calls, .reg = registry, .context = nullptr};
  }();
  return &device;
}

void* function_named(ggml_backend_reg_t, const char* name) {
  if (std::string_view(name) == "ggml_backend_set_n_threads")
    return reinterpret_cast<void*>(set_num_threads);
  if (std::string_view(name) == "ggml_clattn_num_computed")  // for tests: long (*)(void)
    return reinterpret_cast<void*>(+[] { return attention->num_computed(); });
  return nullptr;
}

/// Throws std::exception with what is against using CLAttn here.
ggml_backend_reg_t make_registry() {
  const std::string_view version = ggml_version();
  if (std::ranges::find(kTestedVersions, version) == kTestedVersions.end()) {
    std::string tested;
    for (const std::string_view each : kTestedVersions)
      tested.append(tested.empty() ? "" : ", ").append(each);
    throw std::runtime_error("ggml is version " + std::string(version) +
                             ", tested with CLAttn: " + tested);
  }
  if (attention == nullptr) {
    attention = new Attention;
    if (attention->settings().counts)
      std::atexit([] { std::fputs(attention->counts().c_str(), stderr); });
  }
  static ggml_backend_reg registry = [] {
    ggml_backend_reg_i calls = {};
    calls.get_name = [](ggml_backend_reg_t) { return kName; };
    calls.get_device_count = [](ggml_backend_reg_t) { return std::size_t{1}; };
    calls.get_device = device_at;
    calls.get_proc_address = function_named;
    return ggml_backend_reg{
        .api_version = GGML_BACKEND_API_VERSION, .iface = calls, .context = nullptr};
  }();
  return &registry;
}

}  // namespace
}  // namespace ggml_clattn

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  try {
    return ggml_clattn::make_registry();
  } catch (const std::exception& error) {
    ggml_clattn::log_warning(std::string("is not used: ") + error.what());
    return nullptr;
  }
}
