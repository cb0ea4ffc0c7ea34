#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace clattn::cli {

/// Text as HTML has it.
std::string escape(std::string_view text);

/// HTML that takes the place of "@name@".
struct Filling {
  std::string_view name;
  std::string html;
};
/// The file of program/html/ with its places filled.
std::string fill(std::string_view file, const std::vector<Filling>& fillings = {});

/// A whole page, which loads nothing from elsewhere and follows the reader's light or dark scheme;
/// `style`: a file of further rules, if any.
std::string html_page(std::string title, std::string body, std::string_view style = {});

}  // namespace clattn::cli
