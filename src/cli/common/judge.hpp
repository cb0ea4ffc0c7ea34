#pragma once

#include "cli/common/attention_call.hpp"
#include "cli/common/verify.hpp"

// Outcomes of calls against the oracle.

namespace clattn::cli {

/// The outputs of a call, in its own type and (under config.output_fp8) as fp8. A call that ran as
/// a cascade may also be off by the rounding of its levels to the output's type, and one on matrix
/// units that flush f16 by what they leave out.
Deviation judge_output(const AttentionCall& call, const AttentionOutcome& outcome,
                       const oracle::AttentionResult& truth);

/// Every byte of the cache after the call's keys and values were stored.
Deviation judge_cache(const AttentionOutcome& outcome, const LogicalCache& expected);

/// What a call's outputs should be.
oracle::AttentionResult oracle_result(const AttentionCall& call);

}  // namespace clattn::cli
