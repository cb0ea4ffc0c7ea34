#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

// Safe file access where other processes and users may interfere: reads are bounded by the caller,
// and a file appears under its name only when it is completely written.

namespace clattn::files {

/// The size in bytes of a regular file. Throws kIo naming path and reason for anything else: a pipe
/// or a device could block or never end.
std::uintmax_t regular_file_size(const std::filesystem::path& path);

/// The content of a regular file of at most `limit_bytes`; throws kIo naming path and reason.
std::string read_file(const std::filesystem::path& path, std::uintmax_t limit_bytes);

/// A file that is invisible until commit() and vanishes without it, even if the process is killed.
/// Where the file system has no unnamed files (O_TMPFILE), it has an unpredictable temporary name
/// instead. Links are not followed. Every failure throws kIo naming `path` and the reason.
class PendingFile {
 public:
  explicit PendingFile(std::filesystem::path path);
  PendingFile(PendingFile&& other) noexcept;
  PendingFile& operator=(PendingFile&&) = delete;
  ~PendingFile();

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Moves the file to `path`, replacing what is there.
  void commit();

 private:
  std::filesystem::path path_, temporary_;  // no temporary_: the file has no name yet
  int descriptor_ = -1;
};

/// Writes `head` and `body` to a PendingFile and commits it.
void replace_file(const std::filesystem::path& path, std::string_view head,
                  std::span<const std::byte> body = {});

/// `path` with an unpredictable suffix, for a file that is renamed later.
std::filesystem::path unpredictable(const std::filesystem::path& path);

/// Creates the folder with mode 0700 if it does not exist. Returns whether it belongs to this
/// process's user and nobody else can write to it.
bool is_private_folder(const std::filesystem::path& folder);

}  // namespace clattn::files
