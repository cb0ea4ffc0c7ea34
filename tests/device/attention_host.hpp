#pragma once

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"

/// The host's half of a made-up attention call: what the device gets, bit by bit, and what the
/// oracle gets, as doubles.
namespace attention_test {

oracle::Element element(clattn::DType dtype);
std::size_t index(std::int64_t i);
/// What unused elements hold: a NaN, or int8's largest size, which would show just as well.
std::uint32_t poison_bits(clattn::DType dtype);
/// The factor of KV head `head`; powers of two, so that dividing by it is exact.
double cache_scale(const CaseSpec& spec, bool of_values, std::int64_t head);

/// A host copy of a device tensor in its element type.
class Tensor {
 public:
  Tensor(clattn::DType dtype, std::size_t count)
      : dtype_(dtype), bytes_(count * clattn::element_size_bytes(dtype)) {}

  void set_bits(std::size_t i, std::uint32_t bits) { std::memcpy(at(i), &bits, width()); }
  /// Stores the nearest value and returns what was stored.
  double set(std::size_t i, double value) {
    const std::uint32_t bits = oracle::encode(element(dtype_), value);
    set_bits(i, bits);
    return oracle::decode(element(dtype_), bits);
  }
  double get(std::size_t i) const { return oracle::decode(element(dtype_), bits(i)); }
  std::uint32_t bits(std::size_t i) const {
    std::uint32_t value = 0;
    std::memcpy(&value, bytes_.data() + i * width(), width());
    return value;
  }
  std::size_t size() const { return bytes_.size() / width(); }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::size_t width() const { return clattn::element_size_bytes(dtype_); }
  std::byte* at(std::size_t i) { return bytes_.data() + i * width(); }
  clattn::DType dtype_;
  std::vector<std::byte> bytes_;
};

/// Elements from token to token and from head to head of contiguous values, of their own size
/// maybe.
struct ValueStrides {
  std::int64_t token = 0, head = 0;
};
ValueStrides value_strides(const clattn::AttentionConfig& config, const clattn::KVCache& cache);

/// The call on the host: lengths, tables, tensors as the device gets them and as the oracle sees
/// them.
struct HostCase {
  oracle::AttentionCase truth;
  std::vector<std::int32_t> block_table;  // with poisoned tails
  std::vector<clattn::Direction> direction;
  std::vector<std::int32_t> span_start_loc, spans, tree_start_loc, tree_parents;
  std::int64_t num_blocks = 0;
  std::int64_t num_tokens = 0;
};

HostCase lay_out(const CaseSpec& spec);
/// The batch of the case; `key_start_loc`: where it keeps that list, if keys have no pages.
clattn::CommonAttentionMetadata describe_batch(const CaseSpec& spec, const HostCase& host,
                                               std::vector<std::int32_t>& key_start_loc);

/// The cache of one case: physical bits for the device, logical doubles for the oracle.
class CacheImage {
 public:
  CacheImage(const CaseSpec& spec, HostCase& host, const clattn::KVCache& cache)
      : spec_(spec),
        cache_(cache),
        host_(host),
        bits_(spec.config.cache_dtype(),
              cache.buffer.size_bytes() / clattn::element_size_bytes(cache.dtype)) {
    for (std::size_t i = 0; i < bits_.size(); ++i) bits_.set_bits(i, poison_bits(cache.dtype));
    if (cache.row_scales) poison_scales();
    const std::size_t logical = index(cache.num_blocks) * index(cache.block_size) *
                                index(cache.num_kv_heads) * index(cache.head_size);
    host.truth.key_cache.assign(logical, std::numeric_limits<double>::quiet_NaN());
    host.truth.value_cache = host.truth.key_cache;
  }

  /// Stores a token's K and V element where position `position` of request `r` lives.
  void put(std::size_t r, std::int64_t position, std::int64_t head, std::int64_t dim, double key,
           double value, bool on_device) {
    const std::int64_t page =
        host_.block_table[r * index(host_.truth.max_blocks) + index(position / cache_.block_size)];
    const std::int64_t token = position % cache_.block_size;
    const std::int64_t row_at = page * cache_.block_stride + head * cache_.head_stride +
                                token * cache_.token_stride +
                                dim / clattn::codes_per_element(cache_.dtype);
    const std::int64_t logical =
        ((page * cache_.block_size + token) * cache_.num_kv_heads + head) * cache_.head_size + dim;
    const Stores stores = !on_device || dim > 0 ? Stores::kNothing
                          : std::isnan(key)     ? Stores::kPoison
                                                : Stores::kFactors;
    const RowFactors factors = row_factors(page, token, head, position, stores);
    place(index(cache_.k_offset + row_at), dim, key, factors.key, on_device,
          host_.truth.key_cache[index(logical)]);
    if (dim >= spec_.config.output_head_size()) {  // the oracle knows one size alone
      host_.truth.value_cache[index(logical)] = 0;
      return;
    }
    const bool apart =
        spec_.config.contiguous_kv() && spec_.config.output_head_size() != cache_.head_size;
    const ValueStrides strides = value_strides(spec_.config, cache_);
    const std::int64_t value_at = apart ? page * strides.token + head * strides.head + dim : row_at;
    place(index(cache_.v_offset + value_at), dim, value, factors.value, on_device,
          host_.truth.value_cache[index(logical)]);
  }

