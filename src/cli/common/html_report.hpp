#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace clattn::cli {

/// One self-contained page for a replay's report (to_json()): its numbers and plots over the steps
/// of time, batch, blocks and share of the ceilings. Loads nothing from elsewhere.
std::string to_html(const nlohmann::ordered_json& report);

/// How such pages begin: head with the common style, which follows the reader's light or dark
/// scheme, and heading. `title` is HTML.
std::string html_head(std::string_view title);

}  // namespace clattn::cli
