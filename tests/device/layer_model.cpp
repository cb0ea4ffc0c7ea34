
#include "device/layer_model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

namespace layer_test {

namespace {

constexpr float kUntouched = -12345.0F;

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

}  // namespace

std::vector<float> random_values(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

clattn::Buffer Device::upload(const std::vector<float>& values) const {
  const clattn::Buffer buffer = context->allocate(values.size() * sizeof(float));
  queue.write(buffer, std::as_bytes(std::span(values)));
  return buffer;
}

std::vector<float> Device::download(const clattn::Buffer& buffer) const {
  std::vector<float> values(buffer.size_bytes() / sizeof(float));
  queue.read(buffer, std::as_writable_bytes(std::span(values)));
  return values;
}

clattn::AttentionOptions layer_options(std::string prefix) {
  clattn::AttentionOptions options;
  options.config.num_heads = kShape.num_heads;
  options.config.num_kv_heads = kShape.num_kv_heads;
  options.config.head_size = kShape.head_size;
  options.prefix = std::move(prefix);
  options.config.dtype = clattn::DType::kF32;
  options.config.block_size = kShape.block_size;
  return options;
}

Step::Step(const Shape& shape, std::uint32_t seed) : shape_(shape), seed_(seed) {}

void Step::add_request(std::int32_t query_len, std::int32_t context_len,
                       const std::vector<std::int32_t>& pages) {
  if (lens_.empty()) table_width_ = pages.size();
  ASSERT_EQ(pages.size(), table_width_);
  starts_.push_back(starts_.back() + query_len);
  lens_.push_back(query_len + context_len);
  table_.insert(table_.end(), pages.begin(), pages.end());
  const std::size_t kv = tokens() * index(shape_.num_kv_heads) * index(shape_.head_size);
  key_ = random_values(kv, seed_ * 10 + 1);
  value_ = random_values(kv, seed_ * 10 + 2);
  new_query(seed_);
}

void Step::new_query(std::uint32_t seed) {
  query_ = random_values(tokens() * index(shape_.num_heads) * index(shape_.head_size), seed * 10);
}

clattn::CommonAttentionMetadata Step::batch() const {
  return clattn::CommonAttentionMetadata::of(starts_, lens_, table_);
}

Output Step::run(const Device& device, clattn::Attention& layer,
                 const clattn::AttentionMetadata* metadata, const RunOptions& options) const {
  const std::int64_t row = std::int64_t{shape_.num_heads} * shape_.head_size;
  const std::int64_t stride = row + options.row_gap;
  const auto num_rows = static_cast<std::int64_t>(tokens()) + options.padding_rows;
  constexpr std::int64_t kGuard = 16;
  const std::vector<float> before(
      index(kGuard + std::max<std::int64_t>(num_rows, starts_.back()) * stride + kGuard),
      kUntouched);
  const clattn::Buffer out = device.upload(before);
  const clattn::Buffer query = device.upload(query_);
  const std::vector<float> poison(key_.size(), std::numeric_limits<float>::quiet_NaN());
  const clattn::Buffer key = device.upload(options.poison_key_and_value ? poison : key_);
  const clattn::Buffer value = device.upload(options.poison_key_and_value ? poison : value_);
  clattn::AttentionTensors tensors{.query = {query.handle()},
                                   .output = {out.handle(), kGuard, stride}};
  if (!options.omit_key_and_value) {
    tensors.key = {key.handle()};
    tensors.value = {value.handle()};
  }
  clattn::ForwardOptions forward = options.forward;
  forward.num_rows = num_rows;
  layer.forward(device.queue, tensors, metadata, forward);

  std::vector<float> after = device.download(out);
  Output result;
  for (std::int64_t r = 0; r < num_rows; ++r) {
    float* first = after.data() + index(kGuard + r * stride);
    if (r < starts_.back()) {
      result.out.insert(result.out.end(), first, first + row);
    } else {
      result.padding.insert(result.padding.end(), first, first + row);
    }
    std::fill(first, first + row, kUntouched);
  }
  result.rest_untouched = after == before;
  return result;
}

oracle::AttentionCase Step::truth(bool causal) const {
  oracle::AttentionCase truth;
  truth.causal = causal;
  truth.num_heads = shape_.num_heads;
  truth.num_kv_heads = shape_.num_kv_heads;
  truth.head_size = shape_.head_size;
  truth.scale = 1.0 / std::sqrt(double(shape_.head_size));
  truth.block_size = 0;  // the requests' keys stand one behind the other, as in this step
  truth.query_start_loc = truth.key_start_loc = starts_;
  truth.seq_lens = lens_;
  truth.chunk = chunk_;
  if (window_ > 0) {
    truth.window_left = window_ - 1;
    truth.window_right = truth.window_left;
  }
  truth.query.assign(query_.begin(), query_.end());
  truth.key_cache.assign(key_.begin(), key_.end());
  truth.value_cache.assign(value_.begin(), value_.end());
  return truth;
}

void Step::expect_truth(const Output& output, const oracle::AttentionCase& truth) {
  const oracle::AttentionResult want = oracle::attention(truth, oracle::Element::kF32);
  ASSERT_EQ(output.out.size(), want.out.size());
  constexpr double kFloor = 2e-6;  // f32 sums of values of size about 1
  for (std::size_t i = 0; i < want.out.size(); ++i) {
    ASSERT_LE(std::abs(output.out[i] - want.out[i]), 2 * want.bound[i] + kFloor) << "element " << i;
  }
}

}  // namespace layer_test
