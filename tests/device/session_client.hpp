#pragma once

#include <clattn/session.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "device/layer_model.hpp"

/// An engine around a Session whose projections are random numbers: a token's query, key and value
/// depend on the layer, on the token and on all tokens before it, as in a model. Before a draft are
/// those that lead to it.
namespace session_test {

using Tokens = std::vector<std::int32_t>;
/// A request's output rows of one step, layer after layer.
using Rows = std::vector<float>;

/// A session of two f32 layers of layer_test::kShape and 16 blocks; the second has a window.
clattn::SessionConfig small_config();
/// `count` tokens that begin with `first` and go on in steps of 1.
Tokens counting(std::int32_t first, std::int32_t count);

class Client {
 public:
  Client(const std::shared_ptr<clattn::Context>& context, clattn::SessionConfig config)
      : device_(context), session(context, device_.queue, std::move(config)) {}

  /// Runs a whole step and expects its rows to be those that the requests lack, and, but for latent
  /// attention, what the oracle says.
  std::map<clattn::RequestId, Rows> run(const std::vector<clattn::StepRequest>& requests);
  /// The tensors of `step` in a layer, run by attend().
  std::vector<float> attend(std::int32_t layer, const std::vector<clattn::StepRequest>& requests,
                            const clattn::Step& step, const clattn::ForwardOptions& options = {});
  /// Tokens whose last ones are rows of a step: a request's, or those that lead to a draft.
  struct Sequence {
    Tokens tokens;
    std::int32_t num_rows = 0;
  };
  /// What run() calls before it attends, such as a model's other layers.
  std::function<void(std::span<const Sequence>)> before_attention = {};

 private:
  std::vector<Sequence> sequences(const std::vector<clattn::StepRequest>& requests,
                                  const clattn::Step& step) const;
  std::vector<float> row(std::int32_t layer, int tensor,
                         std::span<const std::int32_t> tokens) const;
  std::size_t row_size(std::int32_t layer, int tensor) const;
  void expect_truth(std::int32_t layer, const std::vector<clattn::StepRequest>& requests,
                    const clattn::Step& step, const std::vector<float>& output) const;

  layer_test::Device device_;

 public:
  clattn::Session session;  ///< on the device's queue
};

}  // namespace session_test
