#include <algorithm>
#include <array>
#include <clattn/cache_ops.hpp>
#include <clattn/recurrent.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "program/bench/data.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"
#include "program/recurrent/layer.hpp"

namespace clattn::cli {
namespace {

/// An operation of a gated delta net. Launches take turns with sets of inputs, outputs and pages.
/// As they change states in place, the last one of a round goes to a set that each round begins
/// anew, so that its truth is known.
class RecurrentWorkload : public Workload {
 public:
  double run(int launches) final {
    const Set& last = sets_.back();
    states_.fill(queue_, last.states.buffer);
    queue_.fill(last.out, kPoison, 0, last.out.size_bytes() / 4 * 4);
    int left = launches;
    return seconds_each(queue_, launches, [&] {
      if (--left == 0) return launch(last);
      next_ = (next_ + 1) % (sets_.size() - 1);
      launch(sets_[next_]);
    });
  }

 protected:
  struct Set {
    Buffer in, out;
    StateView states;
  };

  /// `page`: what a request's page holds; `in`, `out`: elements of a token.
  RecurrentWorkload(const BenchTask& task, const StateTensor& page, std::int64_t in,
                    std::int64_t out)
      : shape_(task.shape),
        context_(task.context),
        queue_(context_->create_queue()),
        dtype_(shape_.model.config.dtype),
        net_(*context_, queue_, shape_.model.delta_net, dtype_),
        in_(dtype_, 1),
        states_(page.dtype, 2),
        builder_(*context_) {
    page_elements_ = 1;
    for (const std::int64_t extent : page.shape) page_elements_ *= extent;
    make_sets(task, page, in, out);
    start_ = {0};
    for (const RequestShape& request : shape_.requests) {
      start_.push_back(start_.back() + request.query_len);
      continues_.push_back(request.seq_len > request.query_len ? 1 : 0);
    }
    pages_ = shuffled_pages(shape_.num_reqs(), 7);
    metadata_ = builder_.build(
        queue_,
        {.query_start_loc = start_, .state_indices = pages_, .has_initial_state = continues_});
    // A state is written by each request and read by those that continue one.
    const auto moved = std::count(continues_.begin(), continues_.end(), 1) + shape_.num_reqs();
    work.bytes = static_cast<double>(shape_.num_tokens() * (in + out)) *
                     static_cast<double>(element_size_bytes(dtype_)) +
                 static_cast<double>(moved * page_elements_) *
                     static_cast<double>(element_size_bytes(page.dtype));
  }

  virtual void launch(const Set& set) = 0;

  void name_kernel(std::string name) {
    kernels = {{.name = std::move(name),
                .role = "recurrent",
                .work_group_size = cache_op_work_group_size(context_->capabilities())}};
  }

  /// Requests to look at: some 16 in all, so that of few requests each stands several times.
  static constexpr std::int32_t kSamples = 16;
  std::int32_t sampled_request(std::int32_t sample) const {
    return static_cast<std::int32_t>(std::int64_t{sample} * shape_.num_reqs() / kSamples);
  }
  std::int32_t tokens_of(std::int32_t request) const {
    return shape_.requests[to_size(request)].query_len;
  }
  std::int32_t first_token(std::int32_t request) const { return start_[to_size(request)]; }
  bool continues(std::int32_t request) const { return continues_[to_size(request)] != 0; }
  /// Elements before a request's page.
  std::int64_t page_of(std::int32_t request) const {
    return pages_[to_size(request)] * page_elements_;
  }
  const Set& last_set() const { return sets_.back(); }
  /// Numbers of the last launch.
  std::vector<double> download_last(const Buffer& buffer, DType dtype) const {
    return decode_elements(dtype, download<std::byte>(queue_, buffer, buffer.size_bytes()));
  }

  const BenchShape& shape_;
  std::shared_ptr<Context> context_;
  Queue queue_;
  DType dtype_;
  DeltaNetLayer net_;
  TiledRandom in_, states_;
  RecurrentMetadata metadata_;

 private:
  void make_sets(const BenchTask& task, const StateTensor& page, std::int64_t in,
                 std::int64_t out) {
    constexpr std::size_t kMaxSets = 256;
    const auto tokens = static_cast<std::size_t>(shape_.num_tokens());
    const std::size_t size = element_size_bytes(dtype_);
    const std::size_t bytes[] = {
        tokens * to_size(in) * size, tokens * to_size(out) * size,
        to_size(shape_.num_reqs() * page_elements_) * element_size_bytes(page.dtype)};
    const std::size_t set_bytes = bytes[0] + bytes[1] + bytes[2];
    const DeviceCapabilities& device = context_->capabilities();
    const std::size_t room = device.global_mem_bytes / 2;
    if (2 * set_bytes > room || std::ranges::max(bytes) > device.max_alloc_bytes) {
      throw_unsupported("needs twice {} bytes of states and tensors, the device has room for {}",
                        set_bytes, room);
    }
    const std::size_t wanted = (task.options.rotate_bytes + set_bytes - 1) / set_bytes + 1;
    const std::size_t count =
        std::clamp<std::size_t>(wanted, 2, std::min(kMaxSets, room / set_bytes));
    for (std::size_t i = 0; i < count; ++i) {
      sets_.push_back({context_->allocate(bytes[0]),
                       context_->allocate(bytes[1]),
                       {context_->allocate(bytes[2]), page, shape_.num_reqs(), 0, page_elements_}});
      in_.fill(queue_, sets_.back().in);
      states_.fill(queue_, sets_.back().states.buffer);
    }
    touched_bytes = count * set_bytes;
  }

