#pragma once

#include <nanobind/ndarray.h>

#include <initializer_list>
#include <vector>

#include "bindings.hpp"

namespace clattn::python {

using HostArray = nb::ndarray<nb::ro, nb::device::cpu>;
using WritableHostArray = nb::ndarray<nb::device::cpu>;
/// Converted, that is copied, where the caller's array has another type or gaps.
template <typename T, std::size_t N>
using Values = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

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
  /// are contiguous (None: no tensor), or what Python has for device memory.
  TensorRef input(nb::handle tensor, DType dtype, std::int64_t width, const char* name);
  /// The same for what the call writes.
  TensorRef output(nb::handle tensor, DType dtype, std::int64_t width, const char* name);

  /// Of rows that must follow one another without gaps.
  TensorRef dense_input(nb::handle tensor, DType dtype, std::int64_t width, const char* name);
  TensorRef dense_output(nb::handle tensor, DType dtype, std::int64_t width, const char* name);
  /// Rows of bytes of any width, bool or uint8; the width of a Tensor is its token_stride.
  TensorRef mask(nb::handle tensor);

  /// Waits if there were arrays, and shows the host what was written to them. Needs no interpreter.
  void finish() const;

 private:
  TensorRef take(nb::handle tensor, DType dtype, std::int64_t width, const char* name,
                 bool written);
  TensorRef share(HostArray array, std::int64_t token_stride, bool written);

  const Context& context_;
  const Queue& queue_;
  std::vector<HostArray> arrays_;  ///< keep their memory
  std::vector<Buffer> shared_;
  std::vector<Buffer> written_;
};

/// Device memory with an array's values.
Buffer upload(const Context& context, const Values<float, 1>& values);

}  // namespace clattn::python
