#include "requests.hpp"

#include <algorithm>
#include <cstring>

namespace ggml_clattn {

namespace {

constexpr std::uint16_t kMinusInfinity = 0xFC00;  // of f16
constexpr std::uint16_t kInfinity = 0x7C00;
constexpr std::uint16_t kSign = 0x8000;

/// Consecutive rows of a stream and the pages that they see, from 0 in the stream.
struct Run {
  std::int64_t stream = 0, first_row = 0, num_rows = 0;
  std::vector<std::int32_t> pages = {};
  std::int32_t seq_len = 0;  ///< in these pages
};

/// The mask as bytes, one row of `keys` for each row of each stream; none without a mask.
class Visible {
 public:
  Visible(const Op& op, std::span<const std::uint16_t> mask)
      : op_(op), streams_(mask.empty() ? 0 : op.mask->ne[3]) {
    bytes_.resize(static_cast<std::size_t>(streams_ * op.rows * op.keys));
    bool zeros = true;
    bool distances = op.max_bias > 0 && op.sinks == nullptr;
    for (std::int64_t i = 0; i < streams_ * op.rows; ++i) {
      const std::int64_t at = (i / op.rows * op.mask->ne[1] + i % op.rows) * op.keys;
      zeros = see(mask.data() + at, bytes_.data() + i * op.keys) && zeros;
      distances = distances && are_distances(mask.data() + at);
    }
    if (!zeros) values_ = distances ? MaskValues::kDistances : MaskValues::kOther;
  }
  MaskValues values() const { return values_; }
  bool empty() const { return bytes_.empty(); }
  const std::uint8_t* row(std::int64_t stream, std::int64_t row) const {
    return bytes_.data() + (stream % streams_ * op_.rows + row) * op_.keys;
  }

 private:
  /// Whether all values are 0 or minus infinity.
  bool see(const std::uint16_t* mask, std::uint8_t* visible) const {
    unsigned others = 0;
    for (std::int64_t key = 0; key < op_.keys; ++key) {
      const unsigned shown = mask[key] != kMinusInfinity ? 1U : 0U;
      visible[key] = static_cast<std::uint8_t>(shown);
      others |= shown * static_cast<std::uint16_t>(mask[key] & ~kSign);
    }
    return others == 0;
  }
  /// Whether each value is the key's index less one number. A constant for a row changes nothing
  /// where no sink joins the denominator.
  bool are_distances(const std::uint16_t* mask) const {
    bool first = true;
    float origin = 0;
    for (std::int64_t key = 0; key < op_.keys; ++key) {
      if (mask[key] == kMinusInfinity) continue;
      if ((mask[key] & kInfinity) == kInfinity) return false;  // or no number
      const float at = static_cast<float>(key) - ggml_fp16_to_fp32(mask[key]);
      if (first) origin = at;
      if (at != origin) return false;
      first = false;
    }
    return true;
  }

