#include <string_view>

#include "program/bench/report.hpp"

namespace clattn::cli {

std::string report_text(const nlohmann::ordered_json& report) {
  using Json = nlohmann::ordered_json;
  const auto line = [](const Json& value) {
    return value.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  std::string text;
  for (const auto& [name, value] : report.items()) {
    text += (text.empty() ? "{\n" : ",\n") + line(name) + ": ";
    if (name != "rows" || value.empty()) {
      text += line(value);
      continue;
    }
    std::string_view before = "[\n";
    for (const Json& row : value) {
      text.append(before) += line(row);
      before = ",\n";
    }
    text += "\n]";
  }
  return text + "\n}\n";
}

}  // namespace clattn::cli
