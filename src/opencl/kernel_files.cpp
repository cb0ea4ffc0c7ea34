#include <cstdint>
#include <filesystem>

#include "base/error.hpp"
#include "files/files.hpp"
#include "opencl/embedded_kernels.hpp"
#include "opencl/source.hpp"

namespace clattn::detail {
namespace {

std::optional<std::string> read_embedded(const std::string& path) {
  for (const EmbeddedFile& file : embedded_kernels()) {
    if (file.path == path) return std::string(file.bytes, file.bytes + file.size);
  }
  return std::nullopt;
}

std::optional<std::string> read_from(const std::filesystem::path& folder, const std::string& path) {
  const std::filesystem::path full = folder / path;
  std::error_code error;
  if (path.starts_with("..") || !std::filesystem::is_regular_file(full, error)) return std::nullopt;
  constexpr std::uintmax_t kMostBytes = std::uintmax_t{1} << 20;
  return files::read_file(full, kMostBytes);
}

}  // namespace

ReadKernelFile kernel_file_reader(const std::string& kernel_dir) {
  if (kernel_dir.empty()) return read_embedded;
  std::error_code error;
  if (!std::filesystem::is_directory(kernel_dir, error)) {
    throw Error(ErrorCode::kIo, fmt::format("CLATTN_KERNEL_DIR: '{}' is no folder", kernel_dir));
  }
  return [folder = std::filesystem::path(kernel_dir)](const std::string& path) {
    std::optional<std::string> text = read_from(folder, path);
    return text ? text : read_embedded(path);
  };
}

}  // namespace clattn::detail
