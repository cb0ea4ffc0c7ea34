#include <array>
#include <clattn/cache_ops.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "capture/capture.hpp"
#include "kernels/launch/update_seq_lens.hpp"
#include "kernels/step/paged_step.hpp"
#include "kv_cache/op_kernel.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"
#include "shared/device_errors.h"

namespace clattn {

namespace {

using detail::KernelLease, detail::op_kernel, detail::OpKernel, detail::require_size;
using detail::throw_invalid, detail::throw_invalid_if, detail::to_size;

constexpr const char* kFile = "cache/advance_step.cl";

/// Throws if a buffer that is written overlaps another one: kernels check the numbers that they
/// find, and one that changes under them could lead anywhere.
void require_apart(const AdvanceStep& step, const AdvanceStepPages* pages) {
  constexpr std::array<std::string_view, 10> kNames = {
      "sampled_token_ids", "block_tables",          "input_tokens",     "input_positions",
      "seq_lens",          "slot_mapping",          "paged_kv_indices", "paged_kv_indptr",
      "block_table_bound", "paged_kv_last_page_len"};
  constexpr std::size_t kNumRead = 2, kNumOfStep = 6;
  std::array<const Buffer*, kNames.size()> buffers = {
      &step.sampled_token_ids, &step.block_tables, &step.input_tokens,
      &step.input_positions,   &step.seq_lens,     &step.slot_mapping};
  if (pages != nullptr) {
    buffers[6] = &pages->paged_kv_indices;
    buffers[7] = &pages->paged_kv_indptr;
    buffers[8] = &pages->block_table_bound;
    buffers[9] = &pages->paged_kv_last_page_len;
  }
  std::array<detail::MemoryPlace, kNames.size()> places;
  for (std::size_t i = 0; i < (pages == nullptr ? kNumOfStep : kNames.size()); ++i) {
    places.at(i) = detail::place_of(buffers.at(i)->handle());
    for (std::size_t k = 0; k < i && i >= kNumRead; ++k) {
      // Unsigned: what begins in front of the other is far behind it.
      const auto begins_in = [&](std::size_t one, std::size_t other) {
        return places.at(one).offset_bytes - places.at(other).offset_bytes <
               buffers.at(other)->size_bytes();
      };
      throw_invalid_if(
          places.at(i).memory == places.at(k).memory && (begins_in(i, k) || begins_in(k, i)),
          "advance_step: {} and {} overlap, legal: memory of its own for each", kNames.at(k),
          kNames.at(i));
    }
  }
}

void check_step(const AdvanceStep& step) {
  throw_invalid_if(step.num_seqs < 0 || step.num_seqs >= CLA_ERROR_ROWS,
                   "advance_step: num_seqs is {}, legal: 0 … {}", step.num_seqs,
                   CLA_ERROR_ROWS - 1);
  throw_invalid_if(step.num_queries < 0 || step.num_queries > step.num_seqs,
                   "advance_step: num_queries is {}, legal: 0 … {} (num_seqs)", step.num_queries,
                   step.num_seqs);
  throw_invalid_if(step.block_size < 1, "advance_step: block_size is {}, legal: >= 1",
                   step.block_size);
  throw_invalid_if(step.num_blocks < 0 || step.block_table_stride < 0,
                   "advance_step: num_blocks is {}, block_table_stride {}, legal: >= 0",
                   step.num_blocks, step.block_table_stride);
  require_size(step.input_tokens, step.num_seqs, 8, "advance_step: input_tokens");
  require_size(step.sampled_token_ids, step.num_queries, 8, "advance_step: sampled_token_ids");
  require_size(step.input_positions, step.num_seqs, 8, "advance_step: input_positions");
  require_size(step.seq_lens, step.num_seqs, 4, "advance_step: seq_lens");
  require_size(step.slot_mapping, step.num_seqs, 8, "advance_step: slot_mapping");
  require_size(step.block_tables,
               detail::checked_mul(std::int64_t{step.num_seqs}, step.block_table_stride,
                                   "advance_step: block_tables"),
               4, "advance_step: block_tables");
}

void check_pages(const AdvanceStep& step, const AdvanceStepPages& pages) {
  const std::int64_t most = step.num_queries * step.block_table_stride;
  throw_invalid_if(most > INT32_MAX,
                   "advance_step: {} rows of {} pages, legal: up to {} pages in all",
                   step.num_queries, step.block_table_stride, INT32_MAX);
  require_size(pages.paged_kv_indices, 0, 4, "advance_step: paged_kv_indices");
  require_size(pages.paged_kv_indptr, std::int64_t{step.num_seqs} + 1, 4,
               "advance_step: paged_kv_indptr");
  require_size(pages.paged_kv_last_page_len, step.num_seqs, 4,
               "advance_step: paged_kv_last_page_len");
  require_size(pages.block_table_bound, step.num_seqs, 4, "advance_step: block_table_bound");
}

/// Before the rows advance, which happens once.
void check_metadata(cl_command_queue queue, const AdvanceStep& step, const DeviceErrors& errors) {
  if (step.metadata == nullptr) return;
  detail::check_update_seq_lens(queue, *step.metadata, {step.seq_lens, step.slot_mapping}, errors);
  // The slots of rows are read by query token.
  const std::int32_t tokens = step.metadata->num_actual_tokens();
  const std::span<const std::int32_t> starts = step.metadata->step()->batch.query_start_loc;
  const bool idle_first = to_size(tokens) < starts.size() && starts[to_size(tokens)] != tokens;
  throw_invalid_if(step.metadata->max_query_len() > 1 || tokens > step.num_seqs || idle_first,
                   "advance_step: metadata: its requests are not the rows, legal: a query token of "
                   "each of the first up to {} rows, none of others",
                   step.num_seqs);
}

/// The pages of every row, 0 of those that become padding.
void find_pages(const Context& context, cl_command_queue queue, const AdvanceStep& step,
                const AdvanceStepPages& pages, const DeviceErrors& errors, Event* event) {
  const OpKernel bounds = op_kernel(context, "clattn_advance_bounds", kFile);
  bounds.pool->acquire()
      .args(step.seq_lens, step.block_tables, cl_long{step.block_table_stride},
            cl_int{step.block_size}, cl_long{step.num_blocks}, errors.word(),
            pages.block_table_bound)
      .enqueue(queue, to_size(step.num_queries), bounds.group_size);
  const OpKernel indptr = op_kernel(context, "clattn_advance_indptr", kFile);
  indptr.pool->acquire()
      .args(pages.block_table_bound, pages.paged_kv_indptr, cl_int{step.num_queries},
            cl_int{step.num_seqs}, static_cast<cl_long>(pages.paged_kv_indices.size_bytes() / 4),
            errors.word())
      .enqueue(queue, 1, indptr.group_size, event);
}

/// `pages`: of FlashInfer's form, else null.
void advance(const Context& context, cl_command_queue queue, const AdvanceStep& step,
             const AdvanceStepPages* pages, DeviceErrors& errors, Event* event) {
  detail::require_in_order(queue);
  check_step(step);
  if (pages != nullptr) check_pages(step, *pages);
  require_apart(step, pages);
  check_metadata(queue, step, errors);
  detail::AddResults add;
  if (detail::capturing()) add = detail::capture_advance_step(queue, step);
  if (pages != nullptr) {
    const bool any = step.num_seqs > 0;
    find_pages(context, queue, step, *pages, errors, any ? nullptr : event);
    if (!any) return;
  }
  const OpKernel kernel =
      op_kernel(context, pages == nullptr ? "clattn_advance_rows" : "clattn_advance_pages", kFile);
  KernelLease lease = kernel.pool->acquire();
  lease.args(step.input_tokens, step.sampled_token_ids, step.input_positions, step.seq_lens,
             step.slot_mapping, step.block_tables, cl_long{step.block_table_stride},
             cl_int{step.block_size}, cl_int{step.num_queries});
  if (pages == nullptr) {
    lease.args(cl_long{step.num_blocks}, errors.word());
  } else {
    lease.args(pages->block_table_bound, pages->paged_kv_indptr, pages->paged_kv_indices,
               pages->paged_kv_last_page_len);
  }
  const bool last = step.metadata == nullptr;
  lease.enqueue(queue, to_size(step.num_seqs), kernel.group_size, last ? event : nullptr);
  if (!last) {  // the lengths in the metadata of the next step
    detail::enqueue_update_seq_lens(queue, *step.metadata, {step.seq_lens, step.slot_mapping},
                                    errors, event, detail::LengthsFrom::kAdvanceStep);
  }
  detail::add_results(add, queue);
}

}  // namespace

DeviceErrors::DeviceErrors(const Context& context, cl_command_queue queue)
    : word_(context.allocate(sizeof(std::int32_t))) {
  Queue::adopt(queue).fill(word_, 0, 0, sizeof(std::int32_t));
}

void DeviceErrors::check(cl_command_queue queue) {
  const Queue commands = Queue::adopt(queue);
  std::int32_t word = 0;
  commands.read(word_, std::as_writable_bytes(std::span(&word, 1)));
  if (word == 0) return;
  commands.fill(word_, 0, 0, sizeof(word));
  // In the order of shared/device_errors.h.
  constexpr std::array<std::string_view, CLA_ERROR_REASONS> kReasons = {
      "its seq_len is outside 0 … 2147483646",
      "its new token lies past its block table",
      "its block table names a block outside the cache",
      "its pages do not fit paged_kv_indices",
      "its seq_len is less than its query tokens",
      "its seq_len is more than the bound that the step was planned with"};
  const std::int32_t reason = word & ((1 << CLA_ERROR_BITS) - 1);
  throw_invalid("{} {} was left out: {}",
                reason < CLA_ERROR_SHORT ? "advance_step: row" : "update_seq_lens: request",
                CLA_ERROR_ROWS - (word >> CLA_ERROR_BITS), kReasons.at(to_size(reason)));
}

void advance_step_flashattn(const Context& context, cl_command_queue queue, const AdvanceStep& step,
                            DeviceErrors& errors, Event* event) {
  advance(context, queue, step, nullptr, errors, event);
}

void advance_step_flashinfer(const Context& context, cl_command_queue queue,
                             const AdvanceStep& step, const AdvanceStepPages& pages,
                             DeviceErrors& errors, Event* event) {
  advance(context, queue, step, &pages, errors, event);
}

}  // namespace clattn
