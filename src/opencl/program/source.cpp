#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <iterator>

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

bool is_word(char c) {
  return c == '_' || std::isalnum(static_cast<unsigned char>(c)) != 0;
}

bool is_ours(std::string_view word) {
  const bool type = word.starts_with("Cla") && word.size() > 3 &&
                    std::isupper(static_cast<unsigned char>(word[3])) != 0;
  return type || word.starts_with("cla_") || word.starts_with("CLA_") ||
         word.starts_with("CLATTN_");
}

/// Appends `text` with the part's number in every name of ours: cla_dot of part 2 is cla2_dot.
void append_numbered(std::string& result, std::string_view text, std::size_t part) {
  const std::string number = std::to_string(part);
  while (!text.empty()) {
    const auto at = std::ranges::find_if(text, is_word);
    const auto end = std::find_if_not(at, text.end(), is_word);
    const std::string_view word(at, end);
    result.append(text.begin(), at);
    if (word.starts_with("clattn_")) {
      result.append(bundled_entry(word, part));
    } else if (is_ours(word)) {
      result.append(word.substr(0, 3)).append(number).append(word.substr(3));
    } else {
      result.append(word);
    }
    text = {end, text.end()};
  }
}

/// "-DNAME=VALUE …" as lines "#define NAME VALUE"; nothing where an option is of another kind.
std::optional<std::string> definitions(std::string_view options) {
  std::string lines;
  while (!options.empty()) {
    const std::string_view option = options.substr(0, options.find(' '));
    options.remove_prefix(std::min(option.size() + 1, options.size()));
    if (option.empty()) continue;
    const std::size_t equals = option.find('=');
    if (!option.starts_with("-D") || equals == std::string_view::npos) return std::nullopt;
    fmt::format_to(std::back_inserter(lines), "#define {} {}\n", option.substr(2, equals - 2),
                   option.substr(equals + 1));
  }
  return lines;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// `:LINE:COLUMN` at the start of `text`: the line and the length of `:LINE`; zeros without one.
struct Position {
  std::size_t line = 0;
  std::size_t length = 0;
};

Position parse_position(std::string_view text) {
  const char* const end = text.data() + text.size();
  std::size_t line = 0, column = 0;
  const auto [colon, failed] = std::from_chars(text.data() + 1, end, line);
  if (failed != std::errc{} || colon == end || *colon != ':' ||
      std::from_chars(colon + 1, end, column).ec == std::errc::invalid_argument)
    return {};
  return {line, static_cast<std::size_t>(colon - text.data())};
}

/// Length of the compiler's name for our source at the end of `text`. The name is bracketed
/// (`<program source>`) or free of blanks (a path, `1`).
std::size_t source_name_length(std::string_view text) {
  if (text.ends_with('>')) {
    const std::size_t open = text.rfind('<');
    return open == std::string_view::npos ? 0 : text.size() - open;
  }
  const std::size_t before = text.find_last_of(" \t\n\r\"'(");
  return before == std::string_view::npos ? text.size() : text.size() - before - 1;
}

/// Whether a compiler may call our source `name`. It gets one text without headers, so a `.h` is
/// the compiler's own (notes on built-in functions point there); a bare number is a source only as
/// "1", else it is likely a clock.
bool may_name_our_source(std::string_view name) {
  const bool number = std::ranges::all_of(name, is_digit);
  return !name.empty() && !name.ends_with(".h") && (!number || name == "1");
}

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

std::optional<std::string> bundle_sources(std::span<const BundlePart> parts) {
  std::string result;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::optional<std::string> macros = definitions(parts[i].options);
    if (!macros) return std::nullopt;
    append_numbered(result, *macros, i);
    append_numbered(result, parts[i].text, i);
  }
  return result;
}

std::string bundled_entry(std::string_view entry, std::size_t part) {
  return fmt::format("{}_{}", entry, part);
}

std::string rewrite_build_log(std::string_view log, const FlatSource& source) {
  std::string result;
  std::size_t copied = 0;  // log[0, copied) is in `result`
  for (std::size_t colon = log.find(':'); colon != std::string_view::npos;
       colon = log.find(':', std::max(colon + 1, copied))) {
    const Position position = parse_position(log.substr(colon));
    const std::string_view before = log.substr(copied, colon - copied);
    if (position.line == 0 || position.line > source.lines.size()) continue;
    const std::size_t name_at = before.size() - source_name_length(before);
    if (!may_name_our_source(before.substr(name_at))) continue;
    const FlatSource::Origin& origin = source.lines[position.line - 1];
    result.append(before.substr(0, name_at))
        .append(fmt::format("{}:{}", source.files[origin.file], origin.line));
    copied = colon + position.length;
  }
  return result.append(log.substr(copied));
}

}  // namespace clattn::detail
