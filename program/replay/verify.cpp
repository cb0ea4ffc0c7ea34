#include "program/replay/verify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

// Bounds on the oracle's work in one step: rows, and keys that all of them see together. The first
// row is always checked.
constexpr std::size_t kMaxRows = 8;
constexpr std::int64_t kMaxKeys = 16384;

/// One head's part of a result.
oracle::AttentionResult head_of(const oracle::AttentionResult& all, std::int32_t head,
                                std::int32_t head_size) {
  const auto part = [&](const std::vector<double>& values) {
    const auto from = values.begin() + std::ptrdiff_t{head} * head_size;
    return std::vector<double>(from, from + head_size);
  };
  return {part(all.out), {}, part(all.bound), part(all.weight_rounding), {}};
}

}  // namespace

Verifier::Verifier(const Engine& engine, double share, std::uint64_t seed)
    : engine_(engine), share_(share), seed_(mix64(~seed)) {
  const std::int64_t slots =
      engine.config().limits.num_blocks * engine.config().attention.block_size;
  slot_rows_.assign(to_size(slots), -1);
}

std::uint64_t Verifier::random(std::int64_t step, std::uint64_t salt) const {
  return mix64(seed_ ^ mix64(static_cast<std::uint64_t>(step) * 64 + salt));
}

std::optional<CapturedLayers> Verifier::choose_layers(std::int64_t step) const {
  const double draw = static_cast<double>(random(step, 0) >> 11U) * 0x1p-53;
  // The first step always counts, so that the shortest replay is checked too.
  if (share_ <= 0 || (step > 0 && draw >= share_)) return {};
  const auto any_of = [&](std::int32_t layers, std::uint64_t salt) {
    return layers == 0
               ? -1
               : static_cast<std::int32_t>(random(step, salt) % static_cast<std::uint64_t>(layers));
  };
  return CapturedLayers{any_of(engine_.config().num_layers, 1),
                        any_of(engine_.config().num_recurrent_layers, 61)};
}

void Verifier::record(const StepBatch& batch, std::int64_t start_row) {
  for (std::int32_t place = 0; place < batch.num_reqs(); ++place) {
    const ScheduledRequest& request = batch.request(place);
    for (std::int32_t i = 0; i < request.num_new; ++i) {
      const std::int64_t slot = batch.slot(place, request.num_computed + i);
      slot_rows_.at(to_size(slot)) =
          static_cast<std::int32_t>(start_row + batch.first_token(place) + i);
    }
  }
}

std::vector<Verifier::Row> Verifier::choose_rows(std::int64_t step, const StepBatch& batch) const {
  std::vector<std::int32_t> prefills;
  std::vector<std::int32_t> decodes;
  std::int32_t longest = 0;
  for (std::int32_t place = 0; place < batch.num_reqs(); ++place) {
    (batch.request(place).num_new == 1 ? decodes : prefills).push_back(place);
    if (batch.seq_len(place) > batch.seq_len(longest)) longest = place;
  }
  std::vector<Row> rows;
  std::int64_t keys = 0;
  std::uint64_t salt = 2;
  const auto add = [&](std::int32_t place, std::int32_t query) {
    const std::int64_t seen = batch.request(place).num_computed + query + 1;
    const bool known = std::ranges::any_of(
        rows, [&](const Row& row) { return row.place == place && row.query == query; });
    if (known || (!rows.empty() && keys + seen > kMaxKeys)) return;
    rows.push_back({place, query});
    keys += seen;
  };
  const auto any_query = [&](std::int32_t place) {
    const auto count = static_cast<std::uint64_t>(batch.request(place).num_new);
    return static_cast<std::int32_t>(random(step, salt++) % count);
  };
  const auto any_of = [&](const std::vector<std::int32_t>& places) {
    return places[random(step, salt++) % places.size()];
  };
  add(longest, batch.request(longest).num_new - 1);
  for (const auto* places : {&prefills, &decodes}) {
    if (places->empty()) continue;
    const std::int32_t place = any_of(*places);
    add(place, any_query(place));
  }
  for (int draws = 0; draws < 2 * static_cast<int>(kMaxRows) && rows.size() < kMaxRows; ++draws) {
    const auto place = static_cast<std::int32_t>(random(step, salt++) %
                                                 static_cast<std::uint64_t>(batch.num_reqs()));
    add(place, any_query(place));
  }
  return rows;
}

void Verifier::check(std::int64_t step, const CapturedLayers& layers, const StepBatch& batch,
                     std::int64_t start_row) {
  ++stats_.steps;
  for (const Row& row : choose_rows(step, batch)) {
    check_row(step, layers.attention, batch, start_row, row);
    if (layers.recurrent >= 0) check_recurrent_row(step, layers.recurrent, batch, row);
  }
}

