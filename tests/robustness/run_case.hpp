#pragma once

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "robustness/program.hpp"

/// The elements of a .npy image.
template <typename T>
std::vector<T> values_of(const std::string& image) {
  const std::string data = npy_data(image);
  std::vector<T> values(data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), data.data(), values.size() * sizeof(T));
  return values;
}

/// Runs a case that must succeed and gives its output files.
class RunCase {
 public:
  explicit RunCase(const CaseImage& image, const std::string& options = {});
  struct InPlace {};
  /// A case directory that is there already; outputs go elsewhere. They must be what the captured
  /// call gave, where the case holds that.
  RunCase(InPlace, const std::filesystem::path& directory);

  template <typename T>
  std::vector<T> array(const std::string& name) const {
    return values_of<T>(bytes(name + ".npy"));
  }
  std::string bytes(const std::string& file) const { return read_bytes(out_ / file); }
  std::string text(const std::string& name) const;  ///< name.json without blanks
  std::size_t num_outputs() const;

 private:
  ScratchDirectory scratch_;
  std::filesystem::path out_;
};
