#include "random_calls/world.hpp"

const std::vector<test::RandomCall>& test::random_calls() {
  static const std::vector<RandomCall> kCalls = [] {
    std::vector<RandomCall> all = random_c_calls();
    all.push_back({"three threads", 2, call_from_threads});
    for (const auto calls : {memory_calls(), layer_calls(), cache_calls(), host_calls()})
      all.insert(all.end(), calls.begin(), calls.end());
    return all;
  }();
  return kCalls;
}
