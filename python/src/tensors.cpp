#include "tensors.hpp"

#include <algorithm>
#include <array>
#include <optional>

namespace clattn::python {

namespace {

struct ArrayType {
  DType dtype;
  nb::dlpack::dtype_code code;
  std::uint8_t bits;
  bool same_size_integer;  ///< NumPy has no such type, so its bits are taken too
};
using Code = nb::dlpack::dtype_code;
constexpr std::array kArrayTypes = {
    ArrayType{DType::kF32, Code::Float, 32, false},
    ArrayType{DType::kF16, Code::Float, 16, false},
    ArrayType{DType::kBF16, Code::Bfloat, 16, true},
    ArrayType{DType::kFp8E4M3, Code::Float8_E4M3FN, 8, true},
    ArrayType{DType::kFp8E5M2, Code::Float8_E5M2, 8, true},
    ArrayType{DType::kInt8, Code::Int, 8, true},
    ArrayType{DType::kUInt4x2, Code::UInt, 8, true},
};

std::string text_of(nb::dlpack::dtype type) {
  constexpr std::array<std::string_view, 7> kNames = {"int",    "uint",    "float", "handle",
                                                      "bfloat", "complex", "bool"};
  const std::string_view name = type.code < kNames.size() ? kNames.at(type.code) : "float8_";
  return std::string(name) + std::to_string(type.bits);
}

std::string text_of_shape(const HostArray& array) {
  std::string text = "[";
  for (std::size_t i = 0; i < array.ndim(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(array.shape(i));
  }
  return text + "]";
}

/// Elements from row to row of [rows, ...] whose rows are contiguous and `width` elements long.
std::int64_t row_stride(const HostArray& array, std::int64_t width, const char* name) {
  std::int64_t contiguous = 1;
  bool gaps = array.ndim() == 0;
  for (std::size_t i = array.ndim(); i-- > 1;) {
    gaps |= array.shape(i) != 1 && array.stride(i) != contiguous;
    contiguous *= static_cast<std::int64_t>(array.shape(i));
  }
  if (gaps || contiguous != width) {
    throw_invalid(std::string(name) + ": shape is " + text_of_shape(array) +
                  (gaps ? " with gaps in a row" : "") + ", legal: rows of " +
                  std::to_string(width) + " contiguous elements");
  }
  return array.shape(0) > 1 ? array.stride(0) : width;
}

/// What needs no buffer to be made; nullopt for an array.
std::optional<TensorRef> on_device(nb::handle tensor) {
  if (!tensor.is_valid() || tensor.is_none()) return TensorRef{};
  if (nb::isinstance<Buffer>(tensor)) return TensorRef{nb::cast<const Buffer&>(tensor).handle()};
  if (!nb::isinstance<Tensor>(tensor)) return std::nullopt;
  const auto& rows = nb::cast<const Tensor&>(tensor);
  return TensorRef{rows.buffer.handle(), rows.offset, rows.token_stride};
}

/// For arguments of which the library takes the memory alone.
TensorRef dense(const TensorRef& rows, std::int64_t width, const char* name) {
  if (rows.offset == 0 && (rows.token_stride == 0 || rows.token_stride == width)) return rows;
  throw_invalid(std::string(name) + ": offset is " + std::to_string(rows.offset) +
                " and the rows' stride " + std::to_string(rows.token_stride) + ", legal: 0 and " +
                std::to_string(width));
}

}  // namespace

HostArray host_array(nb::handle tensor, const char* name) {
  HostArray array;
  if (nb::try_cast(tensor, array)) return array;
  throw_invalid(std::string(name) + ": " + nb::type_name(tensor.type()).c_str() +
                ", legal: an array of the host, a Buffer or a Tensor");
}

void check_dtype(nb::dlpack::dtype type, DType dtype, const char* name) {
  const auto row = std::find_if(kArrayTypes.begin(), kArrayTypes.end(),
                                [&](const ArrayType& r) { return r.dtype == dtype; });
  const bool integer = type.code == static_cast<std::uint8_t>(Code::Int) ||
                       type.code == static_cast<std::uint8_t>(Code::UInt);
  const bool same = type.code == static_cast<std::uint8_t>(row->code);
  if (type.bits == row->bits && type.lanes == 1 && (same || (row->same_size_integer && integer))) {
    return;
  }
  throw_invalid(std::string(name) + ": element type is " + text_of(type) +
                ", legal: " + std::string(to_string(dtype)) +
                (row->same_size_integer ? " or integers of its size" : ""));
}

Extent extent_of(const HostArray& array) {
  if (array.size() == 0) return {};
  std::int64_t last = 0;
  for (std::size_t i = 0; i < array.ndim(); ++i) {
    if (array.stride(i) < 0) throw_invalid("an array's strides are negative, legal: >= 0");
    last += static_cast<std::int64_t>(array.shape(i) - 1) * array.stride(i);
  }
  // Of arrays that are only read nothing is written: the device's buffer type has no const.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  auto* const begin = const_cast<std::byte*>(static_cast<const std::byte*>(array.data()));
  return {begin, begin + static_cast<std::size_t>(last + 1) * array.itemsize()};
}

cl_command_queue& recording_queue() {
  thread_local cl_command_queue queue = nullptr;
  return queue;
}

Buffer CallTensors::share(HostArray array, const char* name, bool written) {
  const Extent extent = extent_of(array);
  if (extent.begin == extent.end) return {};
  if (recording_queue() == static_cast<cl_command_queue>(queue_)) {
    throw_invalid(std::string(name) +
                  ": an array of the host in a step that is recorded, legal: a Buffer or a Tensor");
  }
  arrays_.push_back(std::move(array));
  shared_.push_back(context_.share({extent.begin, extent.end}));
  if (written) written_.push_back(shared_.back());
  return shared_.back();
}

std::optional<Buffer> CallTensors::on_device_alone(nb::handle given, const char* name) {
  if (!given.is_valid() || given.is_none()) return Buffer();
  if (nb::isinstance<Buffer>(given)) return nb::cast<const Buffer&>(given);
  if (!nb::isinstance<Tensor>(given)) return std::nullopt;
  throw_invalid(std::string(name) + ": a Tensor, legal: an array, a list or a Buffer");
}

HostArray CallTensors::exact_values(nb::handle given, const char* dtype, const char* name) {
  nb::ndarray<nb::c_contig, nb::device::cpu> array;
  const std::string wanted = dtype;
  if (nb::try_cast(given, array, false) && text_of(array.dtype()) == wanted) {
    return HostArray(array);
  }
  throw_invalid(std::string(name) + ": " + nb::type_name(given.type()).c_str() +
                ", legal: a writable array of " + wanted + " without gaps, or a Buffer");
}

TensorRef CallTensors::take(nb::handle tensor, DType dtype, std::int64_t width, const char* name,
                            bool written) {
  if (const auto rows = on_device(tensor)) return *rows;
  if (!written && (nb::isinstance<nb::list>(tensor) || nb::isinstance<nb::tuple>(tensor))) {
    const nb::object rows = nb::module_::import_("clattn.arrays").attr("rows");
    return take(rows(tensor, std::string(to_string(dtype)), name), dtype, width, name, false);
  }
  HostArray array = host_array(tensor, name);
  if (written && !nb::isinstance<WritableHostArray>(tensor))
    throw_invalid(std::string(name) + ": read-only memory, legal: a writable array");
  check_dtype(array.dtype(), dtype, name);
  const std::int64_t stride = row_stride(array, width, name);
  // The buffer of an array without elements is null.
  return {share(std::move(array), name, written).handle(), 0, stride};
}

TensorRef CallTensors::input(nb::handle tensor, DType dtype, std::int64_t width, const char* name) {
  return take(tensor, dtype, width, name, false);
}

TensorRef CallTensors::output(nb::handle tensor, DType dtype, std::int64_t width,
                              const char* name) {
  return take(tensor, dtype, width, name, true);
}

TensorRef CallTensors::dense_input(nb::handle tensor, DType dtype, std::int64_t width,
                                   const char* name) {
  return dense(input(tensor, dtype, width, name), width, name);
}

TensorRef CallTensors::dense_output(nb::handle tensor, DType dtype, std::int64_t width,
                                    const char* name) {
  return dense(output(tensor, dtype, width, name), width, name);
}

TensorRef CallTensors::mask(nb::handle tensor) {
  if (const auto rows = on_device(tensor)) return *rows;
  HostArray array;
  if (!nb::try_cast(tensor, array))
    array = HostArray(numbers<std::uint8_t, 2>(tensor, "custom_mask"));
  if (array.ndim() != 2 || array.itemsize() != 1 || array.stride(1) != 1) {
    throw_invalid("custom_mask: shape is " + text_of_shape(array) + " of " +
                  text_of(array.dtype()) + ", legal: rows of uint8 or bool [tokens, keys]");
  }
  const std::int64_t one_row = static_cast<std::int64_t>(array.shape(1));
  const std::int64_t stride = array.shape(0) > 1 ? array.stride(0) : one_row;
  return {share(std::move(array), "custom_mask", false).handle(), 0, stride};
}

Event CallTensors::run(const std::function<void(Event*)>& call) const {
  Event event;
  without_gil([&] {
    try {
      call(&event);
    } catch (...) {
      finish();
      throw;
    }
    finish();
  });
  return event;
}

void CallTensors::finish() const {
  if (shared_.empty()) return;
  for (const Buffer& buffer : written_) {
    const HostView shown = queue_.map(buffer, HostAccess::kRead);
  }
  queue_.finish();
}

Buffer upload(const Context& context, const Values<float, 1>& values) {
  return without_gil([&] {
    Buffer buffer = context.allocate(values.nbytes());
    const std::span<const float> floats(values.data(), values.size());
    context.create_queue().write(buffer, std::as_bytes(floats));
    return buffer;
  });
}

void bind_tensor(nb::module_& module) {
  nb::class_<Tensor>(module, "Tensor",
                     "Rows of a Buffer: offset and token_stride count elements; a stride of 0 is\n"
                     "that of rows without gaps.")
      .def(
          "__init__",
          [](Tensor* self, const Buffer& buffer, std::int64_t offset, std::int64_t token_stride) {
            new (self) Tensor{buffer, offset, token_stride};
          },
          "buffer"_a, "offset"_a = 0, "token_stride"_a = 0)
      .def_ro("buffer", &Tensor::buffer)
      .def_ro("offset", &Tensor::offset)
      .def_ro("token_stride", &Tensor::token_stride);
}

}  // namespace clattn::python
