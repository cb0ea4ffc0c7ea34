#pragma once

#include <optional>

#include "tensors.hpp"

namespace clattn::python {

/// A CommonAttentionMetadata with what keeps the arrays that it looks at.
struct Batch {
  CommonAttentionMetadata common = {};
  std::vector<HostArray> arrays = {};
  nb::object made = {};  ///< an object that holds further ones

  const CommonAttentionMetadata& view() const { return common; }
  /// The array's values, which this keeps.
  template <typename Array>
  auto keep(const Array& array) {
    arrays.push_back(HostArray(array));
    return span_of(array);
  }
  void keep(const RequestLists& lists) {
    lists.give(common);
    for_each_list(
        [this](const auto& array) {
          if (array) arrays.push_back(HostArray(*array));
        },
        lists);
  }
  template <typename T>
  std::span<const T> keep(nb::handle given, const char* name) {
    const auto array = optional_numbers<T>(given, name);
    return array ? keep(*array) : std::span<const T>();
  }
};

/// A batch over the arrays of an object of Python, and of slots that the caller gives.
template <typename Made>
Batch batch_of(const Made& self, nb::handle slots) {
  Batch batch;
  const std::span<const std::int64_t> given = batch.keep<std::int64_t>(slots, "slot_mapping");
  batch.common = self.metadata(given);
  batch.made = nb::find(self);
  return batch;
}

/// A KV cache group's pages with their arrays.
struct Pages {
  GroupPages pages;
  std::vector<HostArray> arrays;
};

/// Python's name of what can be recorded.
inline std::string_view graph_support_name(AttentionCGSupport support) {
  constexpr std::array<std::string_view, 4> kNames = {"never", "uniform_single_token_decode",
                                                      "uniform_batch", "always"};
  return kNames.at(static_cast<std::size_t>(support));
}

}  // namespace clattn::python
