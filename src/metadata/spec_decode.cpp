#include <clattn/compat/spec_decode.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {

SpecDecodeTensor reshape_query_for_spec_decode(const TensorRef& query, std::int64_t num_tokens,
                                               std::int64_t batch_size) {
  detail::check_at_least("batch_size", batch_size, 1);
  detail::throw_invalid_if(num_tokens < 0 || num_tokens % batch_size != 0,
                           "num_tokens is {}, legal: a multiple of batch_size {}", num_tokens,
                           batch_size);
  return {query, batch_size, num_tokens / batch_size};
}

}  // namespace clattn
