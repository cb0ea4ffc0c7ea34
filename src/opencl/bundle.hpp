#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace clattn::detail {

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
