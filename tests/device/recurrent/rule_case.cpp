#include "device/recurrent/rule_case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>

#include "device/cache_ops_support.hpp"
#include "opencl/recorder.hpp"
#include "opencl/runtime.hpp"

namespace recurrent_test {

namespace {

using cache_ops_test::decode;
using cache_ops_test::element;
using cache_ops_test::encode;
using clattn::DType;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

std::int32_t num_tokens(const RuleSpec& spec) {
  std::int32_t tokens = 0;
  for (const Request& request : spec.requests) tokens += request.tokens;
  return tokens;
}

oracle::RecurrentRequests requests_of(const RuleSpec& spec) {
  oracle::RecurrentRequests made;
  made.columns = spec.columns;
  made.query_start_loc = {0};
  std::int32_t page = 1;  // page 0 stays free
  bool drafts = false;
  for (const Request& request : spec.requests) {
    made.query_start_loc.push_back(made.query_start_loc.back() + request.tokens);
    made.has_initial_state.push_back(request.initial ? 1 : 0);
    made.num_accepted_tokens.push_back(request.accepted);
    drafts |= request.accepted >= 0;
    for (std::int32_t c = 0; c < spec.columns; ++c) {
      const std::int32_t own = request.pages.empty() ? page++ : request.pages[at(c)];
      made.slots.push_back(own);
    }
  }
  if (!drafts) made.num_accepted_tokens.clear();
  return made;
}

/// A page that stands for none is a negative one to the oracle.
oracle::RecurrentRequests without_null(oracle::RecurrentRequests requests,
                                       std::int32_t null_block) {
  for (std::int32_t& slot : requests.slots)
    if (slot == null_block) slot = -1;
  return requests;
}

/// Numbers of one request.
class Filler {
 public:
  Filler(const RuleSpec& spec, std::uint32_t seed) : spec_(spec), random_(seed) {}
  double normal() { return stored(spec_.dtype, normal_(random_)); }
  double unit() { return unit_(random_); }
  static double stored(DType dtype, double x) { return oracle::round_to(element(dtype), x); }

  double g(std::int32_t t) {
    switch (spec_.fill) {
      case Fill::kNoDecay:
      case Fill::kAligned:
      case Fill::kEqualKeys:
      case Fill::kAlternatingKeys:
        return 0;
      case Fill::kStrongDecay:
        return -5 - 35 * unit();
      case Fill::kErasure:
        return -1e4;
      case Fill::kOneErasure:
        return t % 16 == 11 ? -200 : -1e-3 * unit();
      default:
        return -0.2 * unit();
    }
  }
  double beta() {
    switch (spec_.fill) {
      case Fill::kAligned:
      case Fill::kEqualKeys:
      case Fill::kAlternatingKeys:
        return 0.998;
      case Fill::kBetaOfTwo:
        return 2 * unit();
      default:
        return unit();
    }
  }
  double key(std::int32_t t, std::int32_t i) {
    switch (spec_.fill) {
      case Fill::kAligned:
        return 1;
      case Fill::kZeroKeys:
        return 0;
      case Fill::kHugeKeys:
        return i % 3 == 0 ? -65504 : 65504;
      case Fill::kAlternatingKeys:
      case Fill::kEqualKeys: {
        const double x = stored(spec_.dtype, std::sin(1.0 + i));
        return spec_.fill == Fill::kAlternatingKeys && t % 2 == 1 ? -x : x;
      }
      default:
        return normal();
    }
  }
  double query() {
    if (spec_.fill == Fill::kZeroQueries) return 0;
    return spec_.fill == Fill::kAligned ? 1 : normal();
  }
  double value() {
    if (spec_.fill == Fill::kHugeValues) return stored(spec_.dtype, 1e6 * normal());
    return spec_.fill == Fill::kAligned ? std::abs(normal()) : normal();
  }
  double a(std::int32_t t) {
    if (spec_.fill != Fill::kExtremeGates) return 4 * normal();
    constexpr std::array<float, 6> kExtremes = {20, 0x1.3ffffep4F, 0x1.400002p4F, 100, -100, -20};
    return kExtremes.at(static_cast<std::size_t>(t) % kExtremes.size());
  }
  double b(std::int32_t t) {
    if (spec_.fill != Fill::kExtremeGates) return 2 * normal();
    return t % 4 < 2 ? 100 : -100;
  }
  double dt_bias() { return spec_.fill == Fill::kExtremeGates ? 0 : -4 + 4 * unit(); }
  /// Of an even head with extreme gates no decay at all.
  double a_log(std::int32_t head) {
    if (spec_.fill != Fill::kExtremeGates) return -1 + 2 * unit();
    return head % 2 == 0 ? -std::numeric_limits<double>::infinity() : 3;
  }

