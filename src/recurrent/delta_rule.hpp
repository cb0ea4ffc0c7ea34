#pragma once

#include <clattn/recurrent.hpp>

#include "recurrent/bind.hpp"

namespace clattn::detail {

/// Where decays come from: CLA_GATES of kernels_cl/recurrent/gates.clh.
enum class GateSource : int { kGiven = 0, kRaw = 1, kStep = 2, kConstant = 3 };

/// A call of the loop or of chunks, whatever layer it is for: checked tensors in `terms`, buffers,
/// and what is compiled in.
struct DeltaRuleCall {
  ClaDeltaRule terms{};
  cl_mem query = nullptr, key = nullptr, value = nullptr, out = nullptr;
  cl_mem decay = nullptr, beta = nullptr, z = nullptr;
  Buffer a_log, dt_bias, d;
  GateSource gates = GateSource::kGiven;
  DType dtype = DType::kBF16, gate_dtype = DType::kF32;
  RecurrentRule rule = RecurrentRule::kDelta;
  std::int32_t num_k_heads = 1, num_v_heads = 1, head_k_dim = 128, head_v_dim = 128;
  bool by_channel = false, lower_bound = false, l2_norm = false, softplus = false;
  bool in_chunks = false;  ///< prompts
  KernelFamily kernel_family = KernelFamily::kGpu;
  bool aligned_keys = false;  ///< rows of query and key begin at multiples of 16 bytes
};

/// Whether a family is of matrix units, which take less than the rule's other kernels.
constexpr bool on_units_alone(KernelFamily family) {
  return family == KernelFamily::kGpuPtx || family == KernelFamily::kGpuMatrix;
}
/// Throws kInvalidArgument for heads, sizes and types that no kernel takes.
void check_heads(const RecurrentCall& call, const DeltaRuleCall& rule);
/// Whether chunks of the rule round operands of products. Builds the kernel.
bool rounds_in_chunks(const Context& context, const DeltaRuleCall& rule);
/// Checks the states, binds and enqueues. The tensors of `rule` were checked.
void run_delta_rule(const RecurrentCall& call, DeltaRuleCall& rule, const StateView& states,
                    Event* event);

}  // namespace clattn::detail
