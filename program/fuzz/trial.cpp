#include "program/fuzz/trial.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <clattn/config_fields.hpp>
#include <clattn/error.hpp>
#include <limits>
#include <utility>

namespace clattn::cli {
namespace {

FuzzResult failure(std::string why, std::vector<LaunchReport> launches = {},
                   double severity = std::numeric_limits<double>::infinity()) {
  return {FuzzState::kFailed, std::move(why), severity, std::move(launches)};
}

FuzzResult judge(const Recipe& recipe, const AttentionCall& call, const AttentionOutcome& outcome) {
  const bool stores = !call.key.empty() && !call.config.contiguous_kv() &&
                      recipe.order != CacheOrder::kLatent && call.num_blocks > 0;
  if (stores && !judge_cache(call, outcome, expected_cache(call)).passed())
    return failure("the cache holds other bytes", outcome.launches);
  const Deviation deviation = judge_output(call, outcome, oracle_result(call));
  if (deviation.passed() || call.num_tokens() == 0) return {.launches = outcome.launches};
  if (deviation.compared == 0) return failure("the output has another size", outcome.launches);
  return failure(fmt::format("{:.3g} times the allowed error", deviation.worst_share),
                 outcome.launches, deviation.worst_share);
}

}  // namespace

std::string_view refused_field(std::string_view message) {
  // A message of the selector lists the whole configuration first.
  constexpr std::string_view kReasons = "Reasons: ";
  if (const auto reasons = message.find(kReasons); reasons != std::string_view::npos)
    message.remove_prefix(reasons + kReasons.size());
  static const std::vector<std::string_view> all_fields = [] {
    std::vector<std::string_view> fields = {
        "Head size",     "Block size",   "kv_lora_rank",  "layout",
        "kernel family", "of family",    "num_splits",    "split_policy",
        "fast_build",    "side_by_side", "max_model_len", "max_num_batched_tokens",
        "max_num_reqs"};
    for_each_field([&](const auto& row) { fields.push_back(row.name); });
    return fields;
  }();
  const auto place = [&](std::string_view field) { return message.find(field); };
  const std::string_view first = std::ranges::min(all_fields, {}, place);
  return place(first) == std::string_view::npos ? "" : first;
}

FuzzResult try_recipe(const Recipe& recipe, const Execute& execute) {
  try {
    const AttentionCall call = make_call(recipe);
    return judge(recipe, call, execute(recipe, call));
  } catch (const Error& error) {
    const std::string_view field = refused_field(error.what());
    if (error.code() == ErrorCode::kUnsupported && !field.empty())
      return {.state = FuzzState::kRefused, .why = std::string(field)};
    return failure(error.what());
  }
}

}  // namespace clattn::cli
