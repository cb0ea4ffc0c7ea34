#include "files/npy.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "files/files.hpp"

namespace clattn::npy {

std::string_view descr_of(DType dtype) {
  constexpr std::pair<DType, std::string_view> kDescrs[] = {
      {DType::kF32, "<f4"},     {DType::kF16, "<f2"},     {DType::kBF16, "<u2"},
      {DType::kFp8E4M3, "|u1"}, {DType::kFp8E5M2, "|u1"}, {DType::kInt8, "|i1"}};
  for (const auto& [known, descr] : kDescrs) {
    if (known == dtype) return descr;
  }
  return {};
}

std::string npy_head(const NpyArray& array) {
  const bool one = array.shape.size() == 1;  // "(7,)", as Python writes it
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}",
                                   array.descr, fmt::join(array.shape, ", "), one ? "," : "");
  header.append(63 - (10 + header.size()) % 64, ' ');  // the data starts at a multiple of 64
  header.push_back('\n');
  const std::string preamble = {'\x01', '\0', static_cast<char>(header.size() & 0xFF),
                                static_cast<char>(header.size() >> 8)};
  return "\x93NUMPY" + preamble + header;
}

void write_npy(const std::filesystem::path& path, const NpyArray& array) {
  files::replace_file(path, npy_head(array), array.data);
}

}  // namespace clattn::npy
