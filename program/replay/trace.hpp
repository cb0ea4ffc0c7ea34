#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

namespace clattn::cli {

/// One request as a trace states it.
struct TraceRequest {
  double arrival_s = 0;                  ///< seconds since the first request of the trace
  std::int32_t prompt_tokens = 1;        ///< >= 1
  std::int32_t output_tokens = 1;        ///< >= 1
  std::vector<std::int64_t> hash_ids{};  ///< one id per hash_block_tokens of the prompt, or empty
};

struct Trace {
  std::string source{};                  ///< file name, or the built-in profile's name
  double hash_block_tokens = 512;        ///< prompt tokens that one hash id stands for
  std::int32_t system_prompt = 0;        ///< tokens with which all prompts begin, of the built-in
  std::vector<TraceRequest> requests{};  ///< in order of arrival
};

/// Longest prompt or output that a trace may name; more is taken for a damaged file.
inline constexpr std::int64_t kMaxTraceTokens = 10'000'000;

/// Reads an Azure LLM inference CSV (TIMESTAMP,ContextTokens,GeneratedTokens) or Mooncake JSON
/// lines (timestamp in ms, input_length, output_length, hash_ids); the content shows which. Every
/// line is checked, `max_requests` (0 = all) are kept. Errors read "NAME:LINE: what".
Trace read_trace(std::istream& input, const std::string& name, std::int64_t max_requests = 0);
/// Throws kIo when the file cannot be read.
Trace read_trace_file(const std::string& path, std::int64_t max_requests = 0);

/// Requests of a conversation service: lengths drawn by inverting the published quantiles of the
/// Azure 2023 conversation trace, Poisson arrivals. Prompts begin with `system_prompt` tokens that
/// are the same in all. The same seed gives the same requests on every machine.
Trace make_builtin_trace(std::int64_t num_requests, double requests_per_s, std::uint64_t seed,
                         std::int32_t system_prompt = 0);

/// Multiplies every length by `factor` (> 0), rounded, at least 1; hash blocks shrink with them,
/// but a system prompt is a length.
void scale_lengths(Trace& trace, double factor);

/// A 64-bit mixer (splitmix64's finaliser): well-spread output for consecutive inputs.
std::uint64_t mix64(std::uint64_t value);

}  // namespace clattn::cli
