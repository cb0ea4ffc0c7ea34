#pragma once

#include <clattn/layer.hpp>

#include "attention.hpp"

namespace clattn::python {

/// A layer, and the context in which arrays become buffers. A session's layers are not owned.
struct Layer {
  std::shared_ptr<Context> context;
  std::unique_ptr<Attention> owned;
  Attention* attention = nullptr;

  Layer(const std::shared_ptr<Context>& made_in, LayerRegistry& registry,
        const AttentionOptions& options)
      : context(made_in),
        owned(std::make_unique<Attention>(made_in, registry, options)),
        attention(owned.get()) {}
  Layer(std::shared_ptr<Context> made_in, Attention& of_session)
      : context(std::move(made_in)), attention(&of_session) {}
};

/// Scales of a checkpoint, as load_kv_scales() takes them. Views the optionals.
LoadedKVScales loaded_scales(const std::optional<float>& k_scale,
                             const std::optional<float>& v_scale,
                             const std::optional<float>& q_scale,
                             const std::optional<float>& prob_scale, bool fnuz);

}  // namespace clattn::python
