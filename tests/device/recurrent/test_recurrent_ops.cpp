// Gated norms, Mamba 2, lightning attention and copies of states on every device; what calls of
// recurrent layers refuse.
#include <gtest/gtest.h>

#include <clattn/recurrent.hpp>
#include <random>

#include "device/cache_ops_support.hpp"
#include "oracle/recurrent.hpp"

namespace test_recurrent_ops {

using cache_ops_test::all_contexts;
using cache_ops_test::decode;
using cache_ops_test::download;
using cache_ops_test::element;
using cache_ops_test::encode;
using cache_ops_test::error_text;
using cache_ops_test::upload;
using clattn::DType;

std::vector<double> numbers(std::size_t count, DType dtype, std::uint32_t seed, double mean = 0) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(mean);
  std::vector<double> made(count);
  for (double& x : made) x = oracle::round_to(element(dtype), normal(random));
  return made;
}

TEST(GatedNorm, TypesWidthsAndOrders) {
  constexpr std::int64_t kTokens = 7;
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const std::int32_t width : {8, 24, 128, 4096}) {
        for (const int form : {0, 1, 2, 3}) {  // gate before the norm; sigmoid
          oracle::GatedNormCase call;
          call.width = width;
          call.norm_before_gate = form % 2 == 0;
          call.sigmoid_gate = form / 2 == 1;
          call.x = numbers(static_cast<std::size_t>(kTokens * 3 * width), dtype, 1);
          if (form != 3) call.z = numbers(call.x.size(), dtype, 2);
          call.weight = numbers(static_cast<std::size_t>(width), DType::kF32, 3, 1);
          clattn::RmsNormGated norm;
          const clattn::Buffer x = upload(*context, queue, encode(dtype, call.x));
          norm.x = norm.out = {x.handle()};  // in place
          clattn::Buffer z;
          if (!call.z.empty()) z = upload(*context, queue, encode(dtype, call.z));
          norm.z = {z.handle()};
          norm.weight = upload(*context, queue, encode(DType::kF32, call.weight));
          norm.num_tokens = kTokens;
          norm.num_heads = 3;
          norm.width = width;
          norm.dtype = dtype;
          norm.weight_dtype = DType::kF32;
          norm.activation = call.sigmoid_gate ? clattn::RecurrentActivation::kSigmoid
                                              : clattn::RecurrentActivation::kSilu;
          norm.norm_before_gate = call.norm_before_gate;
          clattn::rms_norm_gated(*context, queue, norm);
          const auto exact = oracle::gated_norm(call, element(dtype));
          const auto values = decode(dtype, download<std::byte>(queue, x));
          EXPECT_LE(oracle::judge(exact, values, 12).worst, 1)
              << clattn::to_string(dtype) << ", width " << width << ", form " << form;
        }
      }
    }
  }
}

/// Three requests, one fresh, one without a page, of 20, 2 and 1 tokens.
oracle::RecurrentRequests requests() {
  return {{0, 20, 22, 23}, {2, -1, 1}, 1, {0, 1, 1}, {}};
}

clattn::RecurrentMetadata build(clattn::RecurrentMetadataBuilder& builder,
                                const clattn::Queue& queue, const oracle::RecurrentRequests& of) {
  return builder.build(queue, {of.query_start_loc, of.slots, of.columns, of.has_initial_state,
                               of.num_accepted_tokens, -1});
}

clattn::StateView view(const clattn::Context& context, const clattn::Queue& queue,
                       const std::vector<double>& states, std::vector<std::int64_t> shape,
                       DType dtype = DType::kF32) {
  std::int64_t page = 1;
  for (const std::int64_t size : shape) page *= size;
  return {upload(context, queue, encode(dtype, states)),
          {std::move(shape), dtype},
          static_cast<std::int64_t>(states.size()) / page,
          0,
          page};
}

void expect_judged(const clattn::Queue& queue, const oracle::DeltaRuleResult& exact,
                   const clattn::Buffer& out, const clattn::StateView& states,
                   const std::string& what) {
  const auto values = decode(DType::kF32, download<std::byte>(queue, out));
  const auto pages = decode(DType::kF32, download<std::byte>(queue, states.buffer));
  const auto of_out = oracle::judge(exact.out, values, oracle::kOutSigmas);
  const auto of_states = oracle::judge(exact.states, pages, oracle::kStateSigmas);
  EXPECT_LE(of_out.worst, 1) << what << " at " << of_out.at;
  EXPECT_LE(of_states.worst, 1) << what << " at " << of_states.at;
}

