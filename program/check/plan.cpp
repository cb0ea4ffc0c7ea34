#include "program/check/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

#include "program/common/progress.hpp"

namespace clattn::cli {

bool CheckPlan::takes(const std::string& kind, const std::string& name, bool representative) {
  if (extent_ == CheckExtent::kAll || representative) return true;
  std::vector<std::string>& names = left_out_[kind];
  if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  return false;
}

bool CheckPlan::run(std::size_t num_threads) {
  compile(num_threads);
  for (const CheckStep& step : steps_) {
    show_progress(step.name);
    step.run();
  }
  return passed_;
}

void CheckPlan::compile(std::size_t num_threads) const {
  std::vector<const CheckStep*> waiting;
  for (const CheckStep& step : steps_) {
    if (step.compile) waiting.push_back(&step);
  }
  std::mutex mutex;
  std::size_t next = 0, done = 0;
  const auto work = [&] {
    std::unique_lock lock(mutex);
    while (next < waiting.size()) {
      const CheckStep& step = *waiting[next++];
      lock.unlock();
      try {
        step.compile();
        lock.lock();
        show_progress(fmt::format("compiling {} of {}", ++done, waiting.size()));
      } catch (const std::exception&) {  // run() says why
        if (!lock.owns_lock()) lock.lock();
      }
    }
  };
  if (waiting.empty()) return;
  num_threads = std::clamp<std::size_t>(num_threads, 1, waiting.size());
  show_stage(fmt::format("compiling for {} checks on {} threads", waiting.size(), num_threads));
  std::vector<std::jthread> threads(num_threads);
  for (std::jthread& thread : threads) thread = std::jthread(work);
}

}  // namespace clattn::cli