  const Op& op_;
  std::int64_t streams_ = 0;
  std::vector<std::uint8_t> bytes_;
  MaskValues values_ = MaskValues::kZeros;
};

/// Whether a row continues the request of the row before it: it sees what that one saw, less at
/// most the key that left a window. A wrong guess costs time, not correctness.
bool continues(const std::uint8_t* before, const std::uint8_t* row, std::int64_t keys) {
  std::uint32_t lost = 0;
  for (std::int64_t key = 0; key < keys; ++key) lost += before[key] & ~row[key] & 1U;
  return lost <= 1;
}

/// Pages with a visible cell; of distances all from the first one on, so that positions in the
/// request are cells of the stream. At least as many keys as rows, which CLAttn requires.
void find_pages(const Op& op, const Visible& visible, Run& run) {
  const std::int64_t page = op.page_tokens;
  std::vector<std::uint8_t> seen(static_cast<std::size_t>(op.keys), visible.empty() ? 1 : 0);
  if (!visible.empty()) {
    for (std::int64_t i = 0; i < run.num_rows; ++i) {
      const std::uint8_t* const row = visible.row(run.stream, run.first_row + i);
      for (std::int64_t key = 0; key < op.keys; ++key)
        seen[static_cast<std::size_t>(key)] |= row[key];
    }
  }
  const auto in_page = [&](std::int64_t p) { return seen.begin() + p * page; };
  std::vector<std::int32_t> hidden;
  for (std::int64_t p = 0; p < op.keys / page; ++p) {
    const bool any = std::find(in_page(p), in_page(p + 1), 1) != in_page(p + 1);
    if (visible.values() == MaskValues::kDistances && any) {
      run.pages.insert(run.pages.end(), hidden.begin(), hidden.end());
      hidden.clear();
    }
    (any ? run.pages : hidden).push_back(static_cast<std::int32_t>(p));
  }
  std::int64_t seq_len = 0;
  if (!run.pages.empty()) {
    const std::int64_t last = run.pages.back();
    const auto end = std::find(std::reverse_iterator(in_page(last + 1)), seen.rend(), 1).base();
    const auto others = static_cast<std::int64_t>(run.pages.size() - 1);
    seq_len = others * page + (end - in_page(last));
  }
  seq_len = std::max(seq_len, run.num_rows);
  for (auto next = hidden.begin(); static_cast<std::int64_t>(run.pages.size()) * page < seq_len;)
    run.pages.push_back(*next++);
  run.seq_len = static_cast<std::int32_t>(seq_len);
}

std::vector<Run> find_runs(const Op& op, const Visible& visible) {
  std::vector<Run> runs;
  for (std::int64_t stream = 0; stream < op.streams; ++stream) {
    for (std::int64_t row = 0; row < op.rows; ++row) {
      const bool starts = row == 0 || runs.back().num_rows == op.keys ||
                          (!visible.empty() && !continues(visible.row(stream, row - 1),
                                                          visible.row(stream, row), op.keys));
      if (starts) runs.push_back({.stream = stream, .first_row = row});
      ++runs.back().num_rows;
    }
  }
  for (Run& run : runs) find_pages(op, visible, run);
  return runs;
}

/// A row's cells in the pages of its run.
void gather(const Op& op, const Run& run, const std::uint8_t* visible, std::uint8_t* cells) {
  const auto page = static_cast<std::size_t>(op.page_tokens);
  std::size_t left = static_cast<std::size_t>(run.seq_len);
  for (const std::int32_t p : run.pages) {
    const std::size_t count = std::min(page, left);
    std::memcpy(cells, visible + static_cast<std::size_t>(p) * page, count);
    cells += count;
    left -= count;
  }
}

/// Whether a row of `seq_len` cells shows exactly the first `shown`.
bool is_prefix(const std::uint8_t* cells, std::int64_t shown, std::int64_t seq_len) {
  return std::memchr(cells, 0, static_cast<std::size_t>(shown)) == nullptr &&
         std::memchr(cells + shown, 1, static_cast<std::size_t>(seq_len - shown)) == nullptr;
}

/// Fills in the cells, and says whether kernels need them.
void read_cells(const Op& op, const Visible& visible, std::span<const Run> runs, Requests& step) {
  bool causal = true;
  bool all = true;
  step.cells.resize(static_cast<std::size_t>(op.streams * op.rows * step.cells_stride));
  std::uint8_t* cells = step.cells.data();
  for (const Run& run : runs) {
    for (std::int64_t i = 0; i < run.num_rows; ++i) {
      gather(op, run, visible.row(run.stream, run.first_row + i), cells);
      causal = causal && is_prefix(cells, run.seq_len - run.num_rows + i + 1, run.seq_len);
      all = all && is_prefix(cells, run.seq_len, run.seq_len);
      cells += step.cells_stride;
    }
  }
  step.masked = !causal && !all;
  step.causal = causal;
  if (!step.masked) step.cells.clear();
}

}  // namespace

Requests read_requests(const Op& op, std::span<const std::uint16_t> mask) {
  const Visible visible(op, mask);
  Requests step;
  step.values = visible.values();
  if (step.values == MaskValues::kOther) return step;
  const std::vector<Run> runs = find_runs(op, visible);
  for (const Run& run : runs) {
    step.block_table_stride =
        std::max(step.block_table_stride, static_cast<std::int64_t>(run.pages.size()));
    step.cells_stride = std::max(step.cells_stride, std::int64_t{run.seq_len});
  }
  step.query_start_loc.push_back(0);
  for (const Run& run : runs) {
    step.query_start_loc.push_back(step.query_start_loc.back() +
                                   static_cast<std::int32_t>(run.num_rows));
    step.seq_lens.push_back(run.seq_len);
    const auto first = static_cast<std::int32_t>(run.stream * op.pages_of_stream);
    for (const std::int32_t page : run.pages) step.block_table.push_back(first + page);
    step.block_table.resize(step.seq_lens.size() *
                            static_cast<std::size_t>(step.block_table_stride));
  }
  if (!visible.empty()) read_cells(op, visible, runs, step);
  return step;
}

}  // namespace ggml_clattn
