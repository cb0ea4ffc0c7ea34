#pragma once

#include <clattn/context.hpp>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/check_plan.hpp"
#include "cli/check_report.hpp"

namespace clattn::cli {

/// The backends that take a configuration on a device, of all or (unless empty) of one name.
std::vector<const AttentionBackend*> usable_backends(const DeviceCapabilities& capabilities,
                                                     const AttentionConfig& config,
                                                     std::string_view only_backend);

/// Why none of them takes it: the reasons of the first, for what they share is the same in all.
std::string refusal_of(const DeviceCapabilities& capabilities, const AttentionConfig& config,
                       std::string_view only_backend);

/// Has the kernels made that these backends run a configuration with.
void compile_attention(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                       std::string_view only_backend);

/// Attention over paged caches, through every backend and layout: each kind of batch with each pair
/// of types, then each option that a layer may add.
void plan_attention(const std::shared_ptr<Context>& context, std::string_view only_backend,
                    CheckReport& report, CheckPlan& plan);

}  // namespace clattn::cli
