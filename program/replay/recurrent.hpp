#pragma once

#include <clattn/recurrent.hpp>
#include <cstdint>
#include <memory>
#include <vector>

#include "program/recurrent/layer.hpp"

namespace clattn::cli {

struct EngineConfig;
class StepBatch;
class SyntheticPool;

/// The recurrent layers of a hybrid model: pages of states of the requests that run, and what a
/// step does with them: convolution, gated delta rule and gated norm, each layer's in a row.
class RecurrentEngine {
 public:
  /// Throws kUnsupported if a layer's states are more than the device gives away at once.
  RecurrentEngine(const std::shared_ptr<Context>& context, const Queue& queue,
                  const EngineConfig& config);

  /// What a layer's operations give, rows of tokens; of a step that is verified.
  struct Outputs {
    Buffer mixed, out, normed;  ///< [tokens, channels], then twice [tokens, values]
  };
  const Outputs& captured() const { return captured_; }
  const DeltaNetLayer& layer() const { return layer_; }
  double chunk_rounding() const { return layer_.chunk_rounding(*context_); }

  /// Sets all states to NaN.
  void poison() const;
  /// Takes the lists of a step to the device; poisons captured() if it is asked for.
  void begin(const StepBatch& batch, bool capture);
  /// Enqueues a layer over the step's tokens, which have the pool's rows from `row` on.
  void run(std::int32_t layer, const SyntheticPool& pool, std::int64_t row, bool capture) const;

 private:
  Outputs make_outputs(std::int64_t tokens) const;

  std::shared_ptr<Context> context_;
  Queue queue_;
  DeltaNetLayer layer_;
  RecurrentMetadataBuilder builder_;
  RecurrentMetadata metadata_;
  std::vector<std::vector<StateView>> states_;  // by layer: convolution, state
  Outputs outputs_, captured_;
  std::vector<std::int32_t> starts_, pages_;
  std::vector<std::uint8_t> continues_;
};

}  // namespace clattn::cli
