#pragma once

#include <clattn/clattn.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "oracle/oracle.hpp"

/// A step of a small f32 model, run through layers and judged by the oracle.
namespace layer_test {

struct Device {
  explicit Device(std::shared_ptr<clattn::Context> opened)
      : context(std::move(opened)), queue(context->create_queue()) {}
  clattn::Buffer upload(const std::vector<float>& values) const;
  std::vector<float> download(const clattn::Buffer& buffer) const;

  std::shared_ptr<clattn::Context> context;
  clattn::Queue queue;
};

struct Shape {
  std::int32_t num_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_size = 0;
  std::int32_t block_size = 0;
};

inline constexpr Shape kShape{4, 2, 64, 16};

/// A layer of kShape and f32.
clattn::AttentionOptions layer_options(std::string prefix);

struct RunOptions {
  std::int64_t padding_rows = 0;      ///< given to the layer beyond the step's tokens
  std::int64_t row_gap = 0;           ///< elements between output rows
  bool poison_key_and_value = false;  ///< the layer must not read them
  bool omit_key_and_value = false;
  clattn::ForwardOptions forward = {};
};

struct Output {
  std::vector<double> out;     ///< [tokens, heads, dims]
  std::vector<float> padding;  ///< the padding rows
  bool rest_untouched = false;
};

/// Requests with random tensors. Tokens before this step are in no cache: contexts of other steps
/// are the caller's to keep.
class Step {
 public:
  Step(const Shape& shape, std::uint32_t seed);
  /// Pages are physical blocks; those past the request's end may be garbage.
  void add_request(std::int32_t query_len, std::int32_t context_len,
                   const std::vector<std::int32_t>& pages);
  void new_query(std::uint32_t seed);
  void set_window(std::int32_t tokens) { window_ = tokens; }
  void set_chunk(std::int32_t tokens) { chunk_ = tokens; }

  std::size_t tokens() const { return static_cast<std::size_t>(starts_.back()); }
  clattn::CommonAttentionMetadata batch() const;
  const std::vector<float>& query() const { return query_; }
  const std::vector<float>& key() const { return key_; }
  const std::vector<float>& value() const { return value_; }

  Output run(const Device& device, clattn::Attention& layer,
             const clattn::AttentionMetadata* metadata, const RunOptions& options = {}) const;
  /// Attention over this step's keys and values: contexts must be 0.
  oracle::AttentionCase truth(bool causal = true) const;
  static void expect_truth(const Output& output, const oracle::AttentionCase& truth);
  void expect_truth(const Output& output, bool causal = true) const {
    expect_truth(output, truth(causal));
  }

 private:
  Shape shape_;
  std::uint32_t seed_;
  std::int32_t window_ = 0, chunk_ = 0;
  std::size_t table_width_ = 0;
  std::vector<std::int32_t> starts_ = {0}, lens_, table_;
  std::vector<float> query_, key_, value_;
};

/// `count` numbers of a normal distribution.
std::vector<float> random_values(std::size_t count, std::uint32_t seed);

}  // namespace layer_test
