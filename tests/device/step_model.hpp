#pragma once

#include <clattn/cache_ops.hpp>
#include <clattn/graph.hpp>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/cache_ops_support.hpp"
#include "device/step_case.hpp"

/// A layer and its cache, whose steps are judged by the oracle: what they write, and what not.
namespace step_model {

using step_test::Elements;
using step_test::index;

struct Form {
  bool latent;  ///< rows of MLA
  clattn::DType dtype;
  clattn::KernelFamily family;
};

inline clattn::AttentionConfig config_of(const Form& form) {
  clattn::AttentionConfig config = attention_test::small_config();
  config.dtype = form.dtype;
  config.kernel_family = form.family;
  config.use_mla = form.latent;
  if (!form.latent) return config;
  config.num_kv_heads = 1;
  config.rope_dim = 16;
  config.head_size = 64 + config.rope_dim;
  return config;
}

inline std::string form_name(const testing::TestParamInfo<Form>& tested) {
  return std::string(tested.param.latent ? "latent_" : "paged_") +
         std::string(clattn::to_string(tested.param.dtype)) + "_" +
         std::string(clattn::to_string(tested.param.family));
}

inline constexpr Form kForms[] = {{false, clattn::DType::kF32, clattn::KernelFamily::kAuto},
                                  {false, clattn::DType::kF16, clattn::KernelFamily::kAuto},
                                  {false, clattn::DType::kF16, clattn::KernelFamily::kGpu},
                                  {true, clattn::DType::kF16, clattn::KernelFamily::kAuto},
                                  {true, clattn::DType::kF32, clattn::KernelFamily::kGpu}};

/// Where the rows of a step are, and how long its requests.
struct Rows {
  std::vector<std::int32_t> starts{0}, lens;
  Rows(const std::vector<std::int32_t>& query_lens, const std::vector<std::int32_t>& contexts) {
    for (std::size_t r = 0; r < query_lens.size(); ++r) {
      starts.push_back(starts.back() + query_lens[r]);
      lens.push_back(contexts[r] + query_lens[r]);
    }
  }
};

/// Requests with these tokens in the cache, which a step of up to `rows` rows continues. All else
/// in the cache is poison.
class Model {
 public:
  static constexpr std::int32_t kPage = 16, kPages = 48;

  Model(const std::shared_ptr<clattn::Context>& made, const clattn::AttentionConfig& of,
        std::vector<std::int32_t> contexts, std::int32_t rows)
      : context(made),
        config(of),
        queue(made->create_queue()),
        backend(*clattn::get_attn_backend(config, &made->capabilities())),
        impl(backend.make_impl(made, config)),
        contexts_(std::move(contexts)),
        num_rows_(rows),
        query_(config.dtype, rows * query_width()),
        key_(config.dtype, rows * (config.use_mla ? value_size() : kv_width())),
        value_(config.dtype, rows * (config.use_mla ? config.rope_dim : kv_width())),
        image_(config.dtype, 1),
        out_(*context, queue, config.dtype, rows * output_width(), step_test::FencedOutput::kGuard),
        lse_(*context, queue, clattn::DType::kF32, std::int64_t{rows} * config.num_heads, 0) {
    const auto requests = static_cast<std::int32_t>(contexts_.size());
    table.resize(index(requests * kPages));
    for (std::int32_t r = 0; r < requests; ++r) {
      for (std::int32_t p = 0; p < kPages; ++p) table[index(r * kPages + p)] = p * requests + r;
    }
    cache = clattn::make_kv_cache(*context, queue, backend, config, std::ssize(table));
    image_ = Elements(config.dtype, static_cast<std::int64_t>(cache.buffer.size_bytes() /
                                                              element_size_bytes(config.dtype)));
    set_truth();
    set_rows();
    query_buffer_ = query_.upload(*context, queue);
    key_buffer_ = key_.upload(*context, queue);
    value_buffer_ = value_.upload(*context, queue);
  }

