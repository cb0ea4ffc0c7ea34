#include <algorithm>
#include <charconv>
#include <clattn/layer.hpp>
#include <optional>

#include "base/error.hpp"

namespace clattn {

Attention* LayerRegistry::find(std::string_view name) const noexcept {
  const auto found = std::ranges::find_if(
      layers_, [&](const Attention* layer) { return layer->layer_name() == name; });
  return found == layers_.end() ? nullptr : *found;
}

std::int32_t extract_layer_index(std::string_view layer_name) {
  std::optional<std::int32_t> index;
  std::string_view rest = layer_name;
  while (true) {
    const std::string_view part = rest.substr(0, rest.find('.'));
    std::int32_t value = 0;
    const char* end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data(), end, value);
    if (!part.empty() && error == std::errc{} && stop == end) {
      if (index) detail::throw_invalid("layer name {} should only contain one integer", layer_name);
      index = value;
    }
    if (part.size() == rest.size()) break;
    rest.remove_prefix(part.size() + 1);
  }
  if (!index) detail::throw_invalid("layer name {} should only contain one integer", layer_name);
  return *index;
}

}  // namespace clattn
