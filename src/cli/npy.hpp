#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace clattn::cli {

/// An array as a NumPy .npy file holds it: little endian, C order.
struct NpyArray {
  std::string descr;  ///< "<f4", "<f2", "<u2", "<i4", "<i8", "|u1" or "|i1"
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;

  std::int64_t num_elements() const;
};

/// Reads a .npy file of format 1.0-3.0. Throws kInvalidArgument (what is wrong with the content) or
/// kIo, naming the file; never allocates more than the file holds, whatever its header claims.
NpyArray read_npy(const std::filesystem::path& path);

/// Parses a whole .npy image; `name` is what errors call it.
NpyArray parse_npy(std::span<const std::byte> image, std::string_view name);

/// Writes format 1.0. Throws kIo naming the file.
void write_npy(const std::filesystem::path& path, const NpyArray& array);

/// "[3, 4]", for messages.
std::string shape_text(std::span<const std::int64_t> shape);

/// A whole regular file of at most `limit_bytes`; throws kIo naming it.
std::vector<std::byte> read_file(const std::filesystem::path& path, std::uintmax_t limit_bytes);

}  // namespace clattn::cli
