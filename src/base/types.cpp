#include <array>
#include <clattn/types.hpp>
#include <string>

#include "base/error.hpp"

namespace clattn {
namespace {

struct DTypeRow {
  DType dtype;
  std::string_view name;
  std::size_t size_bytes;
};
constexpr std::array kDTypes{DTypeRow{DType::kF32, "f32", 4}, DTypeRow{DType::kF16, "f16", 2},
                             DTypeRow{DType::kBF16, "bf16", 2}};

struct LayoutRow {
  KVCacheLayout layout;
  std::string_view name;
};
constexpr std::array kLayouts{LayoutRow{KVCacheLayout::kNHD, "NHD"},
                              LayoutRow{KVCacheLayout::kHND, "HND"}};

const DTypeRow& row_of(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row;
  }
  detail::throw_invalid("dtype: {} is no element type", static_cast<int>(dtype));
}

}  // namespace

std::size_t element_size_bytes(DType dtype) {
  return row_of(dtype).size_bytes;
}

std::string_view to_string(DType dtype) {
  return row_of(dtype).name;
}

DType parse_dtype(std::string_view name) {
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name) return row.dtype;
  }
  detail::throw_invalid("dtype: '{}' is not one of f32, f16, bf16", name);
}

std::string_view to_string(KVCacheLayout layout) {
  for (const LayoutRow& row : kLayouts) {
    if (row.layout == layout) return row.name;
  }
  detail::throw_invalid("layout: {} is no cache layout", static_cast<int>(layout));
}

KVCacheLayout parse_kv_cache_layout(std::string_view name) {
  for (const LayoutRow& row : kLayouts) {
    if (row.name == name) return row.layout;
  }
  detail::throw_invalid("layout: '{}' is not one of NHD, HND", name);
}

}  // namespace clattn
