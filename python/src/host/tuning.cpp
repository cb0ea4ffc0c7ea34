#include <clattn/tuning.hpp>

#include "steps.hpp"

namespace clattn::python {

namespace {

template <typename T>
void add_type(Record<T>& record, const char* name, std::optional<DType> T::*field) {
  record.def_prop_rw(
      name, [field](const T& self) { return name_of(self.*field); },
      [field](T& self, nb::handle value) {
        self.*field = value.is_none() ? std::nullopt : std::optional(parse_dtype(name_of(value)));
      },
      nb::for_setter(nb::arg("value").none()), "None is any.");
}

template <typename T>
Record<T> bind_row(nb::module_& module, const char* name, const char* doc) {
  Record<T> record(module, name, doc);
  record.def_rw("device", &T::device)
      .def_rw("driver", &T::driver)
      .def_rw("head_size", &T::head_size)
      .def_rw("group", &T::group)
      .def_rw("version", &T::version)
      .def_rw("date", &T::date)
      .def("__eq__", [](const T& self, const T& other) { return self == other; });
  add_type(record, "dtype", &T::dtype);
  add_type(record, "cache_dtype", &T::cache_dtype);
  return record;
}

void bind_rows(nb::module_& module) {
  using R = TuningRow;
  bind_row<R>(module, "TuningRow", "A row of a tuning file that chooses a kernel.")
      .def_rw("role", &R::role)
      .def_rw("pages", &R::pages)
      .def_rw("variant", &R::variant)
      .def_rw("block_rows", &R::block_rows)
      .def_rw("block_kv", &R::block_kv)
      .def_rw("work_group_size", &R::work_group_size)
      .def_rw("time_us", &R::time_us)
      .def_rw("error", &R::error);
  using K = KernelCosts;
  Record<K> costs(module, "KernelCosts", "What a kernel costs on a device; 0 is free or unknown.");
  costs.def_rw("launch_us", &K::launch_us)
      .def_rw("task_us", &K::task_us)
      .def_rw("split_us", &K::split_us)
      .def_rw("read_gbs", &K::read_gbs)
      .def_rw("math_gflops", &K::math_gflops)
      .def_rw("groups", &K::groups);
  bind_row<CostRow>(module, "CostRow", "A row of a tuning file that says what a kernel costs.")
      .def_rw("kernel", &CostRow::kernel)
      .def_rw("costs", &CostRow::costs);
  nb::class_<TuningText>(module, "TuningText", "What parse_tuning() read.")
      .def_ro("rows", &TuningText::rows)
      .def_ro("costs", &TuningText::costs)
      .def_ro("problems", &TuningText::problems, "A line for each part that was left out.");
}

using Rows = std::vector<TuningRow>;
using Costs = std::vector<CostRow>;

}  // namespace

void bind_tuning(nb::module_& module) {
  bind_rows(module);
  module.def(
      "device_classes",
      [](const Context& context) { return device_classes(context.capabilities()); }, "context"_a,
      "The classes of a context's device, closest first.");
  module.def("page_class", &page_class, "block_size"_a, "none, small, medium or large.");
  module.def(
      "format_tuning",
      [](const Rows& rows, const Costs& costs) { return format_tuning(rows, costs); }, "rows"_a,
      "costs"_a = Costs(), "The text of a tuning file.");
  module.def("format_tuning_row", &format_tuning_row, "row"_a);
  module.def("format_cost_row", &format_cost_row, "row"_a);
  module.def("parse_tuning", &parse_tuning, "text"_a, "name"_a = "text",
             "Reads what format_tuning() writes; name stands for the file in problems.");
  module.def("tuning_path", &tuning_path, "The user's file, or an empty text.");
  module.def(
      "save_tuning",
      [](const std::string& path, const Rows& rows, const Costs& costs) {
        without_gil([&] { save_tuning(path, rows, costs); });
      },
      "path"_a, "rows"_a, "costs"_a = Costs(), "Adds rows to a tuning file.");
  module.def(
      "predicted_launches",
      [](const AttentionConfig& config, const DeviceCapabilities& device, const Costs& costs,
         const Batch& batch) {
        return without_gil([&] { return predicted_launches(config, device, costs, batch.view()); });
      },
      "config"_a, "device"_a, "costs"_a, "batch"_a,
      "The launches that would be planned for a step on a device of these capabilities.");
  module.def(
      "set_tuning",
      [](Context& context, const Rows& rows, const Costs& costs) {
        without_gil([&] { set_tuning(context, rows, costs); });
      },
      "context"_a, "rows"_a, "costs"_a = Costs(),
      "Gives a context these rows in place of the user's file.");
  module.def("tuning_problems", &tuning_problems, "context"_a);
  module.def("tuning_candidates", &tuning_candidates, "context"_a, "key"_a,
             "Every tile that kernels of key.role have for the layers that key names.");
}

}  // namespace clattn::python