std::vector<std::int64_t> Verifier::key_rows(const StepBatch& batch, const Row& row,
                                             std::int32_t layer) const {
  const std::int32_t num_keys = batch.request(row.place).num_computed + row.query + 1;
  std::vector<std::int64_t> rows;
  rows.reserve(to_size(num_keys));
  for (std::int32_t position = 0; position < num_keys; ++position) {
    const std::int32_t start = slot_rows_.at(to_size(batch.slot(row.place, position)));
    if (start < 0) throw std::logic_error("replay: a step reads a slot that none wrote");
    rows.push_back(Engine::pool_row(start, layer));
  }
  return rows;
}

oracle::AttentionCase Verifier::make_case(std::int32_t kv_head, std::int64_t query_row,
                                          std::span<const std::int64_t> rows) const {
  const AttentionConfig& config = engine_.config().attention;
  const SyntheticPool& pool = engine_.pool();
  const std::int64_t head_size = config.head_size;
  const std::int64_t group = config.num_heads / config.num_kv_heads;
  oracle::AttentionCase call =
      row_case(config, static_cast<std::int32_t>(rows.size()), {kv_head * group, group});
  const std::int64_t group_elems = call.num_heads * head_size;
  for (std::int64_t i = 0; i < group_elems; ++i) {
    call.query.push_back(pool.stored(PoolTensor::kQuery, query_row, kv_head * group_elems + i));
  }
  call.key_cache.reserve(rows.size() * to_size(head_size));
  call.value_cache.reserve(rows.size() * to_size(head_size));
  const std::int64_t value_size = config.output_head_size();
  for (const std::int64_t row : rows) {
    for (std::int64_t d = 0; d < head_size; ++d) {
      if (config.use_mla) {  // a latent row and its rotary part, which are keys and values
        call.key_cache.push_back(d < value_size
                                     ? pool.stored(PoolTensor::kKey, row, d)
                                     : pool.stored(PoolTensor::kValue, row, d - value_size));
        call.value_cache.push_back(call.key_cache.back());
        continue;
      }
      call.key_cache.push_back(pool.stored(PoolTensor::kKey, row, kv_head * head_size + d));
      const std::int64_t at = kv_head * value_size + d;
      call.value_cache.push_back(d < value_size ? pool.stored(PoolTensor::kValue, row, at) : 0);
    }
  }
  return call;
}

bool Verifier::judge_head(const std::string& where, const oracle::AttentionResult& truth,
                          std::span<const std::byte> bytes) {
  const DType dtype = engine_.config().attention.dtype;
  const Deviation deviation = compare(dtype, bytes, {}, truth, engine_.rounds_probabilities());
  stats_.deviation.merge(deviation);
  if (deviation.passed()) return true;
  if (stats_.failures.size() < kMaxFailuresTold) {
    const std::vector<double> got = decode_elements(dtype, bytes);
    std::size_t worst = 0;  // the first NaN, else the largest error
    for (std::size_t d = 0; d < got.size() && !std::isnan(got[worst]); ++d) {
      const double error = std::abs(got[d] - truth.out[d]);
      if (!(error <= std::abs(got[worst] - truth.out[worst]))) worst = d;
    }
    stats_.failures.push_back(fmt::format(
        "{}, element {}: got {:.6g}, want {:.6g}, error {:.3g} "
        "is {:.3g} times what is allowed",
        where, worst, got[worst], truth.out[worst], deviation.max_error, deviation.worst_share));
  }
  return false;
}

void Verifier::check_row(std::int64_t step, std::int32_t layer, const StepBatch& batch,
                         std::int64_t start_row, const Row& row) {
  const AttentionConfig& config = engine_.config().attention;
  const std::int32_t token = batch.first_token(row.place) + row.query;
  const std::vector<std::int64_t> rows = key_rows(batch, row, layer);
  std::vector<std::byte> output(engine_.output_row_bytes());
  engine_.read_captured(token, output);
  const std::size_t head_bytes = output.size() / to_size(config.num_heads);
  const std::int32_t group = config.num_heads / config.num_kv_heads;
  bool passed = true;
  // One KV head a call keeps the oracle's arrays small for the longest contexts.
  for (std::int32_t kv_head = 0; kv_head < config.num_kv_heads; ++kv_head) {
    const oracle::AttentionResult truth = front_of_rows(
        oracle::attention(make_case(kv_head, Engine::pool_row(start_row + token, layer), rows),
                          element_of(config.dtype)),
        config.head_size, config.output_head_size());
    for (std::int32_t i = 0; i < group; ++i) {
      const std::int32_t head = kv_head * group + i;
      const std::string where =
          fmt::format("step {}, request {}, token {}, layer {}, head {}", step,
                      batch.request(row.place).request->id, rows.size() - 1, layer, head);
      passed &= judge_head(where, head_of(truth, i, config.output_head_size()),
                           std::span(output).subspan(to_size(head) * head_bytes, head_bytes));
    }
  }
  ++stats_.rows;
  stats_.failed_rows += passed ? 0 : 1;
}

}  // namespace clattn::cli
