#pragma once

#include <clattn/prepare_qkv.hpp>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "device/cache_ops_support.hpp"
#include "oracle/prepared_heads.hpp"

/// Rows of a fused projection for prepare_qkv(), and what the oracle says of the result.
namespace prepare_test {

using cache_ops_test::element;
using cache_ops_test::encode;
using cache_ops_test::upload;
using clattn::Buffer;
using clattn::DType;

inline constexpr std::int64_t kPositions = 40;  // rows of tables

inline std::vector<double> numbers(std::size_t count, DType dtype, std::uint32_t seed,
                                   double mean = 0) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(mean);
  std::vector<double> made(count);
  for (double& x : made) x = oracle::round_to(element(dtype), normal(random));
  return made;
}

/// Cosines and sines times `scale` (YaRN), as a table of `dtype` has them.
inline std::vector<double> table_of(std::int32_t rotary_dim, DType dtype, double scale) {
  std::vector<double> table;
  for (std::int64_t position = 0; position < kPositions; ++position) {
    for (std::int32_t i = 0; i < rotary_dim; ++i) {
      const std::int32_t angle = i % (rotary_dim / 2);
      const double turn = static_cast<double>(position) * std::pow(1e4, -2.0 * angle / rotary_dim);
      const double exact = scale * (i < rotary_dim / 2 ? std::cos(turn) : std::sin(turn));
      table.push_back(oracle::round_to(element(dtype), exact));
    }
  }
  return table;
}

/// A model's shape, and what it does to queries and keys.
struct Model {
  std::int32_t heads = 3, kv_heads = 2, head_size = 64;
  DType dtype = DType::kBF16;
  bool norm = true, weights = true, rounds = true, gate = false;
  double beta = 0, eps = 1e-6;
  std::int32_t rotary_dim = 64;  // 0: no rotation
  bool neox = true, tail = false;
  DType table = DType::kF32;
  double table_scale = 1;
  std::array<std::int32_t, 3> sections = {};
  bool in_turn = false;
  bool int32_positions = false;
};

/// A call over rows of one fused projection, [q or q and gate | k | v] of a token.
class Rows {
 public:
  Rows(const clattn::Context& context, const clattn::Queue& queue, const Model& model,
       std::int64_t tokens)
      : context_(context), queue_(queue), model_(model), tokens_(tokens) {
    const std::int64_t of_heads = std::int64_t{model.heads} * model.head_size;
    query_width_ = of_heads * (model.gate ? 2 : 1);
    key_width_ = std::int64_t{model.kv_heads} * model.head_size;
    width_ = query_width_ + 2 * key_width_;
    values = numbers(static_cast<std::size_t>(tokens * width_), model.dtype, 1);
    positions.assign(model.sections[0] != 0 ? 3 : 1, {});
    for (std::size_t axis = 0; axis < positions.size(); ++axis) {
      for (std::int64_t t = 0; t < tokens; ++t)  // first, last, and some twice
        positions[axis].push_back((kPositions - 1 + t / 2 * (7 + 4 * std::int64_t(axis))) %
                                  kPositions);
    }
    q_weight_ = numbers(std::size_t(model.head_size), DType::kF32, 2, 1 - model.beta);
    k_weight_ = numbers(std::size_t(model.head_size), DType::kF32, 3, 1 - model.beta);
    q_weight_[0] = 0;
    table_ = table_of(std::max(model.rotary_dim, 2), model.table, model.table_scale);
  }

  /// The call over these rows, with outputs of its own where `in_place` is false.
  clattn::PrepareQKV call(bool in_place) {
    fused = upload(context_, queue_, encode(model_.dtype, values));
    const std::size_t bytes = clattn::element_size_bytes(model_.dtype);
    const auto memory = [&](std::int64_t width) {
      return context_.allocate(static_cast<std::size_t>(tokens_ * width) * bytes);
    };
    query_out = memory(query_width_);
    key_out = memory(key_width_);
    gate_out = memory(query_width_);
    clattn::PrepareQKV made;
    made.num_tokens = tokens_;
    made.num_heads = model_.heads;
    made.num_kv_heads = model_.kv_heads;
    made.head_size = model_.head_size;
    made.dtype = model_.dtype;
    made.query = {fused.handle(), 0, width_};
    made.key = {fused.handle(), query_width_, width_};
    made.query_out = in_place ? made.query : clattn::TensorRef{query_out.handle()};
    made.key_out = in_place ? made.key : clattn::TensorRef{key_out.handle()};
    if (model_.gate) made.gate_out = {gate_out.handle()};
    if (model_.norm) made.norm = norm();
    if (model_.rotary_dim != 0) rotate(made);
    return made;
  }

