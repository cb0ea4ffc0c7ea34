#include <fmt/format.h>

#include <array>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/run.hpp"

namespace clattn::cli {
namespace {

/// The arrays of a decode batch, each row moved one token on: what advance_step_flashinfer() leaves
/// on a device, by plain loops.
struct Advanced {
  std::vector<std::int64_t> tokens, positions, slots;
  std::vector<std::int32_t> seq_lens, indptr, indices, last_page_len;
};

[[noreturn]] void refuse_row(std::size_t row, std::string_view why) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("advance_step: row {} was left out: {}", row, why));
}

/// Pages of a row of `length` tokens, the new one included, all of which its table must hold.
std::span<const std::int32_t> pages_of(const BatchArrays& batch, std::size_t row,
                                       std::int64_t length, std::int32_t block_size) {
  if (length < 1 || length > INT32_MAX) refuse_row(row, "its seq_len is outside 0 … 2147483646");
  const std::int64_t pages = (length - 1) / block_size + 1;
  if (pages > batch.max_blocks) refuse_row(row, "its new token lies past its block table");
  const auto table = std::span(batch.block_table)
                         .subspan(row * static_cast<std::size_t>(batch.max_blocks),
                                  static_cast<std::size_t>(pages));
  for (const std::int32_t block : table) {
    if (block < 0) refuse_row(row, "its block table names a block outside the cache");
  }
  return table;
}

/// Rows from `sampled.size()` on are padding: they keep their length and last page.
Advanced advance(const BatchArrays& batch, std::int32_t block_size,
                 std::span<const std::int64_t> sampled) {
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
    if (r < sampled.size()) {
      length = position + 1;
      const auto pages = pages_of(batch, r, length, block_size);
      step.tokens[r] = sampled[r];
      step.positions[r] = position;
      step.slots[r] = std::int64_t{pages.back()} * block_size + position % block_size;
      step.seq_lens[r] = static_cast<std::int32_t>(length);
      step.indices.insert(step.indices.end(), pages.begin(), pages.end());
    }
    step.indptr[r + 1] = static_cast<std::int32_t>(step.indices.size());
    step.last_page_len.push_back(
        length > 0 ? static_cast<std::int32_t>((length - 1) % block_size) + 1 : 0);
  }
  return step;
}

template <typename T>
void add_vector(CaseOutputs& outputs, const std::string& name, const std::vector<T>& values) {
  outputs.add(name,
              make_array(sizeof(T) == 4 ? "<i4" : "<i8", {static_cast<std::int64_t>(values.size())},
                         std::span<const T>(values)));
}

void run_on_host(CaseFile& file, CaseOutputs& outputs) {
  const BatchArrays batch = read_batch(file);
  const auto rows = static_cast<std::int64_t>(batch.seq_lens.size());
  const auto block_size = static_cast<std::int32_t>(file.integer("block_size", kBlockSize));
  const auto num_queries = static_cast<std::size_t>(file.integer("num_queries", {0, rows}, rows));
  file.refuse_unknown_keys();
  const std::vector<std::int64_t> sampled =
      file.indices64("sampled_token_ids", std::array<std::int64_t, 1>{-1});
  if (sampled.size() < num_queries) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("sampled_token_ids.npy: holds {}; expected at least {} (num_queries)",
                            sampled.size(), num_queries));
  }
  const Advanced step = advance(batch, block_size, std::span(sampled).first(num_queries));
  add_vector(outputs, "input_tokens", step.tokens);
  add_vector(outputs, "input_positions", step.positions);
  add_vector(outputs, "seq_lens", step.seq_lens);
  add_vector(outputs, "slot_mapping", step.slots);
  add_vector(outputs, "paged_kv_indptr", step.indptr);
  add_vector(outputs, "paged_kv_indices", step.indices);
  add_vector(outputs, "paged_kv_last_page_len", step.last_page_len);
}

}  // namespace

void run_advance_step_anywhere(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  if (options.device.empty() && list_devices().empty()) {
    run_on_host(file, outputs);
  } else {
    run_advance_step(file, options, outputs);
  }
}

}  // namespace clattn::cli
