#pragma once

// For engines that read the XFORMERS backend's block tables. Its kernels are those of every other
// built-in backend; what differs is the metadata's form and what is refused.

#include <clattn/compat/batch_view.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>
#include <string_view>

namespace CLATTN_API clattn {

/// What the XFORMERS backend's builder makes (metadata_as<XFormersMetadata>() of its build()). Host
/// arrays, valid until the next build().
class XFormersMetadata : public BatchMetadata {
 public:
  static constexpr std::string_view kBackend = "XFORMERS";  ///< for metadata_as()

  /// One side of the batch.
  struct View : BatchView {
    std::span<const std::int32_t> block_table = {};  ///< [num_reqs, block_table_stride]
  };

  std::span<const std::int32_t>
      block_table;  ///< [num_reqs, block_table_stride]; 0 past a request's last page
  std::int64_t block_table_stride = 0;  ///< most pages of any request of the batch

  /// The decodes. Throws kUnsupported if they and the prefills are interleaved.
  View decode_metadata() const { return with_table(decodes(), decodes_at_); }
  /// The prefills. Throws as decode_metadata().
  View prefill_metadata() const { return with_table(prefills(), prefills_at_); }

 private:
  View with_table(const BatchView& side, std::int32_t first) const {
    return {side, rows(block_table, first, side.num_reqs, block_table_stride)};
  }
};

}  // namespace clattn
