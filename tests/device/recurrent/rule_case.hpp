#pragma once

#include <clattn/recurrent.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oracle/recurrent.hpp"

/// A call of a recurrent layer made up at random, run on a device and judged by the oracle. Pages
/// that no request may read are NaN, so are the gaps between pages; outputs are filled with a
/// pattern and stand apart.
namespace recurrent_test {

struct Request {
  std::int32_t tokens = 1;
  bool initial = true;
  std::int32_t accepted = -1;                        ///< < 0: no drafts
  std::vector<std::int32_t> pages = {};              ///< by columns; empty = pages of its own
  std::optional<std::uint32_t> seed = std::nullopt;  ///< equal seeds: equal tensors and states
  std::int32_t passed = 0;  ///< tokens of an earlier step, which come first of the seed
};

enum class Gates { kGiven, kRaw, kBounded };
/// What tensors are filled with.
enum class Fill {
  kRandom,
  kNoDecay,
  kEqualKeys,
  kAlternatingKeys,
  kAligned,      ///< keys of one direction, beta 0.998, values of one sign
  kStrongDecay,  ///< g in -40 … -5
  kOneErasure,   ///< g near 0, but -200 at one token of each 16
  kErasure,      ///< g = -1e4
  kZeroKeys,
  kZeroQueries,
  kHugeKeys,     ///< 65504
  kBetaOfTwo,    ///< up to 2
  kHugeValues,   ///< of 1e6: a state in f16 overflows
  kExtremeGates  ///< a at 20, where softplus becomes its argument, and +-100; b +-100
};

struct RuleSpec {
  std::int32_t num_k_heads = 2, num_v_heads = 4, head_k_dim = 64, head_v_dim = 64;
  clattn::DType dtype = clattn::DType::kF32, state_dtype = clattn::DType::kF32;
  clattn::DType gate_dtype = clattn::DType::kF32;
  Gates gates = Gates::kGiven;
  bool by_channel = false, additive = false, l2_norm = true, dt_bias = true;
  bool in_chunks = false;
  bool recorded = false;  ///< the call is recorded and replayed
  clattn::KernelFamily family = clattn::KernelFamily::kAuto;
  Fill fill = Fill::kRandom;
  std::int64_t before = 8;                  ///< elements of a row before its query
  std::int32_t columns = 1, num_pages = 0;  ///< 0: those that requests need and two more
  std::int32_t null_block_id = -1;
  std::vector<Request> requests = {{}};
  std::uint32_t seed = 1;
  std::vector<double> states = {};  ///< of all pages; empty: made up
};

/// Tensors of a call, as they are stored.
struct RuleTensors {
  oracle::DeltaRuleCase truth;
  std::vector<double> a, b, a_log, dt_bias;
};
RuleTensors make_tensors(const RuleSpec& spec);

struct RuleResult {
  oracle::Verdict out, states;
  std::vector<double> values, pages;  ///< out, states
  std::string fault;                  ///< what was touched that must not be; empty: nothing
};
RuleResult run_rule(const clattn::Context& context, const RuleSpec& spec);

/// kAuto, and each family with which the device computes the call's chunks differently.
std::vector<clattn::KernelFamily> families(const clattn::Context& context, const RuleSpec& spec);

/// Whether the device rounds operands of the call's chunks to its type.
bool rounds_products(const clattn::Context& context, const RuleSpec& spec);

/// "" or why the result is wrong; `rms`: the largest legal one.
std::string problem(const RuleResult& result, double rms = 1.5);

}  // namespace recurrent_test