  RecurrentMetadataBuilder builder_;
  std::int64_t page_elements_ = 0;
  std::vector<Set> sets_;
  std::size_t next_ = 0;
  std::vector<std::int32_t> start_, pages_;
  std::vector<std::uint8_t> continues_;
};

/// Suites gdn_decode and gdn_prefill: the gated delta rule from raw gates, its queries, keys and
/// values slices of what a convolution gives.
class RuleWorkload final : public RecurrentWorkload {
 public:
  explicit RuleWorkload(const BenchTask& task)
      : RecurrentWorkload(
            task,
            {{task.shape.model.delta_net.num_v_heads, task.shape.model.delta_net.head_v_dim,
              task.shape.model.delta_net.head_k_dim},
             task.shape.model.delta_net.state_dtype},
            task.shape.model.delta_net.channels(), task.shape.model.delta_net.values()),
        of_gates_(dtype_, 3) {
    const DeltaNet& net = net_.net();
    const std::int64_t gates = std::int64_t{2} * net.num_v_heads * shape_.num_tokens();
    gates_ = context_->allocate(to_size(gates) * element_size_bytes(dtype_));
    of_gates_.fill(queue_, gates_);
    work.bytes += static_cast<double>(gates_.size_bytes());
    const double k = net.head_k_dim, v = net.head_v_dim;
    // Token by token: decay, two products and an update. In chunks of 16, the least that the
    // kernels take, halves of squares used: three products with the state, the rest among tokens.
    const double by_token = 7 * k * v, in_chunks = 6 * k * v + 16 * (2 * k + 2 * v);
    const bool prompts = shape_.suite == "gdn_prefill";
    work.flops = static_cast<double>(shape_.num_tokens()) * net.num_v_heads *
                 (prompts ? std::min(by_token, in_chunks) : by_token);
    chunks_ = prompts && net.in_chunks;
    rounding_ = chunks_ ? net_.chunk_rounding(*context_) : 0;
    name_kernel(chunks_ ? "chunk_gated_delta_rule" : "fused_recurrent_gated_delta_rule");
  }

  /// All tokens of 8 rows of the heads on a key head, and these rows of states after them.
  Deviation verify() override {
    const DeltaNet& net = net_.net();
    constexpr std::int32_t kRows = 8;
    const std::vector<double> out = download_last(last_set().out, dtype_);
    Deviation deviation;
    for (std::int32_t sample = 0; sample < kSamples; ++sample) {
      const std::int32_t request = sampled_request(sample), tokens = tokens_of(request);
      const DeltaNetLayer::HeadRows rows{sample * 5 % net.num_k_heads,
                                         sample * 3 % (net.head_v_dim / kRows) * kRows, kRows};
      oracle::DeltaRuleCase call =
          net_.rule_case(rows, tokens, continues(request), inputs_of(request));
      call.states.clear();
      std::vector<double> got_states, got_out;
      for (std::int32_t i = 0; i < net_.heads_per_key(); ++i) {
        const std::int64_t first = page_of(request) + net_.first_element(rows, i) * net.head_k_dim;
        const std::int64_t count = std::int64_t{kRows} * net.head_k_dim;
        for (std::int64_t at = first; at < first + count; ++at)
          call.states.push_back(states_.at(to_size(at)));
        const std::vector<double> part = read_state(first, to_size(count));
        got_states.insert(got_states.end(), part.begin(), part.end());
      }
      for (std::int32_t t = 0; t < tokens; ++t) {
        for (std::int32_t i = 0; i < net_.heads_per_key(); ++i) {
          const auto from =
              out.begin() + (first_token(request) + t) * net.values() + net_.first_element(rows, i);
          got_out.insert(got_out.end(), from, from + kRows);
        }
      }
      const oracle::DeltaRuleResult truth =
          oracle::delta_rule(call, {element_of(dtype_), element_of(net.state_dtype), rounding_});
      deviation.merge(compare(truth.out, got_out, oracle::kOutSigmas));
      deviation.merge(compare(truth.states, got_states, oracle::kStateSigmas));
    }
    return deviation;
  }

