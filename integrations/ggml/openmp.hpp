#pragma once

namespace ggml_clattn {

/// While it lives, the threads with which ggml's CPU backend computes sleep. Between ops GCC's
/// OpenMP lets them wait in a busy loop, on the cores that the threads of a CPU's OpenCL driver
/// need. Does nothing without GCC's OpenMP and inside a parallel region; other runtimes keep their
/// threads.
class OpenMPAsleep {
 public:
  /// Of the calling thread, which has computed with `num_threads`; 0 = unknown, none sleep.
  explicit OpenMPAsleep(int num_threads);
  OpenMPAsleep(const OpenMPAsleep&) = delete;
  OpenMPAsleep& operator=(const OpenMPAsleep&) = delete;
  ~OpenMPAsleep();

 private:
  struct Team;
  Team* team_ = nullptr;
};

}  // namespace ggml_clattn
