#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace clattn::detail {

/// A file of kernels_cl/ as the build embedded it; `path` is relative to that folder.
struct EmbeddedFile {
  std::string_view path;
  const unsigned char* bytes;
  std::size_t size;
};
std::span<const EmbeddedFile> embedded_kernels();

/// The text of a kernel file by its path below kernels_cl/, nothing when there is no such file.
using ReadKernelFile = std::function<std::optional<std::string>(const std::string& path)>;

/// A kernel file with every `#include "…"` replaced by the text it names, and where each line came
/// from.
struct FlatSource {
  struct Origin {
    std::uint32_t file;  ///< index in `files`
    std::uint32_t line;  ///< from 1
  };
  std::string text;
  std::vector<std::string> files;
  std::vector<Origin> lines;  ///< of line i + 1 of `text`
};

/// Flattens `file`. An include is looked up in the includer's folder, then in the root; every file
/// counts once, as under `#pragma once`. Throws kIo for a missing file and kInvalidArgument for a
/// cycle, naming file and line. `unit` is the file that `#include "tile/unit.clh"` means.
FlatSource flatten_source(const std::string& file, const ReadKernelFile& read,
                          std::string_view unit = {});

/// A compiler's log about `source.text` with each position in it (`<kernel>:5:40`,
/// `/tmp/x/input.cl:5:40`, `1:5:40`, …) replaced by our own file and line. Positions in headers of
/// the compiler and text that is no position stay.
std::string rewrite_build_log(std::string_view log, const FlatSource& source);

/// The embedded kernel files, each replaced by the file of the same relative path in `kernel_dir`
/// where there is one. Throws kIo when `kernel_dir` is given and is no folder.
ReadKernelFile kernel_file_reader(const std::string& kernel_dir);

/// A flattened kernel file and the options that it would be built with alone.
struct BundlePart {
  std::string text;
  std::string options;  ///< "-DCLA_HEAD_DIM=128 …"
};

/// The parts as one source that needs no options: macros are defined before their part, and every
/// name of ours (cla_, Cla, CLA_, CLATTN_; clattn_ as bundled_entry() does) gets the number of its
/// part, so that no two parts share one. Nothing where an option is no macro.
std::optional<std::string> bundle_sources(std::span<const BundlePart> parts);

/// What a part calls its entry: clattn_copy_2 in part 2.
std::string bundled_entry(std::string_view entry, std::size_t part);

}  // namespace clattn::detail
