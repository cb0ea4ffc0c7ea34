#pragma once

#include <gtest/gtest.h>

#include <clattn/error.hpp>
#include <string>
#include <utility>

namespace test {

/// The text of the Error that `call` throws, which must have this code; "no error" if it returns.
template <typename Call>
std::string error_text(Call&& call, clattn::ErrorCode code = clattn::ErrorCode::kInvalidArgument) {
  try {
    std::forward<Call>(call)();
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

}  // namespace test
