#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "files/files.hpp"
#include "opencl/program/source.hpp"

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

/// Whether a block comment is open after `line`.
bool in_comment_after(std::string_view line, bool in_comment) {
  bool in_string = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const std::string_view two = line.substr(i, 2);
    if (in_comment) {
      if (two == "*/") in_comment = false, ++i;
    } else if (in_string) {
      if (line[i] == '\\') ++i;
      in_string = i >= line.size() || line[i] != '"';
    } else if (two == "//") {
      return false;
    } else if (two == "/*") {
      in_comment = true, ++i;
    } else {
      in_string = line[i] == '"';
    }
  }
  return in_comment;
}

/// The name in `#include "name"`, empty when the line is no such include.
std::string_view included_name(std::string_view line) {
  const auto skip_blanks = [&] {
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  };
  const auto skip_word = [&](std::string_view word) {
    if (!line.starts_with(word)) return false;
    line.remove_prefix(word.size());
    skip_blanks();
    return true;
  };
  skip_blanks();
  if (!skip_word("#") || !skip_word("include") || !line.starts_with('"')) return {};
  line.remove_prefix(1);
  const std::size_t end = line.find('"');
  return end == std::string_view::npos ? std::string_view{} : line.substr(0, end);
}

constexpr std::string_view kUnit = "tile/unit.clh";  // no file of its own

class Flattener {
 public:
  Flattener(const ReadKernelFile& read, std::string_view unit) : read_(read), unit_(unit) {}

  FlatSource flatten(const std::string& file) {
    const std::optional<std::string> text = read_(file);
    if (!text) throw Error(ErrorCode::kIo, fmt::format("kernel file '{}' not found", file));
    append_file(file, *text);
    return std::move(flat_);
  }

 private:
  void append_file(const std::string& path, std::string_view text) {
    const std::uint32_t file = index_of(path);
    open_files_.push_back(path);
    bool in_comment = false;
    for (std::uint32_t line_number = 1; !text.empty(); ++line_number) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      const std::string_view line = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      const std::string_view include = in_comment ? std::string_view{} : included_name(line);
      if (include.empty()) {
        append_line(line, {file, line_number});
      } else {
        append_include(include, {file, line_number});
      }
      in_comment = in_comment_after(line, in_comment);
    }
    open_files_.pop_back();
  }

  // The text stands behind a guard of its own at every mention, so that an include in a branch that
  // is not compiled does not swallow a later one.
  void append_include(std::string_view name, FlatSource::Origin at) {
    const auto [path, text] = find(name, at);
    const std::uint32_t file = index_of(path);
    append_line(fmt::format("#ifndef CLA_INCLUDED_{}", file), at);
    append_line(fmt::format("#define CLA_INCLUDED_{}", file), at);
    append_file(path, text);
    append_line("#endif", at);
  }

  std::pair<std::string, std::string> find(std::string_view name, FlatSource::Origin at) const {
    const std::filesystem::path relative{std::string(name == kUnit ? unit_ : name)};
    const auto beside = std::filesystem::path(flat_.files[at.file]).parent_path() / relative;
    for (const auto& candidate : {beside, relative}) {
      std::string path = candidate.lexically_normal().generic_string();
      std::optional<std::string> text = read_(path);
      if (!text) continue;
      refuse_cycle(path, at);
      return {std::move(path), *std::move(text)};
    }
    throw Error(ErrorCode::kIo, fmt::format("{}:{}: included kernel file '{}' not found",
                                            flat_.files[at.file], at.line, name));
  }

  void refuse_cycle(const std::string& path, FlatSource::Origin at) const {
    const auto first = std::ranges::find(open_files_, path);
    if (first == open_files_.end()) return;
    throw_invalid("{}:{}: kernel files include one another in a cycle: {} -> {}",
                  flat_.files[at.file], at.line, fmt::join(first, open_files_.end(), " -> "), path);
  }

  void append_line(std::string_view line, FlatSource::Origin at) {
    flat_.text.append(line).push_back('\n');
    flat_.lines.push_back(at);
  }

  std::uint32_t index_of(const std::string& path) {
    const auto found = std::ranges::find(flat_.files, path);
    const auto index = static_cast<std::uint32_t>(found - flat_.files.begin());
    if (found == flat_.files.end()) flat_.files.push_back(path);
    return index;
  }

  const ReadKernelFile& read_;
  std::string_view unit_;
  FlatSource flat_;
  std::vector<std::string> open_files_;  // from the root to the file being read
};

}  // namespace

FlatSource flatten_source(const std::string& file, const ReadKernelFile& read,
                          std::string_view unit) {
  return Flattener(read, unit).flatten(file);
}

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
