#include "attention/session_prepare.hpp"

#include <clattn/prepare_qkv.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

using detail::throw_invalid_if, detail::to_size;

void Session::prepare_qkv(std::int32_t index, const PrepareQKV& call) {
  const Attention& attention = layer(index);
  const bool is_prepared = prepared_->has(to_size(index));
  throw_invalid_if(attended_.empty() || is_prepared || attended_[to_size(index)],
                   "prepare_qkv: layer is {}, {}, legal: once in a step, before its attend()",
                   index,
                   attended_.empty() ? "outside of a step"
                   : is_prepared     ? "prepared already"
                                     : "attended already");
  throw_invalid_if(call.cache.buffer || call.slot_mapping != nullptr || call.num_slots >= 0,
                   "prepare_qkv: cache, slot_mapping or num_slots is given, legal: none, as the "
                   "session has its own");
  throw_invalid_if(call.num_tokens != 0 && call.num_tokens != step_.num_tokens(),
                   "prepare_qkv: num_tokens is {}, legal: 0 or the step's {}", call.num_tokens,
                   step_.num_tokens());
  const AttentionConfig& config = attention.config();
  detail::throw_unsupported_if(config.use_mla,
                               "prepare_qkv: layer {} has latent rows (use_mla), supported: layers "
                               "with keys and values",
                               index);
  detail::refuse_recording(queue_, "Session::prepare_qkv");
  PrepareQKV made = call;
  made.num_tokens = step_.num_tokens();
  made.num_heads = config.num_heads;
  made.num_kv_heads = config.num_kv_heads;
  made.head_size = config.head_size;
  made.dtype = config.dtype;
  if (!attention.shares_kv_cache()) {
    const AttentionMetadata& metadata = *metadata_[group_of_[to_size(index)]];
    made.cache = *attention.kv_cache();
    made.slot_mapping = metadata.slot_mapping_buffer();
    made.slot_offset_bytes = metadata.slot_mapping_offset_bytes();
  } else {
    throw_invalid_if(call.key.buffer != nullptr,
                     "prepare_qkv: layer {} shares the cache of another: key is given, legal: none",
                     index);
  }
  const auto sections = made.rope ? made.rope->mrope_section : std::array<std::int32_t, 3>{};
  if (made.rope && !made.positions && sections == std::array<std::int32_t, 3>{}) {
    made.positions = prepared_->positions(queue_, step_.positions);
    made.position_bits = 32;
  }
  clattn::prepare_qkv(*context_, queue_, made);
  prepared_->add(to_size(index));
}

}  // namespace clattn
