#include <fmt/format.h>

#include <array>
#include <clattn/recurrent.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "oracle/recurrent.hpp"
#include "program/check/checks.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"
#include "program/recurrent/layer.hpp"

namespace clattn::cli {
namespace {

/// A new prompt, a decode and a continued prompt, whose states lie in any order. The page that is
/// left over stays as it is.
constexpr std::array<std::int32_t, 4> kStart = {0, 40, 41, 61};
constexpr std::array<std::int32_t, 3> kPages = {2, 0, 1};
constexpr std::array<std::uint8_t, 3> kContinues = {0, 1, 1};
constexpr std::int64_t kTokens = kStart.back(), kNumPages = 4;
constexpr DeltaNet kNet{.num_k_heads = 2, .num_v_heads = 4, .head_k_dim = 64, .head_v_dim = 48};

/// Random numbers as a type stores them, here and on the device.
struct Numbers {
  std::vector<std::byte> bytes;
  std::vector<double> values;
  Buffer buffer;
};

struct RecurrentTypes {
  DType dtype, state_dtype;
};

/// A layer and the lists of its step on a device.
class Place : public OnDevice {
 public:
  Place(const std::shared_ptr<Context>& of, RecurrentTypes types, bool in_chunks)
      : OnDevice{of}, builder_(*of) {
    net_.state_dtype = types.state_dtype;
    net_.in_chunks = in_chunks;
    layer = std::make_unique<DeltaNetLayer>(*context, queue, net_, types.dtype);
    metadata = builder_.build(
        queue,
        {.query_start_loc = kStart, .state_indices = kPages, .has_initial_state = kContinues});
  }
  Numbers numbers(DType dtype, std::int64_t count, std::uint32_t seed) const {
    Numbers made{random_elements(dtype, to_size(count), seed), {}, {}};
    made.values = decode_elements(dtype, made.bytes);
    made.buffer = up(made.bytes);
    return made;
  }
  /// An output of `count` activations, poisoned.
  GuardedOutput output(std::int64_t count) const {
    GuardedOutput out(*context, to_size(count) * element_size_bytes(layer->dtype()), 0);
    out.refill(queue);
    return out;
  }
  std::vector<double> read(const GuardedOutput& out) const {
    return decode_elements(layer->dtype(), out.read(queue));
  }

  std::unique_ptr<DeltaNetLayer> layer;
  RecurrentMetadata metadata;

