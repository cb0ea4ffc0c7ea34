#pragma once

#include <clattn/log.hpp>
#include <functional>
#include <string>
#include <vector>

namespace clattn::detail {

/// Every environment variable that the library reads: once per process, here and nowhere else.
/// Unset = empty. A process with more privileges than its caller (set-user-ID, set-group-ID, file
/// capabilities) reads none of them, because several name code that it would execute.
struct Environment {
  std::string device;           ///< CLATTN_DEVICE: selector of select_device()
  std::string backend;          ///< CLATTN_BACKEND: name forced in get_attn_backend()
  std::string kv_cache_layout;  ///< CLATTN_KV_CACHE_LAYOUT: answer of get_kv_cache_layout()
  std::string kernel_dir;   ///< CLATTN_KERNEL_DIR: kernel sources that replace the embedded ones
  std::string cache_dir;    ///< CLATTN_CACHE_DIR, else XDG's cache folder; empty = no cache
  std::string capture_dir;  ///< CLATTN_CAPTURE_DIR: calls are written there as cases; empty = not
  std::vector<std::string> plugins;  ///< CLATTN_PLUGINS: paths of backend plugins, ':' between them
  float q_scale_constant = 200;      ///< CLATTN_Q_SCALE_CONSTANT: calc_kv_scales() divides the
  float k_scale_constant = 200;      ///< CLATTN_K_SCALE_CONSTANT: largest magnitudes of a layer's
  float v_scale_constant = 100;      ///< CLATTN_V_SCALE_CONSTANT: first tensors by these
  bool amx_enabled = true;           ///< CLATTN_AMX=0 (or off): tiles are not asked for
  bool debug = false;                ///< CLATTN_DEBUG=1 (or on): misuse that costs time to find
  bool cache_enabled = true;         ///< CLATTN_CACHE=0 (or off) turns the disk cache off
  std::string tuning_file;           ///< CLATTN_TUNING_FILE, else in XDG's; empty = none
  LogLevel log_level = LogLevel::kOff;  ///< CLATTN_LOG=info, debug or trace
  /// Nothing in POCL_WORK_GROUP_METHOD and POCL_WORK_GROUP_SPECIALIZATION: PoCL compiles groups of
  /// one work-item as it does unasked, which its versions 5 and 6 survive with inline assembly.
  bool pocl_defaults = true;
  bool tuning_enabled = true;  ///< CLATTN_TUNING=0 (or off): the user's tuning file is not used
};
const Environment& environment();

/// What environment() makes of the variables that `get` answers (null = unset). Throws
/// kInvalidArgument naming the variable, its value and what is legal.
Environment parse_environment(const std::function<const char*(const char*)>& get);

}  // namespace clattn::detail
