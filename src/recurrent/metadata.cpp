#include <algorithm>
#include <clattn/recurrent.hpp>
#include <tuple>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "opencl/staged_lists.hpp"

namespace clattn {

namespace {

using detail::throw_invalid_if, detail::to_size;

constexpr std::string_view kBuild = "RecurrentMetadataBuilder::build";

void check_length(std::string_view field, std::size_t length, std::size_t legal) {
  throw_invalid_if(length != legal, "{}: {} has {} elements, legal: {}", kBuild, field, length,
                   legal);
}

/// A request of a batch whose lists are long enough.
struct BatchRequest {
  std::span<const std::int32_t> columns;
  std::int32_t tokens = 0, accepted = -1;  ///< accepted < 0: without drafts
  bool initial = true;
};

BatchRequest request_of(const RecurrentBatch& batch, std::size_t r) {
  const auto columns = to_size(batch.state_columns);
  return {batch.state_indices.subspan(r * columns, columns),
          batch.query_start_loc[r + 1] - batch.query_start_loc[r],
          batch.num_accepted_tokens.empty() ? -1 : batch.num_accepted_tokens[r],
          batch.has_initial_state.empty() || batch.has_initial_state[r] != 0};
}

void check_shapes(const RecurrentBatch& batch) {
  throw_invalid_if(batch.query_start_loc.empty(),
                   "{}: query_start_loc has no element, legal: num_reqs + 1", kBuild);
  detail::check_at_least("RecurrentMetadataBuilder::build: state_columns", batch.state_columns, 1);
  const std::size_t requests = batch.query_start_loc.size() - 1;
  detail::check_between("RecurrentMetadataBuilder::build: num_reqs",
                        static_cast<std::int64_t>(requests), 0, detail::kMaxInt32);
  check_length("state_indices", batch.state_indices.size(),
               requests * to_size(batch.state_columns));
  if (!batch.has_initial_state.empty())
    check_length("has_initial_state", batch.has_initial_state.size(), requests);
  if (!batch.num_accepted_tokens.empty())
    check_length("num_accepted_tokens", batch.num_accepted_tokens.size(), requests);
  throw_invalid_if(batch.query_start_loc[0] != 0, "{}: query_start_loc[0] is {}, legal: 0", kBuild,
                   batch.query_start_loc[0]);
}

void check_request(const RecurrentBatch& batch, std::size_t r) {
  const BatchRequest of = request_of(batch, r);
  throw_invalid_if(of.tokens < 0, "{}: query_start_loc[{}] is {}, legal: at least {}", kBuild,
                   r + 1, batch.query_start_loc[r + 1], batch.query_start_loc[r]);
  if (of.accepted < 0) return;
  throw_invalid_if(of.accepted == 0 || of.accepted > batch.state_columns,
                   "{}: num_accepted_tokens[{}] is {}, legal: 1 … {} (state_columns), or negative "
                   "without drafts",
                   kBuild, r, of.accepted, batch.state_columns);
  throw_invalid_if(!of.initial,
                   "{}: num_accepted_tokens[{}] is {}, legal: negative, as it has no initial state",
                   kBuild, r, of.accepted);
  throw_invalid_if(of.tokens > batch.state_columns,
                   "{}: request {} has drafts and {} tokens, legal: at most {} (state_columns)",
                   kBuild, r, of.tokens, batch.state_columns);
}

/// A page that a request reads or writes.
struct PageUse {
  std::int32_t page;
  std::size_t request;
  bool written;
  auto operator<=>(const PageUse&) const = default;
};

/// Pages are one request's alone where one writes them.
void check_pages(const RecurrentBatch& batch) {
  std::vector<PageUse> uses;
  for (std::size_t r = 0; r + 1 < batch.query_start_loc.size(); ++r) {
    const BatchRequest of = request_of(batch, r);
    if (of.tokens == 0) continue;
    const auto use = [&](std::int32_t column, bool written) {
      const std::int32_t page = of.columns[to_size(column)];
      if (page >= 0 && page != batch.null_block_id) uses.push_back({page, r, written});
    };
    if (of.accepted >= 0) use(of.accepted - 1, false);
    const std::int32_t written = of.accepted < 0 ? 1 : of.tokens;
    for (std::int32_t column = 0; column < written; ++column) use(column, true);
  }
  std::ranges::sort(uses);
  for (std::size_t i = 1; i < uses.size(); ++i) {
    const PageUse &one = uses[i - 1], &other = uses[i];
    if (one.page != other.page) continue;
    throw_invalid_if(one.request == other.request && one.written,
                     "{}: state_indices of request {} name page {} twice, legal: a page for each "
                     "token",
                     kBuild, one.request, one.page);
    throw_invalid_if(one.request != other.request && (one.written || other.written),
                     "{}: state_indices of requests {} and {} name page {}, legal: pages of their "
                     "own",
                     kBuild, one.request, other.request, one.page);
  }
}

RecurrentMetadata counts_of(const RecurrentBatch& batch) {
  RecurrentMetadata made;
  made.num_reqs = static_cast<std::int32_t>(batch.query_start_loc.size() - 1);
  made.state_columns = batch.state_columns;
  made.null_block_id = batch.null_block_id;
  made.num_tokens = batch.query_start_loc.back();
  made.max_query_len = 0;
  for (std::size_t r = 0; r < to_size(made.num_reqs); ++r) {
    const BatchRequest of = request_of(batch, r);
    if (of.accepted < 0) made.max_query_len = std::max<std::int64_t>(made.max_query_len, of.tokens);
    for (const std::int32_t page : of.columns)
      made.max_state_index = std::max(made.max_state_index, page);
  }
  return made;
}

}  // namespace

struct RecurrentMetadataBuilder::Memory {
  explicit Memory(const Context& context) : upload(context.runtime()) {}
  detail::StagedUpload upload;
};

RecurrentMetadataBuilder::RecurrentMetadataBuilder(const Context& context)
    : memory_(std::make_unique<Memory>(context)) {}
RecurrentMetadataBuilder::~RecurrentMetadataBuilder() = default;
RecurrentMetadataBuilder::RecurrentMetadataBuilder(RecurrentMetadataBuilder&&) noexcept = default;
RecurrentMetadataBuilder& RecurrentMetadataBuilder::operator=(RecurrentMetadataBuilder&&) noexcept =
    default;

RecurrentMetadata RecurrentMetadataBuilder::build(cl_command_queue queue,
                                                  const RecurrentBatch& batch) {
  check_shapes(batch);
  for (std::size_t r = 0; r + 1 < batch.query_start_loc.size(); ++r) check_request(batch, r);
  check_pages(batch);
  RecurrentMetadata made = counts_of(batch);
  const std::size_t words =
      batch.query_start_loc.size() + batch.state_indices.size() + batch.num_accepted_tokens.size();
  detail::StagedLists lists(memory_->upload, queue,
                            words * sizeof(std::int32_t) + batch.has_initial_state.size());
  made.query_start_loc = lists.add(batch.query_start_loc);
  made.state_indices = lists.add(batch.state_indices);
  if (!batch.num_accepted_tokens.empty())
    made.num_accepted_tokens = lists.add(batch.num_accepted_tokens);
  if (!batch.has_initial_state.empty()) made.has_initial_state = lists.add(batch.has_initial_state);
  lists.upload();
  return made;
}

}  // namespace clattn
