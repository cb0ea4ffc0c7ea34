#include "robustness/program.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace {

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <typename T>
std::string npy_of(std::string_view descr, const std::vector<T>& values, std::string_view shape) {
  std::string flat = std::to_string(values.size());
  flat.insert(flat.begin(), '(');
  flat.append(",)");
  return npy_image(descr, shape.empty() ? flat : shape, bytes_of(values));
}

/// Values that differ everywhere, of the size that keys and values have.
std::vector<float> ramp(std::size_t count, float start) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = start + 0.01F * static_cast<float>(i * 7 % 97);
  }
  return values;
}

}  // namespace

std::size_t ProgramResult::error_lines() const {
  return static_cast<std::size_t>(std::count(standard_error.begin(), standard_error.end(), '\n'));
}

void write_bytes(const std::filesystem::path& path, std::string_view bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::string read_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

ProgramResult run_program(const std::string& arguments, const std::string& stdout_path,
                          const std::string& variables) {
  const ScratchDirectory scratch;
  const std::string out = (scratch.path() / "out").string();
  const std::string err = (scratch.path() / "err").string();
  const std::string command = variables + " " + CLATTN_PROGRAM + " " + arguments + " >" +
                              (stdout_path.empty() ? out : stdout_path) + " 2>" + err;
  const int status = std::system(command.c_str());
  ProgramResult result;
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.standard_output = read_bytes(out);
  result.standard_error = read_bytes(err);
  return result;
}

std::string npy_image(std::string_view descr, std::string_view shape, std::string_view data) {
  std::string header = "{'descr': '" + std::string(descr) +
                       "', 'fortran_order': False, 'shape': " + std::string(shape) + ", }\n";
  std::string image("\x93NUMPY\x01\0", 8);
  image += static_cast<char>(header.size());
  image += '\0';
  return image + header + std::string(data);
}

std::string npy_i32(const std::vector<std::int32_t>& values, std::string_view shape) {
  return npy_of("<i4", values, shape);
}

std::string npy_i64(const std::vector<std::int64_t>& values, std::string_view shape) {
  return npy_of("<i8", values, shape);
}

std::string npy_f32(const std::vector<float>& values, std::string_view shape) {
  return npy_of("<f4", values, shape);
}

std::string npy_data(const std::string& image) {
  if (image.size() < 10) return {};
  const auto low = static_cast<unsigned char>(image[8]),
             high = static_cast<unsigned char>(image[9]);
  return image.substr(std::min<std::size_t>(10 + low + std::size_t{256} * high, image.size()));
}

void CaseImage::write(const std::filesystem::path& directory) const {
  std::filesystem::create_directories(directory);
  if (!json.empty()) write_bytes(directory / "case.json", json);
  for (const auto& [name, bytes] : files) write_bytes(directory / name, bytes);
}

void expect_refusal(const ProgramResult& result, int code, std::string_view says) {
  EXPECT_EQ(result.code, code) << result.standard_error;
  EXPECT_EQ(result.error_lines(), 1U) << result.standard_error;
  EXPECT_EQ(result.standard_error.rfind("clattn: ", 0), 0U) << result.standard_error;
  EXPECT_NE(result.standard_error.find(says), std::string::npos)
      << "'" << says << "' not in: " << result.standard_error;
}

CaseImage small_attention_case() {
  return {R"({"op": "attention", "num_heads": 2, "num_kv_heads": 1, "head_size": 8,
  "block_size": 4, "dtype": "f32", "return_lse": true})",
          {{"query.npy", npy_f32(ramp(48, -0.3F), "(3, 2, 8)")},
           {"key.npy", npy_f32(ramp(24, -0.5F), "(3, 1, 8)")},
           {"value.npy", npy_f32(ramp(24, 0.1F), "(3, 1, 8)")},
           {"slot_mapping.npy", npy_i64({0, 8, 9})},
           {"key_cache.npy", npy_f32(ramp(96, -0.4F), "(3, 4, 1, 8)")},
           {"value_cache.npy", npy_f32(ramp(96, 0.2F), "(3, 4, 1, 8)")},
           {"block_table.npy", npy_i32({1, 0, 2, 77}, "(2, 2)")},
           {"seq_lens.npy", npy_i32({5, 2})},
           {"query_start_loc.npy", npy_i32({0, 1, 3})}}};
}
