#include "program/common/html.hpp"
#include "program/replay/report.hpp"

namespace clattn::cli {

std::string to_html(const nlohmann::ordered_json& report, std::string_view text) {
  std::string data = report.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  // Inside a script element only "<" could end it; in JSON it occurs in strings alone.
  for (std::size_t at = data.find('<'); at != std::string::npos; at = data.find('<', at)) {
    data.replace(at, 1, "\\u003c");
  }
  return html_page("clattn replay",
                   fill("replay.html",
                        {{"text", escape(text)}, {"report", data}, {"script", fill("replay.js")}}));
}

}  // namespace clattn::cli
