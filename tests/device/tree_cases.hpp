#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"

/// Requests with trees of drafts.
namespace attention_test {

using Parents = std::vector<std::int32_t>;

inline Request with_tree(Parents parents, Request request) {
  request.parents = std::move(parents);
  return request;
}

inline Parents chain_of(std::int32_t nodes) {
  Parents parents;
  for (std::int32_t node = 0; node < nodes; ++node) parents.push_back(node - 1);
  return parents;
}

/// Parents not far back, so that there are long paths, and now and then another root.
inline Parents random_tree(std::int32_t nodes, std::uint32_t seed) {
  std::mt19937 random(seed);
  Parents parents = {-1};
  for (std::int32_t node = 1; node < nodes; ++node) {
    std::uniform_int_distribution<std::int32_t> back(1, std::min(node + node % 29 / 28, 6));
    parents.push_back(std::max(node - back(random), -1));
  }
  return parents;
}

/// Requests with trees of every size between those without.
inline std::vector<Request> requests_with_trees() {
  return {{1, 0},
          {1, 130},
          with_tree({-1}, {1, 60}),
          with_tree({-1, 0, 0, 1}, {4, 61}),
          with_tree({-1, 0, 0, 1}, {2, 100}),
          with_tree(chain_of(7), {7, 90}),
          {35, 170},
          with_tree(random_tree(64, 1), {64, 40}),
          with_tree(random_tree(65, 2), {65, 0}),
          with_tree(random_tree(256, 3), {256, 33}),
          with_tree(random_tree(50, 4), {20, 200})};
}

}  // namespace attention_test
