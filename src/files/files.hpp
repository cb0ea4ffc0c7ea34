#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

// Files of other processes and users: no more is read than a caller bounds, and what is written
// stands under its own name whole or not at all.

namespace clattn::files {

/// The size of a regular file, the only kind that is read: a pipe or a device could block or never
/// end. Throws kIo naming path and reason.
std::uintmax_t regular_file_size(const std::filesystem::path& path);

/// A whole regular file of at most `limit_bytes`; throws kIo naming it.
std::string read_file(const std::filesystem::path& path, std::uintmax_t limit_bytes);

/// A file that nobody sees before commit() and that is gone if that is not reached, even where the
/// process is ended. File systems that know no files without a name give it one that cannot be
/// guessed. No link is followed. Every failure throws kIo naming `path` and the reason.
class PendingFile {
 public:
  explicit PendingFile(std::filesystem::path path);
  PendingFile(PendingFile&& other) noexcept;
  PendingFile& operator=(PendingFile&&) = delete;
  ~PendingFile();

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Puts it in its place, instead of what is there.
  void commit();

 private:
  std::filesystem::path path_, temporary_;  // no temporary_: the file has no name yet
  int descriptor_ = -1;
};

/// A PendingFile of `head` and `body`, committed.
void replace_file(const std::filesystem::path& path, std::string_view head,
                  std::span<const std::byte> body = {});

/// `path` with a suffix that cannot be guessed, for what is renamed later.
std::filesystem::path unpredictable(const std::filesystem::path& path);

/// Makes the folder, for its owner alone, if it is not there. Whether it is this process's user's
/// and nobody else can write to it.
bool is_private_folder(const std::filesystem::path& folder);

}  // namespace clattn::files
