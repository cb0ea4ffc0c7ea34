// Files, folders and other programs.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace amdemu {

std::string read_file(const std::filesystem::path& path);
/// Others see all of it or nothing.
void write_file(const std::filesystem::path& path, const std::string& content);
/// A program's exit code; 127: there is no such program, 128: a signal ended it.
int execute(const std::vector<std::string>& arguments, const std::filesystem::path& output,
            const std::filesystem::path& errors);
/// Where the driver's own library lies.
std::filesystem::path own_folder();

/// A folder that goes with the object, unless AMDEMU_KEEP is set.
struct TemporaryFolder {
  std::filesystem::path path;
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
};

}  // namespace amdemu
