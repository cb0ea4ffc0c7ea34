#include "capture/case_writer.hpp"

#include <fmt/format.h>
#include <algorithm>
#include <atomic>
#include <charconv>
#include <clattn/error.hpp>
#include <system_error>
#include <utility>

#include "files/files.hpp"

namespace clattn::detail {
namespace {

namespace fs = std::filesystem;

void require(const std::error_code& failure, const fs::path& path, std::string_view what) {
  if (!failure) return;
  throw Error(ErrorCode::kIo, fmt::format("CLATTN_CAPTURE_DIR: {}: cannot {}: {}", path.string(),
                                          what, failure.message()));
}

/// One behind the largest number that an entry of `root` begins with.
std::int64_t first_free_number(const fs::path& root) {
  std::int64_t next = 0;
  std::error_code failure;
  for (fs::directory_iterator entry(root, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    std::int64_t number = 0;
    constexpr std::int64_t kMost = 1'000'000'000'000;  // larger ones are not captures' names
    const auto [last, status] =
        std::from_chars(name.data(), name.data() + std::min(name.find('-'), name.size()), number);
    if (status == std::errc{} && number < kMost) next = std::max(next, number + 1);
  }
  require(failure, root, "be read");
  return next;
}

std::int64_t take_number(const fs::path& root) {
  static std::atomic<std::int64_t> next = first_free_number(root);
  return next++;
}

}  // namespace

CaseWriter::CaseWriter(fs::path root, std::string_view op) : root_(std::move(root)), op_(op) {
  std::error_code failure;
  fs::create_directories(root_, failure);
  require(failure, root_, "be created");
  number_ = take_number(root_);
  do {
    staging_ = files::unpredictable(root_ / fmt::format(".{:04}-{}", number_, op_));
  } while (!fs::create_directory(staging_, failure) && !failure);
  require(failure, staging_, "be created");
}

CaseWriter::~CaseWriter() {
  std::error_code ignored;
  if (!staging_.empty()) fs::remove_all(staging_, ignored);
}

void CaseWriter::add(std::string_view name, const npy::NpyArray& array) const {
  npy::write_npy(staging_ / fmt::format("{}.npy", name), array);
}

fs::path CaseWriter::commit(std::string_view case_json) {
  files::replace_file(staging_ / "case.json", case_json);
  for (;;) {
    fs::path place = root_ / fmt::format("{:04}-{}", number_, op_);
    std::error_code failure;
    fs::rename(staging_, place, failure);
    const bool taken = failure == std::errc::directory_not_empty ||
                       failure == std::errc::file_exists || failure == std::errc::not_a_directory;
    if (!taken) {
      require(failure, place, "be written");
      staging_.clear();
      return place;
    }
    number_ = take_number(root_);  // another process was faster
  }
}

CaseResults::CaseResults(const fs::path& place) : folder_(place / "captured") {
  std::error_code failure;
  fs::create_directories(folder_, failure);
  require(failure, folder_, "be created");
}

void CaseResults::add(std::string_view name, const npy::NpyArray& array) const {
  npy::write_npy(folder_ / fmt::format("{}.npy", name), array);
}

}  // namespace clattn::detail
