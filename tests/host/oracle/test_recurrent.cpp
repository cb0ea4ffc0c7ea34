// The oracle of recurrent layers: worked examples, and a judge that passes right kernels and fails
// those with the usual faults.
#include <gtest/gtest.h>

#include <random>

#include "host/oracle/recurrent_kernels.hpp"

namespace {

using oracle::DeltaRuleCase;
using oracle::Element;
using oracle::RecurrentRequests;
using recurrent_test::Chunked;
using recurrent_test::Faults;
using recurrent_test::Results;

enum class Kind { kRandom, kNoDecay, kEqualKeys, kAlternatingKeys, kStrongDecay, kAligned };
constexpr Kind kKinds[] = {Kind::kRandom,          Kind::kNoDecay,     Kind::kEqualKeys,
                           Kind::kAlternatingKeys, Kind::kStrongDecay, Kind::kAligned};

DeltaRuleCase make_case(Kind kind, std::int32_t tokens, std::int32_t size = 64) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> unit(0, 1);
  DeltaRuleCase call;
  call.requests = {{0, tokens}, {0}, 1, {1}, {}};
  call.num_k_heads = call.num_v_heads = 1;
  call.head_k_dim = call.head_v_dim = size;
  call.scale = 1 / std::sqrt(size);
  const auto number = [&](double x) { return oracle::round_to(Element::kBF16, x); };
  std::vector<double> key(static_cast<std::size_t>(size));
  for (double& x : key) x = kind == Kind::kAligned ? 1 : number(normal(random));
  for (std::int32_t t = 0; t < tokens; ++t) {
    for (double& x : key) {
      if (kind == Kind::kAlternatingKeys) x = -x;
      if (kind == Kind::kRandom || kind == Kind::kNoDecay || kind == Kind::kStrongDecay)
        x = number(normal(random));
      call.key.push_back(x);
      call.query.push_back(kind == Kind::kAligned ? 1 : number(normal(random)));
      const double value = number(normal(random));
      call.value.push_back(kind == Kind::kAligned ? std::abs(value) : value);
    }
    double g = -0.1 * unit(random);
    if (kind == Kind::kNoDecay || kind == Kind::kAligned) g = 0;
    if (kind == Kind::kStrongDecay) g = -5 - 35 * unit(random);
    call.g.push_back(static_cast<float>(g));
    const bool near_one = kind != Kind::kRandom && kind != Kind::kNoDecay;
    call.beta.push_back(static_cast<float>(near_one ? 0.998 : unit(random)));
  }
  for (std::int32_t i = 0; i < size * size; ++i) call.states.push_back(number(normal(random)));
  return call;
}

struct Verdicts {
  oracle::Verdict out, states;
  bool passes(double rms) const {
    return out.worst <= 1 && states.worst <= 1 && out.rms <= rms && states.rms <= rms;
  }
};
std::ostream& operator<<(std::ostream& stream, const Verdicts& of) {
  return stream << "out " << of.out.worst << " (rms " << of.out.rms << "), states "
                << of.states.worst << " (rms " << of.states.rms << ")";
}

Verdicts judged(const DeltaRuleCase& call, const Results& results, double products = 0,
                Element state = Element::kF32) {
  const auto truth = oracle::delta_rule(call, {Element::kF32, state, products});
  return {oracle::judge(truth.out, results.out, oracle::kOutSigmas),
          oracle::judge(truth.states, results.states, oracle::kStateSigmas)};
}

TEST(RecurrentOracle, OneStepByHand) {
  DeltaRuleCase call;
  call.requests = {{0, 1}, {0}, 1, {1}, {}};
  call.num_k_heads = call.num_v_heads = 1;
  call.head_k_dim = 2;
  call.head_v_dim = 1;
  call.l2_norm = false;
  call.query = {1, 2};
  call.key = {3, 4};
  call.value = {10};
  call.g = {std::log(0.5)};
  call.beta = {0.5};
  call.states = {2, 4};
  auto result = oracle::delta_rule(call, {});
  // S decays to (1, 2); p = 11, d = -0.5; S = (-0.5, 0).
  EXPECT_NEAR(result.states.exact[0], -0.5, 1e-12);
  EXPECT_NEAR(result.states.exact[1], 0, 1e-12);
  EXPECT_NEAR(result.out.exact[0], -0.5, 1e-12);
  call.additive = true;  // S = (1, 2) + 10 (3, 4)
  result = oracle::delta_rule(call, {});
  EXPECT_NEAR(result.out.exact[0], 31 + 84, 1e-12);
  call.additive = false;
  call.decay_by_channel = true;  // S decays to (1, 1)
  call.g = {std::log(0.5), std::log(0.25)};
  result = oracle::delta_rule(call, {});
  EXPECT_NEAR(result.states.exact[0], 1 + 1.5 * 3, 1e-12);
  EXPECT_NEAR(result.states.exact[1], 1 + 1.5 * 4, 1e-12);
}

