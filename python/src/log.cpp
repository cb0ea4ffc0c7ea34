#include <array>
#include <clattn/log.hpp>
#include <memory>

#include "bindings.hpp"

namespace clattn::python {

namespace {

struct Level {
  LogLevel level;
  std::string_view name;
};
constexpr std::array kLevels = {Level{LogLevel::kOff, "off"}, Level{LogLevel::kInfo, "info"},
                                Level{LogLevel::kDebug, "debug"}, Level{LogLevel::kTrace, "trace"}};

LogLevel parse_level(std::string_view name) {
  for (const Level& row : kLevels) {
    if (row.name == name) return row.level;
  }
  throw_invalid("level is '" + std::string(name) + "', legal: off, info, debug, trace");
}

std::string_view name_of_level(LogLevel level) {
  for (const Level& row : kLevels) {
    if (row.level == level) return row.name;
  }
  return "trace";
}

/// Dropped by whichever thread replaces the sink, which does not hold the interpreter.
struct DropWithGil {
  void operator()(nb::object* object) const {
    const nb::gil_scoped_acquire held;
    delete object;
  }
};

/// A sink must not throw, so what the function raises is reported as Python reports it elsewhere.
LogSink sink_of(nb::object function) {
  if (function.is_none()) return nullptr;
  const std::shared_ptr<nb::object> shared(new nb::object(std::move(function)), DropWithGil{});
  return [shared](LogLevel level, std::string_view message) {
    const nb::gil_scoped_acquire held;
    try {
      (*shared)(name_of_level(level), message);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("the sink of clattn.set_log()");
    }
  };
}

}  // namespace

void bind_log(nb::module_& module) {
  module.def(
      "set_log",
      [](std::string_view level, nb::object sink) {
        const LogLevel parsed = parse_level(level);
        LogSink native = sink_of(std::move(sink));
        without_gil([&] { set_log(parsed, std::move(native)); });
      },
      "level"_a, "sink"_a = nb::none(),
      nb::sig("def set_log(level: str, sink: Callable[[str, str], object] | None = None) -> None"),
      "Sends messages up to level (off, info, debug, trace) to sink(level, message), or to "
      "standard\n"
      "error if it is None. The sink must not call the library.");
  // The interpreter must not end with a function of its own in a static object of the library.
  nb::module_::import_("atexit").attr("register")(
      nb::cpp_function([] { without_gil([] { set_log(LogLevel::kOff); }); }));
}

}  // namespace clattn::python
