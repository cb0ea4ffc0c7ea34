#pragma once

#include <clattn/context.hpp>
#include <memory>
#include <string_view>
#include <vector>

#include "cli/attention_call.hpp"

namespace clattn::cli {

/// The backends that take a configuration on a device, of all or (unless empty) of one name.
std::vector<const AttentionBackend*> usable_backends(const DeviceCapabilities& capabilities,
                                                     const AttentionConfig& config,
                                                     std::string_view only_backend);

/// Runs every kernel variant of every family that the device takes and prints a line of error and
/// latency for each. Returns whether all passed; a variant that was built but never ran does not.
bool check_variants(const std::shared_ptr<Context>& context, std::string_view only_backend);

}  // namespace clattn::cli
