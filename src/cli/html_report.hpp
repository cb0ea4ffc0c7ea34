#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace clattn::cli {

/// One self-contained page for a replay's report (to_json()): its numbers and plots over the steps
/// of time, batch, blocks and share of the ceilings. Loads nothing from elsewhere.
std::string to_html(const nlohmann::ordered_json& report);

}  // namespace clattn::cli
