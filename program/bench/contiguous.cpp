#include <algorithm>
#include <chrono>
#include <set>
#include <utility>
#include <vector>

#include "program/bench/data.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

/// Prompts over their own keys and values, which lie one after the other without pages: the prefill
/// of latent attention in projected form (AttentionConfig::head_size_v).
class ContiguousWorkload final : public Workload {
 public:
  explicit ContiguousWorkload(const BenchTask& task)
      : config_(task.shape.model.config),
        requests_(task.shape.requests),
        queue_(task.context->create_queue()),
        query_(task, config_.num_heads * config_.head_size, 2),
        key_(task, config_.num_kv_heads * config_.head_size, 1),
        value_(task, config_.num_kv_heads * config_.output_head_size(), 3),
        out_(task, config_.num_heads * config_.output_head_size(), 4) {
    const auto& context = task.context;
    for (const Rows* rows : {&query_, &key_, &value_}) rows->source.fill(queue_, rows->buffer);
    const auto& found = *get_attn_backend(config_, &context->capabilities(), task.options.backend);
    backend = found.name();
    impl_ = found.make_impl(context, config_);
    builder_ = found.make_builder(context, config_, builder_options(task.shape, 0));
    std::vector<std::int32_t> lens;
    for (const RequestShape& request : requests_) {
      starts_.push_back(starts_.back() + request.query_len);
      lens.push_back(request.query_len);
    }
    auto batch = CommonAttentionMetadata::of(starts_, lens, {});
    batch.key_start_loc = starts_;
    batch.causal = true;
    metadata_ = &builder_->build(queue_, batch);
    touched_bytes = key_.buffer.size_bytes() + value_.buffer.size_bytes();
    record_kernels();
    work = attention_work(config_, requests_);
  }

  double run(int launches) override {
    queue_.fill(out_.buffer, kPoison, 0, out_.buffer.size_bytes() / 4 * 4);
    return seconds_each(queue_, launches, [&] { forward(); });
  }

  /// The first, middle and last token of some requests, each in another head.
  Deviation verify() override {
    constexpr std::size_t kSampledRequests = 16;
    const std::size_t samples = std::min(requests_.size(), kSampledRequests);
    Deviation deviation;
    std::int32_t head = 0;
    for (std::size_t i = 0; i < samples; ++i) {
      const std::size_t request = samples < 2 ? 0 : i * (requests_.size() - 1) / (samples - 1);
      const std::int32_t last = requests_[request].query_len - 1;
      for (const std::int32_t token : std::set<std::int32_t>{0, (last + 1) / 2, last}) {
        deviation.merge(verify_row(starts_[request], token, head));
        head = (head + 1) % config_.num_heads;
      }
    }
    return deviation;
  }

 private:
  /// A tensor of this many elements a token.
  struct Rows {
    Rows(const BenchTask& task, std::int32_t elements, std::uint32_t seed)
        : width(to_size(elements)), source(task.shape.model.config.dtype, seed) {
      const std::size_t bytes = to_size(task.shape.num_tokens()) * width *
                                element_size_bytes(task.shape.model.config.dtype);
      const std::size_t room = room_of(task.context->capabilities(), 4);
      if (bytes > room)
        throw_unsupported("needs {} bytes of a tensor, the device has room for {}", bytes, room);
      buffer = task.context->allocate((bytes + 3) / 4 * 4);
    }
    double at(std::int32_t token, std::size_t element) const {
      return source.at(to_size(token) * width + element);
    }

    std::size_t width;
    TiledRandom source;
    Buffer buffer;
  };

  void forward(std::vector<LaunchRecord>* launches = nullptr) const {
    impl_->forward_encoder(queue_,
                           {.query = {query_.buffer.handle()},
                            .key = {key_.buffer.handle()},
                            .value = {value_.buffer.handle()},
                            .output = {out_.buffer.handle()}},
                           *metadata_, {.launches = launches});
  }

  void record_kernels() {
    std::vector<LaunchRecord> launches;
    queue_.finish();
    const auto start = std::chrono::steady_clock::now();
    forward(&launches);
    queue_.finish();
    first_seconds = seconds_since(start);
    kernels = kernels_of(launches, impl_->kernels());
    rounds_probabilities_ = std::ranges::any_of(launches, &LaunchRecord::rounds_probabilities);
  }

  /// One head of a token, over the keys that it sees: those of its request up to itself. The oracle
  /// knows one head size alone: after its values' last element it sees zeros.
  Deviation verify_row(std::int32_t first, std::int32_t token, std::int32_t head) const {
    const auto size = to_size(config_.head_size), kept = to_size(config_.output_head_size());
    const std::size_t kv_head = to_size(head / std::max(config_.num_queries_per_kv(), 1));
    oracle::AttentionCase call = row_case(config_, token + 1, {head, 1});
    for (std::size_t d = 0; d < size; ++d)
      call.query.push_back(query_.at(first + token, to_size(head) * size + d));
    for (std::int32_t position = 0; position <= token; ++position) {
      for (std::size_t d = 0; d < size; ++d) {
        call.key_cache.push_back(key_.at(first + position, kv_head * size + d));
        call.value_cache.push_back(d < kept ? value_.at(first + position, kv_head * kept + d)
                                            : 0.0);
      }
    }
    const std::size_t row = to_size(first + token) * to_size(config_.num_heads) + to_size(head);
    std::vector<std::byte> got(kept * element_size_bytes(config_.dtype));
    queue_.read(out_.buffer, got, row * got.size());
    return compare(config_.dtype, got, {},
                   front_of_rows(oracle::attention(call, element_of(config_.dtype)),
                                 config_.head_size, config_.output_head_size()),
                   rounds_probabilities_);
  }

  AttentionConfig config_;
  std::vector<RequestShape> requests_;
  Queue queue_;
  Rows query_, key_, value_, out_;
  std::vector<std::int32_t> starts_ = {0};  // of requests in all tensors
  std::shared_ptr<const AttentionImpl> impl_;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  const AttentionMetadata* metadata_ = nullptr;
  bool rounds_probabilities_ = false;
};

}  // namespace

std::unique_ptr<Workload> make_contiguous_workload(const BenchTask& task) {
  return std::make_unique<ContiguousWorkload>(task);
}

}  // namespace clattn::cli