  /// The host's batch: its rows, and lengths that are bounds.
  clattn::CommonAttentionMetadata batch(const Rows& host) const {
    return clattn::CommonAttentionMetadata::of(host.starts, host.lens,
                                               std::span(table).first(host.lens.size() * kPages));
  }
  /// Of builders whose query lengths are on the device.
  clattn::BuilderOptions options(std::int32_t decode_threshold) const {
    clattn::BuilderOptions made;
    made.limits = {.max_num_reqs = static_cast<std::int32_t>(contexts_.size()),
                   .max_num_batched_tokens = num_rows_,
                   .max_model_len = kPages * kPage,
                   .num_blocks = std::ssize(table)};
    made.decode_threshold = decode_threshold;
    made.device_seq_lens = made.device_query_lens = true;
    return made;
  }
  /// The cache, outputs and tensors before a step, in the buffers that they have already.
  void refill() {
    queue.write(cache.buffer, image_.bytes());
    for (step_test::FencedOutput* const output : {&out_, &lse_}) {
      std::ranges::fill(output->host.bytes(), std::byte{0xA5});
      queue.write(output->buffer, output->host.bytes());
    }
  }
  void launch(const clattn::AttentionMetadata& metadata) const {
    impl->write_kv_cache(queue, {key_buffer_.handle()}, {value_buffer_.handle()}, cache, metadata);
    impl->forward(queue,
                  {.query = {query_buffer_.handle()},
                   .output = {out_.buffer.handle(), out_.front},
                   .lse = lse_.buffer.handle()},
                  cache, metadata);
  }
  void give(const clattn::AttentionMetadata& metadata, const Rows& device,
            clattn::DeviceErrors& errors) const {
    clattn::update_query_lens(queue, metadata,
                              {cache_ops_test::upload(*context, queue, device.starts),
                               cache_ops_test::upload(*context, queue, device.lens)},
                              errors);
  }
  /// Expects what the step had to write: rows, and keys of the cache. Requests in `left_out` have
  /// written nothing.
  void expect(const Rows& device, const std::string& what,
              const std::vector<std::size_t>& left_out = {}) {
    oracle::AttentionCase truth = truth_;
    Elements image = image_;
    std::vector<bool> written(index(num_rows_));
    for (std::size_t r = 0; r < device.lens.size(); ++r) {
      if (std::ranges::count(left_out, r) > 0) continue;
      for (std::int32_t row = device.starts[r]; row < device.starts[r + 1]; ++row) {
        written[index(row)] = true;
        store(truth, image, r, device.lens[r] - (device.starts[r + 1] - row), row);
      }
    }
    truth.query_start_loc = device.starts;
    truth.seq_lens = device.lens;
    truth.query.resize(index(device.starts.back() * query_width()));
    for (const std::size_t r : left_out)  // whatever the oracle makes of its rows is not looked at
      truth.seq_lens[r] = std::max(0, device.starts[r + 1] - device.starts[r]);
    oracle::AttentionResult want = oracle::attention(truth, step_test::element(config.dtype));
    if (step_test::rounds_probabilities(impl->kernels())) want.add_weight_rounding();
    expect_rows(want, written, what);
    Elements now = image;
    queue.read(cache.buffer, now.bytes());
    EXPECT_EQ(now.bytes(), image.bytes()) << what << ": the cache";
  }

  std::shared_ptr<clattn::Context> context;
  clattn::AttentionConfig config;
  clattn::Queue queue;
  const clattn::AttentionBackend& backend;
  std::shared_ptr<const clattn::AttentionImpl> impl;
  std::vector<std::int32_t> table;
  clattn::KVCache cache;

 private:
  std::int32_t value_size() const {
    return config.head_size - (config.use_mla ? config.rope_dim : 0);
  }
  std::int64_t query_width() const { return std::int64_t{config.num_heads} * config.head_size; }
  std::int64_t output_width() const { return std::int64_t{config.num_heads} * value_size(); }
  std::int64_t kv_width() const { return std::int64_t{config.num_kv_heads} * config.head_size; }

