#include <array>
#include <clattn/cache_ops.hpp>
#include <vector>

#include "base/checked.hpp"
#include "capture/capture.hpp"
#include "kernels/launch/update_seq_lens.hpp"
#include "kernels/step/paged_step.hpp"
#include "kv_cache/op_kernel.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"
#include "shared/device_errors.h"

namespace clattn {

namespace {

using detail::KernelLease, detail::op_kernel, detail::OpKernel;
using detail::throw_invalid, detail::throw_invalid_if, detail::to_size;

constexpr const char* kFile = "cache/advance_step.cl";

/// A buffer of a call: what it must hold, and whether kernels write it. Those that are only read
/// come first.
struct Operand {
  std::string_view name;
  const Buffer* buffer;
  std::int64_t count;
  std::size_t element_bytes;
  bool written = true;
};

std::vector<Operand> operands_of(const AdvanceStep& step, const AdvanceStepPages* pages) {
  const std::int64_t rows = step.num_seqs;
  const std::int64_t entries =
      detail::checked_mul(rows, step.block_table_stride, "advance_step: block_tables");
  std::vector<Operand> all = {
      {"sampled_token_ids", &step.sampled_token_ids, step.num_queries, 8, false},
      {"block_tables", &step.block_tables, entries, 4, false},
      {"input_tokens", &step.input_tokens, rows, 8},
      {"input_positions", &step.input_positions, rows, 8},
      {"seq_lens", &step.seq_lens, rows, 4},
      {"slot_mapping", &step.slot_mapping, rows, 8}};
  if (pages != nullptr) {
    all.push_back({"paged_kv_indices", &pages->paged_kv_indices, 0, 4});
    all.push_back({"paged_kv_indptr", &pages->paged_kv_indptr, rows + 1, 4});
    all.push_back({"block_table_bound", &pages->block_table_bound, rows, 4});
    all.push_back({"paged_kv_last_page_len", &pages->paged_kv_last_page_len, rows, 4});
  }
  return all;
}

/// Throws if a buffer is too small, or one that is written overlaps another one: kernels check the
/// numbers that they find, and one that changes under them could lead anywhere.
void check_operands(const std::vector<Operand>& all) {
  std::vector<detail::MemoryPlace> places;
  // Unsigned: what begins in front of the other is far after it.
  const auto begins_in = [&](std::size_t one, std::size_t other) {
    return places[one].offset_bytes - places[other].offset_bytes < all[other].buffer->size_bytes();
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    detail::require_size(*all[i].buffer, all[i].count, all[i].element_bytes,
                         fmt::format("advance_step: {}", all[i].name));
    places.push_back(detail::place_of(all[i].buffer->handle()));
    for (std::size_t k = 0; k < i && all[i].written; ++k) {
      throw_invalid_if(places[i].memory == places[k].memory && (begins_in(i, k) || begins_in(k, i)),
                       "advance_step: {} and {} overlap, legal: memory of its own for each",
                       all[k].name, all[i].name);
    }
  }
}

void check_step(const AdvanceStep& step, const AdvanceStepPages* pages) {
  detail::check_between("advance_step: num_seqs", step.num_seqs, 0, CLA_ERROR_ROWS - 1);
  throw_invalid_if(step.num_queries < 0 || step.num_queries > step.num_seqs,
                   "advance_step: num_queries is {}, legal: 0 … {} (num_seqs)", step.num_queries,
                   step.num_seqs);
  detail::check_at_least("advance_step: block_size", step.block_size, 1);
  detail::check_at_least("advance_step: num_blocks", step.num_blocks, 0);
  detail::check_at_least("advance_step: block_table_stride", step.block_table_stride, 0);
  check_operands(operands_of(step, pages));
  const std::int64_t most = step.num_queries * step.block_table_stride;
  throw_invalid_if(pages != nullptr && most > INT32_MAX,
                   "advance_step: {} rows of {} pages, legal: up to {} pages in all",
                   step.num_queries, step.block_table_stride, INT32_MAX);
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
  check_step(step, pages);
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
      "its seq_len is more than the bound that the step was planned with",
      "its query tokens are more than decode_threshold or its seq_len bound, or lie outside the "
      "rows that the batch gives it and the decodes next to it, or, in a prefill, are not the "
      "batch's",
      "its seq_len is less than its query tokens, or more than the bound that the step was planned "
      "with",
      "its direction is none of 0 (both ways), 1 (causal), 2 (canvas)",
      "its tree has fewer nodes than it has query tokens, more than tree_start_loc or its seq_len "
      "allows, or its first or kept keys",
      "the tree_bits of a row do not hold its own node, or hold later ones",
      "one of its positions is outside cos_sin_cache"};
  const std::int32_t reason = word & ((1 << CLA_ERROR_BITS) - 1);
  const std::string_view what = reason < CLA_ERROR_SHORT       ? "advance_step: row"
                                : reason < CLA_ERROR_QUERIES   ? "update_seq_lens: request"
                                : reason < CLA_ERROR_DIRECTION ? "update_query_lens: request"
                                : reason < CLA_ERROR_POSITION  ? "update_lists: request"
                                                               : "prepare_qkv: token";
  const std::string_view effect =
      reason == CLA_ERROR_BITS_OF_ROW ? "is not what was meant" : "was left out";
  throw_invalid("{} {} {}: {}", what, CLA_ERROR_ROWS - (word >> CLA_ERROR_BITS), effect,
                kReasons.at(to_size(reason)));
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
