#pragma once

#include <clattn/kv_cache_spec.hpp>
#include <clattn/recurrent.hpp>
#include <cstdint>
#include <vector>

namespace CLATTN_API clattn {

/// The recurrent layers of a session's model (SessionConfig::recurrent): gated delta nets and
/// others whose memory of a request is a state. States lie in slots of a pool. A step never writes
/// the state that it begins with, so steps that are given up cost nothing, and forks share a state.
struct RecurrentLayers {
  /// One for each layer, kMamba: `states` are those of a convolution, [rows, channels], then the
  /// state, [heads, v, k], or one of the two (gated_delta_net_state_shape() and the like). All else
  /// is equal in all of them:
  /// - num_speculative_blocks: the most drafts of a request in a step, as the shapes' num_spec;
  ///   drafts are a chain behind one new token of a request that has computed ones.
  /// - mamba_cache_mode: with kNone requests share no prefix. With kAlign a state that a step ends
  ///   with at a multiple of block_size tokens is kept, until its slot is needed, and prefixes are
  ///   found that end there; so steps end there: they compute of a request at most the tokens up to
  ///   the next multiple, whatever else there is to compute. block_size is a multiple of that of
  ///   the layers of attention. States after accepted drafts are not kept. kAll is refused.
  std::vector<KVCacheSpec> layers = {};
  /// Slots for states of all layers, >= 2. A request has one, after drafts were accepted two, and
  /// in a step one more and one for each draft; the others keep states of prefixes. Their memory
  /// comes in addition to SessionConfig::cache_bytes.
  std::int32_t num_slots = 0;
};

/// What the operations of a recurrent layer are given in a step (Session::recur()). Metadata of
/// convolutions differs, as they do not begin with the page of a column; the other kinds of
/// operations take `metadata`.
struct RecurrentStep {
  StateView conv_states = {};            ///< no buffer: the layer has no convolution
  RecurrentMetadata conv_metadata = {};  ///< of causal_conv1d_fn(), short_conv()
  StateView states = {};                 ///< no buffer: the layer has a convolution alone
  RecurrentMetadata metadata = {};       ///< of the gated delta rule and its relatives
};

}  // namespace clattn
