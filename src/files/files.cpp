#include "files/files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <clattn/error.hpp>
#include <fstream>
#include <random>
#include <system_error>
#include <utility>

namespace clattn::files {
namespace {

namespace fs = std::filesystem;

constexpr mode_t kAsUmaskHasIt = 0666;
constexpr const char* kOwnDescriptors = "/proc/self/fd";

[[noreturn]] void fail(const fs::path& path, std::string_view why) {
  throw Error(ErrorCode::kIo, fmt::format("{}: {}", path.string(), why));
}

[[noreturn]] void fail_writing(const fs::path& path) {
  fail(path, fmt::format("cannot be written: {}", std::generic_category().message(errno)));
}

}  // namespace

std::uintmax_t regular_file_size(const fs::path& path) {
  std::error_code failure;
  const fs::file_type type = fs::status(path, failure).type();
  if (type == fs::file_type::not_found) fail(path, "no such file");
  if (type == fs::file_type::none) fail(path, failure.message());
  if (type == fs::file_type::directory) fail(path, "a folder; expected a file");
  if (type != fs::file_type::regular) fail(path, "neither a file nor a link to one");
  const std::uintmax_t size = fs::file_size(path, failure);
  if (failure) fail(path, failure.message());
  return size;
}

std::string read_file(const fs::path& path, std::uintmax_t limit_bytes) {
  regular_file_size(path);  // throws the reason; opening a pipe would block
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file.tellg();  // of the open file: the path may be replaced meanwhile
  if (size < 0) fail(path, "cannot be read");
  if (std::cmp_greater(size, limit_bytes))
    fail(path, fmt::format("larger than the {} bytes accepted here", limit_bytes));
  std::string text(static_cast<std::size_t>(size), '\0');
  if (!file.seekg(0).read(text.data(), size)) fail(path, "cannot be read");
  return text;
}

fs::path unpredictable(const fs::path& path) {
  std::random_device random;
  return fmt::format("{}.{:08x}{:08x}.tmp", path.string(), random(), random());
}

PendingFile::PendingFile(fs::path path) : path_(std::move(path)) {
  const fs::path folder = path_.has_parent_path() ? path_.parent_path() : ".";
  if (::access(kOwnDescriptors, X_OK) == 0) {  // by which such a file gets its name
    descriptor_ = ::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, kAsUmaskHasIt);
    if (descriptor_ >= 0) return;
  }
  fs::path temporary = unpredictable(path_);
  descriptor_ = ::open(temporary.c_str(), O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC,
                       kAsUmaskHasIt);
  if (descriptor_ < 0) fail_writing(path_);
  temporary_ = std::move(temporary);
}

PendingFile::PendingFile(PendingFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      descriptor_(std::exchange(other.descriptor_, -1)) {
  other.temporary_.clear();
}

PendingFile::~PendingFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void PendingFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) fail_writing(path_);
    if (written > 0) bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void PendingFile::commit() {
  if (temporary_.empty()) {
    const std::string self = fmt::format("{}/{}", kOwnDescriptors, descriptor_);
    fs::path temporary = unpredictable(path_);
    if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, temporary.c_str(), AT_SYMLINK_FOLLOW) != 0)
      fail_writing(path_);
    temporary_ = std::move(temporary);
  }
  // A failed write may be reported only by these two. After a power cut the name must not stand for
  // an empty file.
  if (::fsync(descriptor_) != 0) fail_writing(path_);
  if (::close(std::exchange(descriptor_, -1)) != 0) fail_writing(path_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_writing(path_);
  temporary_.clear();
}

void replace_file(const fs::path& path, std::string_view head, std::span<const std::byte> body) {
  PendingFile file(path);
  file.write(head);
  file.write(body);
  file.commit();
}

bool is_private_folder(const fs::path& path) {
  const fs::path folder = path.has_filename() ? path : path.parent_path();  // "a/" is "a"
  std::error_code ignored;
  if (folder.has_parent_path()) fs::create_directories(folder.parent_path(), ignored);
  ::mkdir(folder.c_str(), S_IRWXU);
  struct stat status {};
  return ::stat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
         status.st_uid == ::geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

}  // namespace clattn::files
