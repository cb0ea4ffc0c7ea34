#pragma once

#include <gtest/gtest.h>

#include <clattn/attention.hpp>
#include <clattn/registry.hpp>
#include <string>
#include <vector>

namespace test {

using Names = std::vector<std::string>;

/// The registered backends, by priority.
inline Names names() {
  Names found;
  for (const auto& backend : clattn::list_attn_backends()) found.emplace_back(backend->name());
  return found;
}

/// Every test leaves the registry as it found it.
class RegistryTest : public testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(names(), before_); }
  Names before_ = names();
};

}  // namespace test
