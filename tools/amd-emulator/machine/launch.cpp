#include "machine/launch.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "machine/float_mode.hpp"
#include "machine/settings.hpp"
#include "machine/start_wave.hpp"
#include "machine/wave.hpp"

namespace amdemu {
namespace {

std::atomic<std::uint64_t> total_instructions{0};

/// What a host thread keeps from group to group.
struct Store {
  std::vector<std::unique_ptr<Wave>> waves;
  std::vector<std::uint32_t> local;
  std::vector<unsigned char> scratch;
};
thread_local Store store;

class Runner {
 public:
  explicit Runner(const Launch& launch)
      : launch_(launch), arguments_(launch), start_(launch, arguments_) {
    for (int d = 0; d < 3; ++d) groups_[d] = launch.global[d] / launch.local[d];
  }

  std::string run() {
    const std::uint64_t total = groups_[0] * groups_[1] * groups_[2];
    const auto threads = std::min<std::uint64_t>(total, settings().threads);
    std::atomic<std::uint64_t> next{0};
    const auto work = [&] {
      const HostFloatMode restored;
      try {
        while (!failed_.load(std::memory_order_relaxed)) {
          const std::uint64_t at = next.fetch_add(1);
          if (at >= total) return;
          run_group(at);
        }
      } catch (const Fault& fault) {
        const std::lock_guard guard(error_lock_);
        if (!failed_.exchange(true)) error_ = fault.what;
      }
    };
    std::vector<std::thread> pool;
    for (std::uint64_t t = 1; t < threads; ++t) pool.emplace_back(work);
    work();
    for (std::thread& thread : pool) thread.join();
    return error_;
  }

 private:
  void run_group(std::uint64_t at) {
    Group group;
    group.id[0] = static_cast<std::uint32_t>(at % groups_[0]);
    group.id[1] = static_cast<std::uint32_t>(at / groups_[0] % groups_[1]);
    group.id[2] = static_cast<std::uint32_t>(at / groups_[0] / groups_[1]);
    const std::uint32_t count = start_.waves_of_group();
    while (store.waves.size() < count) store.waves.push_back(std::make_unique<Wave>());
    store.local.assign(start_.local_bytes() / 4 + 1, settings().poison);
    group.local = reinterpret_cast<unsigned char*>(store.local.data());
    group.local_bytes = start_.local_bytes();
    const std::size_t per_wave = start_.scratch_bytes_of_wave();
    if (store.scratch.size() < per_wave * count) store.scratch.resize(per_wave * count);
    for (std::uint32_t n = 0; n < count; ++n)
      start_.wave(*store.waves[n], group, n, store.scratch.data() + per_wave * n);
    take_turns(count, at);
  }

  /// A wave runs until its slice is over, it comes to a barrier or it ends.
  void take_turns(std::uint32_t count, std::uint64_t seed) {
    std::vector<std::uint32_t> order(count);
    std::iota(order.begin(), order.end(), 0U);
    if (settings().order == WaveOrder::kReverse) std::reverse(order.begin(), order.end());
    std::minstd_rand random(static_cast<unsigned>(seed + 1));
    std::uint64_t executed = 0;
    for (std::uint32_t left = count; left > 0 && !failed_.load(std::memory_order_relaxed);) {
      if (settings().order == WaveOrder::kRandom) std::shuffle(order.begin(), order.end(), random);
      bool ran = false;
      for (const std::uint32_t n : order) {
        Wave& w = *store.waves[n];
        if (w.state != Wave::kRunning) continue;
        ran = true;
        executed += run_slice(w);
        if (w.state == Wave::kDone) --left;
      }
      if (ran) continue;
      for (const std::uint32_t n : order) {  // every wave that is left waits at the barrier
        Wave& w = *store.waves[n];
        if (w.state == Wave::kAtBarrier) w.state = Wave::kRunning;
      }
    }
    total_instructions.fetch_add(executed, std::memory_order_relaxed);
  }

  std::uint32_t run_slice(Wave& w) const {
    const std::vector<Instruction>& code = launch_.image->code;
    const auto size = static_cast<std::int32_t>(code.size());
    const std::uint32_t slice = settings().slice;
    HostFloatMode::set(w.mode);
    std::uint32_t n = 0;
    for (; n < slice && w.state == Wave::kRunning; ++n) {
      if (w.pc < 0 || w.pc >= size) throw Fault{"ran off the end of the code"};
      const Instruction& i = code[static_cast<std::size_t>(w.pc++)];
      i.handler(w, i);
    }
    return n;
  }

  const Launch& launch_;
  const Arguments arguments_;
  const WaveStart start_;
  std::uint64_t groups_[3] = {1, 1, 1};
  std::atomic<bool> failed_{false};
  std::mutex error_lock_;
  std::string error_;
};

}  // namespace

std::string run(const Launch& launch) {
  Runner runner(launch);
  const std::string error = runner.run();
  if (error.empty()) return error;
  return launch.kernel->name + " on " + launch.image->chip->gfx + ": " + error;
}

std::uint64_t instructions_executed() {
  return total_instructions.load();
}

}  // namespace amdemu
