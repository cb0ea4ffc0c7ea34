#pragma once

#include <filesystem>

#include "cli/common/attention_call.hpp"

namespace clattn::cli {

/// Writes a call as the case directory that `clattn run` reads as the same call, and what the
/// oracle says of it as expected/out.npy and expected/lse.npy, in single precision.
void write_case(const AttentionCall& call, const std::filesystem::path& directory);
/// The same of latent attention: mla_decode, with a request for each query token.
void write_latent_case(const AttentionCall& call, const std::filesystem::path& directory);

}  // namespace clattn::cli
