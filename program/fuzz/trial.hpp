#pragma once

#include <functional>
#include <string>
#include <vector>

#include "program/common/attention_call.hpp"
#include "program/fuzz/recipe.hpp"

namespace clattn::cli {

/// What runs a call: a device, or in tests what stands for a faulty one.
using Execute = std::function<AttentionOutcome(const Recipe& recipe, const AttentionCall& call)>;

enum class FuzzState : std::uint8_t { kPassed, kRefused, kFailed };

/// What came of one call.
struct FuzzResult {
  FuzzState state = FuzzState::kPassed;
  std::string why = {};  ///< what is wrong with it; of a refusal the field that is named
  /// Largest error as a share of what is allowed; infinite for a NaN, wrong bytes and exceptions.
  double severity = 0;
  std::vector<LaunchReport> launches = {};
};

/// Makes the call of a recipe, runs it and judges it by the oracle. A refusal must be kUnsupported
/// and name a field; whatever else is thrown is a failure.
FuzzResult try_recipe(const Recipe& recipe, const Execute& execute);

/// The field or option that the message of a refusal names; empty = none.
std::string_view refused_field(std::string_view message);

}  // namespace clattn::cli
