#include <algorithm>
#include <iterator>

#include "random_calls/world.hpp"

static constexpr auto kThreads =
    std::to_array<test::RandomCall>({{"three threads", 2, test::call_from_threads}});

const std::vector<test::RandomCall>& test::random_calls() {
  static const std::vector<RandomCall> kCalls = [] {
    std::vector<RandomCall> all(kThreads.begin(), kThreads.end());
    for (const auto calls :
         {memory_calls(), layer_calls(), cache_calls(), host_calls(), random_c_calls()})
      std::ranges::copy(calls, std::back_inserter(all));
    return all;
  }();
  return kCalls;
}