 private:
  DeltaNet net_ = kNet;
  RecurrentMetadataBuilder builder_;
};

StateView view_of(const Numbers& states, StateTensor page) {
  const auto elements = static_cast<std::int64_t>(states.values.size()) / kNumPages;
  return {states.buffer, std::move(page), kNumPages, 0, elements};
}

/// The pages after a call, of which the one that no request has must hold its bits.
std::vector<double> read_pages(const Place& place, const Numbers& states, DType dtype,
                               Deviation& deviation) {
  const auto bytes = place.down<std::byte>(states.buffer, states.bytes.size());
  const std::size_t unused = bytes.size() / kNumPages * (kNumPages - 1);
  deviation.merge(
      compare_bytes(std::span(bytes).subspan(unused), std::span(states.bytes).subspan(unused)));
  return decode_elements(dtype, bytes);
}

std::vector<double> slice(const std::vector<double>& of, std::int64_t first, std::int64_t count) {
  return {of.begin() + first, of.begin() + first + count};
}

/// One request's tokens on one key head: results, and the state after them.
void compare_heads(const Place& place, const oracle::DeltaRuleResult& truth, std::size_t request,
                   std::int32_t key_head, const std::vector<double>& out,
                   const std::vector<double>& pages, Deviation& deviation) {
  const std::int64_t width = place.layer->heads_per_key() * std::int64_t{kNet.head_v_dim};
  std::vector<double> rows;
  for (std::int64_t t = kStart[request]; t < kStart[request + 1]; ++t) {
    const std::vector<double> row = slice(out, t * kNet.values() + key_head * width, width);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  const std::int64_t state = width * kNet.head_k_dim;
  deviation.merge(compare(truth.out, rows, oracle::kOutSigmas));
  deviation.merge(compare(
      truth.states, slice(pages, kPages[request] * kNet.state_elements() + key_head * state, state),
      oracle::kStateSigmas));
}

Verdict check_rule(const std::shared_ptr<Context>& context, RecurrentTypes types, bool in_chunks) {
  const Place place(context, types, in_chunks);
  const DeltaNetLayer& layer = *place.layer;
  const std::int64_t channels = kNet.channels(), num_gates = std::int64_t{2} * kNet.num_v_heads;
  const Numbers mixed = place.numbers(types.dtype, kTokens * channels, 1);
  const Numbers gates = place.numbers(types.dtype, kTokens * num_gates, 2);
  const Numbers states = place.numbers(types.state_dtype, kNumPages * kNet.state_elements(), 3);
  const GuardedOutput out = place.output(kTokens * kNet.values());
  Event event;
  const auto call = in_chunks ? chunk_gated_delta_rule : fused_recurrent_gated_delta_rule;
  call(*context, place.queue,
       layer.rule(mixed.buffer.handle(), {gates.buffer.handle()}, out.handle()),
       view_of(states, {{kNet.num_v_heads, kNet.head_v_dim, kNet.head_k_dim}, types.state_dtype}),
       place.metadata, &event);
  Verdict verdict{
      {},
      one_launch(in_chunks ? "chunk_gated_delta_rule" : "fused_recurrent_gated_delta_rule", event)};
  const std::vector<double> got = place.read(out);
  const std::vector<double> pages = read_pages(place, states, types.state_dtype, verdict.deviation);
  for (std::size_t r = 0; r < kPages.size(); ++r) {
    const std::int32_t first = kStart[r], tokens = kStart[r + 1] - first;
    const DeltaNetLayer::Inputs inputs{
        .mixed =
            [&](std::int64_t channel, std::int32_t count) {
              std::vector<double> values;
              for (std::int64_t t = first; t < first + tokens; ++t)
                for (std::int64_t c = channel; c < channel + count; ++c)
                  values.push_back(mixed.values[to_size(t * channels + c)]);
              return values;
            },
        .gates =
            [&](std::int32_t t, std::int64_t i) {
              return gates.values[to_size((first + t) * num_gates + i)];
            }};
    for (std::int32_t head = 0; head < kNet.num_k_heads; ++head) {
      oracle::DeltaRuleCase one =
          layer.rule_case({head, 0, kNet.head_v_dim}, tokens, kContinues[r] != 0, inputs);
      const auto size = static_cast<std::int64_t>(one.states.size());
      one.states = slice(states.values, kPages[r] * kNet.state_elements() + head * size, size);
      const oracle::DeltaRuleResult truth =
          oracle::delta_rule(one, {element_of(types.dtype), element_of(types.state_dtype),
                                   tokens >= 16 ? layer.chunk_rounding(*context) : 0});
      compare_heads(place, truth, r, head, got, pages, verdict.deviation);
    }
  }
  return verdict;
}

Verdict check_loop(const std::shared_ptr<Context>& context, RecurrentTypes types) {
  return check_rule(context, types, false);
}
Verdict check_chunks(const std::shared_ptr<Context>& context, RecurrentTypes types) {
  return check_rule(context, types, true);
}

Verdict check_conv(const std::shared_ptr<Context>& context, RecurrentTypes types) {
  const Place place(context, types, false);
  const std::int64_t channels = kNet.channels(), rows = kNet.conv_width - 1;
  const Numbers x = place.numbers(types.dtype, kTokens * channels, 4);
  const Numbers states = place.numbers(types.dtype, kNumPages * rows * channels, 5);
  const GuardedOutput out = place.output(kTokens * channels);
  Event event;
  causal_conv1d_fn(*context, place.queue, place.layer->conv({x.buffer.handle()}, out.handle()),
                   view_of(states, {{rows, channels}, types.dtype}), place.metadata, &event);
  oracle::CausalConvCase call = place.layer->conv_case(0, static_cast<std::int32_t>(channels));
  call.requests.query_start_loc.assign(kStart.begin(), kStart.end());
  call.requests.slots.assign(kPages.begin(), kPages.end());
  call.requests.has_initial_state.assign(kContinues.begin(), kContinues.end());
  call.x = x.values;
  call.states = states.values;
  const oracle::CausalConvResult truth = oracle::causal_conv(call, element_of(types.dtype));
  Verdict verdict{compare(truth.out, place.read(out), oracle::kOutSigmas),
                  one_launch("causal_conv1d_fn", event)};
  const std::vector<double> pages = read_pages(place, states, types.dtype, verdict.deviation);
  for (std::size_t i = 0; i < pages.size(); ++i)
    verdict.deviation.add(pages[i] == truth.states[i] ? 0 : 1, 0, 0.5);
  return verdict;
}

Verdict check_norm(const std::shared_ptr<Context>& context, RecurrentTypes types) {
  const Place place(context, types, false);
  const Numbers x = place.numbers(types.dtype, kTokens * kNet.values(), 6);
  const Numbers z = place.numbers(types.dtype, kTokens * kNet.values(), 7);
  const GuardedOutput out = place.output(kTokens * kNet.values());
  Event event;
  rms_norm_gated(*context, place.queue,
                 place.layer->norm(x.buffer.handle(), {z.buffer.handle()}, out.handle(), kTokens),
                 &event);
  const oracle::JudgedTensor truth =
      oracle::gated_norm(place.layer->norm_case(x.values, z.values), element_of(types.dtype));
  return {compare(truth, place.read(out), 1), one_launch("rms_norm_gated", event)};
}

struct CheckedOp {
  std::string_view name;
  Verdict (*check)(const std::shared_ptr<Context>& context, RecurrentTypes types);
};
constexpr CheckedOp kOps[] = {{"causal_conv1d", check_conv},
                              {"delta rule by token", check_loop},
                              {"delta rule in chunks", check_chunks},
                              {"rms_norm_gated", check_norm}};
constexpr RecurrentTypes kTypes[] = {{DType::kBF16, DType::kF32},
                                     {DType::kBF16, DType::kBF16},
                                     {DType::kF16, DType::kF32},
                                     {DType::kF32, DType::kF32}};

}  // namespace

void plan_recurrent(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan) {
  for (const CheckedOp& op : kOps) {
    for (const RecurrentTypes& of : kTypes) {
      const std::string types = types_of(of.dtype, of.state_dtype);
      if (!plan.takes(std::string(op.name), types, &of == &kTypes[0])) continue;
      const auto call = [=] { return op.check(context, of); };
      plan.add({fmt::format("{}, {}", op.name, types), call, [=, &report] {
                  CheckLine line{.what = std::string(op.name), .types = types};
                  line.run(line.what, call);
                  report.add(line);
                }});
    }
  }
}

}  // namespace clattn::cli
