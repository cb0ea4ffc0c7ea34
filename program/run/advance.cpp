#include <clattn/cache_ops.hpp>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "program/common/device_memory.hpp"
#include "program/common/error.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {
namespace {

/// The arrays of a decode batch, each row moved one token on.
struct Advanced {
  std::vector<std::int64_t> tokens, positions, slots;
  std::vector<std::int32_t> seq_lens, indptr, indices, last_page_len;
};

/// What a case says of the step.
struct AdvanceCase {
  BatchArrays batch;
  std::int32_t block_size = 0;
  std::int32_t num_queries = 0;
  std::int32_t num_blocks = INT32_MAX;  ///< of the cache, where the case says it
  std::vector<std::int64_t> sampled;
};

AdvanceCase read_advance(CaseFile& file) {
  AdvanceCase given;
  given.batch = read_batch(file);
  const auto rows = static_cast<std::int64_t>(given.batch.seq_lens.size());
  given.block_size = file.int32("block_size", kBlockSize);
  given.num_queries = file.int32("num_queries", {0, rows}, rows);
  given.num_blocks = file.int32("num_blocks", kCount, INT32_MAX);
  file.refuse_unknown_keys();
  given.sampled = file.indices64("sampled_token_ids", {-1});
  throw_invalid_if(std::cmp_less(given.sampled.size(), given.num_queries),
                   "sampled_token_ids.npy: holds {}; expected at least {} (num_queries)",
                   given.sampled.size(), given.num_queries);
  return given;
}

std::int32_t last_page_len(std::int64_t length, std::int32_t block_size) {
  return length > 0 ? static_cast<std::int32_t>((length - 1) % block_size) + 1 : 0;
}

[[noreturn]] void refuse_row(std::size_t row, std::string_view why) {
  throw_invalid("advance_step: row {} was left out: {}", row, why);
}

/// Pages of a row of `length` tokens, the new one included, all of which its table must hold.
std::span<const std::int32_t> pages_of(const AdvanceCase& given, std::size_t row,
                                       std::int64_t length) {
  const BatchArrays& batch = given.batch;
  if (length < 1 || length > INT32_MAX) refuse_row(row, "its seq_len is outside 0 … 2147483646");
  const std::int64_t pages = (length - 1) / given.block_size + 1;
  if (pages > batch.max_blocks) refuse_row(row, "its new token lies past its block table");
  const auto table =
      std::span(batch.block_table).subspan(row * to_size(batch.max_blocks), to_size(pages));
  for (const std::int32_t block : table) {
    if (block < 0 || block >= given.num_blocks)
      refuse_row(row, "its block table names a block outside the cache");
  }
  return table;
}

/// What advance_step_flashinfer() leaves on a device, by plain loops. Rows from num_queries on are
/// padding: they keep their length and last page.
Advanced advance_on_host(const AdvanceCase& given) {
  const BatchArrays& batch = given.batch;
  const std::size_t rows = batch.seq_lens.size();
  Advanced step;
  step.tokens.resize(rows);
  step.positions.resize(rows);
  step.slots.assign(rows, -1);
  step.seq_lens = batch.seq_lens;
  step.indptr.assign(rows + 1, 0);
  for (std::size_t r = 0; r < rows; ++r) {
    const std::int64_t position = batch.seq_lens[r];
    std::int64_t length = position;
    if (std::cmp_less(r, given.num_queries)) {
      length = position + 1;
      const auto pages = pages_of(given, r, length);
      step.tokens[r] = given.sampled[r];
      step.positions[r] = position;
      step.slots[r] = std::int64_t{pages.back()} * given.block_size + position % given.block_size;
      step.seq_lens[r] = static_cast<std::int32_t>(length);
      step.indices.insert(step.indices.end(), pages.begin(), pages.end());
    }
    step.indptr[r + 1] = static_cast<std::int32_t>(step.indices.size());
    step.last_page_len.push_back(last_page_len(length, given.block_size));
  }
  return step;
}

Advanced advance_on_device(const OnDevice& on, const AdvanceCase& given, Event* event) {
  const Context& context = *on.context;
  const BatchArrays& batch = given.batch;
  const std::size_t rows = batch.seq_lens.size();
  std::vector<std::int32_t> last_page;  // as before the step: padding rows keep theirs
  last_page.reserve(rows);
  for (const std::int32_t length : batch.seq_lens)
    last_page.push_back(last_page_len(length, given.block_size));
  const AdvanceStep step{.num_seqs = static_cast<std::int32_t>(rows),
                         .num_queries = given.num_queries,
                         .block_size = given.block_size,
                         .num_blocks = given.num_blocks,
                         .input_tokens = context.allocate(rows * 8),
                         .sampled_token_ids = on.up(given.sampled),
                         .input_positions = context.allocate(rows * 8),
                         .seq_lens = on.up(batch.seq_lens),
                         .slot_mapping = context.allocate(rows * 8),
                         .block_tables = on.up(batch.block_table),
                         .block_table_stride = batch.max_blocks};
  const AdvanceStepPages pages{.paged_kv_indices = context.allocate(batch.block_table.size() * 4),
                               .paged_kv_indptr = context.allocate((rows + 1) * 4),
                               .paged_kv_last_page_len = on.up(last_page),
                               .block_table_bound = context.allocate(rows * 4)};
  DeviceErrors errors(context, on.queue);
  advance_step_flashinfer(context, on.queue, step, pages, errors, event);
  errors.check(on.queue);
  Advanced done;
  done.tokens = on.down<std::int64_t>(step.input_tokens, rows);
  done.positions = on.down<std::int64_t>(step.input_positions, rows);
  done.slots = on.down<std::int64_t>(step.slot_mapping, rows);
  done.seq_lens = on.down<std::int32_t>(step.seq_lens, rows);
  done.indptr = on.down<std::int32_t>(pages.paged_kv_indptr, rows + 1);
  done.indices = on.down<std::int32_t>(pages.paged_kv_indices, to_size(done.indptr.back()));
  done.last_page_len = on.down<std::int32_t>(pages.paged_kv_last_page_len, rows);
  return done;
}

}  // namespace

void run_advance_step(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const AdvanceCase given = read_advance(file);
  Advanced step;
  if (options.device.empty() && list_devices().empty()) {
    step = advance_on_host(given);
  } else {
    const OnDevice on{Context::create(options.device)};
    Event event;
    step = advance_on_device(on, given, &event);
    outputs.add("info", device_info("advance_step", *on.context, event));
  }
  outputs.add_values("input_tokens", step.tokens);
  outputs.add_values("input_positions", step.positions);
  outputs.add_values("seq_lens", step.seq_lens);
  outputs.add_values("slot_mapping", step.slots);
  outputs.add_values("paged_kv_indptr", step.indptr);
  outputs.add_values("paged_kv_indices", step.indices);
  outputs.add_values("paged_kv_last_page_len", step.last_page_len);
}

}  // namespace clattn::cli
