#include "cli/replay_pool.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "cli/elements.hpp"
#include "cli/trace.hpp"
#include "oracle/oracle.hpp"

namespace clattn::cli {
namespace {

constexpr std::size_t kNumValues = 1U << 16U;  // one 16-bit draw chooses a value
// Queries of +-6 against keys of +-1 give logits a standard deviation of 6/3 = 2 whatever the head
// size: weights differ enough that a lost key shows, and no single key takes all.
constexpr double kQueryAmplitude = 6.0;
constexpr std::int64_t kUploadRows = 256;

}  // namespace

SyntheticPool::SyntheticPool(const Context& context, const Queue& queue,
                             const AttentionConfig& config, std::int64_t num_rows,
                             std::uint64_t seed) {
  for (const PoolTensor name : {PoolTensor::kQuery, PoolTensor::kKey, PoolTensor::kValue}) {
    const bool query = name == PoolTensor::kQuery;
    const auto index = static_cast<std::size_t>(name);
    Tensor& tensor = tensors_[index];
    tensor.salt = mix64(seed ^ mix64(index + 1));
    tensor.row_elems =
        std::int64_t{query ? config.num_heads : config.num_kv_heads} * config.head_size;
    make_values(tensor, config, !query, query ? kQueryAmplitude : 1.0);
    upload(tensor, context, queue, num_rows, element_size_bytes(config.dtype));
  }
}

std::size_t SyntheticPool::value_index(const Tensor& tensor, std::int64_t place) {
  const auto number = static_cast<std::uint64_t>(place);
  return (mix64(tensor.salt + number / 4) >> (number % 4 * 16)) & (kNumValues - 1);
}

void SyntheticPool::make_values(Tensor& tensor, const AttentionConfig& config, bool cached,
                                double amplitude) {
  const oracle::Element input = element_of(config.dtype);
  const oracle::Element cache = element_of(config.cache_dtype());
  const double scale = is_quantized(config.cache_dtype()) ? kPoolCacheScale : 1.0;
  tensor.bits.resize(kNumValues);
  tensor.values.resize(kNumValues);
  for (std::size_t i = 0; i < kNumValues; ++i) {
    const double uniform = static_cast<double>(mix64(~tensor.salt + i) >> 11U) * 0x1p-53;
    tensor.bits[i] = oracle::encode(input, amplitude * (2 * uniform - 1));
    const double value = oracle::decode(input, tensor.bits[i]);
    tensor.values[i] = cached ? scale * oracle::round_to(cache, value / scale) : value;
  }
}

void SyntheticPool::upload(Tensor& tensor, const Context& context, const Queue& queue,
                           std::int64_t num_rows, std::size_t element_bytes) {
  const std::size_t row_bytes = static_cast<std::size_t>(tensor.row_elems) * element_bytes;
  tensor.buffer = context.allocate(static_cast<std::size_t>(num_rows) * row_bytes);
  std::vector<std::byte> staging;
  for (std::int64_t row = 0; row < num_rows; row += kUploadRows) {
    const std::int64_t count = std::min(kUploadRows, num_rows - row);
    staging.resize(static_cast<std::size_t>(count) * row_bytes);
    std::byte* out = staging.data();
    for (std::int64_t place = row * tensor.row_elems; place < (row + count) * tensor.row_elems;
         ++place, out += element_bytes) {
      std::memcpy(out, &tensor.bits[value_index(tensor, place)], element_bytes);
    }
    queue.write(tensor.buffer, staging, static_cast<std::size_t>(row) * row_bytes);
  }
}

TensorRef SyntheticPool::rows_from(PoolTensor tensor, std::int64_t row) const {
  const Tensor& source = tensors_[static_cast<std::size_t>(tensor)];
  return {.buffer = source.buffer.handle(), .offset = row * source.row_elems};
}

double SyntheticPool::stored(PoolTensor tensor, std::int64_t row, std::int64_t element) const {
  const Tensor& source = tensors_[static_cast<std::size_t>(tensor)];
  return source.values[value_index(source, row * source.row_elems + element)];
}

}  // namespace clattn::cli
