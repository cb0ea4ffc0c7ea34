#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

namespace clattn::cli {

/// A file that is built into the program, by program/CMakeLists.txt.
struct TextFile {
  std::string_view name, text;
};
std::vector<TextFile> shape_files();  ///< bench/shapes/
std::vector<TextFile> card_files();   ///< bench/cards/
std::vector<TextFile> page_files();   ///< program/html/

/// What `git describe` says of the sources.
const char* commit();

/// The text of one that is there.
inline std::string_view text_of(const std::vector<TextFile>& files, std::string_view name) {
  return std::ranges::find(files, name, &TextFile::name)->text;
}

}  // namespace clattn::cli
