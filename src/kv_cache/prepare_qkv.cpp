#include <algorithm>
#include <array>
#include <bit>
#include <clattn/cache_ops.hpp>
#include <clattn/prepare_qkv.hpp>
#include <numeric>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kv_cache/op_kernel.hpp"
#include "shared/device_errors.h"
#include "shared/prepare_qkv.h"

namespace clattn {

namespace {

using detail::bounded_token_stride, detail::check_at_least, detail::check_between;
using detail::throw_invalid_if, detail::to_size;

/// A tensor of the call: what it must hold, and what errors call it.
struct QKVTensor {
  std::string_view name;
  const TensorRef* ref;
  std::int64_t width;  ///< elements of a row
  ClaRows* place;
};

bool given(const TensorRef& tensor) {
  return tensor.buffer != nullptr;
}
bool stores(const PrepareQKV& call) {
  return call.cache.buffer.handle() != nullptr;
}

void check_plain(DType dtype, std::string_view field) {
  throw_invalid_if(
      dtype > DType::kBF16, "prepare_qkv: {} is {}, legal: f32, f16, bf16", field,
      dtype <= DType::kUInt4x2 ? to_string(dtype) : std::to_string(static_cast<int>(dtype)));
}

/// Throws unless `field` is given if and only if it is wanted.
void check_given(bool is_given, bool wanted, std::string_view field, std::string_view why) {
  throw_invalid_if(is_given && !wanted, "prepare_qkv: {} is given, legal {}: none", field, why);
  throw_invalid_if(wanted && !is_given, "prepare_qkv: {}: no buffer, needed {}", field, why);
}

/// Which tensors come together.
void check_presence(const PrepareQKV& call) {
  const bool query = given(call.query), key = given(call.key), cache = stores(call);
  throw_invalid_if(!query && !key,
                   "prepare_qkv: neither query nor key has a buffer, legal: one or both");
  check_given(given(call.query_out), query, "query_out", query ? "with query" : "without query");
  throw_invalid_if(given(call.gate_out) && !query,
                   "prepare_qkv: gate_out is given, legal without query: none");
  throw_invalid_if(given(call.key_out) && !key,
                   "prepare_qkv: key_out is given, legal without key: none");
  throw_invalid_if(key && !cache && !given(call.key_out),
                   "prepare_qkv: key is given without key_out and cache, legal: with one of them");
  check_given(given(call.value), cache, "value", cache ? "with a cache" : "without a cache");
  throw_invalid_if(cache && !key, "prepare_qkv: key: no buffer, needed with a cache");
  const bool slots = call.slot_mapping != nullptr;
  throw_invalid_if(slots && !cache,
                   "prepare_qkv: slot_mapping is given, legal without a cache: none");
  throw_invalid_if((call.num_slots >= 0 || call.slot_offset_bytes != 0) && !cache,
                   "prepare_qkv: num_slots is {} and slot_offset_bytes {}, legal without a cache: "
                   "-1 and 0",
                   call.num_slots, call.slot_offset_bytes);
  check_given(static_cast<bool>(call.positions), call.rope.has_value(), "positions",
              call.rope ? "with rope" : "without rope");
  throw_invalid_if(call.errors != nullptr && !call.rope,
                   "prepare_qkv: errors is given, legal without rope: none");
}

void check_sizes(const PrepareQKV& call) {
  check_between("prepare_qkv: num_tokens", call.num_tokens, 0, detail::kMaxInt32);
  throw_invalid_if(call.errors != nullptr && call.num_tokens >= CLA_ERROR_ROWS,
                   "prepare_qkv: num_tokens is {}, legal with errors: 0 … {}", call.num_tokens,
                   CLA_ERROR_ROWS - 1);
  constexpr std::int64_t kMostHeads = 1 << 20;
  if (given(call.query)) check_between("prepare_qkv: num_heads", call.num_heads, 1, kMostHeads);
  if (given(call.key)) check_between("prepare_qkv: num_kv_heads", call.num_kv_heads, 1, kMostHeads);
  throw_invalid_if(call.head_size < 8 || call.head_size > 512 || call.head_size % 8 != 0,
                   "prepare_qkv: head_size is {}, legal: 8 … 512 in steps of 8", call.head_size);
  check_plain(call.dtype, "dtype");
}

void bind_norm(const PrepareQKV& call, ClaPrepareQKV& terms) {
  if (!call.norm) return;
  const HeadNorm& norm = *call.norm;
  check_plain(norm.weight_dtype, "norm: weight_dtype");
  throw_invalid_if(!(norm.eps >= 0), "prepare_qkv: norm: eps is {}, legal: >= 0", norm.eps);
  const std::pair<const Buffer*, std::pair<std::string_view, bool>> weights[] = {
      {&norm.q_weight, {"q_weight", given(call.query)}},
      {&norm.k_weight, {"k_weight", given(call.key)}}};
  for (const auto& [weight, of] : weights) {
    if (!*weight) continue;
    throw_invalid_if(!of.second, "prepare_qkv: norm: {} is given, legal without its tensor: none",
                     of.first);
    detail::require_size(*weight, call.head_size, element_size_bytes(norm.weight_dtype),
                         fmt::format("prepare_qkv: norm: {}", of.first));
  }
  throw_invalid_if(norm.weight_plus_one && !norm.q_weight && !norm.k_weight,
                   "prepare_qkv: norm: weight_plus_one is true, legal without weights: false");
  terms.norm = norm.rounds ? CLA_NORM_ROUNDED : CLA_NORM_EXACT;
  terms.eps = norm.eps;
  terms.weight_dtype = static_cast<cl_int>(norm.weight_dtype);
  terms.weight_beta = norm.weight_plus_one ? 1 : 0;
  terms.has_q_weight = norm.q_weight ? 1 : 0;
  terms.has_k_weight = norm.k_weight ? 1 : 0;
}

void bind_sections(const RotaryEmbedding& rope, ClaPrepareQKV& terms) {
  const auto [time, height, width] = rope.mrope_section;
  if (time == 0 && height == 0 && width == 0) {
    throw_invalid_if(rope.mrope_interleaved,
                     "prepare_qkv: rope: mrope_interleaved is true, legal without mrope_section: "
                     "false");
    return;
  }
  const std::int64_t angles = terms.rotary_dim / 2;
  throw_invalid_if(
      time < 0 || height < 0 || width < 0 || std::int64_t{time} + height + width != angles,
      "prepare_qkv: rope: mrope_section is {}, {}, {}, legal: >= 0, with the sum {} (rotary_dim / "
      "2)",
      time, height, width, angles);
  throw_invalid_if(rope.mrope_interleaved && (height > (angles + 1) / 3 || width > angles / 3),
                   "prepare_qkv: rope: mrope_section is {}, {}, {}, legal with mrope_interleaved: "
                   "height up to {}, width up to {}",
                   time, height, width, (angles + 1) / 3, angles / 3);
  terms.sections = rope.mrope_interleaved ? CLA_SECTIONS_IN_TURN : CLA_SECTIONS_IN_BLOCKS;
  terms.section_time = time;
  terms.section_height = height;
  terms.section_width = width;
}

void bind_positions(const PrepareQKV& call, ClaPrepareQKV& terms) {
  throw_invalid_if(call.position_bits != 64 && call.position_bits != 32,
                   "prepare_qkv: position_bits is {}, legal: 64, 32", call.position_bits);
  check_at_least("prepare_qkv: positions_offset", call.positions_offset, 0);
  const std::int64_t rows = terms.sections != 0 ? 3 : 1;
  const std::int64_t stride = call.positions_stride == 0 ? call.num_tokens : call.positions_stride;
  throw_invalid_if(stride < call.num_tokens || (rows == 1 && call.positions_stride != 0),
                   "prepare_qkv: positions_stride is {}, legal: 0, or with mrope_section at least "
                   "{} (num_tokens)",
                   call.positions_stride, call.num_tokens);
  const std::int64_t end =
      detail::checked_add(detail::checked_mul(rows - 1, stride, "prepare_qkv: positions"),
                          call.num_tokens, "prepare_qkv: positions");
  detail::require_size(call.positions,
                       detail::checked_add(call.positions_offset, end, "prepare_qkv: positions"),
                       to_size(call.position_bits / 8), "prepare_qkv: positions");
  terms.positions_at = call.positions_offset;
  terms.positions_stride = stride;
  terms.wide_positions = call.position_bits == 64 ? 1 : 0;
}

void bind_rope(const PrepareQKV& call, ClaPrepareQKV& terms) {
  if (!call.rope) return;
  const RotaryEmbedding& rope = *call.rope;
  terms.rotary_dim = rope.rotary_dim == 0 ? call.head_size : rope.rotary_dim;
  throw_invalid_if(
      terms.rotary_dim < 2 || terms.rotary_dim > call.head_size || terms.rotary_dim % 2 != 0,
      "prepare_qkv: rope: rotary_dim is {}, legal: even, 2 … {} (head_size), or 0 for all",
      rope.rotary_dim, call.head_size);
  check_plain(rope.dtype, "rope: dtype");
  detail::require_size(rope.cos_sin_cache, terms.rotary_dim, element_size_bytes(rope.dtype),
                       "prepare_qkv: rope: cos_sin_cache");
  terms.max_position =
      static_cast<cl_long>(rope.cos_sin_cache.size_bytes() /
                           (to_size(terms.rotary_dim) * element_size_bytes(rope.dtype)));
  terms.rotary_at = rope.rotates_tail ? call.head_size - terms.rotary_dim : 0;
  terms.interleaved = rope.is_neox ? 0 : 1;
  terms.table_dtype = static_cast<cl_int>(rope.dtype);
  bind_sections(rope, terms);
  bind_positions(call, terms);
  terms.has_errors = call.errors != nullptr ? 1 : 0;
}

void bind_cache(const PrepareQKV& call, ClaPrepareQKV& terms) {
  if (!stores(call)) return;
  const KVCache& cache = call.cache;
  detail::refuse_row_scales(cache, "prepare_qkv");
  (void)detail::cache_write_shape(cache, call.dtype);
  throw_invalid_if(cache.num_kv_heads != call.num_kv_heads || cache.head_size != call.head_size,
                   "prepare_qkv: cache: {} heads of {}, legal: {} of {} (num_kv_heads, head_size)",
                   cache.num_kv_heads, cache.head_size, call.num_kv_heads, call.head_size);
  throw_invalid_if(cache.value_size() != call.head_size,
                   "prepare_qkv: cache: head_size_v is {}, legal: {} (head_size)",
                   cache.value_size(), call.head_size);
  detail::check_cache(cache);
  const std::int64_t tokens = call.num_slots < 0 ? call.num_tokens : call.num_slots;
  check_between("prepare_qkv: num_slots", tokens, 0, call.num_tokens);
  detail::check_slots({call.slot_mapping, call.slot_offset_bytes, tokens});
  terms.slot_tokens = static_cast<cl_int>(tokens);
  terms.slots_at = static_cast<cl_long>(call.slot_offset_bytes / sizeof(std::int64_t));
  terms.cache_slots = detail::checked_mul(cache.num_blocks, std::int64_t{cache.block_size},
                                          "prepare_qkv: cache: slots");
  terms.block_size = cache.block_size;
  terms.k_offset = cache.k_offset;
  terms.v_offset = cache.v_offset;
  terms.block_stride = cache.block_stride;
  terms.token_stride = cache.token_stride;
  terms.head_stride = cache.head_stride;
  terms.scale_stride = detail::scale_stride_of(cache);
}

/// Whether rows of two tensors, both checked, have bytes in common. Of rows with different strides
/// only the ends of the tensors count.
bool overlap(const QKVTensor& a, const QKVTensor& b, std::int64_t num_tokens) {
  if (a.ref->buffer != b.ref->buffer) return false;
  const auto end = [&](const QKVTensor& of) {
    return of.place->offset + (num_tokens - 1) * of.place->stride + of.width;
  };
  if (end(a) <= b.place->offset || end(b) <= a.place->offset) return false;
  const std::int64_t stride = a.place->stride;
  if (num_tokens == 1 || stride != b.place->stride) return true;
  const std::int64_t ahead = ((b.place->offset - a.place->offset) % stride + stride) % stride;
  return ahead < a.width || stride - ahead < b.width;
}

bool same_place(const QKVTensor& a, const QKVTensor& b) {
  return a.ref->buffer == b.ref->buffer && a.place->offset == b.place->offset &&
         a.place->stride == b.place->stride && a.width == b.width;
}

/// Finds all tensors, and checks that outputs damage none.
void bind_tensors(const PrepareQKV& call, ClaPrepareQKV& terms) {
  const std::int64_t keys = std::int64_t{call.num_kv_heads} * call.head_size;
  const std::int64_t queries = std::int64_t{call.num_heads} * call.head_size;
  const std::array<QKVTensor, 6> all = {
      QKVTensor{"query", &call.query, queries * (given(call.gate_out) ? 2 : 1), &terms.query},
      QKVTensor{"key", &call.key, keys, &terms.key},
      QKVTensor{"value", &call.value, keys, &terms.value},
      QKVTensor{"query_out", &call.query_out, queries, &terms.query_out},
      QKVTensor{"key_out", &call.key_out, keys, &terms.key_out},
      QKVTensor{"gate_out", &call.gate_out, queries, &terms.gate_out}};
  for (const QKVTensor& each : all) {
    if (!given(*each.ref)) continue;
    *each.place = {each.ref->offset,
                   bounded_token_stride(*each.ref, {call.num_tokens, each.width, call.dtype},
                                        fmt::format("prepare_qkv: {}", each.name))};
  }
  if (call.num_tokens == 0) return;
  constexpr std::size_t kInputs = 3;
  for (std::size_t out = kInputs; out < all.size(); ++out) {
    for (std::size_t other = 0; other < out; ++other) {
      if (!given(*all[out].ref) || !given(*all[other].ref)) continue;
      // A query without gates, or a key, and its output.
      const bool own = other < 2 && other + kInputs == out && all[out].width == all[other].width;
      throw_invalid_if(!(own && same_place(all[out], all[other])) &&
                           overlap(all[out], all[other], call.num_tokens),
                       "prepare_qkv: {} overlaps {}, legal: memory that no other tensor has{}",
                       all[out].name, all[other].name, own ? ", or the very same rows" : "");
    }
  }
}

/// Whether all rows and pages begin at multiples of eight elements.
bool aligned(const ClaPrepareQKV& terms) {
  const ClaRows rows[] = {terms.query,     terms.key,     terms.value,
                          terms.query_out, terms.key_out, terms.gate_out};
  std::int64_t all =
      terms.k_offset | terms.v_offset | terms.block_stride | terms.token_stride | terms.head_stride;
  for (const ClaRows& each : rows) all |= each.offset | each.stride;
  return all % 8 == 0;
}

ClaPrepareQKV checked_terms(const PrepareQKV& call) {
  check_presence(call);
  check_sizes(call);
  ClaPrepareQKV terms{};
  terms.num_heads = given(call.query) ? call.num_heads : 0;
  terms.num_kv_heads = given(call.key) ? call.num_kv_heads : 0;
  terms.num_rows = terms.num_heads + terms.num_kv_heads * (stores(call) ? 2 : 1);
  terms.has_key_out = given(call.key_out) ? 1 : 0;
  terms.has_gate = given(call.gate_out) ? 1 : 0;
  bind_norm(call, terms);
  bind_rope(call, terms);
  bind_cache(call, terms);
  bind_tensors(call, terms);
  return terms;
}

}  // namespace

void prepare_qkv(const Context& context, cl_command_queue queue, const PrepareQKV& call,
                 Event* event) {
  detail::clear(event);
  ClaPrepareQKV terms = checked_terms(call);
  const DeviceCapabilities& device = context.capabilities();
  detail::throw_unsupported_if(!device.struct_arguments,
                               "prepare_qkv: the driver damages structs as kernel arguments");
  if (call.num_tokens == 0) return;
  const DType cache_dtype = stores(call) ? call.cache.dtype : call.dtype;
  const auto group = cache_op_work_group_size(device);
  const std::int32_t lanes = std::min(group, call.head_size / 8);
  const std::int32_t heads = group / lanes;
  const bool vectors = group > 1 && aligned(terms);  // CPUs load a vector from any address
  const detail::OpKernel kernel =
      detail::op_kernel(context, "clattn_prepare_qkv", "cache/prepare_qkv.cl",
                        fmt::format("{} -DCLA_HEAD_DIM={} -DCLA_LANES={} -DCLA_ALIGNED={}",
                                    detail::dtype_options(call.dtype, cache_dtype), call.head_size,
                                    lanes, vectors ? 1 : 0));
  terms.rows_of_group = group == 1 ? terms.num_rows : heads;
  terms.groups_of_token = detail::ceil_div(terms.num_rows, terms.rows_of_group);
  const HeadNorm norm = call.norm.value_or(HeadNorm());
  detail::KernelLease lease = kernel.pool->acquire();
  lease.args(terms, call.query.buffer, call.key.buffer, call.value.buffer, call.query_out.buffer,
             call.key_out.buffer, call.gate_out.buffer, norm.q_weight, norm.k_weight,
             call.rope ? call.rope->cos_sin_cache : Buffer(), call.positions,
             call.errors != nullptr ? call.errors->word() : Buffer(), call.cache.buffer,
             call.slot_mapping);
  if (is_quantized(cache_dtype)) lease.arg(call.cache.scales);
  lease.enqueue(queue, to_size(call.num_tokens) * to_size(terms.groups_of_token), kernel.group_size,
                event);
}

}  // namespace clattn