 private:
  const RuleSpec& spec_;
  std::mt19937 random_;
  std::normal_distribution<double> normal_;
  std::uniform_real_distribution<double> unit_{0, 1};
};

void fill_gates(const RuleSpec& spec, Filler& fill, std::int32_t t, RuleTensors& made) {
  const std::int32_t channels = spec.by_channel ? spec.head_k_dim : 1;
  for (std::int32_t h = 0; h < spec.num_v_heads; ++h) {
    for (std::int32_t c = 0; c < channels; ++c) {
      if (spec.gates == Gates::kGiven) {
        made.truth.g.push_back(Filler::stored(spec.gate_dtype, fill.g(t)));
        continue;
      }
      const double a = Filler::stored(spec.gate_dtype, fill.a(t));
      const double a_log = made.a_log[at(h)];
      const double bias = spec.dt_bias ? made.dt_bias[at(std::int64_t{h} * channels + c)] : 0;
      made.a.push_back(a);
      made.truth.g.push_back(spec.gates == Gates::kBounded
                                 ? oracle::bounded_decay(a, a_log, bias, -5)
                                 : oracle::delta_rule_decay(a, a_log, bias));
    }
    if (spec.additive) continue;
    if (spec.gates == Gates::kGiven) {
      made.truth.beta.push_back(Filler::stored(spec.gate_dtype, fill.beta()));
    } else {
      made.b.push_back(Filler::stored(spec.gate_dtype, fill.b(t)));
      made.truth.beta.push_back(oracle::sigmoid(made.b.back()));
    }
  }
}

void fill_token(const RuleSpec& spec, Filler& fill, std::int32_t t, RuleTensors& made) {
  for (std::int32_t i = 0; i < spec.num_k_heads * spec.head_k_dim; ++i) {
    made.truth.query.push_back(fill.query());
    made.truth.key.push_back(fill.key(t, i % spec.head_k_dim));
  }
  for (std::int32_t i = 0; i < spec.num_v_heads * spec.head_v_dim; ++i)
    made.truth.value.push_back(fill.value());
  fill_gates(spec, fill, t, made);
}

/// Pages hold numbers where a request reads them, else NaN.
std::vector<double> make_states(const RuleSpec& spec, const oracle::RecurrentRequests& of,
                                std::int64_t pages) {
  const std::int64_t page = std::int64_t{spec.num_v_heads} * spec.head_v_dim * spec.head_k_dim;
  std::vector<double> states(at(pages * page), kNaN);
  for (std::int32_t r = 0; r < of.num_requests(); ++r) {
    const Request& request = spec.requests[at(r)];
    const std::int32_t slot = of.slot_read(r);
    if (!request.initial || slot < 0) continue;
    std::mt19937 random(request.seed.value_or(spec.seed * 1000 + static_cast<std::uint32_t>(r)) +
                        5);
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < page; ++i)
      states[at(slot * page + i)] = Filler::stored(spec.state_dtype, normal(random));
  }
  return states;
}

/// Tensors beside each other in rows, as a projection makes them, behind `before` elements.
struct FusedRows {
  FusedRows(const clattn::Context& context, const clattn::Queue& queue, DType dtype,
            std::int64_t tokens,
            const std::vector<std::pair<const std::vector<double>*, std::int64_t>>& parts,
            std::int64_t before = 8) {
    std::int64_t stride = before;
    for (const auto& [values, width] : parts) stride += width;
    std::vector<double> rows(at(tokens * stride), kNaN);
    std::int64_t begin = before;
    for (const auto& [values, width] : parts) {
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t i = 0; i < width; ++i)
          rows[at(t * stride + begin + i)] = (*values)[at(t * width + i)];
      places.push_back({nullptr, begin, stride});
      begin += width;
    }
    buffer = cache_ops_test::upload(context, queue, encode(dtype, rows));
    for (clattn::TensorRef& place : places) place.buffer = buffer.handle();
  }
  clattn::Buffer buffer;
  std::vector<clattn::TensorRef> places;
};

