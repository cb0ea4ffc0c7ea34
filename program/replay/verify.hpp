#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "oracle/oracle.hpp"
#include "program/common/verify.hpp"
#include "program/replay/engine.hpp"

namespace clattn::cli {

struct VerifyStats {
  std::int64_t steps = 0;
  std::int64_t rows = 0;  ///< tokens of a layer, each with all its heads
  std::int64_t failed_rows = 0;
  Deviation deviation{};                ///< over every verified element
  std::vector<std::string> failures{};  ///< the first few, in words
};

/// Judges rows of a step by the double oracle. It remembers which pool row every cache slot was
/// written from, so shared and reused blocks are known exactly, whatever the library did with them.
class Verifier {
 public:
  Verifier(const Engine& engine, double share, std::uint64_t seed);

  /// The layers to capture in this step, or nothing when the step is not checked.
  std::optional<CapturedLayers> choose_layers(std::int64_t step) const;
  /// Notes what the step writes; to be called for every step.
  void record(const StepBatch& batch, std::int64_t start_row);
  /// Compares rows of a captured step: the longest request's, a prefill's, a decode's, some others.
  void check(std::int64_t step, const CapturedLayers& layers, const StepBatch& batch,
             std::int64_t start_row);

  const VerifyStats& stats() const { return stats_; }

 private:
  static constexpr std::size_t kMaxFailuresTold = 5;
  struct Row {
    std::int32_t place = 0;  // of the request in the batch
    std::int32_t query = 0;  // token within its query
  };
  std::vector<Row> choose_rows(std::int64_t step, const StepBatch& batch) const;
  void check_row(std::int64_t step, std::int32_t layer, const StepBatch& batch,
                 std::int64_t start_row, const Row& row);
  std::vector<std::int64_t> key_rows(const StepBatch& batch, const Row& row,
                                     std::int32_t layer) const;
  oracle::AttentionCase make_case(std::int32_t kv_head, std::int64_t query_row,
                                  std::span<const std::int64_t> rows) const;
  bool judge_head(const std::string& where, const oracle::AttentionResult& truth,
                  std::span<const std::byte> bytes);
  void check_recurrent_row(std::int64_t step, std::int32_t layer, const StepBatch& batch,
                           const Row& row);
  /// The convolution of these tokens' channels, the first of which begin a request.
  oracle::JudgedTensor convolved(std::span<const std::int64_t> rows, std::int64_t first,
                                 std::int32_t count) const;
  /// The rule's output of the last of these tokens.
  bool check_rule(const std::string& where, std::span<const std::int64_t> rows,
                  std::span<const double> out, std::uint64_t salt);
  bool judge_recurrent(const std::string& where, const oracle::JudgedTensor& truth,
                       std::span<const double> values, double sigmas);
  std::uint64_t random(std::int64_t step, std::uint64_t salt) const;

  const Engine& engine_;
  double share_;
  std::uint64_t seed_;
  std::vector<std::int32_t>
      slot_rows_;  // pool row (before the layer's shift) of each slot, -1 none
  VerifyStats stats_;
};

}  // namespace clattn::cli
