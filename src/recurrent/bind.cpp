#include "recurrent/bind.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/device/device_info.hpp"

namespace clattn::detail {

namespace {

void check_list(const RecurrentCall& call, const DeviceList& list, std::int64_t count,
                std::size_t element_bytes, std::string_view field) {
  const std::string name = fmt::format("{}: {}", call.name, field);
  check_at_least(fmt::format("{}: offset", name), list.offset, 0);
  require_size(list.buffer, checked_add(list.offset, count, name), element_bytes, name);
}

std::string text_of(std::span<const std::int64_t> shape) {
  std::string text;
  for (const std::int64_t size : shape)
    text += fmt::format("{}{}", text.empty() ? "" : ", ", size < 0 ? "…" : std::to_string(size));
  return text;
}

}  // namespace

void begin_call(const RecurrentCall& call, Event* event) {
  if (event != nullptr) event->reset();
  const RecurrentMetadata& of = call.metadata;
  require_in_order(call.queue);
  check_at_least(fmt::format("{}: num_reqs", call.name), of.num_reqs, 0);
  check_at_least(fmt::format("{}: state_columns", call.name), of.state_columns, 1);
  check_between(fmt::format("{}: num_tokens", call.name), of.num_tokens, 0, kMaxInt32);
  if (of.num_reqs == 0) return;
  const std::int64_t requests = of.num_reqs;
  check_list(call, of.query_start_loc, requests + 1, sizeof(cl_int), "query_start_loc");
  check_list(call, of.state_indices, requests * of.state_columns, sizeof(cl_int), "state_indices");
  if (of.has_initial_state.buffer)
    check_list(call, of.has_initial_state, requests, 1, "has_initial_state");
  if (of.num_accepted_tokens.buffer)
    check_list(call, of.num_accepted_tokens, requests, sizeof(cl_int), "num_accepted_tokens");
}

void check_states(const RecurrentCall& call, const StateView& states,
                  std::span<const std::int64_t> shape, std::string_view field) {
  const std::string name = fmt::format("{}: {}", call.name, field);
  check_plain_type(call, states.tensor.dtype, field);
  const bool fits =
      std::ranges::equal(states.tensor.shape, shape, [](std::int64_t given, std::int64_t legal) {
        return legal < 0 ? given >= 1 : given == legal;
      });
  throw_invalid_if(!fits, "{} are [{}], legal: [{}]", name, text_of(states.tensor.shape),
                   text_of(shape));
  check_at_least(fmt::format("{}: num_blocks", name), states.num_blocks, 0);
  check_at_least(fmt::format("{}: offset", name), states.offset, 0);
  throw_invalid_if(call.metadata.max_state_index >= states.num_blocks,
                   "{}: state_indices name page {}, legal: 0 … {} ({})", call.name,
                   call.metadata.max_state_index, states.num_blocks - 1, field);
  if (states.num_blocks == 0) return;
  std::int64_t elements = 1;
  for (const std::int64_t size : states.tensor.shape) elements = checked_mul(elements, size, name);
  throw_invalid_if(states.num_blocks > 1 && states.block_stride < elements,
                   "{}: block_stride is {}, legal: at least {} (a page)", name, states.block_stride,
                   elements);
  const std::int64_t last = checked_mul(states.num_blocks - 1, states.block_stride, name);
  require_size(states.buffer, checked_add(checked_add(states.offset, last, name), elements, name),
               element_size_bytes(states.tensor.dtype), name);
}

void check_plain_type(const RecurrentCall& call, DType dtype, std::string_view field) {
  throw_invalid_if(is_quantized(dtype), "{}: {}: dtype is {}, legal: f32, f16, bf16", call.name,
                   field, to_string(dtype));
}

void check_values(const RecurrentCall& call, const Buffer& buffer, std::int64_t count, DType dtype,
                  std::string_view field) {
  require_size(buffer, count, element_size_bytes(dtype), fmt::format("{}: {}", call.name, field));
}

ClaRows check_tensor(const RecurrentCall& call, const TensorRef& tensor, std::int64_t width,
                     DType dtype, std::string_view field) {
  check_plain_type(call, dtype, field);
  const std::string name = fmt::format("{}: {}", call.name, field);
  return {tensor.offset,
          bounded_token_stride(tensor, {call.metadata.num_tokens, width, dtype}, name)};
}

cl_mem bind_tensor(const RecurrentCall& call, const TensorRef& tensor, std::int64_t width,
                   DType dtype, std::string_view field, ClaRows& place) {
  place = check_tensor(call, tensor, width, dtype, field);
  return tensor.buffer;
}

ClaRecurrentLists bound_lists(const RecurrentMetadata& metadata, std::int64_t num_blocks) {
  const auto at = [](const DeviceList& list) { return list.buffer ? list.offset : -1; };
  return {.starts_at = metadata.query_start_loc.offset,
          .indices_at = metadata.state_indices.offset,
          .initial_at = at(metadata.has_initial_state),
          .accepted_at = at(metadata.num_accepted_tokens),
          .num_blocks = num_blocks,
          .num_tokens = metadata.num_tokens,
          .num_reqs = metadata.num_reqs,
          .columns = metadata.state_columns,
          .null_block = metadata.null_block_id,
          .reserved = 0};
}

void bind_lists(KernelLease& lease, const RecurrentMetadata& metadata) {
  lease.args(metadata.query_start_loc.buffer, metadata.state_indices.buffer,
             metadata.has_initial_state.buffer, metadata.num_accepted_tokens.buffer);
}

int recurrent_vector(const DeviceCapabilities& device) {
  if (!takes_single_items(device)) return 4;
  return std::clamp(device.float_vector_width / 8 * 8, 4, 16);
}

std::string vector_options(const DeviceCapabilities& device, int vector,
                           std::span<const std::int64_t> elements) {
  const bool aligned =
      !takes_single_items(device) &&
      std::ranges::all_of(elements, [&](std::int64_t n) { return n % vector == 0; });
  return fmt::format("-DCLA_VEC={} -DCLA_ALIGNED={}", vector, aligned ? 1 : 0);
}

}  // namespace clattn::detail