clattn::Buffer upload_f32(const clattn::Context& context, const clattn::Queue& queue,
                          const std::vector<double>& values) {
  return cache_ops_test::upload(context, queue, encode(DType::kF32, values));
}

clattn::RecurrentBatch batch_of(const oracle::RecurrentRequests& requests,
                                std::int32_t null_block_id) {
  return {
      requests.query_start_loc,     requests.slots, requests.columns, requests.has_initial_state,
      requests.num_accepted_tokens, null_block_id};
}

/// Rows of `width` with gaps before and between them, in a pattern.
class GuardedOutput {
 public:
  GuardedOutput(const clattn::Context& context, const clattn::Queue& queue, DType dtype,
                std::int64_t tokens, std::int64_t width)
      : dtype_(dtype), tokens_(tokens), width_(width) {
    const auto bytes = at((tokens * (width + kGap) + kGap)) * clattn::element_size_bytes(dtype);
    buffer_ = cache_ops_test::upload(context, queue, std::vector<std::uint8_t>(bytes, 0x5a));
  }
  clattn::TensorRef ref() const { return {buffer_.handle(), kGap, width_ + kGap}; }
  /// The rows; a touched gap goes to `fault`.
  std::vector<double> read(const clattn::Queue& queue, std::string& fault) const {
    const auto bytes = cache_ops_test::download<std::byte>(queue, buffer_);
    const std::size_t element = clattn::element_size_bytes(dtype_);
    const std::vector<double> all = decode(dtype_, bytes);
    std::vector<double> rows;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(all.size()); ++i) {
      const std::int64_t column = (i - kGap) % (width_ + kGap);
      if (i >= kGap && column < width_) {
        rows.push_back(all[at(i)]);
        continue;
      }
      for (std::size_t b = 0; b < element; ++b)
        if (bytes[at(i) * element + b] != std::byte{0x5a})
          fault = fmt::format("output: element {} outside the rows was written", i);
    }
    return rows;
  }

 private:
  static constexpr std::int64_t kGap = 8;
  DType dtype_;
  std::int64_t tokens_, width_;
  clattn::Buffer buffer_;
};

/// Pages with NaN between them.
class PaddedPages {
 public:
  PaddedPages(const clattn::Context& context, const clattn::Queue& queue, const RuleSpec& spec,
              const std::vector<double>& states)
      : page_(std::int64_t{spec.num_v_heads} * spec.head_v_dim * spec.head_k_dim) {
    const std::int64_t pages = static_cast<std::int64_t>(states.size()) / page_;
    std::vector<double> all(at(kBefore + pages * (page_ + kGap)), kNaN);
    for (std::int64_t p = 0; p < pages; ++p)
      std::copy_n(states.begin() + p * page_, page_, all.begin() + kBefore + p * (page_ + kGap));
    before_ = encode(spec.state_dtype, all);
    view = {cache_ops_test::upload(context, queue, before_),
            {{spec.num_v_heads, spec.head_v_dim, spec.head_k_dim}, spec.state_dtype},
            pages,
            kBefore,
            page_ + kGap};
  }
  /// The pages; a change in a gap, or in a page that was not written, goes to `fault`.
  std::vector<double> read(const clattn::Queue& queue, const std::vector<std::uint8_t>& written,
                           std::string& fault) const {
    const auto after = cache_ops_test::download<std::byte>(queue, view.buffer);
    const std::size_t element = clattn::element_size_bytes(view.tensor.dtype);
    const std::vector<double> all = decode(view.tensor.dtype, after);
    std::vector<double> pages;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(all.size()); ++i) {
      const std::int64_t page = (i - kBefore) / (page_ + kGap);
      const bool inside = i >= kBefore && (i - kBefore) % (page_ + kGap) < page_;
      if (inside) pages.push_back(all[at(i)]);
      if (inside && written[at(page)] != 0) continue;
      if (!std::equal(before_.begin() + i * static_cast<std::int64_t>(element),
                      before_.begin() + (i + 1) * static_cast<std::int64_t>(element),
                      after.begin() + i * static_cast<std::int64_t>(element)))
        fault = fmt::format("states: element {} of no written page changed", i);
    }
    return pages;
  }
  clattn::StateView view;

 private:
  static constexpr std::int64_t kBefore = 16, kGap = 16;
  std::int64_t page_;
  std::vector<std::byte> before_;
};

