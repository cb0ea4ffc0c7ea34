#include "attention.hpp"

#include <exception>

#include "openmp.hpp"

namespace ggml_clattn {

Attention::Attention() : settings_(read_settings()) {}

std::string Attention::refusal(const Op& op) {
  if (op.keys < settings_.min_keys) return "fewer keys than CLATTN_GGML_MIN_KEYS";
  if (!op.refusal.empty()) return op.refusal;
  return engine_.refusal(op);
}

bool Attention::takes(const ggml_tensor* node) try {
  const Op op = read_op(*node);
  const ggml_tensor* const cache = op.key->view_src;
  if (cache == nullptr || op.keys >= cache->ne[1]) return cpu_supports(node);
  return refusal(op).empty();
} catch (const std::exception& error) {
  log_warning(std::string("leaves attention to ggml: ") + error.what());
  return false;
}

ggml_status Attention::compute(ggml_tensor* node, Cpu& cpu) {
  std::string reason;
  try {
    const Op op = read_op(*node);
    reason = refusal(op);
    if (reason.empty()) {
      const OpenMPAsleep asleep(cpu.num_threads());
      reason = engine_.compute(op);
    }
  } catch (const std::exception& error) {
    reason = error.what();
  }
  count(reason);
  return reason.empty() ? GGML_STATUS_SUCCESS : cpu.compute(node);
}

void Attention::count(const std::string& reason) {
  const std::scoped_lock lock(mutex_);
  if (reason.empty()) {
    if (computed_++ == 0) log_info("computes attention on " + engine_.device_name());
    return;
  }
  if (handed_on_[reason]++ == 0) log_info("hands attention on to ggml's CPU backend: " + reason);
}

long Attention::num_computed() {
  const std::scoped_lock lock(mutex_);
  return computed_;
}

std::string Attention::counts() {
  const std::scoped_lock lock(mutex_);
  long total = 0;
  std::string reasons;
  for (const auto& [reason, number] : handed_on_) {
    total += number;
    reasons += "CLAttn: " + std::to_string(number) + " handed on: " + reason + "\n";
  }
  return "CLAttn: computed " + std::to_string(computed_) + ", handed on " + std::to_string(total) +
         " calls of FLASH_ATTN_EXT\n" + reasons;
}

}  // namespace ggml_clattn
