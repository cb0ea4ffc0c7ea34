#include <nanobind/ndarray.h>
#include <clattn/device.hpp>

#include "tensors.hpp"

namespace clattn::python {

namespace {

/// The handle of a PyOpenCL object, or an address as it is.
template <typename Handle>
Handle handle_of(nb::handle object) {
  const nb::object address =
      nb::hasattr(object, "int_ptr") ? nb::getattr(object, "int_ptr") : nb::borrow(object);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): that is what PyOpenCL has
  return reinterpret_cast<Handle>(nb::cast<std::uintptr_t>(address));
}

HostAccess parse_access(const std::string& name) {
  if (name == "read") return HostAccess::kRead;
  if (name == "write") return HostAccess::kWrite;
  if (name == "read_write") return HostAccess::kReadWrite;
  throw_invalid("access is '" + name + "', legal: read, write, read_write");
}

/// A contiguous array's bytes.
template <typename Array>
auto bytes_of(const Array& array, const char* name) {
  std::int64_t contiguous = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) != 1 && array.stride(i) != contiguous) {
      throw_invalid(std::string(name) + ": the array has gaps or another order, legal: contiguous");
    }
    contiguous *= static_cast<std::int64_t>(array.shape(i));
  }
  using Byte = std::conditional_t<Array::ReadOnly, const std::byte, std::byte>;
  return std::span<Byte>(static_cast<Byte*>(array.data()), array.nbytes());
}

void bind_buffer(nb::module_& module) {
  nb::class_<Buffer>(module, "Buffer", "Device memory, counted by reference.")
      .def_static(
          "adopt", [](nb::handle buffer) { return Buffer::adopt(handle_of<cl_mem>(buffer)); },
          "buffer"_a, "Retains a pyopencl.Buffer, or the cl_mem at an address.")
      .def_prop_ro("size_bytes", &Buffer::size_bytes)
      .def("__bool__", [](const Buffer& self) { return static_cast<bool>(self); })
      .def_prop_ro(
          "int_ptr",
          [](const Buffer& self) { return reinterpret_cast<std::uintptr_t>(self.handle()); },
          "The cl_mem's address, as PyOpenCL's from_int_ptr() takes it.");
  nb::class_<Event>(module, "Event", "When a call's work is done; empty if it had none.")
      .def_prop_ro(
          "int_ptr",
          [](const Event& self) { return reinterpret_cast<std::uintptr_t>(self.handle()); },
          "The cl_event's address, 0 if empty.")
      .def("wait",
           [](const Event& self) {
             if (self) without_gil([&] { self.wait(); });
           })
      .def(
          "duration_ns",
          [](const Event& self) { return without_gil([&] { return self.duration_ns(); }); },
          "Time on the device; the queue must have been created with profiling.");
}

void bind_view(nb::module_& module) {
  nb::class_<HostView>(module, "HostView",
                       "A buffer's bytes in place, while `with queue.map(buffer) as array` runs.")
      .def(
          "__enter__",
          [](const HostView& self) {
            const std::span<std::byte> bytes = self.bytes();
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(bytes.data(), {bytes.size()},
                                                                     nb::find(self));
          },
          "The bytes, as a NumPy array that must not be used behind the block.")
      .def("__exit__",
           [](HostView& self, const nb::args&) { without_gil([&] { self = HostView(); }); });
}

void bind_async(nb::class_<Queue>& queue) {
  queue
      .def(
          "write_async",
          [](const Queue& self, const Buffer& destination, const HostArray& source,
             std::size_t offset_bytes) {
            Event event;
            self.write_async(destination, bytes_of(source, "source"), offset_bytes, &event);
            return event;
          },
          "destination"_a, "source"_a, "offset_bytes"_a = 0,
          "write() without waiting: the array must be kept, unchanged, until the event.")
      .def(
          "read_async",
          [](const Queue& self, const Buffer& source, const WritableHostArray& destination,
             std::size_t offset_bytes) {
            Event event;
            self.read_async(source, bytes_of(destination, "destination"), offset_bytes, &event);
            return event;
          },
          "source"_a, "destination"_a, "offset_bytes"_a = 0,
          "read() without waiting: the array must be kept until the event.")
      .def(
          "fill",
          [](const Queue& self, const Buffer& destination, std::uint32_t pattern,
             std::size_t offset_bytes, std::optional<std::size_t> size_bytes) {
            const std::size_t all = destination.size_bytes();
            const std::size_t rest = all > offset_bytes ? all - offset_bytes : 0;
            self.fill(destination, pattern, offset_bytes, size_bytes.value_or(rest));
          },
          "destination"_a, "pattern"_a = 0, "offset_bytes"_a = 0, "size_bytes"_a = nb::none(),
          "Fills a range with a 4-byte pattern. Asynchronous.");
}

