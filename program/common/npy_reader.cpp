#include "program/common/npy_reader.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <optional>
#include <utility>
#include <vector>

#include "files/files.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxDimensions = 32;  // NumPy's own limit

/// The element types that cases use, and their bytes.
struct ElementType {
  std::string_view descr;
  std::int64_t size_bytes;
};
constexpr std::array<ElementType, 9> kElementTypes = {{{"<f4", 4},
                                                       {"<f2", 2},
                                                       {"<u2", 2},
                                                       {"<i4", 4},
                                                       {"<i8", 8},
                                                       {"|u1", 1},
                                                       {"|i1", 1},
                                                       {"<u1", 1},
                                                       {"<i1", 1}}};

template <typename... Args>
[[noreturn]] void refuse_file(std::string_view name, fmt::format_string<Args...> format,
                              Args&&... args) {
  throw_invalid("{}: {}", name, fmt::format(format, std::forward<Args>(args)...));
}

/// The header is a Python literal: a dict of three keys. This reads exactly that much Python.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, std::string_view name) : text_(text), name_(name) {}

  NpyArray read() {
    NpyArray array;
    bool order_seen = false, shape_seen = false;
    expect('{');
    while (!accept('}')) {
      const std::string key = quoted();
      expect(':');
      if (key == "descr" && array.descr.empty()) {
        array.descr = descr();
      } else if (key == "fortran_order" && !order_seen) {
        order_seen = true;
        c_order();
      } else if (key == "shape" && !shape_seen) {
        shape_seen = true;
        array.shape = shape();
      } else {
        refuse_file(name_, "header key '{}' is unknown or repeated", key);
      }
      if (!accept(',') && peek() != '}') expect('}');
    }
    skip_space();
    if (!text_.empty()) refuse_file(name_, "text after the header's dictionary");
    if (array.descr.empty() || !order_seen || !shape_seen) {
      refuse_file(name_, "the header must name descr, fortran_order and shape");
    }
    return array;
  }

 private:
  void skip_space() {
    text_.remove_prefix(std::min(text_.find_first_not_of(" \t\r\n"), text_.size()));
  }
  char peek() {
    skip_space();
    return text_.empty() ? '\0' : text_.front();
  }
  bool accept(char wanted) {
    if (peek() != wanted) return false;
    text_.remove_prefix(1);
    return true;
  }
  void expect(char wanted) {
    if (!accept(wanted)) refuse_file(name_, "malformed header: '{}' expected", wanted);
  }
  std::string quoted() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') refuse_file(name_, "malformed header: a string expected");
    const std::size_t end = text_.find(quote, 1);
    if (end == std::string_view::npos) refuse_file(name_, "malformed header: unfinished string");
    std::string result(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return result;
  }
  std::string descr() {
    if (peek() == '[') refuse_file(name_, "structured element types are not accepted");
    std::string result = quoted();
    const auto* const known = std::ranges::find(kElementTypes, result, &ElementType::descr);
    if (known == kElementTypes.end()) {
      refuse_file(
          name_,
          "element type '{}' is not accepted; expected little endian <f4, <f2, <u2, <i4, <i8, "
          "|u1 or |i1",
          result);
    }
    if (known->size_bytes == 1) result[0] = '|';
    return result;
  }
  void c_order() {
    skip_space();
    if (text_.starts_with("True"))
      refuse_file(name_, "Fortran order is not accepted; expected C order");
    if (!text_.starts_with("False")) refuse_file(name_, "fortran_order: expected True or False");
    text_.remove_prefix(std::string_view("False").size());
  }
  std::vector<std::int64_t> shape() {
    std::vector<std::int64_t> result;
    expect('(');
    while (!accept(')')) {
      skip_space();
      std::int64_t extent = 0;
      const auto [end, status] = std::from_chars(text_.data(), text_.data() + text_.size(), extent);
      if (status != std::errc{} || extent < 0) {
        refuse_file(name_, "shape: expected extents in [0, 2^63)");
      }
      text_.remove_prefix(static_cast<std::size_t>(end - text_.data()));
      result.push_back(extent);
      if (result.size() > kMaxDimensions)
        refuse_file(name_, "shape: more than {} axes", kMaxDimensions);
      if (!accept(',') && peek() != ')') expect(')');
    }
    return result;
  }

  std::string_view text_;
  std::string_view name_;
};