/// The rule without its tensors.
clattn::GatedDeltaRule options_of(const RuleSpec& spec) {
  clattn::GatedDeltaRule rule;
  rule.num_k_heads = spec.num_k_heads;
  rule.num_v_heads = spec.num_v_heads;
  rule.head_k_dim = spec.head_k_dim;
  rule.head_v_dim = spec.head_v_dim;
  rule.dtype = spec.dtype;
  rule.gate_dtype = spec.gate_dtype;
  rule.decay_by_channel = spec.by_channel;
  rule.rule = spec.additive ? clattn::RecurrentRule::kAdditive : clattn::RecurrentRule::kDelta;
  rule.use_qk_l2norm_in_kernel = spec.l2_norm;
  rule.kernel_family = spec.family;
  rule.query.offset = rule.query.token_stride = rule.key.offset = rule.key.token_stride =
      spec.before;
  return rule;
}

/// The relative error of rounded operands of products; 0 where they are not rounded.
double unit_of_products(const clattn::Context& context, const RuleSpec& spec) {
  const bool chunks = std::ranges::any_of(
      spec.requests, [](const Request& request) { return request.tokens >= 16; });
  return chunks && rounds_products(context, spec) ? 0x1p-8 : 0;
}

}  // namespace

bool rounds_products(const clattn::Context& context, const RuleSpec& spec) {
  return spec.in_chunks && clattn::rounds_products(context, options_of(spec));
}

RuleTensors make_tensors(const RuleSpec& spec) {
  RuleTensors made;
  oracle::DeltaRuleCase& truth = made.truth;
  const oracle::RecurrentRequests requests = requests_of(spec);
  truth.requests = without_null(requests, spec.null_block_id);
  truth.num_k_heads = spec.num_k_heads;
  truth.num_v_heads = spec.num_v_heads;
  truth.head_k_dim = spec.head_k_dim;
  truth.head_v_dim = spec.head_v_dim;
  truth.l2_norm = spec.l2_norm;
  truth.additive = spec.additive;
  truth.decay_by_channel = spec.by_channel;
  truth.scale = static_cast<float>(1 / std::sqrt(static_cast<float>(spec.head_k_dim)));
  Filler gates(spec, spec.seed + 77);
  for (std::int32_t h = 0; h < spec.num_v_heads; ++h)
    made.a_log.push_back(Filler::stored(DType::kF32, gates.a_log(h)));
  const std::int64_t biases =
      std::int64_t{spec.num_v_heads} * (spec.by_channel ? spec.head_k_dim : 1);
  for (std::int64_t i = 0; i < biases; ++i)
    made.dt_bias.push_back(Filler::stored(DType::kF32, gates.dt_bias()));
  for (std::size_t r = 0; r < spec.requests.size(); ++r) {
    const Request& request = spec.requests[r];
    Filler fill(spec, request.seed.value_or(spec.seed * 1000 + static_cast<std::uint32_t>(r)));
    RuleTensors passed = made;  // of tokens that are over
    for (std::int32_t t = 0; t < request.passed; ++t) fill_token(spec, fill, t, passed);
    for (std::int32_t t = 0; t < request.tokens; ++t)
      fill_token(spec, fill, request.passed + t, made);
  }
  const std::int64_t pages =
      spec.num_pages != 0 ? spec.num_pages
                          : static_cast<std::int64_t>(spec.requests.size()) * spec.columns + 2;
  truth.states = spec.states.empty() ? make_states(spec, truth.requests, pages) : spec.states;
  return made;
}

namespace {

/// What the call's launches leave to each other begins as NaN.
void poison_memory(const clattn::Context& context, const clattn::Queue& queue) {
  constexpr std::size_t kBytes = std::size_t{4} << 20;
  const auto lease = context.runtime().queue_memory().reserve(queue, kBytes);
  queue.fill(lease.buffer(), 0xffffffffU, 0, lease.buffer().size_bytes());
}

}  // namespace

