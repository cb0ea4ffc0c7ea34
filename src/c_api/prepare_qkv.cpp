#include <clattn/prepare_qkv.hpp>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

namespace {

std::optional<HeadNorm> norm_of(const ClattnPrepareQKV& given, DType dtype) {
  if (given.norm == 0) {
    detail::throw_invalid_if(given.q_weight != nullptr || given.k_weight != nullptr ||
                                 given.weight_plus_one != 0 || given.norm_unrounded != 0 ||
                                 given.eps != 0,
                             "call: norm is 0, but weights, weight_plus_one, norm_unrounded or eps "
                             "are given, legal: none of them");
    return std::nullopt;
  }
  HeadNorm norm;
  norm.q_weight = buffer_of(given.q_weight);
  norm.k_weight = buffer_of(given.k_weight);
  norm.weight_dtype = given.weight_dtype == nullptr ? dtype : parse_dtype(given.weight_dtype);
  norm.weight_plus_one = given.weight_plus_one != 0;
  norm.eps = static_cast<float>(given.eps);
  norm.rounds = given.norm_unrounded == 0;
  return norm;
}

std::optional<RotaryEmbedding> rope_of(const ClattnPrepareQKV& given) {
  RotaryEmbedding rope;
  std::ranges::copy(given.mrope_section, rope.mrope_section.begin());
  const bool sections = rope.mrope_section != std::array<std::int32_t, 3>{};
  if (given.cos_sin_cache == nullptr) {
    detail::throw_invalid_if(given.rotary_dim != 0 || given.is_interleaved != 0 ||
                                 given.rotates_tail != 0 || given.mrope_interleaved != 0 ||
                                 sections,
                             "call: cos_sin_cache is null, but rotary_dim, is_interleaved, "
                             "rotates_tail, mrope_section or mrope_interleaved are given, legal: "
                             "none of them");
    return std::nullopt;
  }
  rope.cos_sin_cache = buffer_of(given.cos_sin_cache);
  rope.dtype = dtype_of(given.cos_sin_dtype, DType::kF32);
  rope.rotary_dim = given.rotary_dim;
  rope.is_neox = given.is_interleaved == 0;
  rope.rotates_tail = given.rotates_tail != 0;
  rope.mrope_interleaved = given.mrope_interleaved != 0;
  return rope;
}

}  // namespace

PrepareQKV clattn::c_api::prepare_of(const ClattnPrepareQKV& given) {
  PrepareQKV call;
  take(given.num_heads, call.num_heads);
  take(given.num_kv_heads, call.num_kv_heads);
  take(given.head_size, call.head_size);
  take(given.position_bits, call.position_bits);
  call.num_tokens = given.num_tokens;
  call.dtype = dtype_of(given.dtype, DType::kBF16);
  call.query = tensor_of(given.query);
  call.key = tensor_of(given.key);
  call.value = tensor_of(given.value);
  call.query_out = tensor_of(given.query_out);
  call.key_out = tensor_of(given.key_out);
  call.gate_out = tensor_of(given.gate_out);
  call.norm = norm_of(given, call.dtype);
  call.rope = rope_of(given);
  call.positions = buffer_of(given.positions);
  call.positions_offset = given.positions_offset;
  call.positions_stride = given.positions_stride;
  call.slot_mapping = memory_of(given.slot_mapping);
  call.slot_offset_bytes = given.slot_offset_bytes;
  if (given.num_padding_tokens != 0) {
    detail::throw_invalid_if(
        given.num_padding_tokens < 0 || given.num_padding_tokens > given.num_tokens,
        "call: num_padding_tokens is {}, legal: 0 to {} (num_tokens)", given.num_padding_tokens,
        given.num_tokens);
    call.num_slots = given.num_tokens - given.num_padding_tokens;
  }
  if (given.errors != nullptr) call.errors = &given.errors->held;
  return call;
}

ClattnResult clattn_prepare_qkv(const ClattnContext* context, const ClattnQueue* queue,
                                const ClattnCache* cache, const ClattnPrepareQKV* call) {
  return guarded([&] {
    const ClattnPrepareQKV& given = read(call, "call");
    PrepareQKV made = prepare_of(given);
    if (cache != nullptr) {
      detail::throw_unsupported_if(cache->rope_dim != 0,
                                   "cache: it has latent rows (use_mla), supported: caches of keys "
                                   "and values");
      made.cache = cache->in_use();
    }
    prepare_qkv(*held(context), held(queue), made, event_of(given.event));
  });
}