 private:
  DeltaNetLayer::Inputs inputs_of(std::int32_t request) const {
    const std::int64_t first = first_token(request), tokens = tokens_of(request);
    return {.mixed =
                [this, first, tokens](std::int64_t channel, std::int32_t count) {
                  std::vector<double> values;
                  for (std::int64_t t = first; t < first + tokens; ++t)
                    for (std::int64_t c = channel; c < channel + count; ++c)
                      values.push_back(in_.at(to_size(t * net_.net().channels() + c)));
                  return values;
                },
            .gates =
                [this, first](std::int32_t t, std::int64_t i) {
                  return of_gates_.at(to_size((first + t) * 2 * net_.net().num_v_heads + i));
                }};
  }

  void launch(const Set& set) override {
    const auto call = chunks_ ? chunk_gated_delta_rule : fused_recurrent_gated_delta_rule;
    call(*context_, queue_, net_.rule(set.in.handle(), {gates_.handle()}, set.out.handle()),
         set.states, metadata_, nullptr);
  }

  std::vector<double> read_state(std::int64_t first, std::size_t count) const {
    const DType dtype = net_.net().state_dtype;
    std::vector<std::byte> bytes(count * element_size_bytes(dtype));
    queue_.read(last_set().states.buffer, bytes, to_size(first) * element_size_bytes(dtype));
    return decode_elements(dtype, bytes);
  }

  TiledRandom of_gates_;
  Buffer gates_;
  bool chunks_ = false;
  double rounding_ = 0;  ///< of the operands of products
};

/// Suite conv: the convolution in front, of all channels.
class ConvWorkload final : public RecurrentWorkload {
 public:
  explicit ConvWorkload(const BenchTask& task)
      : RecurrentWorkload(
            task,
            {{task.shape.model.delta_net.conv_width - 1, task.shape.model.delta_net.channels()},
             task.shape.model.config.dtype},
            task.shape.model.delta_net.channels(), task.shape.model.delta_net.channels()) {
    const DeltaNet& net = net_.net();
    const double weights = static_cast<double>(net.channels()) * net.conv_width;
    work.bytes += weights * static_cast<double>(element_size_bytes(dtype_));
    work.flops = 2 * weights * shape_.num_tokens();
    name_kernel(shape_.max_query_len() == 1 ? "causal_conv1d_update" : "causal_conv1d_fn");
  }

  /// All tokens of 64 channels; pages have to be exact copies.
  Deviation verify() override {
    const std::int64_t channels = net_.net().channels();
    const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(channels, 64));
    const std::vector<double> out = download_last(last_set().out, dtype_);
    const std::vector<double> pages = download_last(last_set().states.buffer, dtype_);
    Deviation deviation;
    for (std::int32_t sample = 0; sample < kSamples; ++sample) {
      const std::int32_t request = sampled_request(sample), tokens = tokens_of(request);
      const std::int64_t channel = sample * (channels - count) / (kSamples - 1);
      oracle::CausalConvCase call = net_.conv_case(channel, count);
      call.requests = one_request(tokens, continues(request));
      const auto part = [&](const auto& at, std::int64_t first, std::int64_t rows) {
        std::vector<double> values;
        for (std::int64_t row = 0; row < rows; ++row)
          for (std::int64_t c = 0; c < count; ++c)
            values.push_back(at(to_size(first + row * channels + channel + c)));
        return values;
      };
      const auto of = [](const std::vector<double>& values) {
        return [&values](std::size_t i) { return values[i]; };
      };
      const std::int64_t first = std::int64_t{first_token(request)} * channels;
      call.x = part([&](std::size_t i) { return in_.at(i); }, first, tokens);
      call.states =
          part([&](std::size_t i) { return states_.at(i); }, page_of(request), call.state_rows);
      const oracle::CausalConvResult truth = oracle::causal_conv(call, element_of(dtype_));
      deviation.merge(compare(truth.out, part(of(out), first, tokens), oracle::kOutSigmas));
      const std::vector<double> page = part(of(pages), page_of(request), call.state_rows);
      for (std::size_t i = 0; i < page.size(); ++i)
        deviation.add(page[i] == truth.states[i] ? 0 : 1, 0, 0.5);
    }
    return deviation;
  }

 private:
  void launch(const Set& set) override {
    causal_conv1d_fn(*context_, queue_, net_.conv({set.in.handle()}, set.out.handle()), set.states,
                     metadata_);
  }
};

}  // namespace

std::unique_ptr<Workload> make_recurrent_workload(const BenchTask& task) {
  if (task.shape.suite == "conv") return std::make_unique<ConvWorkload>(task);
  return std::make_unique<RuleWorkload>(task);
}

}  // namespace clattn::cli
