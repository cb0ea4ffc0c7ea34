#pragma once

#include <ggml.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cpu.hpp"
#include "engine.hpp"
#include "settings.hpp"

namespace ggml_clattn {

/// Decides who computes an op, CLAttn or ggml's CPU backend, and counts. Thread-safe.
class Attention {
 public:
  /// Throws what Engine() and read_settings() throw.
  Attention();
  const Settings& settings() const noexcept { return settings_; }
  const Engine& engine() const noexcept { return engine_; }
  /// Whether ggml should bring the FLASH_ATTN_EXT here. So it should where all of a cache is
  /// attended to, even if CLAttn will hand the op on: llama.cpp asks about such an op whether flash
  /// attention is possible at all, and switches it off if the answer names another device.
  bool takes(const ggml_tensor* node);
  /// Computes it, or lets `cpu` do so.
  ggml_status compute(ggml_tensor* node, Cpu& cpu);
  /// How many ops CLAttn has computed.
  long num_computed();
  /// Who computed how many ops, and why not CLAttn; a line each.
  std::string counts();

 private:
  /// Why CLAttn leaves the op to ggml, as far as its shapes say; empty = it does not.
  std::string refusal(const Op& op);
  void count(const std::string& reason);

  Settings settings_;
  Engine engine_;
  std::mutex mutex_;
  std::map<std::string, long> handed_on_;  ///< by reason
  long computed_ = 0;
};

}  // namespace ggml_clattn
