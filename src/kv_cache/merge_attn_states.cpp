#include "kv_cache/op_kernel.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "capture/capture.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

using detail::KernelLease, detail::throw_invalid_if;

DType output_type(const MergeAttnStates& config) {
  return config.output_dtype.value_or(config.dtype);
}

void check_merge(const MergeAttnStates& config) {
  detail::check_between("merge_attn_states: num_tokens", config.num_tokens, 0, INT32_MAX);
  detail::check_at_least("merge_attn_states: num_heads", config.num_heads, 1);
  throw_invalid_if(config.head_size < 8 || config.head_size % 8 != 0,
                   "merge_attn_states: head_size is {}, legal: multiples of 8", config.head_size);
  const DType output = output_type(config);
  const bool is_byte = is_quantized(output) && codes_per_element(output) == 1;
  throw_invalid_if(output != config.dtype && !is_byte,
                   "merge_attn_states: output_dtype is {}, legal: {} (dtype) or an 8-bit type",
                   to_string(output), to_string(config.dtype));
  throw_invalid_if(config.output_scale && !is_quantized(output),
                   "merge_attn_states: output_scale given, legal: none for {}", to_string(output));
  throw_invalid_if(config.output_dtype == DType::kInt8 && !config.output_scale,
                   "merge_attn_states: no output_scale, legal for int8: f32 [1]");
  throw_invalid_if(config.output_scale && config.output_scale.size_bytes() < sizeof(float),
                   "merge_attn_states: output_scale holds {} bytes, legal: at least 4 (f32 [1])",
                   config.output_scale.size_bytes());
  (void)detail::checked_mul(config.num_heads, config.head_size,
                            "merge_attn_states: elements of a token");
}

void bind_state(KernelLease& lease, const MergeAttnStates& config, const OutputWithLse& state,
                const detail::TokenRows& rows, std::string_view name) {
  const std::int64_t stride =
      detail::bounded_token_stride(state.output, rows, fmt::format("{}.output", name));
  lease.args(state.output.buffer, cl_long{state.output.offset}, cl_long{stride});
  const LseRef lse =
      detail::checked_lse(state.lse, rows.count, config.num_heads, fmt::format("{}.lse", name));
  lease.args(lse.buffer, cl_long{lse.offset}, cl_long{lse.token_stride}, cl_long{lse.head_stride});
}

}  // namespace

LseRef detail::checked_lse(LseRef lse, std::int64_t num_tokens, std::int32_t num_heads,
                           std::string_view name) {
  throw_invalid_if(lse.offset < 0 || lse.token_stride < 0 || lse.head_stride < 0,
                   "{}: offset {}, token_stride {}, head_stride {}, legal: >= 0", name, lse.offset,
                   lse.token_stride, lse.head_stride);
  if (lse.token_stride == 0 && lse.head_stride == 0) {
    lse.token_stride = num_heads;
    lse.head_stride = 1;
  }
  if (lse.buffer == nullptr) return lse;
  const std::int64_t last_head = checked_mul(num_heads - std::int64_t{1}, lse.head_stride, name);
  check_rows(
      {lse.buffer, DType::kF32},
      {lse.offset, num_tokens, lse.token_stride, checked_add(last_head, std::int64_t{1}, name)},
      name);
  return lse;
}

detail::OpKernel detail::merge_kernel(const Context& context, const MergeAttnStates& config) {
  check_merge(config);
  return op_kernel(
      context, "clattn_merge_attn_states", "attention/merge_attn_states.cl",
      fmt::format("{} -DCLA_LSE_LOG2={}", dtype_options(config.dtype, output_type(config)),
                  config.lse_base == LseBase::k2 ? 1 : 0));
}

void detail::enqueue_merge(const OpKernel& kernel, cl_command_queue queue,
                           const MergeAttnStates& config, const OutputWithLse& merged,
                           const OutputWithLse& prefix, const OutputWithLse& suffix, Event* event) {
  check_merge(config);
  if (prefix.lse.buffer == nullptr) throw_invalid("prefix.lse: no buffer");
  if (suffix.lse.buffer == nullptr) throw_invalid("suffix.lse: no buffer");
  KernelLease lease = kernel.pool->acquire();
  const std::int64_t with_context =
      config.prefill_tokens_with_context < 0
          ? config.num_tokens
          : std::min(config.prefill_tokens_with_context, config.num_tokens);
  const std::int64_t row = std::int64_t{config.num_heads} * config.head_size;
  bind_state(lease, config, merged, {config.num_tokens, row, output_type(config)}, "merged");
  bind_state(lease, config, prefix, {with_context, row, config.dtype}, "prefix");
  bind_state(lease, config, suffix, {config.num_tokens, row, config.dtype}, "suffix");
  AddResults add;
  if (capturing()) add = capture_merge(queue, config, prefix, suffix, merged);
  lease
      .args(cl_int{config.num_heads}, cl_int{config.head_size}, cl_long{with_context},
            cl_int{merged.lse.buffer != nullptr ? 1 : 0}, config.output_scale,
            cl_int{config.output_scale ? 1 : 0})
      .enqueue(queue, static_cast<std::size_t>(config.num_tokens), kernel.group_size, event);
  add_results(add, queue);
}

void merge_attn_states(const Context& context, cl_command_queue queue,
                       const MergeAttnStates& config, const OutputWithLse& merged,
                       const OutputWithLse& prefix, const OutputWithLse& suffix, Event* event) {
  detail::enqueue_merge(detail::merge_kernel(context, config), queue, config, merged, prefix,
                        suffix, event);
}

}  // namespace clattn