  Tensor& bits() { return bits_; }

  /// What differs between the device's cache and the expectation: stored tokens, NaN elsewhere.
  std::string compare(Tensor& device) const {
    std::vector<std::uint32_t> want = poison_;
    if (want.empty()) want.assign(device.size(), poison_bits(cache_.dtype));
    for (const auto& [place, value] : expected_) want[place] = value;
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (device.bits(i) != want[i]) {
        return fmt::format("cache element {} is {:#x}, expected {:#x}", i, device.bits(i), want[i]);
      }
    }
    return {};
  }

 private:
  /// The factors of a token's codes. With row_scales each row has its own, which are stored along
  /// with its first code; kPoison stores NaN and infinity instead, which spoil what uses them.
  /// Codes of 4 bits have zeros, too.
  struct Factor {
    double scale = 1;
    std::uint32_t zero = 0;
  };
  struct RowFactors {
    Factor key, value;
  };
  enum class Stores : std::uint8_t { kNothing, kFactors, kPoison };
  RowFactors row_factors(std::int64_t page, std::int64_t token, std::int64_t head,
                         std::int64_t position, Stores stores) {
    RowFactors factors{{cache_scale(spec_, false, head)}, {cache_scale(spec_, true, head)}};
    if (!cache_.row_scales) return factors;
    factors.key.scale = std::ldexp(factors.key.scale, static_cast<int>((position * 5 + head) % 4));
    // They also grow every 16 tokens, so that levels rise (attention/row_scales.clh).
    const std::int64_t power = (position * 3 + head) % 4 + position / 16 % 8 - 9;
    factors.value.scale = std::ldexp(factors.value.scale, static_cast<int>(power));
    if (cache_.dtype == clattn::DType::kUInt4x2) {
      factors.key.zero = static_cast<std::uint32_t>((position * 7 + head * 3) % 16);
      factors.value.zero = static_cast<std::uint32_t>((position * 3 + head * 7 + 5) % 16);
    }
    if (stores == Stores::kNothing) return factors;
    const bool poison = stores == Stores::kPoison;
    const clattn::KVCache::RowScales& at = *cache_.row_scales;
    const std::int64_t row =
        page * at.block_stride + token * at.token_stride + head * at.head_stride;
    constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
    put_scale(at.k_offset + row, {poison ? kNaN : factors.key.scale, factors.key.zero});
    put_scale(at.v_offset + row,
              {poison ? std::numeric_limits<double>::infinity() : factors.value.scale,
               factors.value.zero});
    return factors;
  }
  /// The lowest bits of a scale are its zero.
  void put_scale(std::int64_t at, Factor factor) {
    const std::uint32_t bits = oracle::encode(oracle::Element::kF32, factor.scale) | factor.zero;
    for (std::size_t byte = 0; byte < sizeof(float); ++byte) {
      const std::size_t place = index(at) * sizeof(float) + byte;
      bits_.set_bits(place, bits >> 8 * byte & 0xFF);
      expected_.emplace_back(place, bits >> 8 * byte & 0xFF);
    }
  }
  /// NaN as every scale.
  void poison_scales() {
    const clattn::KVCache::RowScales& at = *cache_.row_scales;
    for (std::int64_t page = 0; page < cache_.num_blocks; ++page)
      for (std::int64_t token = 0; token < cache_.block_size; ++token)
        for (std::int64_t head = 0; head < cache_.num_kv_heads; ++head)
          for (const std::int64_t side : {at.k_offset, at.v_offset}) {
            const std::int64_t scale =
                side + page * at.block_stride + token * at.token_stride + head * at.head_stride;
            for (std::size_t byte = 0; byte < sizeof(float); ++byte)
              bits_.set_bits(index(scale) * sizeof(float) + byte, 0xFF);
          }
    for (std::size_t i = 0; i < bits_.size(); ++i) poison_.push_back(bits_.bits(i));
  }
  void place(std::size_t at, std::int64_t dim, double value, Factor factor, bool on_device,
             double& truth) {
    std::uint32_t bits = oracle::encode(element(cache_.dtype), value / factor.scale + factor.zero);
    truth = (oracle::decode(element(cache_.dtype), bits) - factor.zero) * factor.scale;
    if (clattn::codes_per_element(cache_.dtype) > 1) {  // beside the other one of the byte
      const std::int64_t shift = dim % 2 * 4;
      bits = (bits_.bits(at) & ~(15U << shift)) | bits << shift;
    }
    if (on_device) bits_.set_bits(at, bits);
    expected_.push_back({at, bits});
  }

  const CaseSpec& spec_;
  const clattn::KVCache& cache_;
  HostCase& host_;
  Tensor bits_;
  std::vector<std::pair<std::size_t, std::uint32_t>> expected_;
  std::vector<std::uint32_t> poison_;  ///< where it is not everywhere the same
};

/// Fills the cache with random tokens; the step's own tokens go through `key` and `value` when they
/// are written by the library.
void fill_cache(const CaseSpec& spec, HostCase& host, CacheImage& image, Tensor& key,
                Tensor& value);

/// Random query rows; the padding between them is NaN.
Tensor make_query(const CaseSpec& spec, HostCase& host, std::int64_t stride);

}  // namespace attention_test
