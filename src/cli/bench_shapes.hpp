#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace clattn::cli {

/// One row of bench/shapes.txt, which explains the fields.
struct BenchShape {
  std::string suite, set;
  std::int32_t batch = 0, query_len = 0, seq_len = 0;

  std::int32_t num_tokens() const { return batch * query_len; }
};

/// bench/shapes.txt as it was built in.
std::string_view built_in_shapes();

/// Parses the text of a shapes file; throws kInvalidArgument naming `name`, line and what is wrong.
std::vector<BenchShape> parse_shapes(std::string_view text, const std::string& name);

}  // namespace clattn::cli
