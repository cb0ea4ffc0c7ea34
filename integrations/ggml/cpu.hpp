#pragma once

#include <ggml-backend.h>
#include <ggml.h>

namespace ggml_clattn {

/// A CPU backend of ggml of its own, for ops that are handed on: they give its bits. Made when it
/// is first needed. For one thread at a time.
class Cpu {
 public:
  Cpu() = default;
  Cpu(const Cpu&) = delete;
  Cpu& operator=(const Cpu&) = delete;
  ~Cpu();
  /// Threads of the ops that follow; until then ggml's default.
  void set_num_threads(int num_threads);
  /// What was set; 0 = nothing yet.
  int num_threads() const noexcept { return num_threads_; }
  ggml_status compute(ggml_tensor* node);

 private:
  ggml_backend_t backend_ = nullptr;
  int num_threads_ = 0;
};

/// Whether ggml's CPU backend computes the op.
bool cpu_supports(const ggml_tensor* op);

}  // namespace ggml_clattn
