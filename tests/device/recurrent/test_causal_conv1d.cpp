// Convolutions of recurrent layers on every device, against the oracle; pages are exact copies.
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/recurrent.hpp>
#include <limits>
#include <random>

#include "device/cache_ops_support.hpp"
#include "oracle/recurrent.hpp"

namespace test_causal_conv1d {

using cache_ops_test::all_contexts;
using cache_ops_test::decode;
using cache_ops_test::download;
using cache_ops_test::element;
using cache_ops_test::encode;
using cache_ops_test::upload;
using clattn::DType;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct ConvSpec {
  std::int32_t channels = 48, width = 4, state_rows = 3;
  DType dtype = DType::kF32, weight_dtype = DType::kF32;
  bool silu = true, bias = true, gates = false;
  oracle::RecurrentRequests requests;
  std::int64_t pages = 4;
};

oracle::CausalConvCase make_case(const ConvSpec& spec) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  const auto numbers = [&](std::int64_t count, DType dtype) {
    std::vector<double> made;
    for (std::int64_t i = 0; i < count; ++i)
      made.push_back(oracle::round_to(element(dtype), normal(random)));
    return made;
  };
  oracle::CausalConvCase call;
  call.requests = spec.requests;
  call.channels = spec.channels;
  call.width = spec.width;
  call.state_rows = spec.state_rows;
  call.silu = spec.silu;
  call.x = numbers(std::int64_t{spec.channels} * spec.requests.query_start_loc.back(), spec.dtype);
  call.weight = numbers(std::int64_t{spec.channels} * spec.width, spec.weight_dtype);
  if (spec.bias) call.bias = numbers(spec.channels, spec.weight_dtype);
  call.states = numbers(spec.pages * spec.state_rows * spec.channels, spec.dtype);
  for (std::int32_t r = 0; r < spec.requests.num_requests(); ++r) {
    const std::int32_t slot =
        spec.requests
            .slots[static_cast<std::size_t>(r) * static_cast<std::size_t>(spec.requests.columns)];
    if (slot < 0 || spec.requests.has_initial_state[static_cast<std::size_t>(r)] != 0) continue;
    const auto page = std::int64_t{spec.state_rows} * spec.channels;
    std::fill_n(call.states.begin() + slot * page, page, kNaN);
  }
  return call;
}

/// Rows with 16 elements in front of each.
struct Rows {
  Rows(const clattn::Context& context, const clattn::Queue& queue, DType dtype, std::int64_t width,
       const std::vector<double>& values) {
    std::vector<double> all;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i % static_cast<std::size_t>(width) == 0) all.insert(all.end(), 16, kNaN);
      all.push_back(values[i]);
    }
    if (all.empty()) all.push_back(0);
    buffer = upload(context, queue, encode(dtype, all));
    ref = {buffer.handle(), 16, width + 16};
  }
  clattn::Buffer buffer;
  clattn::TensorRef ref;
};

std::vector<double> without_gaps(const std::vector<double>& rows, std::int64_t width) {
  std::vector<double> values;
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (i % static_cast<std::size_t>(width + 16) >= 16) values.push_back(rows[i]);
  return values;
}

void expect_right(const ConvSpec& spec) {
  oracle::CausalConvCase call = make_case(spec);
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const Rows x(*context, queue, spec.dtype, spec.channels, call.x);
    const std::vector<double> stale(call.x.size(), kNaN);
    const Rows out(*context, queue, spec.dtype, spec.channels, stale);
    const auto page = static_cast<std::int64_t>(spec.state_rows) * spec.channels;
    const clattn::StateView states{upload(*context, queue, encode(spec.dtype, call.states)),
                                   {{spec.state_rows, spec.channels}, spec.dtype},
                                   spec.pages,
                                   0,
                                   page};
    clattn::CausalConv1d conv;
    conv.x = x.ref;
    conv.out = out.ref;
    conv.weight = upload(*context, queue, encode(spec.weight_dtype, call.weight));
    if (spec.bias) conv.bias = upload(*context, queue, encode(spec.weight_dtype, call.bias));
    conv.channels = spec.channels;
    conv.width = spec.width;
    conv.dtype = spec.dtype;
    conv.weight_dtype = spec.weight_dtype;
    conv.activation =
        spec.silu ? clattn::RecurrentActivation::kSilu : clattn::RecurrentActivation::kNone;
    clattn::RecurrentMetadataBuilder builder(*context);
    const oracle::RecurrentRequests& of = spec.requests;
    const clattn::RecurrentMetadata metadata =
        builder.build(queue, {of.query_start_loc, of.slots, of.columns, of.has_initial_state,
                              of.num_accepted_tokens, -1});
    clattn::causal_conv1d_fn(*context, queue, conv, states, metadata);
    const auto exact = oracle::causal_conv(call, element(spec.dtype));
    const auto values =
        without_gaps(decode(spec.dtype, download<std::byte>(queue, out.buffer)), spec.channels);
    const auto verdict = oracle::judge(exact.out, values, oracle::kOutSigmas);
    EXPECT_LE(verdict.worst, 1) << "element " << verdict.at << ", type "
                                << clattn::to_string(spec.dtype);
    const auto after = download<std::byte>(queue, states.buffer);
    EXPECT_TRUE(after == encode(spec.dtype, exact.states)) << "pages differ";
  }
}

