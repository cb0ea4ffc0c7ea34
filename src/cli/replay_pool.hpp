#pragma once

#include <clattn/clattn.hpp>
#include <cstdint>
#include <vector>

namespace clattn::cli {

/// k_scale and v_scale of quantized caches: a power of two, so that it rounds nothing itself, with
/// room in every such type for the pool's keys and values, which lie in [-1, 1].
inline constexpr float kPoolCacheScale = 1.0F / 64;

enum class PoolTensor : std::uint8_t { kQuery, kKey, kValue };

/// Random query, key and value rows on the device, made once. A step of n tokens uses n consecutive
/// rows from a random start, so nothing is generated per step, and the host knows every element
/// without keeping any: each is a function of tensor, row and place.
class SyntheticPool {
 public:
  SyntheticPool(const Context& context, const Queue& queue, const AttentionConfig& config,
                std::int64_t num_rows, std::uint64_t seed);

  TensorRef rows_from(PoolTensor tensor, std::int64_t row) const;
  /// An element as kernels meet it: rounded to the input's type, keys and values then to the
  /// cache's. `element` counts within the row of heads * head_size.
  double stored(PoolTensor tensor, std::int64_t row, std::int64_t element) const;

 private:
  struct Tensor {
    std::int64_t row_elems = 0;
    std::uint64_t salt = 0;
    std::vector<std::uint32_t> bits;  // of each value that occurs, as the device gets it
    std::vector<double> values;       // the same, as kernels meet it
    Buffer buffer;
  };
  static std::size_t value_index(const Tensor& tensor, std::int64_t place);
  void make_values(Tensor& tensor, const AttentionConfig& config, bool cached, double amplitude);
  void upload(Tensor& tensor, const Context& context, const Queue& queue, std::int64_t num_rows,
              std::size_t element_bytes);

  Tensor tensors_[3];
};

}  // namespace clattn::cli
