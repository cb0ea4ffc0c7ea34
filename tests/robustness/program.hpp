#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/scratch_directory.hpp"

/// What running the program said and did.
struct ProgramResult {
  int code = -1;  ///< exit status; 128 + signal when it was killed
  std::string standard_output, standard_error;
  std::size_t error_lines() const;
};

/// Runs `clattn` with shell-quoted `arguments` under more environment `variables` ("A=1 B=2"); what
/// it prints goes to `stdout_path`, if given.
ProgramResult run_program(const std::string& arguments, const std::string& stdout_path = {},
                          const std::string& variables = {});

/// The only acceptable way to fail: the documented code and exactly one line that names the
/// trouble.
void expect_refusal(const ProgramResult& result, int code, std::string_view says);

using test::ScratchDirectory;

void write_bytes(const std::filesystem::path& path, std::string_view bytes);
std::string read_bytes(const std::filesystem::path& path);

/// A .npy image of format 1.0.
std::string npy_image(std::string_view descr, std::string_view shape, std::string_view data);
std::string npy_i32(const std::vector<std::int32_t>& values, std::string_view shape = {});
std::string npy_i64(const std::vector<std::int64_t>& values, std::string_view shape = {});
std::string npy_f32(const std::vector<float>& values, std::string_view shape);
/// The bytes of a .npy file's data.
std::string npy_data(const std::string& image);

/// A case directory in memory: case.json and the other files by name.
struct CaseImage {
  std::string json;
  std::map<std::string, std::string> files;
  void write(const std::filesystem::path& directory) const;
};

/// Two requests over a cache of three pages of four tokens: one decode after four tokens of
/// history, one prompt of two tokens; the new tokens are stored first. f32, two heads on one KV
/// head of 8.
CaseImage small_attention_case();
