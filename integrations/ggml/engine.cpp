#include "engine.hpp"

#include <ggml-backend.h>

#include <algorithm>
#include <bit>
#include <clattn/registry.hpp>
#include <cstdlib>
#include <cstring>

#include "settings.hpp"

namespace ggml_clattn {

namespace {

/// Masks of a model's kinds of layers, for a few models at once.
constexpr std::size_t kMostSteps = 16;
/// Layers with sinks have an impl each.
constexpr std::size_t kMostImpls = 1024;

template <typename Value>
Value info(cl_device_id device, cl_device_info what) {
  Value value{};
  clGetDeviceInfo(device, what, sizeof value, &value, nullptr);
  return value;
}

std::string name_of(cl_device_id device) {
  std::string name(256, '\0');
  clGetDeviceInfo(device, CL_DEVICE_NAME, name.size() - 1, name.data(), nullptr);
  return name.c_str();
}

/// The configuration as far as plans depend on it: layers whose slopes and sinks differ share them.
clattn::AttentionConfig without_values(clattn::AttentionConfig config) {
  std::ranges::fill(config.alibi_slopes, 0.0F);
  std::ranges::fill(config.sinks, 0.0F);
  return config;
}

/// A number of things that a builder makes room for.
std::int32_t room_for(std::int64_t count) {
  return static_cast<std::int32_t>(std::bit_ceil(static_cast<std::uint32_t>(count)));
}

const std::byte* bytes_of(const ggml_tensor& tensor) {
  return static_cast<const std::byte*>(tensor.data);
}

ggml_backend_buffer_t buffer_of(const ggml_tensor& tensor) {
  return tensor.view_src != nullptr ? tensor.view_src->buffer : tensor.buffer;
}

/// Bytes from one row of queries to the next, of all streams one after the other; 0 = they are not
/// [rows, num_heads, head_size] in memory.
std::size_t row_bytes(const ggml_tensor& query) {
  const bool heads_together =
      query.ne[2] == 1 || query.nb[2] == static_cast<std::size_t>(query.ne[0]) * sizeof(float);
  if (!heads_together) return 0;
  const bool one_row = query.ne[1] == 1;
  if (query.ne[3] == 1) return one_row ? query.nb[2] * query.ne[2] : query.nb[1];
  if (one_row) return query.nb[3];
  return query.nb[3] == query.nb[1] * static_cast<std::size_t>(query.ne[1]) ? query.nb[1] : 0;
}

/// Queries as [all rows, num_heads, head_size].
std::vector<float> packed(const ggml_tensor& query) {
  const auto size = static_cast<std::size_t>(query.ne[0]);
  std::vector<float> rows(static_cast<std::size_t>(ggml_nelements(&query)));
  float* to = rows.data();
  for (std::int64_t stream = 0; stream < query.ne[3]; ++stream) {
    for (std::int64_t row = 0; row < query.ne[1]; ++row) {
      for (std::int64_t head = 0; head < query.ne[2]; ++head, to += size) {
        std::memcpy(to,
                    bytes_of(query) + stream * query.nb[3] + row * query.nb[1] + head * query.nb[2],
                    size * sizeof(float));
      }
    }
  }
  return rows;
}

/// Of the memory of both keys and values, the first byte and the size.
std::span<const std::byte> cache_memory(const Op& op) {
  const std::byte* const begin = std::min(bytes_of(*op.key), bytes_of(*op.value));
  const std::byte* const end = std::max(bytes_of(*op.key) + ggml_nbytes(op.key),
                                        bytes_of(*op.value) + ggml_nbytes(op.value));
  return {begin, end};
}

/// Why the tensors' places in memory are not those of one cache.
std::string memory_refusal(const Op& op) {
  if (buffer_of(*op.key) != buffer_of(*op.value)) return "keys and values in two buffers";
  const auto between = bytes_of(*op.value) - bytes_of(*op.key);
  if (between % (8 * op.element_bytes) != 0)
    return "keys and values that are not a multiple of 8 elements apart";
  return {};
}

clattn::KVCache cache_of(const Op& op, clattn::Buffer buffer) {
  const std::byte* const begin = cache_memory(op).data();
  const auto elements = [&](std::int64_t bytes) { return bytes / op.element_bytes; };
  clattn::KVCache cache;
  cache.buffer = std::move(buffer);
  cache.dtype = op.config.cache_dtype();
  cache.num_blocks = (op.streams - 1) * op.pages_of_stream + op.keys / op.page_tokens;
  cache.block_size = op.config.block_size;
  cache.num_kv_heads = op.config.num_kv_heads;
  cache.head_size = op.config.head_size;
  cache.k_offset = elements(bytes_of(*op.key) - begin);
  cache.v_offset = elements(bytes_of(*op.value) - begin);
  cache.token_stride = elements(static_cast<std::int64_t>(op.key->nb[1]));
  cache.head_stride = elements(static_cast<std::int64_t>(op.key->nb[2]));
  cache.block_stride = cache.token_stride * op.page_tokens;
  return cache;
}

}  // namespace

Engine::Engine()
    : device_(clattn::select_device(std::getenv("CLATTN_DEVICE") != nullptr ? "" : "cpu")),
      device_name_(name_of(device_.id)) {
  if (info<cl_bool>(device_.id, CL_DEVICE_HOST_UNIFIED_MEMORY) == CL_FALSE) {
    throw clattn::Error(clattn::ErrorCode::kUnsupported,
                        device_name_ +
                            " has memory of its own, supported: CPUs and GPUs that "
                            "share the host's memory");
  }
}

void Engine::open_context() {
  if (context_) return;
  context_ = clattn::Context::create(device_);
  queue_ = context_->create_queue();
}

std::string Engine::refusal(const Op& op) {
  const std::scoped_lock lock(mutex_);
  open_context();
  const auto known =
      std::ranges::find(refusals_, op.config, [](const auto& entry) { return entry.first; });
  if (known != refusals_.end()) return known->second;
  const auto choice = clattn::choose_attn_backend(op.config, &context_->capabilities());
  std::string reason;
  if (!choice.backend) {
    // Every backend's reasons contain those of the one that takes most.
    const auto fewest = std::ranges::min_element(
        choice.rejected, {}, [](const auto& rejection) { return rejection.reasons.size(); });
    reason = fewest->reasons.front();
  }
  refusals_.emplace_back(op.config, reason);
  return reason;
}

std::string Engine::compute(const Op& op) {
  const std::scoped_lock lock(mutex_);
  open_context();
  if (std::string reason = memory_refusal(op); !reason.empty()) return reason;
  Step& step = step_of(op);
  if (step.requests.values == MaskValues::kOther)
    return "a mask of values other than 0, -inf and distances";
  attend(op, step);
  return {};
}

Engine::Step& Engine::step_of(const Op& op) {
  const ggml_tensor* const mask = op.mask;
  std::vector<std::int64_t> shape = {op.rows,
                                     op.keys,
                                     op.streams,
                                     op.page_tokens,
                                     op.pages_of_stream,
                                     op.max_bias > 0,
                                     op.sinks != nullptr,
                                     mask != nullptr ? mask->ne[1] : 0,
                                     mask != nullptr ? mask->ne[3] : 0};
  const void* const mask_at = mask != nullptr ? mask->data : nullptr;
  const std::span values(static_cast<const std::uint16_t*>(mask_at),
                         mask != nullptr ? static_cast<std::size_t>(ggml_nelements(mask)) : 0);
  auto found = std::ranges::find_if(
      steps_, [&](const auto& step) { return step->mask_at == mask_at && step->shape == shape; });
  if (found == steps_.end() || !std::ranges::equal((*found)->mask, values)) {
    auto step = std::make_unique<Step>(Step{.mask_at = mask_at, .shape = std::move(shape)});
    step->mask.assign(values.begin(), values.end());
    step->requests = read_requests(op, values);
    if (step->requests.masked)
      step->cells = share(step->requests.cells.data(), step->requests.cells.size());
    if (found == steps_.end()) {
      if (steps_.size() == kMostSteps) steps_.pop_back();
      steps_.push_back(std::move(step));
      found = steps_.end() - 1;
    } else {
      step->plans = std::move((*found)->plans);
      for (Plan& plan : step->plans) plan.metadata = nullptr;
      *found = std::move(step);
    }
  }
  std::rotate(steps_.begin(), found, found + 1);
  return *steps_.front();
}

const clattn::AttentionImpl& Engine::impl_of(const clattn::AttentionConfig& config) {
  const auto known =
      std::ranges::find_if(impls_, [&](const auto& impl) { return impl->config() == config; });
  if (known != impls_.end()) return **known;
  if (impls_.size() == kMostImpls) impls_.clear();
  const auto backend = clattn::choose_attn_backend(config, &context_->capabilities()).backend;
  if (!backend) throw clattn::Error(clattn::ErrorCode::kUnsupported, "no backend for this layer");
  log_info("prepares attention of " + std::to_string(config.num_heads) + " heads of " +
           std::to_string(config.head_size) + ", which may take seconds where it is new");
  impls_.push_back(backend->make_impl(context_, config));
  return *impls_.back();
}

const clattn::AttentionMetadata& Engine::metadata_of(const clattn::AttentionConfig& config,
                                                     std::int64_t num_rows, Step& step) {
  const Requests& requests = step.requests;
  const auto num_requests = static_cast<std::int64_t>(requests.seq_lens.size());
  const std::int64_t num_keys = std::ranges::max(requests.seq_lens);
  const clattn::AttentionConfig wanted = without_values(config);
  auto plan = std::ranges::find_if(step.plans, [&](const Plan& each) {
    return each.config == wanted && each.num_rows >= num_rows &&
           each.num_requests >= num_requests && each.num_keys >= num_keys;
  });
  if (plan == step.plans.end()) {
    std::erase_if(step.plans, [&](const Plan& each) { return each.config == wanted; });
    step.plans.push_back(
        {wanted, room_for(num_rows), room_for(num_requests), room_for(num_keys), nullptr, nullptr});
    plan = step.plans.end() - 1;
    const auto backend = clattn::choose_attn_backend(config, &context_->capabilities()).backend;
    plan->builder = backend->make_builder(context_, config,
                                          {.limits = {.max_num_reqs = plan->num_requests,
                                                      .max_num_batched_tokens = plan->num_rows,
                                                      .max_model_len = plan->num_keys}});
  }
  if (plan->metadata == nullptr) {
    auto batch = clattn::CommonAttentionMetadata::of(requests.query_start_loc, requests.seq_lens,
                                                     requests.block_table);
    batch.causal = requests.causal;
    plan->metadata = &plan->builder->build(queue_, batch);
  }
  return *plan->metadata;
}

clattn::Buffer Engine::share(const void* memory, std::size_t size_bytes) {
  // OpenCL's buffers do not know read-only memory of the host; only the output is written to.
  auto* const bytes = static_cast<std::byte*>(const_cast<void*>(memory));  // NOLINT
  return context_->share({bytes, size_bytes});
}

void Engine::attend(const Op& op, Step& step) {
  clattn::AttentionConfig config = op.config;
  config.custom_mask = step.requests.masked;
  if (step.requests.values == MaskValues::kDistances)
    config.alibi_slopes = alibi_slopes(config.num_heads, op.max_bias);
  if (op.sinks != nullptr) {
    const auto* const sinks = static_cast<const float*>(op.sinks->data);
    config.sinks.assign(sinks, sinks + op.sinks->ne[0]);
  }
  const clattn::AttentionImpl& impl = impl_of(config);
  const std::int64_t num_rows = op.rows * op.streams;
  const clattn::AttentionMetadata& metadata = metadata_of(config, num_rows, step);

  // Buffers last for one call: what the host has written is in one when it is made.
  const std::size_t row_size = static_cast<std::size_t>(config.num_heads) *
                               static_cast<std::size_t>(config.head_size) * sizeof(float);
  std::size_t stride = row_bytes(*op.query);
  std::vector<float> copy;
  const void* queries = op.query->data;
  if (stride == 0) {
    copy = packed(*op.query);
    queries = copy.data();
    stride = row_size;
  }
  const clattn::Buffer query =
      share(queries, static_cast<std::size_t>(num_rows - 1) * stride + row_size);
  const std::span<const std::byte> memory = cache_memory(op);
  const clattn::KVCache cache = cache_of(op, share(memory.data(), memory.size()));
  const clattn::Buffer output = share(op.output->data, ggml_nbytes(op.output));
  clattn::ForwardOptions options;
  if (step.requests.masked) {
    options.custom_mask = step.cells.handle();
    options.custom_mask_stride = step.requests.cells_stride;
  }
  impl.forward(queue_,
               {.query = {query.handle(), 0, static_cast<std::int64_t>(stride / sizeof(float))},
                .output = {output.handle()}},
               cache, metadata, options);
  // Brings the results to the host where the device worked on a copy; waits.
  const auto results = queue_.map(output, clattn::HostAccess::kRead);
}

}  // namespace ggml_clattn