  clattn::HeadNorm norm() const {
    clattn::HeadNorm made;
    if (model_.weights) {
      made.q_weight = upload(context_, queue_, encode(DType::kF32, q_weight_));
      made.k_weight = upload(context_, queue_, encode(DType::kF32, k_weight_));
      made.weight_dtype = DType::kF32;
    }
    made.weight_plus_one = model_.beta != 0;
    made.eps = static_cast<float>(model_.eps);
    made.rounds = model_.rounds;
    return made;
  }

  void rotate(clattn::PrepareQKV& call) const {
    clattn::RotaryEmbedding rope;
    rope.cos_sin_cache = upload(context_, queue_, encode(model_.table, table_));
    rope.dtype = model_.table;
    rope.rotary_dim = model_.rotary_dim;
    rope.is_neox = model_.neox;
    rope.rotates_tail = model_.tail;
    rope.mrope_section = model_.sections;
    rope.mrope_interleaved = model_.in_turn;
    call.rope = rope;
    std::vector<std::int64_t> all;
    for (const auto& row : positions) all.insert(all.end(), row.begin(), row.end());
    if (model_.int32_positions) {
      call.positions = upload(context_, queue_, std::vector<std::int32_t>(all.begin(), all.end()));
      call.position_bits = 32;
    } else {
      call.positions = upload(context_, queue_, all);
    }
  }

  /// Elements of `width` per token that begin at `offset` of each row.
  std::vector<double> slice(const std::vector<double>& rows, std::int64_t offset,
                            std::int64_t width) const {
    std::vector<double> made;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const auto begin = rows.begin() + t * width_ + offset;
      made.insert(made.end(), begin, begin + width);
    }
    return made;
  }
  std::vector<double> keys(const std::vector<double>& rows) const {
    return slice(rows, query_width_, key_width_);
  }
  /// Queries, or with `of_gate` gates.
  std::vector<double> queries(const std::vector<double>& rows, bool of_gate = false) const {
    const std::vector<double> both = slice(rows, 0, query_width_);
    if (!model_.gate) return both;
    std::vector<double> made;
    for (std::size_t i = 0; i < both.size(); ++i) {
      if ((i / std::size_t(model_.head_size) % 2 == 1) == of_gate) made.push_back(both[i]);
    }
    return made;
  }

  void expect(const std::vector<double>& x, bool of_keys, const std::vector<double>& got,
              const std::string& what) const {
    oracle::PreparedHeads exact;
    exact.heads = of_keys ? model_.kv_heads : model_.heads;
    exact.head_size = model_.head_size;
    exact.x = x;
    exact.norm = model_.norm;
    if (model_.weights) exact.weight = of_keys ? k_weight_ : q_weight_;
    exact.beta = model_.beta;
    exact.eps = model_.eps;
    exact.rounds_norm = model_.rounds;
    exact.rotary_dim = model_.rotary_dim;
    exact.rotary_at = model_.tail ? model_.head_size - model_.rotary_dim : 0;
    exact.neox = model_.neox;
    exact.table = table_;
    exact.positions = positions;
    exact.sections = model_.sections;
    exact.sections_in_turn = model_.in_turn;
    const auto judged = oracle::prepared_heads(exact, element(model_.dtype));
    ASSERT_EQ(got.size(), judged.exact.size()) << what;
    const oracle::Verdict verdict = oracle::judge(judged, got, 1);
    EXPECT_LE(verdict.worst, 1) << what << (of_keys ? ", key " : ", query ") << verdict.at << ": "
                                << got[verdict.at] << ", exact " << judged.exact[verdict.at];
  }

  std::vector<double> values;
  std::vector<std::vector<std::int64_t>> positions;
  Buffer fused, query_out, key_out, gate_out;

 private:
  const clattn::Context& context_;
  const clattn::Queue& queue_;
  Model model_;
  std::int64_t tokens_, query_width_ = 0, key_width_ = 0, width_ = 0;
  std::vector<double> q_weight_, k_weight_, table_;
};

}  // namespace prepare_test