TEST(CausalConv, TypesActivationsAndBias) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool plain : {false, true}) {
      ConvSpec spec;
      spec.dtype = dtype;
      spec.weight_dtype = plain ? dtype : DType::kF32;
      spec.silu = spec.bias = !plain;
      spec.requests = {{0, 5, 6, 75, 75}, {2, 0, 3, 1}, 1, {0, 1, 1, 1}, {}};
      expect_right(spec);
    }
  }
}

TEST(CausalConv, WidthsChannelsAndLengths) {
  for (const std::int32_t width : {2, 3, 4, 8}) {
    for (const std::int32_t channels : {16, 1040}) {
      ConvSpec spec;
      spec.width = width;
      spec.state_rows = width + 1;
      spec.channels = channels;
      spec.pages = 9;
      spec.requests = {{0, 0, 1, 3, 3 + width, 40, 72, 136, 201},
                       {8, 7, 6, 5, 4, 3, 2, 1},
                       1,
                       {0, 1, 1, 1, 0, 1, 1, 0},
                       {}};
      expect_right(spec);
    }
  }
}

TEST(CausalConv, DraftsAmongOtherRequests) {
  for (const std::int32_t accepted : {1, 2, 4}) {
    for (const std::int32_t tokens : {0, 1, 2, 4}) {
      ConvSpec spec;
      spec.state_rows = 3 + 3;
      spec.requests = {{0, tokens, tokens + 1, tokens + 41},
                       {2, -1, -1, -1, 0, -1, -1, -1, 3, 1, -1, -1},
                       4,
                       {1, 1, 1},
                       {accepted, -1, -1}};
      expect_right(spec);
    }
  }
}

TEST(CausalConv, RequestsWithoutPagesGiveZeros) {
  ConvSpec spec;
  spec.requests = {{0, 2, 40, 41}, {-1, 2, -1}, 1, {1, 1, 0}, {}};
  expect_right(spec);
}

// y = out_gate conv(in_gate x), and pages hold products as their type does.
TEST(CausalConv, AShortConvolutionBetweenGates) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    ConvSpec spec;
    spec.width = 3;
    spec.state_rows = 2;
    spec.dtype = dtype;
    spec.silu = spec.bias = false;
    spec.requests = {{0, 1, 40}, {2, 1}, 1, {1, 0}, {}};
    oracle::CausalConvCase call = make_case(spec);
    const std::vector<double> x = call.x;
    std::vector<double> in_gate(x.rbegin(), x.rend()), out_gate = x;
    std::ranges::rotate(out_gate, out_gate.begin() + 7);
    for (std::size_t i = 0; i < x.size(); ++i)
      call.x[i] = oracle::round_to(element(dtype), x[i] * in_gate[i]);
    auto exact = oracle::causal_conv(call, element(dtype));
    for (std::size_t i = 0; i < x.size(); ++i) {
      exact.out.exact[i] *= out_gate[i];
      exact.out.floor[i] = 1.1 * (std::abs(out_gate[i]) * exact.out.floor[i] +
                                  oracle::half_ulp(element(dtype), exact.out.exact[i]));
    }
    for (const auto& context : all_contexts()) {
      const clattn::Queue queue = context->create_queue();
      const Rows rows(*context, queue, dtype, spec.channels, x);
      const Rows before(*context, queue, dtype, spec.channels, in_gate);
      const Rows after(*context, queue, dtype, spec.channels, out_gate);
      const Rows out(*context, queue, dtype, spec.channels, x);
      const clattn::StateView states{upload(*context, queue, encode(dtype, call.states)),
                                     {{2, spec.channels}, dtype},
                                     spec.pages,
                                     0,
                                     std::int64_t{2} * spec.channels};
      clattn::CausalConv1d conv;
      conv.x = rows.ref;
      conv.out = out.ref;
      conv.weight = upload(*context, queue, encode(spec.weight_dtype, call.weight));
      conv.channels = spec.channels;
      conv.width = 3;
      conv.dtype = dtype;
      conv.weight_dtype = spec.weight_dtype;
      conv.activation = clattn::RecurrentActivation::kNone;
      clattn::RecurrentMetadataBuilder builder(*context);
      const oracle::RecurrentRequests& of = spec.requests;
      const auto metadata = builder.build(
          queue, {of.query_start_loc, of.slots, of.columns, of.has_initial_state, {}, -1});
      clattn::short_conv(*context, queue, conv, before.ref, after.ref, states, metadata);
      const auto values =
          without_gaps(decode(dtype, download<std::byte>(queue, out.buffer)), spec.channels);
      EXPECT_LE(oracle::judge(exact.out, values, oracle::kOutSigmas).worst, 1)
          << clattn::to_string(dtype);
      EXPECT_TRUE(download<std::byte>(queue, states.buffer) == encode(dtype, exact.states));
    }
  }
}

}  // namespace test_causal_conv1d