TEST(Mamba2, GroupsSkipsGatesAndLimits) {
  constexpr std::int32_t kHeads = 6, kGroups = 2, kDim = 32, kState = 64;
  for (const bool extras : {false, true}) {
    oracle::DeltaRuleCase call;
    call.requests = requests();
    call.num_k_heads = kGroups;
    call.num_v_heads = kHeads;
    call.head_k_dim = kState;
    call.head_v_dim = kDim;
    call.additive = true;
    call.l2_norm = false;
    const auto x = numbers(23 * kHeads * kDim, DType::kF32, 1);
    const auto z = numbers(x.size(), DType::kF32, 2);
    const auto dt = numbers(23 * kHeads, DType::kF32, 3);
    const auto bias = numbers(kHeads, DType::kF32, 4);
    const auto d = numbers(kHeads, DType::kF32, 5);
    auto a = numbers(kHeads, DType::kF32, 6);
    for (double& each : a) each = -std::abs(each);
    call.query = numbers(23 * kGroups * kState, DType::kF32, 7);
    call.key = numbers(call.query.size(), DType::kF32, 8);
    call.states = numbers(3 * kHeads * kDim * kState, DType::kF32, 9);
    for (std::size_t i = 0; i < dt.size(); ++i) {
      const std::size_t head = i % kHeads;
      double step = extras ? std::clamp(oracle::softplus(dt[i] + bias[head]), 0.25, 1.5)
                           : oracle::softplus(dt[i]);
      call.g.push_back(a[head] * step);
      for (std::size_t v = 0; v < kDim; ++v) call.value.push_back(step * x[i * kDim + v]);
    }
    auto exact = oracle::delta_rule(call, {});
    for (std::size_t i = 0; i < x.size() && extras; ++i) {
      const bool skipped = i / (kHeads * kDim) >= 20 && i / (kHeads * kDim) < 22;
      if (skipped) continue;
      const double factor = z[i] * oracle::sigmoid(z[i]);
      exact.out.exact[i] = (exact.out.exact[i] + d[i / kDim % kHeads] * x[i]) * factor;
      exact.out.sigma[i] *= std::abs(factor);
      exact.out.floor[i] =
          exact.out.floor[i] * std::abs(factor) + 0x1p-20 * std::abs(exact.out.exact[i]) + 0x1p-21;
    }
    for (const auto& context : all_contexts()) {
      for (const bool in_chunks : {false, true}) {
        const clattn::Queue queue = context->create_queue();
        const auto f32 = [&](const std::vector<double>& values) {
          return upload(*context, queue, encode(DType::kF32, values));
        };
        const clattn::Buffer of_x = f32(x), of_dt = f32(dt), of_b = f32(call.key),
                             of_c = f32(call.query), of_z = f32(z), out = f32(x);
        clattn::SelectiveStateUpdate update;
        update.x = {of_x.handle()};
        update.dt = {of_dt.handle()};
        update.B = {of_b.handle()};
        update.C = {of_c.handle()};
        update.out = {out.handle()};
        update.A = f32(a);
        update.num_heads = kHeads;
        update.n_groups = kGroups;
        update.head_dim = kDim;
        update.state_size = kState;
        update.dtype = DType::kF32;
        if (extras) {
          update.z = {of_z.handle()};
          update.D = f32(d);
          update.dt_bias = f32(bias);
          update.dt_min = 0.25;
          update.dt_max = 1.5;
        }
        const auto states = view(*context, queue, call.states, {kHeads, kDim, kState});
        clattn::RecurrentMetadataBuilder builder(*context);
        const auto metadata = build(builder, queue, call.requests);
        (in_chunks ? clattn::mamba_chunk_scan_combined : clattn::selective_state_update)(
            *context, queue, update, states, metadata, nullptr);
        expect_judged(queue, exact, out, states, in_chunks ? "chunks" : "loop");
      }
    }
  }
}

TEST(Lightning, DecaysOfHeadsAlone) {
  constexpr std::int32_t kHeads = 3, kSize = 96;
  oracle::DeltaRuleCase call;
  call.requests = requests();
  call.num_k_heads = call.num_v_heads = kHeads;
  call.head_k_dim = call.head_v_dim = kSize;
  call.additive = true;
  call.l2_norm = false;
  const std::vector<double> decays = {-0.5, -0.0625, -1};
  call.query = numbers(23 * kHeads * kSize, DType::kF32, 7);
  call.key = numbers(call.query.size(), DType::kF32, 8);
  call.value = numbers(call.query.size(), DType::kF32, 9);
  call.states = numbers(3 * kHeads * kSize * kSize, DType::kF32, 10);
  for (std::size_t i = 0; i < 23 * kHeads; ++i) call.g.push_back(decays[i % kHeads]);
  const auto exact = oracle::delta_rule(call, {});
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const auto f32 = [&](const std::vector<double>& values) {
      return upload(*context, queue, encode(DType::kF32, values));
    };
    const clattn::Buffer q = f32(call.query), k = f32(call.key), v = f32(call.value),
                         out = f32(call.query);
    const clattn::LightningAttention attention{{q.handle()},   {k.handle()}, {v.handle()},
                                               {out.handle()}, f32(decays),  kHeads,
                                               kSize,          DType::kF32,  1};
    const auto states = view(*context, queue, call.states, {kHeads, kSize, kSize});
    clattn::RecurrentMetadataBuilder builder(*context);
    clattn::lightning_attention(*context, queue, attention, states,
                                build(builder, queue, call.requests));
    expect_judged(queue, exact, out, states, "lightning");
  }
}

