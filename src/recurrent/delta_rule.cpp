#include "recurrent/delta_rule.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/choose/traits.hpp"
#include "kernels/choose/variants.hpp"
#include "kv_cache/op_kernel.hpp"
#include "opencl/device/device_info.hpp"
#include "opencl/driver.hpp"
#include "recurrent/rule_tiles.hpp"

namespace clattn {

namespace detail {

namespace {

/// Requests without drafts of so many tokens are worth a chunk.
constexpr std::int32_t kChunkTokens = 16;

std::string vectors_of(const DeviceCapabilities& device, int vector, const ClaDeltaRule& terms,
                       bool by_channel) {
  const ClaRows decay = by_channel ? terms.decay : ClaRows{};
  return vector_options(
      device, vector,
      std::array{terms.state_offset, terms.state_stride, terms.query.offset, terms.query.stride,
                 terms.key.offset, terms.key.stride, terms.value.offset, terms.value.stride,
                 terms.out.offset, terms.out.stride, terms.z.offset, terms.z.stride, decay.offset,
                 decay.stride});
}

std::string shared_options(const DeltaRuleCall& rule, DType states, std::string_view vectors) {
  const auto flag = [](bool set) { return set ? 1 : 0; };
  return fmt::format(
      "{} -DCLA_GATE_DTYPE={} -DCLA_GATES={} -DCLA_RULE={} -DCLA_BY_CHANNEL={} "
      "-DCLA_LOWER_BOUND={} -DCLA_HAS_BIAS={} -DCLA_SOFTPLUS={} -DCLA_L2_NORM={} -DCLA_SKIP={} "
      "-DCLA_HAS_Z={} -DCLA_K_DIM={} -DCLA_V_DIM={} {}",
      dtype_options(rule.dtype, states), static_cast<int>(rule.gate_dtype),
      static_cast<int>(rule.gates), static_cast<int>(rule.rule), flag(rule.by_channel),
      flag(rule.lower_bound), flag(static_cast<bool>(rule.dt_bias)), flag(rule.softplus),
      flag(rule.l2_norm), flag(static_cast<bool>(rule.d)), flag(rule.z != nullptr), rule.head_k_dim,
      rule.head_v_dim, vectors);
}

/// A kernel and the groups that a head of a request needs.
struct HeadKernel {
  OpKernel kernel;
  std::int32_t splits = 1;
};

HeadKernel loop_kernel(const Context& context, const DeltaRuleCall& rule,
                       const std::string& options, int vector) {
  // Fastest on an H200: 8 lanes take 128 B of a row at once, and small groups wait less.
  constexpr std::int32_t kMostItems = 64, kMostLanes = 8, kRows = 32;
  const std::int32_t group = std::min(cache_op_work_group_size(context.capabilities()), kMostItems);
  std::int32_t lanes = group == 1 ? 1 : kMostLanes;
  while (group % lanes != 0 || rule.head_k_dim / vector % lanes != 0) lanes /= 2;
  const std::int32_t lane_rows = std::max(kRows / (group / lanes), 1);
  return {op_kernel(context, "clattn_delta_rule_loop", "recurrent/delta_rule_loop.cl",
                    fmt::format("{} -DCLA_LANES={} -DCLA_LANE_ROWS={}", options, lanes, lane_rows),
                    kMostItems),
          ceil_div(rule.head_v_dim, group / lanes * lane_rows)};
}

/// Local memory of a chunk (kernels_cl/recurrent/delta_rule_chunk.cl), bytes.
std::int64_t chunk_bytes(const DeltaRuleCall& rule, std::int64_t chunk, std::int64_t rows) {
  const std::int64_t keys = chunk * rule.head_k_dim * (rule.by_channel ? 4 : 2);
  const std::int64_t small = rule.by_channel ? 4 : 5;
  return (rule.head_k_dim * rows + chunk * rows + keys + 2 * chunk * chunk + small * chunk) * 4;
}

/// The two kernels of chunks on a matrix unit: what does not need the state of all chunks at once,
/// then what does, from chunk to chunk.
struct MatrixKernels {
  RuleTile tile;
  OpKernel pairs;
  OpKernel chunks;
};

OpKernel tile_kernel(const Context& context, const RuleTile& tile, std::string_view name,
                     std::int32_t group_size, const std::string& options) {
  const DeviceCapabilities& device = context.capabilities();
  const Unit& unit = unit_of(tile.unit);
  // As for attention's kernels on such units: on CPUs they only serve comparison.
  const bool slow = device.kind == DeviceKind::kCpu;
  return {context.runtime().kernel({fmt::format("recurrent/{}.cl", name),
                                    fmt::format("clattn_{}", name),
                                    fmt::format("-DCLA_WG_SIZE={} {} {} -DCLA_CHUNK={}{}",
                                                group_size, unit_options(unit, device), options,
                                                tile.chunk, slow ? " -cl-opt-disable" : ""),
                                    std::string(unit.header)}),
          to_size(group_size)};
}

/// Whether a driver can run a kernel that it built, without spilling more than costs little.
bool suits(const RuleTile& tile, const OpKernel& kernel, const DeviceCapabilities& device) {
  if (device.kind == DeviceKind::kCpu) return true;  // reports fixed numbers
  const bool matrix = unit_of(tile.unit).family == KernelFamily::kGpuMatrix;
  const KernelPool& pool = *kernel.pool;
  return pool.private_mem_bytes() <= (matrix ? 0 : kCheapSpillBytes) &&
         pool.local_mem_bytes() <= device.static_local_mem_bytes &&
         pool.work_group_size() >= kernel.group_size;
}

/// None where no matrix unit takes the rule, or the driver takes none of its kernels.
std::optional<MatrixKernels> matrix_kernels(const Context& context, const DeltaRuleCall& rule,
                                            const std::string& options, std::int64_t num_prompts) {
  const DeviceCapabilities& device = context.capabilities();
  for (const RuleTile& tile : rule_tiles(device, rule, num_prompts)) {
    try {
      MatrixKernels kernels{tile,
                            tile_kernel(context, tile, "delta_rule_pairs", kPairItems, options),
                            tile_kernel(context, tile, "delta_rule_mma", tile.group_size,
                                        fmt::format("{} -DCLA_ROWS={}", options, tile.rows()))};
      if (suits(tile, kernels.pairs, device) && suits(tile, kernels.chunks, device)) return kernels;
    } catch (const Error& error) {
      if (!is_build_refusal(error)) throw;
      context.runtime().note_build_failure("delta_rule_mma", error.what());
    }
  }
  return std::nullopt;
}

/// None where no chunk has room.
std::optional<HeadKernel> chunk_kernel(const Context& context, const DeltaRuleCall& rule,
                                       const std::string& options, int vector) {
  const DeviceCapabilities& device = context.capabilities();
  const std::int32_t group = cache_op_work_group_size(device);
  struct Sizes {
    std::int32_t chunk, rows;
  };
  for (const Sizes sizes : std::array{Sizes{16, 32}, Sizes{16, 16}, Sizes{8, 32}, Sizes{8, 16}}) {
    if (rule.head_v_dim % sizes.rows != 0 || (group != 1 && group % sizes.rows != 0)) continue;
    const auto bytes = static_cast<std::uint64_t>(chunk_bytes(rule, sizes.chunk, sizes.rows));
    if (bytes > device.static_local_mem_bytes) continue;
    return HeadKernel{op_kernel(context, "clattn_delta_rule_chunk", "recurrent/delta_rule_chunk.cl",
                                fmt::format("{} -DCLA_CHUNK={} -DCLA_ROWS={} -DCLA_ROW_VEC={} "
                                            "-DCLA_TOKEN_BLOCK={}",
                                            options, sizes.chunk, sizes.rows,
                                            group == 1 ? vector : 1, vector == 16 ? 8 : 4)),
                      rule.head_v_dim / sizes.rows};
  }
  return std::nullopt;
}

void enqueue_rule(const RecurrentCall& call, const DeltaRuleCall& rule, const HeadKernel& kernel,
                  const StateView& states, Event* event) {
  KernelLease lease = kernel.kernel.pool->acquire();
  lease.arg(rule.terms);
  bind_lists(lease, call.metadata);
  lease.args(rule.query, rule.key, rule.value, rule.out, rule.decay, rule.beta, rule.a_log,
             rule.dt_bias, rule.d, rule.z, states.buffer);
  const std::size_t heads =
      checked_mul(to_size(call.metadata.num_reqs), to_size(rule.num_v_heads), call.name);
  lease.enqueue(call.queue, checked_mul(heads, to_size(kernel.splits), call.name),
                kernel.kernel.group_size, event);
}

/// How many prompts of the step are as long as its longest, if its tokens are theirs.
std::int64_t prompts_of(const RecurrentMetadata& metadata) {
  const std::int64_t longest = std::min(metadata.max_query_len, metadata.num_tokens);
  return std::clamp<std::int64_t>(ceil_div(metadata.num_tokens, std::max<std::int64_t>(longest, 1)),
                                  1, metadata.num_reqs);
}

/// Memory for so many heads, or for fewer where the device has none left.
QueueMemory::Lease reserve_heads(const RecurrentCall& call, QueueMemory& memory,
                                 std::int64_t& heads, std::int64_t head_bytes) {
  for (;; heads = ceil_div(heads, std::int64_t{2})) {
    try {
      return memory.reserve(call.queue, to_size(checked_mul(heads, head_bytes, call.name)));
    } catch (const Error& error) {
      if (heads == 1 || error.code() != ErrorCode::kOpenCL) throw;
    }
  }
}

/// Chunks on matrix units, for as many value heads at once as matrices have room for in memory that
/// stays within bounds.
void enqueue_matrices(const RecurrentCall& call, DeltaRuleCall& rule, const MatrixKernels& kernels,
                      const StateView& states) {
  QueueMemory& of_queue = call.context.runtime().queue_memory();
  const auto most_bytes = static_cast<std::int64_t>(of_queue.most_bytes());
  ClaDeltaRule& terms = rule.terms;
  const std::int64_t chunks = made_chunks(kernels.tile, call.metadata, terms.min_tokens);
  const std::int64_t head_bytes = checked_mul(chunks, made_bytes(kernels.tile), call.name);
  const std::int64_t all = rule.num_v_heads;
  const std::int64_t turns =
      ceil_div(all, std::clamp<std::int64_t>(most_bytes / head_bytes, 1, all));
  std::int64_t heads = ceil_div(all, turns);
  const QueueMemory::Lease memory = reserve_heads(call, of_queue, heads, head_bytes);
  const std::size_t splits = to_size(rule.head_v_dim / kernels.tile.rows());
  for (std::int64_t first = 0; first < all; first += heads) {
    terms.first_head = static_cast<cl_int>(first);
    terms.num_heads = static_cast<cl_int>(std::min(heads, all - first));
    const std::size_t of_launch = to_size(terms.num_heads);
    KernelLease pairs = kernels.pairs.pool->acquire();
    pairs.arg(terms);
    bind_lists(pairs, call.metadata);
    pairs.args(rule.query, rule.key, rule.decay, rule.beta, rule.a_log, rule.dt_bias,
               memory.buffer());
    pairs.enqueue(call.queue, checked_mul(to_size(chunks), of_launch, call.name),
                  kernels.pairs.group_size);
    KernelLease tiles = kernels.chunks.pool->acquire();
    tiles.arg(terms);
    bind_lists(tiles, call.metadata);
    tiles.args(rule.query, rule.key, rule.value, rule.out, states.buffer, memory.buffer());
    const std::size_t groups = checked_mul(of_launch, splits, call.name);
    tiles.enqueue(call.queue, checked_mul(to_size(call.metadata.num_reqs), groups, call.name),
                  kernels.chunks.group_size);
  }
}

}  // namespace

bool rounds_in_chunks(const Context& context, const DeltaRuleCall& rule) {
  const DeviceCapabilities& device = context.capabilities();
  const std::string vectors = vectors_of(device, recurrent_vector(device), {}, rule.by_channel);
  return matrix_kernels(context, rule, shared_options(rule, DType::kF32, vectors), 1).has_value();
}

void check_heads(const RecurrentCall& call, const DeltaRuleCall& rule) {
  const auto name = [&](std::string_view field) { return fmt::format("{}: {}", call.name, field); };
  constexpr std::int32_t kMostHeads = 1 << 16;  // 32-bit numbers of rows in kernels
  check_between(name("num_k_heads"), rule.num_k_heads, 1, kMostHeads);
  check_between(name("num_v_heads"), rule.num_v_heads, 1, kMostHeads);
  throw_invalid_if(rule.num_v_heads % rule.num_k_heads != 0,
                   "{}: num_v_heads is {}, legal: multiples of num_k_heads, {}", call.name,
                   rule.num_v_heads, rule.num_k_heads);
  for (const auto& [field, size] :
       {std::pair{"head_k_dim", rule.head_k_dim}, std::pair{"head_v_dim", rule.head_v_dim}}) {
    throw_invalid_if(size < 16 || size > 256 || size % 16 != 0,
                     "{}: {} is {}, legal: multiples of 16 up to 256", call.name, field, size);
  }
  check_plain_type(call, rule.dtype, "dtype");
  check_plain_type(call, rule.gate_dtype, "gate_dtype");
}

void run_delta_rule(const RecurrentCall& call, DeltaRuleCall& rule, const StateView& states,
                    Event* event) {
  const std::array<std::int64_t, 3> shape = {rule.num_v_heads, rule.head_v_dim, rule.head_k_dim};
  check_states(call, states, shape, "states");
  if (call.metadata.num_reqs == 0 || call.metadata.num_tokens == 0) return;
  ClaDeltaRule& terms = rule.terms;
  terms.lists = bound_lists(call.metadata, states.num_blocks);
  terms.state_offset = states.offset;
  terms.state_stride = states.block_stride;
  terms.num_v_heads = rule.num_v_heads;
  terms.heads_per_key = rule.num_v_heads / rule.num_k_heads;
  const int vector = recurrent_vector(call.context.capabilities());
  const std::string options =
      shared_options(rule, states.tensor.dtype,
                     vectors_of(call.context.capabilities(), vector, terms, rule.by_channel));
  std::optional<MatrixKernels> matrices;
  std::optional<HeadKernel> chunks;
  if (rule.in_chunks && call.metadata.max_query_len >= kChunkTokens) {
    matrices = matrix_kernels(call.context, rule, options, prompts_of(call.metadata));
    throw_unsupported_if(
        !matrices && on_units_alone(rule.kernel_family),
        "{}: kernel_family is {}, which takes bf16 with a decay for each head, the "
        "delta rule, query and key at multiples of 16 bytes; legal here: auto, gpu",
        call.name, to_string(rule.kernel_family));
    if (!matrices) chunks = chunk_kernel(call.context, rule, options, vector);
  }
  const HeadKernel loop = loop_kernel(call.context, rule, options, vector);
  terms.min_tokens = kChunkTokens;
  terms.max_tokens = INT32_MAX;
  if (matrices) enqueue_matrices(call, rule, *matrices, states);
  if (chunks) enqueue_rule(call, rule, *chunks, states, nullptr);
  terms.min_tokens = 0;
  terms.max_tokens = matrices || chunks ? kChunkTokens - 1 : INT32_MAX;
  enqueue_rule(call, rule, loop, states, event);
}

}  // namespace detail

namespace {

using detail::bind_tensor, detail::DeltaRuleCall, detail::RecurrentCall, detail::throw_invalid_if;

/// Gates of one of the two forms.
void take_gates(const RecurrentCall& call, const GatedDeltaRule& given, DeltaRuleCall& rule) {
  const bool raw = given.a.buffer != nullptr;
  throw_invalid_if(raw == (given.g.buffer != nullptr),
                   "{}: {} of g and a has a buffer, legal: one of them", call.name,
                   raw ? "each" : "none");
  const auto refuse = [&](bool wrong, std::string_view field, std::string_view beside) {
    throw_invalid_if(wrong, "{}: {} given, legal: none beside {}", call.name, field, beside);
  };
  const bool delta = given.rule == RecurrentRule::kDelta;
  refuse(raw && given.beta.buffer != nullptr, "beta", "a");
  refuse(!raw && given.b.buffer != nullptr, "b", "g");
  refuse(!raw && given.A_log, "A_log", "g");
  refuse(!raw && given.dt_bias, "dt_bias", "g");
  refuse(!raw && given.gate_lower_bound.has_value(), "gate_lower_bound", "g");
  refuse(!delta && (given.beta.buffer != nullptr || given.b.buffer != nullptr), raw ? "b" : "beta",
         "the additive rule");
  rule.gates = raw ? detail::GateSource::kRaw : detail::GateSource::kGiven;
  const TensorRef& decay = raw ? given.a : given.g;
  const TensorRef& beta = raw ? given.b : given.beta;
  const std::int64_t heads = given.num_v_heads;
  const std::int64_t numbers = heads * (given.decay_by_channel ? given.head_k_dim : 1);
  rule.decay =
      bind_tensor(call, decay, numbers, given.gate_dtype, raw ? "a" : "g", rule.terms.decay);
  if (delta)
    rule.beta =
        bind_tensor(call, beta, heads, given.gate_dtype, raw ? "b" : "beta", rule.terms.beta);
  if (!raw) return;
  detail::check_values(call, given.A_log, heads, DType::kF32, "A_log");
  if (given.dt_bias) detail::check_values(call, given.dt_bias, numbers, DType::kF32, "dt_bias");
  rule.a_log = given.A_log;
  rule.dt_bias = given.dt_bias;
  if (!given.gate_lower_bound) return;
  throw_invalid_if(!(*given.gate_lower_bound < 0), "{}: gate_lower_bound is {}, legal: below 0",
                   call.name, *given.gate_lower_bound);
  rule.lower_bound = true;
  rule.terms.lower_bound = *given.gate_lower_bound;
}

/// The part of a call that a kernel is chosen by.
DeltaRuleCall options_of(const GatedDeltaRule& given) {
  DeltaRuleCall rule;
  rule.dtype = given.dtype;
  rule.gate_dtype = given.gate_dtype;
  rule.rule = given.rule;
  rule.num_k_heads = given.num_k_heads;
  rule.num_v_heads = given.num_v_heads;
  rule.head_k_dim = given.head_k_dim;
  rule.head_v_dim = given.head_v_dim;
  rule.by_channel = given.decay_by_channel;
  rule.l2_norm = given.use_qk_l2norm_in_kernel;
  rule.kernel_family = given.kernel_family;
  rule.gates = given.a.buffer != nullptr ? detail::GateSource::kRaw : detail::GateSource::kGiven;
  rule.dt_bias = given.dt_bias;
  rule.lower_bound = given.gate_lower_bound.has_value();
  constexpr std::int64_t kUnit = 8;  // elements in 16 bytes
  rule.aligned_keys = true;
  for (const TensorRef& rows : {given.query, given.key})
    rule.aligned_keys &= rows.offset % kUnit == 0 && rows.token_stride % kUnit == 0;
  return rule;
}

/// Throws kUnsupported where the device has nothing of a family that is asked for.
void check_family(const Context& context, const GatedDeltaRule& rule, std::string_view name) {
  if (!detail::on_units_alone(rule.kernel_family)) return;
  const auto unmet = detail::unmet_need(rule.kernel_family, context.capabilities());
  if (unmet)
    detail::throw_unsupported("{}: kernel_family {} {}", name, to_string(rule.kernel_family),
                              *unmet);
}

void gated_delta_rule(const RecurrentCall& call, const GatedDeltaRule& given,
                      const StateView& states, bool in_chunks, Event* event) {
  detail::begin_call(call, event);
  check_family(call.context, given, call.name);
  DeltaRuleCall rule = options_of(given);
  rule.in_chunks = in_chunks;
  detail::check_heads(call, rule);
  const std::int64_t keys = std::int64_t{given.num_k_heads} * given.head_k_dim;
  const std::int64_t values = std::int64_t{given.num_v_heads} * given.head_v_dim;
  rule.query = bind_tensor(call, given.query, keys, given.dtype, "query", rule.terms.query);
  rule.key = bind_tensor(call, given.key, keys, given.dtype, "key", rule.terms.key);
  rule.value = bind_tensor(call, given.value, values, given.dtype, "value", rule.terms.value);
  rule.out = bind_tensor(call, given.out, values, given.dtype, "out", rule.terms.out);
  if (call.metadata.num_tokens != 0) take_gates(call, given, rule);
  const float scale = given.scale.value_or(1.0F / std::sqrt(static_cast<float>(given.head_k_dim)));
  throw_invalid_if(!std::isfinite(scale), "{}: scale is {}, legal: finite numbers", call.name,
                   scale);
  rule.terms.scale = scale;
  detail::run_delta_rule(call, rule, states, event);
}

}  // namespace

void fused_recurrent_gated_delta_rule(const Context& context, cl_command_queue queue,
                                      const GatedDeltaRule& rule, const StateView& states,
                                      const RecurrentMetadata& metadata, Event* event) {
  gated_delta_rule({context, queue, "fused_recurrent_gated_delta_rule", metadata}, rule, states,
                   false, event);
}

void chunk_gated_delta_rule(const Context& context, cl_command_queue queue,
                            const GatedDeltaRule& rule, const StateView& states,
                            const RecurrentMetadata& metadata, Event* event) {
  gated_delta_rule({context, queue, "chunk_gated_delta_rule", metadata}, rule, states, true, event);
}

bool rounds_products(const Context& context, const GatedDeltaRule& rule) {
  const RecurrentMetadata none;
  const RecurrentCall call{context, nullptr, "rounds_products", none};
  check_family(context, rule, call.name);
  const DeltaRuleCall taken = options_of(rule);
  detail::check_heads(call, taken);
  return detail::rounds_in_chunks(context, taken);
}

}  // namespace clattn
