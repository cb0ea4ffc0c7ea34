#include <algorithm>
#include <bit>
#include <clattn/attention.hpp>
#include <clattn/attention_backend.hpp>
#include <clattn/attention_functions.hpp>
#include <iterator>
#include <list>
#include <mutex>
#include <numbers>
#include <optional>
#include <vector>

#include "attention/layer_kernels.hpp"
#include "backends/registry.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kv_cache/op_kernel.hpp"
#include "metadata/validate.hpp"
#include "opencl/call_memory.hpp"
#include "opencl/copy.hpp"
#include "opencl/runtime.hpp"

namespace clattn {
namespace {

using detail::CallMemory, detail::throw_invalid_if, detail::to_size;

/// What calls of one queue and configuration share.
struct Served {
  std::shared_ptr<Context> context;
  Queue queue;
  AttentionConfig config;
  std::int64_t num_blocks = -1;  ///< of the cache; -1: contiguous keys
  std::mutex mutex;              ///< of what follows
  BatchLimits limits = {.max_num_reqs = 1, .max_num_batched_tokens = 1, .max_model_len = 1};
  std::uint64_t tuning = 0;  ///< revision of the rows that the impl was made by
  detail::FittingBackend made;
  std::unique_ptr<AttentionMetadataBuilder> builder;
  std::optional<detail::StreamKernel> unpack_mask, lse_form;  ///< of call_forms.cl, once needed
};

/// Most recently used first.
struct Kept {
  std::mutex mutex;
  std::list<std::shared_ptr<Served>> served;
};
constexpr std::size_t kMostServed = 64;

Kept& kept() {
  static auto* const made = new Kept;  // drivers may be gone when a process destroys its statics
  return *made;
}

std::shared_ptr<Served> serve(cl_command_queue queue, const AttentionConfig& config,
                              std::int64_t num_blocks) {
  std::list<std::shared_ptr<Served>> evicted;  // they end without the lock
  const std::scoped_lock lock(kept().mutex);
  auto& all = kept().served;
  const auto found = std::ranges::find_if(all, [&](const std::shared_ptr<Served>& one) {
    return one->queue == queue && one->num_blocks == num_blocks && one->config == config;
  });
  if (found != all.end()) {
    all.splice(all.begin(), all, found);
    return all.front();
  }
  auto made = std::make_shared<Served>();
  made->queue = Queue::adopt(queue);
  made->context = Context::of(queue);
  made->config = config;
  made->num_blocks = num_blocks;
  all.push_front(std::move(made));
  if (all.size() > kMostServed) evicted.splice(evicted.end(), all, std::prev(all.end()));
  return all.front();
}

/// Makes the impl, at first and when other tuning rows are set.
const AttentionImpl& impl_of(Served& served) {
  const std::uint64_t tuning = served.context->runtime().tuning().revision;
  if (served.made.impl == nullptr || served.tuning != tuning) {
    served.builder = nullptr;
    served.made = detail::get_fitting_backend(served.context, served.config);
    served.tuning = tuning;
  }
  return *served.made.impl;
}

/// A power of two, so that calls that grow step by step do not each make a builder.
std::int32_t grown(std::int32_t limit, std::int32_t needed) {
  if (needed <= limit) return limit;
  if (needed > (1 << 30)) return needed;
  return static_cast<std::int32_t>(std::bit_ceil(static_cast<std::uint32_t>(needed)));
}

/// Throws what a builder and a layer would throw, before memory is sized by lengths that exceed the
/// tensors.
void check_lengths(const AttentionArguments& call, const AttentionConfig& config,
                   const CommonAttentionMetadata& batch) {
  const bool contiguous = config.contiguous_kv();
  detail::validate_lengths(batch, config.block_size,
                           detail::key_source_of(config.attn_type, contiguous));
  const auto check = [&](const TensorRef& tensor, std::int64_t rows, std::int64_t heads,
                         std::string_view name) {
    detail::bounded_token_stride(tensor, {rows, heads * config.head_size, config.dtype}, name);
  };
  check(call.query, batch.num_actual_tokens, config.num_heads, "query");
  if (contiguous) check(call.key, batch.key_start_loc.back(), config.num_kv_heads, "key");
}

/// One whose limits hold the batch.
AttentionMetadataBuilder& builder_for(Served& served, const AttentionArguments& call,
                                      const CommonAttentionMetadata& batch, std::int32_t longest) {
  const BatchLimits& old = served.limits;
  const BatchLimits limits = {
      .max_num_reqs = grown(old.max_num_reqs, batch.num_reqs),
      .max_num_batched_tokens = grown(old.max_num_batched_tokens, batch.num_actual_tokens),
      .max_model_len = grown(old.max_model_len, longest),
      .num_blocks = served.num_blocks};
  if (served.builder == nullptr || limits.max_num_reqs > old.max_num_reqs ||
      limits.max_num_batched_tokens > old.max_num_batched_tokens ||
      limits.max_model_len > old.max_model_len) {
    check_lengths(call, served.config, batch);
    served.builder = served.made.backend->make_builder(served.context, served.config,
                                                       BuilderOptions{.limits = limits});
    served.limits = limits;
  }
  return *served.builder;
}

const detail::StreamKernel& form_kernel(const Served& served, const char* entry,
                                        std::optional<detail::StreamKernel>& kept_kernel) {
  if (!kept_kernel)
    kept_kernel.emplace(served.context->runtime(), "attention/call_forms.cl", entry, "");
  return *kept_kernel;
}

template <typename... T>
Event enqueue_form(const Served& served, const detail::StreamKernel& kernel,
                   const T&... arguments) {
  Event event;
  kernel.pool->acquire()
      .args(arguments...)
      .enqueue(served.queue, kernel.num_groups, kernel.group_size, &event);
  return event;
}

/// The mask as bytes, [tokens, stride].
struct Mask {
  cl_mem buffer = nullptr;
  std::int64_t stride = 0;
  std::optional<CallMemory::Lease> memory;  ///< none where it was given as bytes
};

Mask unpack_mask(Served& served, const MaskRef& mask, std::int64_t num_tokens,
                 std::int64_t longest) {
  if (mask.buffer == nullptr || !mask.packed_bits) return {mask.buffer, mask.stride, {}};
  const auto row_bytes = detail::ceil_div<std::int64_t>(longest, 8);
  throw_invalid_if(mask.stride < row_bytes,
                   "mask.stride is {}, legal: at least {} bytes (bits for {} keys)", mask.stride,
                   row_bytes, longest);
  detail::check_rows({mask.buffer, DType::kInt8}, {0, num_tokens, mask.stride, row_bytes}, "mask");
  CallMemory::Lease memory = served.context->runtime().call_memory().reserve(
      to_size(std::max<std::int64_t>(num_tokens * row_bytes * 8, 1)));
  memory.used_until(enqueue_form(served,
                                 form_kernel(served, "clattn_unpack_mask", served.unpack_mask),
                                 mask.buffer, memory.buffer(), cl_long{mask.stride},
                                 static_cast<cl_int>(num_tokens), static_cast<cl_int>(row_bytes)));
  const cl_mem bytes = memory.buffer().handle();
  return {bytes, row_bytes * 8, std::move(memory)};
}

bool is_plain(const LseRef& lse, LseBase base) {
  return base == LseBase::kE && lse.offset == 0 && lse.token_stride == 0 && lse.head_stride == 0;
}

/// A log-sum-exp in another form than the kernels write it: these write to memory of the library's,
/// from which it is made.
struct OtherLse {
  LseRef wanted;  ///< with strides
  float factor;
  const detail::StreamKernel& kernel;
  CallMemory::Lease made;  ///< [tokens, heads], base e
};

/// Throws unless each of the elements has a place of its own, and the buffer nothing else of the
/// call.
void check_lse(const AttentionArguments& call, const LseRef& lse, std::int64_t num_tokens,
               std::int32_t num_heads) {
  const auto nested = [](std::int64_t outer, std::int64_t inner, std::int64_t count) {
    return inner >= 1 && outer / inner >= count;
  };
  const bool apart =
      num_tokens <= 1 || num_heads <= 1
          ? (num_tokens <= 1 || lse.token_stride >= 1) && (num_heads <= 1 || lse.head_stride >= 1)
          : nested(lse.token_stride, lse.head_stride, num_heads) ||
                nested(lse.head_stride, lse.token_stride, num_tokens);
  throw_invalid_if(!apart,
                   "lse: token_stride {} and head_stride {}, legal: those that keep {} tokens and "
                   "{} heads apart",
                   lse.token_stride, lse.head_stride, num_tokens, num_heads);
  for (const cl_mem other :
       {call.output.buffer, call.output_fp8, call.query.buffer, call.key.buffer, call.value.buffer})
    throw_invalid_if(other == lse.buffer,
                     "lse: in a buffer with other tensors of the call, legal with an offset, "
                     "strides or base 2: a buffer of its own");
}

/// nullopt: unwanted, or as the kernels write it.
std::optional<OtherLse> other_lse(Served& served, const AttentionArguments& call,
                                  std::int64_t num_tokens) {
  if (call.lse.buffer == nullptr || is_plain(call.lse, call.lse_base)) return std::nullopt;
  const std::int32_t heads = served.config.num_heads;
  detail::require_context(call.lse.buffer, served.context->handle(), "lse");
  const LseRef wanted = detail::checked_lse(call.lse, num_tokens, heads, "lse");
  check_lse(call, wanted, num_tokens, heads);
  const std::int64_t bytes = num_tokens * heads * std::int64_t{sizeof(float)};
  return OtherLse{
      wanted, call.lse_base == LseBase::k2 ? std::numbers::log2e_v<float> : 1.0F,
      form_kernel(served, "clattn_lse_form", served.lse_form),
      served.context->runtime().call_memory().reserve(to_size(std::max<std::int64_t>(bytes, 4)))};
}

Event write_lse(const Served& served, const OtherLse& lse, std::int64_t num_tokens) {
  return enqueue_form(served, lse.kernel, lse.made.buffer(), lse.wanted.buffer,
                      cl_long{lse.wanted.offset}, cl_long{lse.wanted.token_stride},
                      cl_long{lse.wanted.head_stride}, static_cast<cl_int>(num_tokens),
                      cl_int{served.config.num_heads}, cl_float{lse.factor});
}

void take_lists(const AttentionArguments& call, AttentionConfig& config,
                CommonAttentionMetadata& batch) {
  for_each_list([](auto& list, const auto& given) { list = given; }, batch, call);
  throw_invalid_if(!call.direction.empty() && !call.causal,
                   "causal is false, legal with a direction for each sequence: not given");
  config.use_directions |= !call.direction.empty();
  if (!config.use_directions) batch.causal = call.causal;
  config.use_spans |= !call.span_start_loc.empty() || !call.spans.empty();
  config.use_first_keys |= !call.first_keys.empty();
  config.use_keep_keys |= !call.keep_keys.empty();
  config.use_trees |= !call.tree_start_loc.empty() || !call.tree_parents.empty();
}

/// Builds the step and enqueues what the call asks for. `batch` lacks only its counts.
void run(cl_command_queue queue, const AttentionArguments& call, const KVCache& cache,
         AttentionConfig config, CommonAttentionMetadata batch, Event* event) {
  config.custom_mask = call.mask.buffer != nullptr;
  config.output_fp8 = call.output_fp8 != nullptr;
  take_lists(call, config, batch);
  batch.query_start_loc = call.query_start_loc;
  batch.num_actual_tokens = call.query_start_loc.back();
  const bool contiguous = config.contiguous_kv();
  const std::shared_ptr<Served> served = serve(queue, config, contiguous ? -1 : cache.num_blocks);
  const std::scoped_lock lock(served->mutex);
  const AttentionImpl& impl = impl_of(*served);  // refuses the configuration, if it is illegal
  const std::int32_t longest = batch.seq_lens.empty() ? 0 : std::ranges::max(batch.seq_lens);
  const AttentionMetadata& step =
      builder_for(*served, call, batch, std::max(longest, 1)).build(queue, batch);
  const std::int64_t tokens = step.num_actual_tokens();

  std::optional<OtherLse> lse = other_lse(*served, call, tokens);
  const AttentionTensors tensors = {.query = call.query,
                                    .key = call.key,
                                    .value = call.value,
                                    .output = call.output,
                                    .lse = lse ? lse->made.buffer().handle() : call.lse.buffer};
  Mask mask = unpack_mask(*served, call.mask, tokens, longest);
  Event ended;
  const ForwardOptions options = {.event = &ended,
                                  .custom_mask = mask.buffer,
                                  .custom_mask_stride = mask.stride,
                                  .output_fp8 = call.output_fp8,
                                  .output_scale = call.output_scale};
  if (contiguous) {
    impl.forward_encoder(queue, tensors, step, options);
  } else {
    impl.forward(queue, tensors, cache, step, options);
  }
  if (mask.memory) mask.memory->used_until(ended);
  if (lse) {
    lse->made.used_until(ended);
    ended = write_lse(*served, *lse, tokens);
    lse->made.used_until(ended);
  }
  if (event != nullptr) *event = std::move(ended);
}

std::int32_t count_sequences(const AttentionArguments& call) {
  throw_invalid_if(call.query_start_loc.empty(),
                   "query_start_loc holds 0 elements, legal: the number of sequences + 1");
  throw_invalid_if(call.query_start_loc.size() > to_size(detail::kMaxInt32),
                   "query_start_loc holds {} elements, legal: at most {}",
                   call.query_start_loc.size(), detail::kMaxInt32);
  return static_cast<std::int32_t>(call.query_start_loc.size() - 1);
}

template <typename T>
void refuse(std::span<const T> given, std::string_view name, std::string_view function) {
  throw_invalid_if(!given.empty(), "{} holds {} elements, legal in {}: 0", name, given.size(),
                   function);
}

/// Rows of pages, made of lists.
struct PageTable {
  std::vector<std::int32_t> rows;
  std::span<const std::int32_t> table;
  std::int64_t stride = 0;
};

PageTable page_table(const AttentionArguments& call, std::int32_t sequences) {
  const auto& starts = call.page_start_loc;
  if (starts.empty()) {
    const auto size = static_cast<std::int64_t>(call.block_table.size());
    throw_invalid_if(sequences > 0 && size % sequences != 0,
                     "block_table holds {} elements, legal: a multiple of {} sequences", size,
                     sequences);
    return {{}, call.block_table, sequences == 0 ? 0 : size / sequences};
  }
  detail::check_size("page_start_loc", starts.size(), std::int64_t{sequences} + 1, "sequences + 1");
  PageTable made;
  for (std::size_t s = 0; s < to_size(sequences); ++s) {
    throw_invalid_if(starts[s] < 0 || starts[s + 1] < starts[s] ||
                         to_size(starts[s + 1]) > call.block_table.size(),
                     "page_start_loc[{}] is {} and the next {}, legal: 0 … {} (elements of "
                     "block_table), never falling",
                     s, starts[s], starts[s + 1], call.block_table.size());
    made.stride = std::max<std::int64_t>(made.stride, starts[s + 1] - starts[s]);
  }
  made.rows.assign(to_size(made.stride * sequences), -1);
  for (std::size_t s = 0; s < to_size(sequences); ++s) {
    const auto pages =
        call.block_table.subspan(to_size(starts[s]), to_size(starts[s + 1] - starts[s]));
    std::ranges::copy(pages, made.rows.begin() + static_cast<std::ptrdiff_t>(s) * made.stride);
  }
  made.table = made.rows;
  return made;
}

}  // namespace

void attention(cl_command_queue queue, const AttentionArguments& call,
               const AttentionConfig& config, Event* event) {
  const std::int32_t sequences = count_sequences(call);
  refuse(call.seq_lens, "seq_lens", "attention()");
  refuse(call.block_table, "block_table", "attention()");
  refuse(call.page_start_loc, "page_start_loc", "attention()");
  const bool own = call.key_start_loc.empty();
  detail::check_size("key_start_loc", own ? to_size(sequences) + 1 : call.key_start_loc.size(),
                     std::int64_t{sequences} + 1, "sequences + 1");
  const auto starts =
      (own ? call.query_start_loc : call.key_start_loc).first(to_size(sequences) + 1);
  std::vector<std::int32_t> key_counts;
  key_counts.reserve(to_size(sequences));
  for (std::size_t s = 0; s < to_size(sequences); ++s)  // build() refuses what wraps around
    key_counts.push_back(static_cast<std::int32_t>(std::int64_t{starts[s + 1]} - starts[s]));
  AttentionConfig direct = config;
  direct.attn_type = AttentionType::kEncoderOnly;
  run(queue, call, {}, std::move(direct),
      {.seq_lens = key_counts, .num_reqs = sequences, .key_start_loc = starts}, event);
}

void paged_attention(cl_command_queue queue, const AttentionArguments& call, const KVCache& cache,
                     const AttentionConfig& config, Event* event) {
  const std::int32_t sequences = count_sequences(call);
  refuse(call.key_start_loc, "key_start_loc", "paged_attention()");
  detail::check_size("seq_lens", call.seq_lens.size(), sequences, "sequences");
  const PageTable pages = page_table(call, sequences);
  AttentionConfig paged = config;
  paged.attn_type = AttentionType::kDecoder;
  paged.block_size = cache.block_size;
  paged.num_kv_heads = cache.num_kv_heads;
  paged.kv_cache_dtype = cache.format();
  run(queue, call, cache, std::move(paged),
      {.seq_lens = call.seq_lens.first(to_size(sequences)),
       .num_reqs = sequences,
       .block_table = pages.table,
       .block_table_stride = pages.stride},
      event);
}

void clear_attention_functions() {
  std::list<std::shared_ptr<Served>> freed;
  const std::scoped_lock lock(kept().mutex);
  freed.swap(kept().served);
}

}  // namespace clattn