TEST(MambaCopies, ColumnsWindowsAndPagesOntoThemselves) {
  constexpr std::int64_t kRows = 5, kChannels = 16, kState = 3 * 16 * 16;
  const auto conv = numbers(8 * kRows * kChannels, DType::kBF16, 1);
  const auto state = numbers(8 * kState, DType::kF32, 2);
  // Accepted 3, into its own page; 1; none; no target; a column without a page.
  const oracle::RecurrentRequests of = {{0, 1, 2, 3, 4, 5},
                                        {1, 2, 3, 4, -1, -1, 5, -1, -1, 6, -1, -1, 0, -1, -1},
                                        3,
                                        {1, 1, 1, 1, 1},
                                        {3, 1, -1, 1, 2}};
  const std::vector<std::int32_t> targets = {1, 4, 7, -1, 2};
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    auto want_conv = conv, want_state = state;
    const auto rows = [&](std::int64_t to, std::int64_t from, std::int64_t first) {
      std::copy_n(conv.begin() + (from * kRows + first) * kChannels, (kRows - first) * kChannels,
                  want_conv.begin() + to * kRows * kChannels);
    };
    rows(1, 1, 2);
    rows(7, 5, 0);
    rows(2, 0, 1);
    std::copy_n(state.begin() + 3 * kState, kState, want_state.begin() + kState);
    std::copy_n(state.begin() + 5 * kState, kState, want_state.begin() + 7 * kState);
    const auto of_conv = view(*context, queue, conv, {kRows, kChannels}, DType::kBF16);
    const auto of_state = view(*context, queue, state, {3, 16, 16});
    clattn::RecurrentMetadataBuilder builder(*context);
    const auto metadata = build(builder, queue, of);
    clattn::mamba_copy_blocks(*context, queue, of_conv, of_state, metadata,
                              {upload(*context, queue, targets)});
    EXPECT_TRUE(decode(DType::kBF16, download<std::byte>(queue, of_conv.buffer)) == want_conv);
    EXPECT_TRUE(decode(DType::kF32, download<std::byte>(queue, of_state.buffer)) == want_state);
  }
}

TEST(RecurrentShapes, AsVllmLaysStatesOut) {
  const auto gdn = clattn::gated_delta_net_state_shape(16, 32, 128, 128, 4, 2, DType::kBF16);
  ASSERT_EQ(gdn.size(), 2U);
  EXPECT_EQ(gdn[0], (clattn::StateTensor{{5, 8192}, DType::kBF16}));
  EXPECT_EQ(gdn[1], (clattn::StateTensor{{32, 128, 128}, DType::kF32}));
  const auto mamba = clattn::mamba2_state_shape(48, 64, 1, 128, 4, 0, DType::kF16, DType::kF16);
  EXPECT_EQ(mamba[0], (clattn::StateTensor{{3, 48 * 64 + 2 * 128}, DType::kF16}));
  EXPECT_EQ(mamba[1], (clattn::StateTensor{{48, 64, 128}, DType::kF16}));
  EXPECT_EQ(clattn::short_conv_state_shape(2048, 3, DType::kBF16)[0],
            (clattn::StateTensor{{2, 2048}, DType::kBF16}));
  EXPECT_EQ(error_text([] { clattn::short_conv_state_shape(0, 3, DType::kBF16); }),
            "short_conv_state_shape: channels is 0, legal: at least 1");
  EXPECT_EQ(error_text([] { clattn::parse_recurrent_activation("gelu"); }),
            "activation: 'gelu' is not one of none, silu, sigmoid");
  EXPECT_EQ(clattn::parse_recurrent_activation("swish"), clattn::RecurrentActivation::kSilu);
  EXPECT_EQ(clattn::parse_recurrent_rule("additive"), clattn::RecurrentRule::kAdditive);
}

using Starts = std::vector<std::int32_t>;