TEST(RecurrentOracle, ValueHeadsTakeTheKeyHeadsInRuns) {
  DeltaRuleCase call;
  call.requests = {{0, 1}, {0}, 1, {0}, {}};
  call.num_k_heads = 2;
  call.num_v_heads = 4;
  call.head_k_dim = call.head_v_dim = 1;
  call.l2_norm = false;
  call.query = {1, 1};
  call.key = {2, 3};
  call.value = {1, 1, 1, 1};
  call.g = {0, 0, 0, 0};
  call.beta = {1, 1, 1, 1};
  call.states = {std::nan(""), std::nan(""), std::nan(""), std::nan("")};
  EXPECT_EQ(oracle::delta_rule(call, {}).out.exact, (std::vector<double>{2, 2, 3, 3}));
}

TEST(RecurrentOracle, GatesByTheirFormulas) {
  EXPECT_NEAR(oracle::delta_rule_decay(1, 0.5, 0.25), -std::exp(0.5) * std::log(1 + std::exp(1.25)),
              1e-12);
  EXPECT_EQ(oracle::delta_rule_decay(1, -INFINITY, 0), 0);
  EXPECT_EQ(oracle::softplus(800), 800);
  EXPECT_NEAR(oracle::bounded_decay(0.5, 0, 0.5, -5), -5 / (1 + std::exp(-1.0)), 1e-12);
  EXPECT_EQ(oracle::sigmoid(-1000), 0);
}

TEST(RecurrentOracle, DraftsReadAndWriteTheirColumns) {
  DeltaRuleCase call = make_case(Kind::kRandom, 2, 16);
  call.requests = {{0, 2}, {2, 0, 1}, 3, {1}, {2}};
  call.states.resize(3 * call.states.size(), 0.5);
  const auto result = oracle::delta_rule(call, {});
  EXPECT_EQ(result.written, (std::vector<std::uint8_t>{1, 0, 1}));
  call.requests.num_accepted_tokens = {-1};
  EXPECT_EQ(oracle::delta_rule(call, {}).written, (std::vector<std::uint8_t>{0, 0, 1}));
}

TEST(RecurrentJudge, PassesATokenLoopInF32) {
  for (const Kind kind : kKinds) {
    const DeltaRuleCase call = make_case(kind, 200);
    const Verdicts verdicts = judged(call, recurrent_test::loop(call, {}));
    EXPECT_TRUE(verdicts.passes(1.5)) << static_cast<int>(kind) << ": " << verdicts;
  }
}

TEST(RecurrentJudge, PassesStatesStoredInSixteenBits) {
  for (const Element state : {Element::kF16, Element::kBF16}) {
    DeltaRuleCase call = make_case(Kind::kRandom, 1);
    const Verdicts verdicts = judged(call, recurrent_test::loop(call, {}, state), 0, state);
    EXPECT_TRUE(verdicts.passes(1.5)) << verdicts;
  }
}

TEST(RecurrentJudge, PassesChunksWhoseSolveIsInF32) {
  struct Operands {
    Element element;
    double unit;
  };
  for (const Operands of :
       {Operands{Element::kF32, 0}, {Element::kBF16, 0x1p-8}, {Element::kF16, 0x1p-11}}) {
    for (const std::size_t chunk : {16U, 64U}) {
      for (const Kind kind : kKinds) {
        const DeltaRuleCase call = make_case(kind, 150);
        const Verdicts verdicts = judged(call, Chunked(call, of.element, chunk, {}).run(), of.unit);
        EXPECT_TRUE(verdicts.passes(kind == Kind::kAligned ? 3 : 1.5))
            << static_cast<int>(kind) << " chunks of " << chunk << ": " << verdicts;
      }
    }
  }
}

