#pragma once

#include <string>

#include "program/bench/shapes.hpp"

namespace clattn::cli {

/// What is wrong with a line of a shapes file: which field, its value and what is legal.
struct ShapeFault {
  std::string field, value, legal;
};

/// Throw it unless the suite, the cache and the batch are ones that the row's operation takes, and
/// unless a row without pages is one of prompts over their own keys. The cache may not have a scale
/// for each token and head.
///@{
void check_op(const BenchShape& shape);
void check_format(const BenchShape& shape);
void check_contiguous(const BenchShape& shape);
///@}

/// Throws it unless a row of a recurrent layer has one, and a batch that its suite measures.
void check_recurrent(const BenchShape& shape);

/// Gives the requests of a row the span and the directions that its options ask for; throws where
/// the row has no use for them.
void add_lists(BenchShape& shape);

}  // namespace clattn::cli
