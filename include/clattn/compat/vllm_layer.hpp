#pragma once

// For code that calls vLLM's methods of Attention that say nothing new here.

#include <clattn/kv_cache_spec.hpp>
#include <clattn/layer.hpp>
#include <clattn/types.hpp>
#include <string>
#include <string_view>

namespace CLATTN_API clattn {

/// "head_size=64, num_heads=8, num_kv_heads=2, scale=0.125, backend=FLASHINFER"
std::string extra_repr(const Attention& layer);

/// After the weights are loaded: throws kInvalidArgument unless activations have the layer's
/// dtype. Sinks are f32 from the start.
void process_weights_after_loading(const Attention& layer, DType act_dtype);

/// vLLM's KVCacheSpecKind: "full_attention", "mla_attention", "sliding_window", "mamba",
/// "chunked_local_attention", "encoder_only_attention" or "cross_attention".
std::string_view get_kv_cache_spec_kind(const KVCacheSpec& spec);

}  // namespace clattn
