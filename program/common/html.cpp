#include "program/common/html.hpp"

#include <algorithm>
#include <utility>

#include "program/common/built_in.hpp"

namespace clattn::cli {

std::string escape(std::string_view text) {
  std::string result;
  for (const char c : text) {
    result += c == '<' ? "&lt;" : c == '&' ? "&amp;" : c == '"' ? "&quot;" : std::string(1, c);
  }
  return result;
}

std::string fill(std::string_view file, const std::vector<Filling>& fillings) {
  std::string result;
  std::string_view rest = text_of(page_files(), file);
  for (std::size_t at = rest.find('@'); at != std::string_view::npos; at = rest.find('@')) {
    result += rest.substr(0, at);
    rest.remove_prefix(at + 1);
    const std::size_t end = rest.find('@');
    const auto found = std::ranges::find(fillings, rest.substr(0, end), &Filling::name);
    if (end != std::string_view::npos && found != fillings.end()) {
      result += found->html;
      rest.remove_prefix(end + 1);
    } else {
      result += '@';  // of the page itself, such as @media
    }
  }
  return result.append(rest);
}

std::string html_page(std::string title, std::string body, std::string_view style) {
  return fill("page.html", {{"title", std::move(title)},
                            {"style", fill("page.css") + (style.empty() ? "" : fill(style))},
                            {"body", std::move(body)}});
}

}  // namespace clattn::cli