RuleResult run_rule(const clattn::Context& context, const RuleSpec& spec) {
  const RuleTensors tensors = make_tensors(spec);
  const oracle::DeltaRuleCase& truth = tensors.truth;
  const clattn::Queue queue = context.create_queue();
  const std::int64_t tokens = num_tokens(spec);
  const std::int64_t keys = std::int64_t{spec.num_k_heads} * spec.head_k_dim;
  const std::int64_t values = std::int64_t{spec.num_v_heads} * spec.head_v_dim;
  const std::int64_t decays = spec.num_v_heads * (spec.by_channel ? spec.head_k_dim : 1);
  const FusedRows rows(context, queue, spec.dtype, tokens,
                       {{&truth.query, keys}, {&truth.key, keys}, {&truth.value, values}},
                       spec.before);
  const bool raw = spec.gates != Gates::kGiven;
  std::vector<std::pair<const std::vector<double>*, std::int64_t>> gate_parts = {
      {raw ? &tensors.a : &truth.g, decays}};
  if (!spec.additive) gate_parts.push_back({raw ? &tensors.b : &truth.beta, spec.num_v_heads});
  const FusedRows gates(context, queue, spec.gate_dtype, tokens, gate_parts);
  const GuardedOutput out(context, queue, spec.dtype, tokens, values);
  const PaddedPages pages(context, queue, spec, truth.states);

  clattn::GatedDeltaRule rule = options_of(spec);
  rule.query = rows.places[0];
  rule.key = rows.places[1];
  rule.value = rows.places[2];
  rule.out = out.ref();
  (raw ? rule.a : rule.g) = gates.places[0];
  if (!spec.additive) (raw ? rule.b : rule.beta) = gates.places[1];
  if (raw) rule.A_log = upload_f32(context, queue, tensors.a_log);
  if (raw && spec.dt_bias) rule.dt_bias = upload_f32(context, queue, tensors.dt_bias);
  if (spec.gates == Gates::kBounded) rule.gate_lower_bound = -5.0F;

  clattn::RecurrentMetadataBuilder builder(context);
  const oracle::RecurrentRequests requests = requests_of(spec);
  const clattn::RecurrentMetadata metadata =
      builder.build(queue, batch_of(requests, spec.null_block_id));
  const auto call =
      spec.in_chunks ? clattn::chunk_gated_delta_rule : clattn::fused_recurrent_gated_delta_rule;
  if (spec.in_chunks) poison_memory(context, queue);
  if (spec.recorded) {
    const auto recording = [&] {
      clattn::detail::Recorder recorder(queue);
      call(context, queue, rule, pages.view, metadata, nullptr);
      return recorder.finish(clattn::ReplayMode::kLaunchList);
    }();
    poison_memory(context, queue);
    recording->replay(queue, nullptr);
  } else {
    call(context, queue, rule, pages.view, metadata, nullptr);
  }

  const oracle::DeltaRuleResult exact = oracle::delta_rule(
      truth, {element(spec.dtype), element(spec.state_dtype), unit_of_products(context, spec)});
  RuleResult result;
  result.values = out.read(queue, result.fault);
  result.pages = pages.read(queue, exact.written, result.fault);
  result.out = oracle::judge(exact.out, result.values, oracle::kOutSigmas);
  result.states = oracle::judge(exact.states, result.pages, oracle::kStateSigmas);
  return result;
}

std::vector<clattn::KernelFamily> families(const clattn::Context& context, const RuleSpec& spec) {
  using enum clattn::KernelFamily;
  std::vector<clattn::KernelFamily> all = {kAuto};
  clattn::GatedDeltaRule rule = options_of(spec);
  const bool rounds = clattn::rounds_products(context, rule);
  for (const clattn::KernelFamily family : {kGpu, kGpuPtx, kGpuMatrix}) {
    rule.kernel_family = family;
    try {
      if (clattn::rounds_products(context, rule) != rounds) all.push_back(family);
    } catch (const clattn::Error& error) {
      if (error.code() != clattn::ErrorCode::kUnsupported) throw;
    }
  }
  return all;
}

std::string problem(const RuleResult& result, double rms) {
  if (!result.fault.empty()) return result.fault;
  const bool right = result.out.worst <= 1 && result.states.worst <= 1 && result.out.rms <= rms &&
                     result.states.rms <= rms;
  if (right) return {};
  return fmt::format(
      "out {:.3g} of what is allowed at {} (rms {:.3g}), states {:.3g} at {} (rms "
      "{:.3g})",
      result.out.worst, result.out.at, result.out.rms, result.states.worst, result.states.at,
      result.states.rms);
}

}  // namespace recurrent_test
