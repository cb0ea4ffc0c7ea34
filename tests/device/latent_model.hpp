#pragma once

#include <clattn/clattn.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "device/step_case.hpp"
#include "oracle/oracle.hpp"

/// Requests of a model with latent attention, run through layers step by step and judged by the
/// oracle over what the layers were given, rounded as their caches store it.
namespace latent_test {

struct Shape {
  std::int32_t num_heads = 16;
  std::int32_t rank = 512;
  std::int32_t rope = 64;
  std::int32_t block_size = 16;
  clattn::DType dtype = clattn::DType::kF16;
  clattn::DType cache_dtype = clattn::DType::kF16;
  double cache_scale = 1;  ///< a power of two: real = stored * cache_scale

  std::int32_t width() const { return rank + rope; }
};

/// Layer options of this shape.
clattn::AttentionOptions options_of(const Shape& shape, std::string prefix);

struct RunOptions {
  std::int64_t padding_rows = 0;      ///< given to the layer beyond the step's tokens
  bool poison_key_and_value = false;  ///< the layer must not read them
};

class Requests {
 public:
  /// Room for `num_reqs` requests of `pages` pages each, shuffled.
  Requests(const Shape& shape, std::int32_t num_reqs, std::int32_t pages);

  /// The next step: so many new tokens of each request, with random tensors.
  void step(const std::vector<std::int32_t>& query_lens, std::uint32_t seed);
  clattn::CommonAttentionMetadata batch() const;
  std::int64_t num_tokens() const { return starts_.back(); }
  std::int64_t num_blocks() const { return num_blocks_; }

  /// Runs the step's tensors through a layer; the outputs, padding rows included.
  std::vector<double> run(const clattn::Context& context, const clattn::Queue& queue,
                          clattn::Attention& layer, const clattn::AttentionMetadata* metadata,
                          const RunOptions& options = {}) const;
  /// Compares with latent attention over all that was stored so far; padding rows must be 0.
  void expect_truth(std::vector<double> got, const clattn::Attention& layer,
                    const std::string& what) const;

  const step_test::Elements& query() const { return query_; }
  const step_test::Elements& kv_c() const { return kv_c_; }
  const step_test::Elements& k_pe() const { return k_pe_; }

 private:
  Shape shape_;
  std::int32_t pages_;
  std::int64_t num_blocks_;
  std::vector<std::int32_t> starts_{0}, lens_, table_;
  step_test::Elements query_, kv_c_, k_pe_;
  std::vector<double> truth_query_;
  std::vector<double> rows_;  ///< [num_blocks, block_size, width], NaN where nothing was stored
};

}  // namespace latent_test
