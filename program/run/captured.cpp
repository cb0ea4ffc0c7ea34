#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "program/common/elements.hpp"
#include "program/common/error.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {
namespace {

/// As single precision, which holds every value of the 16-bit types.
NpyArray widened(const NpyArray& array, const std::string& name) {
  const std::vector<double> values = decode_elements(dtype_of(array, name), array.data);
  return npy::array_of(std::vector<float>(values.begin(), values.end()), array.shape);
}

bool are_nans(const std::byte* a, const std::byte* b) {
  float x = 0, y = 0;
  std::memcpy(&x, a, sizeof(x));
  std::memcpy(&y, b, sizeof(y));
  return std::isnan(x) && std::isnan(y);
}

std::int64_t count_different(const NpyArray& a, const NpyArray& b) {
  const std::int64_t count = num_elements(a);
  const std::size_t size = count == 0 ? 0 : a.data.size() / static_cast<std::size_t>(count);
  std::int64_t different = 0;
  for (std::size_t at = 0; at < a.data.size(); at += size) {
    if (std::memcmp(&a.data[at], &b.data[at], size) == 0) continue;
    if (a.descr == "<f4" && are_nans(&a.data[at], &b.data[at])) continue;
    ++different;
  }
  return different;
}

}  // namespace

nlohmann::json compare_with_captured(const CaseOutputs& outputs,
                                     const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    paths.push_back(entry.path());
  std::ranges::sort(paths);
  nlohmann::json report = nlohmann::json::object();
  for (const std::filesystem::path& path : paths) {
    const std::string name = path.stem().string(), file = "captured/" + path.filename().string();
    const NpyArray* const output = outputs.find(name);
    throw_invalid_if(output == nullptr, "{}: the operation gives no such output", file);
    NpyArray captured = read_npy(path);
    if (output->descr == "<f4" && captured.descr != "<f4") {
      captured = widened(captured, "captured/" + name);
    }
    throw_invalid_if(captured.descr != output->descr || captured.shape != output->shape,
                     "{}: {} {}; expected {} {}, as the operation gives", file, captured.descr,
                     shape_text(captured.shape), output->descr, shape_text(output->shape));
    report[name] = {{"elements", num_elements(captured)},
                    {"different", count_different(captured, *output)}};
  }
  return report;
}

}  // namespace clattn::cli
