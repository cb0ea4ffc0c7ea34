#pragma once

#include <clattn/types.hpp>

#include "oracle/oracle.hpp"

namespace clattn::cli {

/// The oracle has its own element types, since it shares nothing with the library.
inline oracle::Element oracle_element(DType dtype) {
  if (dtype == DType::kF32) return oracle::Element::kF32;
  return dtype == DType::kF16 ? oracle::Element::kF16 : oracle::Element::kBF16;
}

}  // namespace clattn::cli
