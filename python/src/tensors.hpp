#pragma once

#include <functional>
#include <vector>

#include "arrays.hpp"

namespace clattn::python {

using HostArray = nb::ndarray<nb::ro, nb::device::cpu>;
using WritableHostArray = nb::ndarray<nb::device::cpu>;
/// Throws InvalidArgument naming the argument for what is no array of the host.
HostArray host_array(nb::handle tensor, const char* name);

/// Rows of a device buffer, where a call takes an array or a buffer.
struct Tensor {
  Buffer buffer;
  std::int64_t offset = 0;
  std::int64_t token_stride = 0;
};
void bind_tensor(nb::module_& module);

/// Throws InvalidArgument unless an array of this type holds elements of `dtype`: the type itself,
/// or, for types that NumPy does not have, an integer of its size.
void check_dtype(nb::dlpack::dtype type, DType dtype, const char* name);

/// Elements of host memory from the first to behind the last that an array's strides reach.
struct Extent {
  std::byte* begin = nullptr;
  std::byte* end = nullptr;
};
Extent extent_of(const HostArray& array);

/// The tensors of one call. Arrays become buffers over their memory while this lives; Buffer and
/// Tensor objects are taken as they are.
class CallTensors {
 public:
  CallTensors(const Context& context, const Queue& queue) : context_(context), queue_(queue) {}

  /// An input: an array [tokens, heads, size] or [tokens, heads * size] whose heads and elements
  /// are contiguous, or lists (None: no tensor), or what Python has for device memory.
  TensorRef input(nb::handle tensor, DType dtype, std::int64_t width, const char* name);
  /// The same for what the call writes.
  TensorRef output(nb::handle tensor, DType dtype, std::int64_t width, const char* name);

  /// Of rows that must follow one another without gaps.
  TensorRef dense_input(nb::handle tensor, DType dtype, std::int64_t width, const char* name);
  TensorRef dense_output(nb::handle tensor, DType dtype, std::int64_t width, const char* name);
  /// Rows of bytes of any width, bool or uint8; the width of a Tensor is its token_stride.
  TensorRef mask(nb::handle tensor);
  /// Numbers without gaps, as numbers() takes them, or a Buffer of them; None: no buffer.
  template <typename T>
  Buffer values(nb::handle given, const char* name) {
    if (std::optional<Buffer> buffer = on_device_alone(given, name)) return *buffer;
    return share(HostArray(numbers<T>(given, name)), name, false);
  }
  /// An array as it is.
  Buffer array_values(const HostArray& array, const char* name) {
    return share(array, name, false);
  }
  /// A float, or what values() takes.
  Buffer scalar(nb::handle given, const char* name) {
    const bool number =
        given.is_valid() && (nb::isinstance<nb::float_>(given) || nb::isinstance<nb::int_>(given));
    return values<float>(number ? nb::object(nb::make_tuple(given)) : nb::borrow(given), name);
  }
  /// As values(), of what the call writes: an array of this very type, which it writes in place.
  template <typename T>
  Buffer written_values(nb::handle given, const char* name) {
    if (std::optional<Buffer> buffer = on_device_alone(given, name)) return *buffer;
    return share(exact_values(given, type_name<T>(), name), name, true);
  }

  /// A buffer over host memory that the caller made for this call: the call waits, and what it
  /// wrote is shown to the host.
  void shared(const Buffer& buffer, bool written) {
    shared_.push_back(buffer);
    if (written) written_.push_back(buffer);
  }

  /// Makes a call without the interpreter and waits as finish() does, also if it throws: what it
  /// enqueued before reads the arrays.
  Event run(const std::function<void(Event*)>& call) const;
  /// Waits if there were arrays, and shows the host what was written to them. Needs no interpreter.
  void finish() const;

 private:
  TensorRef take(nb::handle tensor, DType dtype, std::int64_t width, const char* name,
                 bool written);
  Buffer share(HostArray array, const char* name, bool written);
  static std::optional<Buffer> on_device_alone(nb::handle given, const char* name);
  static HostArray exact_values(nb::handle given, const char* dtype, const char* name);

  const Context& context_;
  const Queue& queue_;
  std::vector<HostArray> arrays_;  ///< keep their memory
  std::vector<Buffer> shared_;
  std::vector<Buffer> written_;
};

/// Values of some type that begin where a buffer does.
inline Buffer whole(CallTensors& tensors, nb::handle given, DType dtype, std::int64_t width,
                    const char* name) {
  if (given.is_none()) return {};
  return Buffer::adopt(tensors.dense_input(given, dtype, width, name).buffer);
}

/// Device memory with an array's values.
Buffer upload(const Context& context, const Values<float, 1>& values);

/// The queue whose launches this thread records (GraphCapture), or null. Arrays of the host are
/// refused there: their buffers do not outlive the call.
cl_command_queue& recording_queue();

}  // namespace clattn::python