/// Bytes of an array, or nothing when they overflow.
std::optional<std::int64_t> size_bytes_of(const NpyArray& array) {
  if (std::ranges::find(array.shape, 0) != array.shape.end()) return 0;
  const auto* const type = std::ranges::find(kElementTypes, array.descr, &ElementType::descr);
  std::int64_t bytes = type->size_bytes;
  for (const std::int64_t extent : array.shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

constexpr std::size_t kLongestPreamble = 12, kLongestHeader = 65535;

/// A file up to its data: the array's type and shape, and how many bytes that was.
struct Head {
  NpyArray array;
  std::size_t bytes = 0;
};

/// `front` is the start of a file of `file_bytes`: all of it, or as much as a header may take.
Head parse_head(std::span<const std::byte> front, std::uintmax_t file_bytes,
                std::string_view name) {
  const std::string_view text(reinterpret_cast<const char*>(front.data()), front.size());
  if (!text.starts_with(kMagic)) refuse_file(name, "not a .npy file");
  if (text.size() < kLongestPreamble) refuse_file(name, "truncated in the header");
  const int major = std::to_integer<int>(front[6]);
  if (major < 1 || major > 3) {
    refuse_file(name, "format version {} is not accepted; expected 1 to 3", major);
  }
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  std::size_t header_bytes = 0;
  for (std::size_t i = 0; i < length_bytes; ++i) {
    header_bytes |= std::to_integer<std::size_t>(front[8 + i]) << (8 * i);
  }
  const std::size_t start = 8 + length_bytes;
  if (header_bytes > file_bytes - start) refuse_file(name, "truncated in the header");
  if (header_bytes > kLongestHeader) {
    refuse_file(name, "header of {} bytes; expected at most {}", header_bytes, kLongestHeader);
  }
  Head head{HeaderReader(text.substr(start, header_bytes), name).read(), start + header_bytes};

  const NpyArray& array = head.array;
  const std::optional<std::int64_t> expected = size_bytes_of(array);
  if (!expected) refuse_file(name, "shape {} overflows", shape_text(array.shape));
  if (std::cmp_not_equal(*expected, file_bytes - head.bytes)) {
    refuse_file(name, "holds {} bytes of data; expected {} for {} {}", file_bytes - head.bytes,
                *expected, array.descr, shape_text(array.shape));
  }
  return head;
}

void read_into(std::ifstream& file, std::span<std::byte> bytes, const std::filesystem::path& path) {
  if (!file.read(reinterpret_cast<char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()))) {
    throw_io("{}: cannot be read", path.string());
  }
}

}  // namespace

std::int64_t num_elements(const NpyArray& array) {
  std::int64_t count = 1;
  for (const std::int64_t extent : array.shape) count *= extent;
  return count;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

NpyArray parse_npy(std::span<const std::byte> image, std::string_view name) {
  Head head = parse_head(image, image.size(), name);
  const std::span<const std::byte> data = image.subspan(head.bytes);
  head.array.data.assign(data.begin(), data.end());
  return std::move(head.array);
}

NpyArray read_npy(const std::filesystem::path& path,
                  const std::function<void(const NpyArray&)>& accept) {
  const std::uintmax_t size = files::regular_file_size(path);
  std::ifstream file(path, std::ios::binary);
  std::vector<std::byte> front(
      static_cast<std::size_t>(std::min<std::uintmax_t>(size, kLongestPreamble + kLongestHeader)));
  read_into(file, front, path);
  Head head = parse_head(front, size, path.filename().string());
  if (accept) accept(head.array);
  head.array.data.resize(static_cast<std::size_t>(size - head.bytes));
  file.seekg(static_cast<std::streamoff>(head.bytes));
  read_into(file, head.array.data, path);
  return std::move(head.array);
}

}  // namespace clattn::cli