TEST(RecurrentRefusals, ListsOfAStep) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  clattn::RecurrentMetadataBuilder builder(*context);
  const auto refused = [&](const Starts& starts, const Starts& pages, std::int32_t columns,
                           const Starts& accepted, std::vector<std::uint8_t> initial = {}) {
    return error_text([&] {
      builder.build(queue, {starts, pages, columns, initial, accepted, -1});
    });
  };
  const std::string name = "RecurrentMetadataBuilder::build: ";
  EXPECT_EQ(refused({}, {}, 1, {}), name + "query_start_loc has no element, legal: num_reqs + 1");
  EXPECT_EQ(refused({1, 2}, {0}, 1, {}), name + "query_start_loc[0] is 1, legal: 0");
  EXPECT_EQ(refused({0, 3, 2}, {0, 1}, 1, {}), name + "query_start_loc[2] is 2, legal: at least 3");
  EXPECT_EQ(refused({0, 1}, {0, 1}, 1, {}), name + "state_indices has 2 elements, legal: 1");
  EXPECT_EQ(refused({0, 1}, {0}, 0, {}), name + "state_columns is 0, legal: at least 1");
  EXPECT_EQ(refused({0, 1}, {0}, 1, {}, {1, 1}),
            name + "has_initial_state has 2 elements, legal: 1");
  for (const std::int32_t accepted : {0, 3})
    EXPECT_EQ(refused({0, 1}, {0, 1}, 2, {accepted}),
              name + "num_accepted_tokens[0] is " + std::to_string(accepted) +
                  ", legal: 1 … 2 (state_columns), or negative without drafts");
  EXPECT_EQ(refused({0, 1}, {0, 1}, 2, {1}, {0}),
            name + "num_accepted_tokens[0] is 1, legal: negative, as it has no initial state");
  EXPECT_EQ(refused({0, 3}, {0, 1}, 2, {1}),
            name + "request 0 has drafts and 3 tokens, legal: at most 2 (state_columns)");
  EXPECT_EQ(refused({0, 1, 2}, {4, 4}, 1, {}),
            name + "state_indices of requests 0 and 1 name page 4, legal: pages of their own");
  EXPECT_EQ(refused({0, 2}, {4, 4}, 2, {1}),
            name + "state_indices of request 0 name page 4 twice, legal: a page for each token");
}

TEST(RecurrentRefusals, TensorsAndStates) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  clattn::RecurrentMetadataBuilder builder(*context);
  const auto metadata = build(builder, queue, {{0, 1}, {1}, 1, {1}, {}});
  const clattn::Buffer memory = context->allocate(1 << 16);
  const clattn::TensorRef rows{memory.handle()};
  clattn::GatedDeltaRule rule{.query = rows,
                              .key = rows,
                              .value = rows,
                              .out = rows,
                              .g = rows,
                              .beta = rows,
                              .head_k_dim = 32,
                              .head_v_dim = 32};
  clattn::StateView states{memory, {{1, 32, 32}, DType::kF32}, 2, 0, 1024};
  const auto refused = [&] {
    return error_text(
        [&] { clattn::fused_recurrent_gated_delta_rule(*context, queue, rule, states, metadata); });
  };
  EXPECT_EQ(refused(), "no error");
  const auto expect = [&](auto change, const std::string& text) {
    const auto kept = rule;
    const auto kept_states = states;
    change();
    EXPECT_EQ(refused(), "fused_recurrent_gated_delta_rule: " + text);
    rule = kept;
    states = kept_states;
  };
  expect([&] { rule.head_k_dim = 24; }, "head_k_dim is 24, legal: multiples of 16 up to 256");
  expect([&] { rule.head_v_dim = 272; }, "head_v_dim is 272, legal: multiples of 16 up to 256");
  expect([&] { rule.num_k_heads = 2; }, "num_v_heads is 1, legal: multiples of num_k_heads, 2");
  expect([&] { rule.dtype = DType::kInt8; }, "dtype: dtype is int8, legal: f32, f16, bf16");
  expect([&] { rule.a = rows; }, "each of g and a has a buffer, legal: one of them");
  expect([&] { rule.g = {}; }, "none of g and a has a buffer, legal: one of them");
  expect([&] { rule.b = rows; }, "b given, legal: none beside g");
  expect([&] { rule.gate_lower_bound = -5.0F; }, "gate_lower_bound given, legal: none beside g");
  expect([&] { rule.rule = clattn::RecurrentRule::kAdditive; },
         "beta given, legal: none beside the additive rule");
  expect([&] { rule.scale = INFINITY; }, "scale is inf, legal: finite numbers");
  expect([&] { rule.beta = {}; }, "beta: no buffer");
  expect([&] { states.tensor.shape = {1, 16, 32}; }, "states are [1, 16, 32], legal: [1, 32, 32]");
  expect([&] { states.num_blocks = 1; }, "state_indices name page 1, legal: 0 … 0 (states)");
  expect([&] { states.block_stride = 8; },
         "states: block_stride is 8, legal: at least 1024 (a page)");
}

}  // namespace test_recurrent_ops