void bind_queue(nb::module_& module) {
  nb::class_<Queue> type(module, "Queue", "An in-order command queue.");
  bind_async(type);
  type.def_static(
          "adopt",
          [](nb::handle queue) { return Queue::adopt(handle_of<cl_command_queue>(queue)); },
          "queue"_a, "Retains a pyopencl.CommandQueue, or the cl_command_queue at an address.")
      .def_prop_ro(
          "int_ptr",
          [](const Queue& self) {
            return reinterpret_cast<std::uintptr_t>(static_cast<cl_command_queue>(self));
          },
          "The cl_command_queue's address.")
      .def("flush", &Queue::flush, nb::call_guard<nb::gil_scoped_release>())
      .def("finish", &Queue::finish, nb::call_guard<nb::gil_scoped_release>(),
           "Waits for everything enqueued so far.")
      .def(
          "write",
          [](const Queue& self, const Buffer& destination, const HostArray& source,
             std::size_t offset_bytes) {
            const auto bytes = bytes_of(source, "source");
            without_gil([&] { self.write(destination, bytes, offset_bytes); });
          },
          "destination"_a, "source"_a, "offset_bytes"_a = 0,
          "Copies a contiguous array to the device and waits.")
      .def(
          "read",
          [](const Queue& self, const Buffer& source, const WritableHostArray& destination,
             std::size_t offset_bytes) {
            const auto bytes = bytes_of(destination, "destination");
            without_gil([&] { self.read(source, bytes, offset_bytes); });
          },
          "source"_a, "destination"_a, "offset_bytes"_a = 0,
          "Copies from the device to a contiguous array and waits.")
      .def(
          "map",
          [](const Queue& self, const Buffer& buffer, const std::string& access) {
            const HostAccess parsed = parse_access(access);
            return without_gil([&] { return self.map(buffer, parsed); });
          },
          "buffer"_a, "access"_a = "read_write",
          "Shows a whole buffer to the host in place; access is read, write or read_write.\n"
          "Devices whose memory the host cannot reach copy it here and back.");
}

}  // namespace

void bind_context(nb::module_& module) {
  bind_buffer(module);
  bind_view(module);
  bind_queue(module);
  nb::class_<Context>(module, "Context",
                      "Everything slow and shared about a device: compiled programs, self-tests.\n"
                      "Create one and keep it. Thread-safe.")
      .def(nb::new_([](const std::string& device) {
             return without_gil([&] { return Context::create(device); });
           }),
           "device"_a = "",
           "Opens \"gpu\", \"cpu\", \"P:D\" or part of a name; \"\" is the best device there is.")
      .def(nb::new_([](const Device& device) {
             return without_gil([&] { return Context::create(device); });
           }),
           "device"_a)
      .def_static(
          "adopt",
          [](nb::handle context, nb::handle device) {
            const auto native = handle_of<cl_context>(context);
            const auto id = handle_of<cl_device_id>(device);
            return without_gil([&] { return Context::adopt(native, id); });
          },
          "context"_a, "device"_a,
          "Retains a pyopencl.Context (or an address); the device must belong to it.")
      .def_prop_ro(
          "int_ptr",
          [](const Context& self) { return reinterpret_cast<std::uintptr_t>(self.handle()); },
          "The cl_context's address.")
      .def_prop_ro("capabilities", &Context::capabilities, nb::rv_policy::reference_internal)
      .def("build_failures", &Context::build_failures,
           "Kernels that the driver failed to build so far, each with its reason.")
      .def("program_cache_problem", &Context::program_cache_problem)
      .def(
          "create_queue",
          [](const Context& self, bool profiling) {
            return without_gil([&] {
              return self.create_queue(profiling ? QueueProfiling::kOn : QueueProfiling::kOff);
            });
          },
          "profiling"_a = false)
      .def("allocate", &Context::allocate, "size_bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Uninitialised device memory.")
      .def(
          "share",
          [](const Context& self, const WritableHostArray& array) {
            const auto bytes = bytes_of(array, "array");
            return without_gil([&] { return self.share(bytes); });
          },
          "array"_a, nb::keep_alive<0, 2>(),
          "A buffer over the memory of a contiguous NumPy or DLPack array, without a copy where\n"
          "the device works on the host's memory. Between kernels the host sees it by "
          "Queue.map().");
}

}  // namespace clattn::python
