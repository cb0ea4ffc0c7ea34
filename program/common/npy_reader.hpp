#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "files/npy.hpp"

namespace clattn::cli {

using npy::NpyArray;

/// Reads a .npy file of format 1.0-3.0. Throws kInvalidArgument (what is wrong with the content) or
/// kIo, naming the file. The header is read first and must agree with the file's size; `accept`, if
/// given, then sees type and shape and throws for those that it does not want. Only then memory is
/// taken for the data.
NpyArray read_npy(const std::filesystem::path& path,
                  const std::function<void(const NpyArray&)>& accept = {});

/// Parses a whole .npy image; `name` is what errors call it.
NpyArray parse_npy(std::span<const std::byte> image, std::string_view name);

std::int64_t num_elements(const NpyArray& array);

/// "[3, 4]", for messages.
std::string shape_text(std::span<const std::int64_t> shape);

}  // namespace clattn::cli
