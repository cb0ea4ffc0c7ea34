#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/run/case_file.hpp"

namespace clattn::cli {

/// Compares outputs with what the captured call gave, the arrays of `directory`, bit for bit:
/// {"out": {"elements": 128, "different": 0}, …}. Outputs in single precision stand for the call's
/// own 16-bit ones. NaNs are equal. Throws kInvalidArgument for an array that the operation does
/// not give, or gives in another shape or type.
nlohmann::json compare_with_captured(const CaseOutputs& outputs,
                                     const std::filesystem::path& directory);

}  // namespace clattn::cli
