#pragma once

#include <clattn/context.hpp>
#include <memory>
#include <string_view>

namespace clattn::cli {

/// Runs every kernel variant of every family that the device takes and prints a line of error and
/// latency for each. Returns whether all passed; a variant that was built but never ran does not.
bool check_variants(const std::shared_ptr<Context>& context, std::string_view only_backend);

}  // namespace clattn::cli
