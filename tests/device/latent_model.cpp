#include "device/latent_model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

namespace latent_test {

using clattn::DType;
using step_test::Elements;
using step_test::FencedOutput;
using step_test::index;

clattn::AttentionOptions options_of(const Shape& shape, std::string prefix) {
  clattn::AttentionOptions options;
  options.config.num_heads = shape.num_heads;
  options.config.head_size = shape.width();
  options.config.rope_dim = shape.rope;
  options.config.use_mla = true;
  options.prefix = std::move(prefix);
  options.config.dtype = shape.dtype;
  options.config.block_size = shape.block_size;
  options.config.kv_cache_dtype = shape.cache_dtype;
  return options;
}

Requests::Requests(const Shape& shape, std::int32_t num_reqs, std::int32_t pages)
    : shape_(shape),
      pages_(pages),
      num_blocks_(std::int64_t{num_reqs} * pages + 1),
      lens_(index(num_reqs)),
      query_(shape.dtype, 0),
      kv_c_(shape.dtype, 0),
      k_pe_(shape.dtype, 0) {
  std::vector<std::int32_t> blocks(index(num_blocks_));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(5));
  table_.assign(blocks.begin(), blocks.end() - 1);
  rows_.assign(index(num_blocks_ * shape.block_size * shape.width()),
               std::numeric_limits<double>::quiet_NaN());
}

void Requests::step(const std::vector<std::int32_t>& query_lens, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  starts_ = {0};
  for (const std::int32_t len : query_lens) starts_.push_back(starts_.back() + len);
  const std::int64_t query_row = std::int64_t{shape_.num_heads} * shape_.width();
  query_ = Elements(shape_.dtype, num_tokens() * query_row);
  kv_c_ = Elements(shape_.dtype, num_tokens() * shape_.rank);
  k_pe_ = Elements(shape_.dtype, num_tokens() * shape_.rope);
  truth_query_.clear();
  for (std::int64_t i = 0; i < num_tokens() * query_row; ++i) {
    truth_query_.push_back(query_.set(i, normal(random)));
  }
  const oracle::Element cached = step_test::element(shape_.cache_dtype);
  std::int64_t token = 0;
  for (std::size_t r = 0; r < query_lens.size(); ++r) {
    for (std::int32_t i = 0; i < query_lens[r]; ++i, ++token, ++lens_[r]) {
      const std::int64_t page = table_[r * index(pages_) + index(lens_[r] / shape_.block_size)];
      const std::int64_t slot = page * shape_.block_size + lens_[r] % shape_.block_size;
      for (std::int32_t d = 0; d < shape_.width(); ++d) {
        const double x = d < shape_.rank
                             ? kv_c_.set(token * shape_.rank + d, normal(random))
                             : k_pe_.set(token * shape_.rope + d - shape_.rank, normal(random));
        rows_[index(slot * shape_.width() + d)] =
            oracle::round_to(cached, x / shape_.cache_scale) * shape_.cache_scale;
      }
    }
  }
}

clattn::CommonAttentionMetadata Requests::batch() const {
  return clattn::CommonAttentionMetadata::of(starts_, lens_, table_);
}

std::vector<double> Requests::run(const clattn::Context& context, const clattn::Queue& queue,
                                  clattn::Attention& layer,
                                  const clattn::AttentionMetadata* metadata,
                                  const RunOptions& options) const {
  const std::int64_t rows = num_tokens() + options.padding_rows;
  const clattn::Buffer query = query_.upload(context, queue);
  const Elements nothing(shape_.dtype, num_tokens() * shape_.width());  // NaN
  const bool poison = options.poison_key_and_value;
  const clattn::Buffer kv_c = (poison ? nothing : kv_c_).upload(context, queue);
  const clattn::Buffer k_pe = (poison ? nothing : k_pe_).upload(context, queue);
  FencedOutput out(context, queue, shape_.dtype, rows * shape_.num_heads * shape_.rank,
                   FencedOutput::kGuard);
  layer.forward(queue,
                {.query = {query.handle()},
                 .key = {kv_c.handle()},
                 .value = {k_pe.handle()},
                 .output = {out.buffer.handle(), FencedOutput::kGuard}},
                metadata, {.num_rows = rows});
  return out.read(queue);
}

void Requests::expect_truth(std::vector<double> got, const clattn::Attention& layer,
                            const std::string& what) const {
  oracle::AttentionCase truth;
  truth.num_heads = shape_.num_heads;
  truth.num_kv_heads = 1;
  truth.head_size = shape_.width();
  truth.block_size = shape_.block_size;
  truth.scale = 1 / std::sqrt(double(shape_.width()));
  truth.query_start_loc = starts_;
  truth.seq_lens = lens_;
  truth.block_table = table_;
  truth.max_blocks = pages_;
  truth.query = truth_query_;
  truth.key_cache = truth.value_cache = rows_;
  oracle::AttentionResult want = oracle::attention(truth, step_test::element(shape_.dtype));
  if (step_test::rounds_probabilities(layer.impl().kernels())) want.add_weight_rounding();
  std::vector<double> out, bound;
  for (std::size_t i = 0; i < want.out.size(); ++i) {
    if (std::cmp_greater_equal(i % index(shape_.width()), shape_.rank)) continue;
    out.push_back(want.out[i]);
    bound.push_back(want.bound[i]);
  }
  ASSERT_GE(got.size(), out.size()) << what;
  const auto padding = got.begin() + static_cast<std::ptrdiff_t>(out.size());
  EXPECT_TRUE(std::all_of(padding, got.end(), [](double value) { return value == 0; })) << what;
  got.erase(padding, got.end());
  step_test::expect_close(got, out, &bound, what);
}

}  // namespace latent_test