TEST(RecurrentJudge, FailsADecayAfterThePrediction) {
  for (const double products : {0.0, 0x1p-8}) {
    const DeltaRuleCase call = make_case(Kind::kRandom, 64);
    const Verdicts verdicts =
        judged(call, recurrent_test::loop(call, {.decay_after_prediction = true}), products);
    EXPECT_GT(verdicts.out.worst, 1) << verdicts;
    EXPECT_GT(verdicts.out.rms, 3) << verdicts;
    EXPECT_GT(verdicts.states.rms, 2) << verdicts;
  }
}

TEST(RecurrentJudge, FailsTheSlotOfAcceptedTokens) {
  DeltaRuleCase call = make_case(Kind::kRandom, 2);
  call.requests = {{0, 2}, {0, 1, 2}, 3, {1}, {2}};
  std::vector<double> states = call.states;
  for (const double factor : {0.5, 0.25})
    for (const double x : states) call.states.push_back(factor * x);
  EXPECT_TRUE(judged(call, recurrent_test::loop(call, {})).passes(1.5));
  EXPECT_GT(judged(call, recurrent_test::loop(call, {.slot_of_accepted = true})).out.worst, 100);
}

TEST(RecurrentJudge, FailsAnInverseRoundedToBF16) {
  for (const std::size_t chunk : {32U, 64U}) {
    const DeltaRuleCase call = make_case(Kind::kAligned, 256, 128);
    const Verdicts right = judged(call, Chunked(call, Element::kBF16, chunk, {}).run(), 0x1p-8);
    EXPECT_TRUE(right.passes(3)) << right;
    const Verdicts wrong =
        judged(call, Chunked(call, Element::kBF16, chunk, {.rounds_inverse = true}).run(), 0x1p-8);
    EXPECT_GT(wrong.out.worst, 2) << wrong;
  }
}

TEST(RecurrentJudge, FailsWhatIsNoNumber) {
  const oracle::JudgedTensor tensor{{1, 2}, {0.1, 0.1}, {0, 0}};
  EXPECT_EQ(oracle::judge(tensor, {1, 2}, 12).worst, 0);
  EXPECT_NEAR(oracle::judge(tensor, {1, 2.6}, 12).worst, 0.5, 1e-9);
  EXPECT_TRUE(std::isinf(oracle::judge(tensor, {std::nan(""), 2}, 12).worst));
  EXPECT_TRUE(std::isinf(oracle::judge(tensor, {1, INFINITY}, 12).rms));
}

TEST(RecurrentOracle, ConvolutionsMixOldRowsAndNew) {
  oracle::CausalConvCase call;
  call.requests = {{0, 2}, {1}, 1, {1}, {}};
  call.channels = 1;
  call.width = 4;
  call.state_rows = 3;
  call.silu = false;
  call.x = {5, 6};
  call.weight = {1, 10, 100, 1000};
  call.bias = {0.5};
  call.states = {9, 9, 9, 2, 3, 4};
  auto result = oracle::causal_conv(call, Element::kF32);
  EXPECT_EQ(result.out.exact, (std::vector<double>{5432.5, 6543.5}));
  EXPECT_EQ(result.states, (std::vector<double>{9, 9, 9, 4, 5, 6}));
  // Two accepted: the window begins one row later, and all rows but the oldest are kept.
  call.state_rows = 4;
  call.requests = {{0, 2}, {0, -1}, 2, {1}, {2}};
  call.states = {1, 2, 3, 4};
  result = oracle::causal_conv(call, Element::kF32);
  EXPECT_EQ(result.out.exact, (std::vector<double>{5432.5, 6543.5}));
  EXPECT_EQ(result.states, (std::vector<double>{3, 4, 5, 6}));
}

TEST(RecurrentOracle, GatesBeforeAndAfterANorm) {
  oracle::GatedNormCase call{2, 0, false, true, {3, 4}, {0, 100}, {2, 2}};
  const double rms = std::sqrt(12.5);
  auto result = oracle::gated_norm(call, Element::kF32);
  EXPECT_EQ(result.exact[0], 0);
  EXPECT_NEAR(result.exact[1], 4 / rms * 2 * 100, 1e-9);
  call.norm_before_gate = false;  // (0, 400) has an rms of 400 / sqrt 2
  result = oracle::gated_norm(call, Element::kF32);
  EXPECT_NEAR(result.exact[1], 2 * std::sqrt(2.0), 1e-9);
  call.sigmoid_gate = true;
  call.z = {0, 0};
  result = oracle::gated_norm(call, Element::kF32);
  EXPECT_NEAR(result.exact[0], 2 * 3 / rms, 1e-9);
}

}  // namespace
