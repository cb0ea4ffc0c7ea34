#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace clattn::detail {

/// A file of kernels_cl/ as the build embedded it; `path` is relative to that folder.
struct EmbeddedFile {
  std::string_view path;
  const unsigned char* bytes;
  std::size_t size;
};
std::span<const EmbeddedFile> embedded_kernels();

}  // namespace clattn::detail
