#include "device/masks.hpp"

#include <algorithm>
#include <clattn/registry.hpp>

namespace attention_test {
namespace {

/// What the rows see; all heads of a row must agree.
std::vector<Keys> keys_of(const CaseSpec& spec, const CaseResult& result) {
  const auto dims = static_cast<std::size_t>(spec.config.head_size);
  const std::size_t width = dims * static_cast<std::size_t>(spec.config.num_heads);
  std::vector<Keys> rows;
  for (std::size_t at = 0; at < result.out.size(); at += dims) {
    Keys seen;
    for (std::size_t key = 0; key < dims; ++key)
      if (result.out[at + key] > 0) seen.push_back(static_cast<std::int32_t>(key));
    if (at % width == 0) rows.push_back(seen);
    EXPECT_EQ(seen, rows.back()) << "head " << at % width / dims;
  }
  return rows;
}

}  // namespace

std::vector<std::shared_ptr<clattn::Context>> Masks::devices() {
  std::vector<std::shared_ptr<clattn::Context>> able;
  clattn::AttentionConfig config = attention_test::small_config();
  config.kernel_family = GetParam();
  const auto backend = clattn::get_attn_backend(config, nullptr, "FLASHINFER");
  for (const auto& context : all_contexts()) {
    if (backend->validate_configuration(config, &context->capabilities()).empty())
      able.push_back(context);
  }
  return able;
}

CaseResult Masks::run(const std::shared_ptr<clattn::Context>& context, CaseSpec spec) {
  std::uint32_t next = 1;
  for (Request& request : spec.requests) request.identity = next++;
  spec.config.kernel_family = GetParam();
  if (spec.planned_for) spec.planned_for->kernel_family = GetParam();
  const CaseResult result = attention_test::run_case(context, spec);
  EXPECT_EQ(result.fault, "") << describe(spec);
  EXPECT_LE(result.worst_share, 1.0) << describe(spec) << "\n " << result.worst_place;
  return result;
}

void Masks::expect_right(const CaseSpec& spec) {
  for (const auto& context : devices()) run(context, spec);
}

void Masks::expect_rows(const CaseSpec& spec, const Request& request, const Rows& wanted) {
  std::vector<Keys> keys;
  for (const auto& [first, last] : wanted) {
    Keys& row = keys.emplace_back();
    for (std::int32_t key = first; key >= 0 && key <= last; ++key) row.push_back(key);
  }
  expect_keys(spec, request, keys);
}

void Masks::expect_keys(CaseSpec spec, const Request& request, const std::vector<Keys>& wanted) {
  spec.requests = {request};
  spec.unit_values = true;
  for (const std::int32_t page : {0, 1, 16}) {
    spec.config.block_size = page;
    spec.config.attn_type =
        page == 0 ? clattn::AttentionType::kEncoderOnly : clattn::AttentionType::kDecoder;
    for (const std::int32_t splits : {0, 1, 7}) {
      spec.num_splits = splits;
      for (const auto& context : devices())
        EXPECT_EQ(keys_of(spec, run(context, spec)), wanted) << describe(spec);
    }
  }
}

}  // namespace attention_test
