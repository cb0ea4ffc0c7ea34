#pragma once

#include <clattn/context.hpp>
#include <nlohmann/json.hpp>

namespace clattn::cli {

/// The capability record as reports carry it: sizes in bytes.
nlohmann::json capabilities_json(const DeviceCapabilities& capabilities);

}  // namespace clattn::cli
