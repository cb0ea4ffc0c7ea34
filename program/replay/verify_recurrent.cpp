#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "program/common/elements.hpp"
#include "program/common/error.hpp"
#include "program/replay/verify.hpp"

// A gated delta net's row is judged from the first token of its request on, by what the pool holds:
// states are not read, so one that was lost or mixed up shows in what follows from it.

namespace clattn::cli {
namespace {

// Of each head so many elements of the rule's output are judged, each of which needs a row of the
// state from the first token on; of convolution and norm, all.
constexpr std::int32_t kHeadRows = 4;

/// What the operands of the rule may be off by: the convolution is rounded as its truth is, but
/// now and then, at a tie, to the other side. That counts as a quarter of a unit of all of them; in
/// f32, as the errors of its few sums.
double operand_rounding(DType dtype) {
  return std::max(oracle::half_ulp(element_of(dtype), 1) / 4, 0x1p-21);
}

/// Row `row` of rows of `width`.
oracle::JudgedTensor row_of(const oracle::JudgedTensor& all, std::int64_t row, std::int64_t width) {
  const auto part = [&](const std::vector<double>& values) {
    const auto from = values.begin() + row * width;
    return std::vector<double>(from, from + width);
  };
  return {part(all.exact), part(all.sigma), part(all.floor)};
}

}  // namespace

oracle::JudgedTensor Verifier::convolved(std::span<const std::int64_t> rows, std::int64_t first,
                                         std::int32_t count) const {
  const DeltaNetLayer& layer = engine_.recurrent().layer();
  oracle::CausalConvCase call = layer.conv_case(first, count);
  call.requests = one_request(static_cast<std::int32_t>(rows.size()), false);
  call.states.resize(to_size(std::int64_t{call.state_rows} * count));
  call.x.reserve(rows.size() * to_size(count));
  for (const std::int64_t row : rows)
    for (std::int64_t c = first; c < first + count; ++c)
      call.x.push_back(engine_.pool().stored(PoolTensor::kChannels, row, c));
  return oracle::causal_conv(call, element_of(layer.dtype())).out;
}

bool Verifier::judge_recurrent(const std::string& where, const oracle::JudgedTensor& truth,
                               std::span<const double> values, double sigmas) {
  const Deviation deviation = compare(truth, values, sigmas);
  stats_.deviation.merge(deviation);
  if (deviation.passed()) return true;
  if (stats_.failures.size() < kMaxFailuresTold) {
    stats_.failures.push_back(fmt::format("{}: error {:.3g} is {:.3g} times what is allowed", where,
                                          deviation.max_error, deviation.worst_share));
  }
  return false;
}

bool Verifier::check_rule(const std::string& where, std::span<const std::int64_t> rows,
                          std::span<const double> out, std::uint64_t salt) {
  const DeltaNetLayer& layer = engine_.recurrent().layer();
  const DeltaNet& net = layer.net();
  const auto tokens = static_cast<std::int32_t>(rows.size());
  const oracle::Element element = element_of(layer.dtype());
  const DeltaNetLayer::Inputs inputs{
      .mixed =
          [&](std::int64_t first, std::int32_t count) {
            std::vector<double> values = convolved(rows, first, count).exact;
            for (double& value : values) value = oracle::round_to(element, value);
            return values;
          },
      .gates =
          [&](std::int32_t token, std::int64_t i) {
            return engine_.pool().stored(PoolTensor::kGates, rows[to_size(token)], i);
          }};
  const double products =
      std::hypot(operand_rounding(layer.dtype()), engine_.recurrent().chunk_rounding());
  bool passed = true;
  for (std::int32_t key_head = 0; key_head < net.num_k_heads; ++key_head) {
    const std::int64_t places = std::int64_t{net.head_v_dim} - kHeadRows + 1;
    const DeltaNetLayer::HeadRows part{
        key_head,
        static_cast<std::int32_t>(mix64(salt + static_cast<std::uint64_t>(key_head)) %
                                  static_cast<std::uint64_t>(places)),
        kHeadRows};
    const oracle::JudgedTensor truth =
        oracle::delta_rule(layer.rule_case(part, tokens, false, inputs),
                           {element, element_of(net.state_dtype), products})
            .out;
    std::vector<double> got;
    for (std::int32_t i = 0; i < layer.heads_per_key(); ++i) {
      const auto from = out.begin() + layer.first_element(part, i);
      got.insert(got.end(), from, from + kHeadRows);
    }
    passed &= judge_recurrent(fmt::format("{}, rule, key head {}", where, key_head),
                              row_of(truth, tokens - 1, std::ssize(got)), got, oracle::kOutSigmas);
  }
  return passed;
}

void Verifier::check_recurrent_row(std::int64_t step, std::int32_t layer_index,
                                   const StepBatch& batch, const Row& row) {
  const DeltaNetLayer& layer = engine_.recurrent().layer();
  const DeltaNet& net = layer.net();
  const std::int32_t token = batch.first_token(row.place) + row.query;
  const std::vector<std::int64_t> rows = key_rows(batch, row, layer_index);
  const std::string where =
      fmt::format("step {}, request {}, token {}, recurrent layer {}", step,
                  batch.request(row.place).request->id, rows.size() - 1, layer_index);
  const RecurrentEngine::Outputs& captured = engine_.recurrent().captured();
  const auto read = [&](const Buffer& buffer, std::int64_t width) {
    return engine_.read_row(buffer, token, width);
  };
  const std::vector<double> mixed = read(captured.mixed, net.channels());
  const std::vector<double> out = read(captured.out, net.values());
  const std::vector<double> normed = read(captured.normed, net.values());

  const std::size_t window = std::min(rows.size(), to_size(net.conv_width));
  const oracle::JudgedTensor of_conv =
      convolved(std::span(rows).last(window), 0, static_cast<std::int32_t>(net.channels()));
  bool passed = judge_recurrent(
      where + ", convolution",
      row_of(of_conv, static_cast<std::int64_t>(window) - 1, net.channels()), mixed, 1);
  passed &= check_rule(where, rows, out, random(step, 60) + static_cast<std::uint64_t>(token));
  std::vector<double> z(to_size(net.values()));
  for (std::size_t i = 0; i < z.size(); ++i) {
    z[i] =
        engine_.pool().stored(PoolTensor::kOutputGate, rows.back(), static_cast<std::int64_t>(i));
  }
  passed &= judge_recurrent(
      where + ", norm",
      oracle::gated_norm(layer.norm_case(out, std::move(z)), element_of(layer.dtype())), normed, 1);
  ++stats_.rows;
  stats_.failed_rows += passed ? 0 : 1;
}

}  // namespace clattn::cli