  /// Puts a key and a value into the truth's cache and into the device's.
  template <typename Key, typename Value>
  void put(oracle::AttentionCase& truth, Elements& image, std::size_t request,
           std::int32_t position, const Key& key, const Value& value) const {
    const std::int64_t block = table[request * kPages + index(position / kPage)];
    const std::int64_t at = (block * kPage + position % kPage) * kv_width();
    for (std::int64_t i = 0; i < kv_width(); ++i) {
      const std::int64_t head = i / config.head_size, dim = i % config.head_size;
      truth.key_cache[index(at + i)] =
          image.set(cache.key_at(block, position % kPage, head, dim), key(i));
      truth.value_cache[index(at + i)] =
          config.use_mla ? truth.key_cache[index(at + i)]
                         : image.set(cache.value_at(block, position % kPage, head, dim), value(i));
    }
  }
  void store(oracle::AttentionCase& truth, Elements& image, std::size_t request,
             std::int32_t position, std::int32_t row) const {
    const std::int32_t rank = value_size(), rope = config.rope_dim;
    put(
        truth, image, request, position,
        [&](std::int64_t i) {
          if (!config.use_mla) return key_.get(row * kv_width() + i);
          return i < rank ? key_.get(std::int64_t{row} * rank + i)
                          : value_.get(std::int64_t{row} * rope + i - rank);
        },
        [&](std::int64_t i) { return value_.get(row * kv_width() + i); });
  }
  void set_truth() {
    truth_.num_heads = config.num_heads;
    truth_.num_kv_heads = config.num_kv_heads;
    truth_.head_size = config.head_size;
    truth_.block_size = kPage;
    truth_.scale = 1.0 / std::sqrt(static_cast<double>(config.head_size));
    truth_.block_table = table;
    truth_.max_blocks = kPages;
    const std::size_t elements = table.size() * kPage * index(kv_width());
    truth_.key_cache.assign(elements, std::numeric_limits<double>::quiet_NaN());
    truth_.value_cache = truth_.key_cache;
    std::mt19937 random(5);
    std::normal_distribution<double> normal;
    const auto any = [&](std::int64_t) { return normal(random); };
    for (std::size_t r = 0; r < contexts_.size(); ++r) {
      for (std::int32_t p = 0; p < contexts_[r]; ++p) put(truth_, image_, r, p, any, any);
    }
  }
  void set_rows() {
    std::mt19937 random(6);
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < num_rows_ * query_width(); ++i)
      truth_.query.push_back(query_.set(i, normal(random)));
    for (Elements* const tensor : {&key_, &value_}) {
      const auto count =
          static_cast<std::int64_t>(tensor->bytes().size() / element_size_bytes(config.dtype));
      for (std::int64_t i = 0; i < count; ++i) tensor->set(i, normal(random));
    }
  }
  void expect_rows(const oracle::AttentionResult& want, const std::vector<bool>& written,
                   const std::string& what) {
    const std::int32_t dims = value_size();
    const Elements before = out_.host, lse_before = lse_.host;
    const std::vector<double> out = out_.read(queue), lse = lse_.read(queue);
    std::vector<double> got, wanted, bound, got_lse, wanted_lse;
    for (std::int64_t at = 0; at < std::int64_t{num_rows_} * config.num_heads; ++at) {
      const std::int64_t row = at / config.num_heads;
      if (!written[index(row)]) {
        ASSERT_EQ(lse[index(at)], lse_before.get(at)) << what << " row " << row;
      }
      for (std::int64_t d = 0; d < dims; ++d) {
        const double now = out[index(at * dims + d)];
        if (!written[index(row)]) {
          ASSERT_EQ(now, before.get(out_.front + at * dims + d)) << what << " row " << row;
          continue;
        }
        got.push_back(now);
        wanted.push_back(want.out[index(at * config.head_size + d)]);
        bound.push_back(want.bound[index(at * config.head_size + d)]);
      }
      if (!written[index(row)]) continue;
      got_lse.push_back(lse[index(at)]);
      wanted_lse.push_back(want.lse[index(at)]);
    }
    step_test::expect_close(got, wanted, &bound, what + " out");
    step_test::expect_close(got_lse, wanted_lse, nullptr, what + " lse");
  }

  std::vector<std::int32_t> contexts_;
  std::int32_t num_rows_;
  Elements query_, key_, value_;  // of the step
  Elements image_;                // the cache before it
  oracle::AttentionCase truth_;
  step_test::FencedOutput out_, lse_;
  clattn::Buffer query_buffer_, key_buffer_, value_buffer_;
};

}  // namespace step_model
