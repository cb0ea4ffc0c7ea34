#include "bindings.hpp"

namespace clattn::python {

namespace {

std::string selector_of(const Device& device) {
  return std::to_string(device.platform_index) + ":" + std::to_string(device.device_index);
}

void bind_capabilities(nb::module_& module) {
  using C = DeviceCapabilities;
  nb::class_<C>(module, "DeviceCapabilities",
                "What a device can do, by its driver and by self-tests. Kernels are chosen by it.")
      .def_ro("name", &C::name)
      .def_ro("vendor", &C::vendor)
      .def_ro("driver_version", &C::driver_version)
      .def_ro("device_version", &C::device_version)
      .def_ro("opencl_c_version", &C::opencl_c_version)
      .def_ro("platform_name", &C::platform_name)
      .def_ro("platform_version", &C::platform_version)
      .def_prop_ro(
          "kind", [](const C& self) { return std::string(to_string(self.kind)); },
          "\"gpu\", \"cpu\" or \"other\".")
      .def_ro("compute_units", &C::compute_units)
      .def_ro("max_work_group_size", &C::max_work_group_size)
      .def_ro("global_mem_bytes", &C::global_mem_bytes)
      .def_ro("max_alloc_bytes", &C::max_alloc_bytes)
      .def_ro("local_mem_bytes", &C::local_mem_bytes)
      .def_ro("float_vector_width", &C::float_vector_width)
      .def_ro("reports_fp16", &C::reports_fp16)
      .def_ro("reports_subgroups", &C::reports_subgroups)
      .def_ro("static_local_mem_bytes", &C::static_local_mem_bytes)
      .def_ro("inline_ptx", &C::inline_ptx)
      .def_ro("warpgroup_products", &C::warpgroup_products)
      .def_ro("fp8_conversions", &C::fp8_conversions)
      .def_ro("bf16_products", &C::bf16_products)
      .def_ro("x86_tiles", &C::x86_tiles)
      .def_ro("native_exp2_error", &C::native_exp2_error)
      .def_ro("native_builtins", &C::native_builtins)
      .def_ro("x86_prefetch", &C::x86_prefetch)
      .def_ro("struct_arguments", &C::struct_arguments)
      .def_ro("sub_groups_in_step", &C::sub_groups_in_step,
              "Sizes of sub-groups that run in step, a bit each.")
      .def_ro("wrong_matrix_units", &C::wrong_matrix_units)
      .def_ro("flushes_f16", &C::flushes_f16)
      .def_ro("long_loops", &C::long_loops)
      .def_ro("wave_size", &C::wave_size)
      .def_ro("ptx_arch", &C::ptx_arch)
      .def_ro("matrix_units", &C::matrix_units,
              "Matrix units whose products a self-test found to be right.");
}

}  // namespace

void bind_devices(nb::module_& module) {
  nb::class_<Device>(module, "Device", "One OpenCL device as devices() found it.")
      .def_ro("platform_index", &Device::platform_index)
      .def_ro("device_index", &Device::device_index)
      .def_prop_ro("selector", &selector_of, "\"P:D\", as Context() takes it.")
      .def("__repr__", [](const Device& self) { return "Device(" + selector_of(self) + ")"; });
  bind_capabilities(module);
  for (const char* const name : {"devices", "list_devices"}) {
    module.def(
        name, [] { return without_gil([] { return list_devices(); }); },
        "Every device of every platform, in the drivers' order.");
  }
  module.def(
      "select_device",
      [](std::string_view selector) {
        return without_gil([&] { return select_device(selector); });
      },
      "selector"_a = "", "The device that Context(selector) opens.");
}

}  // namespace clattn::python
