#include "program/bench/shapes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <clattn/config_fields.hpp>
#include <map>
#include <set>
#include <span>
#include <sstream>

#include "program/bench/shape_checks.hpp"
#include "program/common/error.hpp"
#include "program/common/text.hpp"

namespace clattn::cli {
namespace {

constexpr std::array<std::string_view, 3> kSets = {"quick", "cpu", "gpu"};
constexpr std::int64_t kMaxLength = 1 << 24, kMaxRequests = 65536;

template <typename Number>
std::optional<Number> parse_number(std::string_view text, Number least, Number most) {
  const auto value = cli::parse_number<Number>(text);
  // Written so that NaN is refused too.
  return value && *value >= least && *value <= most ? value : std::nullopt;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream{std::string(text)};
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  if (text.empty() || text.back() == separator) parts.emplace_back();
  return parts;
}

/// Sets a field to the one of `values` that is written so.
template <typename Field, typename Values>
bool set_named(Field& field, const Values& values, std::string_view text) {
  const auto found =
      std::ranges::find(values, text, [](const auto& value) { return to_string(value); });
  if (found == std::end(values)) return false;
  field = *found;
  return true;
}

bool set_layout(BenchModel& model, std::string_view text) {
  return set_named(model.layout, std::array{KVCacheLayout::kNHD, KVCacheLayout::kHND}, text);
}

constexpr std::pair<CacheOp, std::string_view> kOps[] = {
    {CacheOp::kWrite, "write"},      {CacheOp::kReshapeAndCache, "reshape_and_cache"},
    {CacheOp::kAppend, "append"},    {CacheOp::kCopyBlocks, "copy_blocks"},
    {CacheOp::kSwapOut, "swap_out"}, {CacheOp::kSwapIn, "swap_in"},
    {CacheOp::kGather, "gather"},
};

bool set_op(BenchModel& model, std::string_view text) {
  const auto* const row = std::ranges::find(kOps, text, [](const auto& op) { return op.second; });
  if (row == std::end(kOps)) return false;
  model.op = row->first;
  return true;
}

bool set_span(BenchModel& model, std::string_view text) {
  const auto tokens = parse_number<std::int32_t>(text, 0, kMaxLength);
  model.span = tokens.value_or(0);
  model.config.use_spans = model.span > 0;
  return tokens.has_value();
}

bool set_directions(BenchModel& model, std::string_view text) {
  model.config.use_directions = text == "yes";
  return text == "yes" || text == "no";
}

bool set_keep_keys(BenchModel& model, std::string_view text) {
  const auto keys = parse_number<std::int32_t>(text, 0, kMaxLength);
  model.keep_keys = keys.value_or(0);
  model.config.use_keep_keys = model.keep_keys > 0;
  return keys.has_value();
}

/// A tree of drafts, which rows see as a list of the batch or through a dense mask.
template <bool AttentionConfig::*kForm>
bool set_tree(BenchModel& model, std::string_view text) {
  const auto children = parse_number<std::int32_t>(text, 0, kMaxTreeNodes);
  model.tree = children.value_or(0);
  model.config.*kForm = model.tree > 0;
  return children.has_value();
}
constexpr std::string_view kLegalTree = "drafts that each draft has, 0 ... 256 (0 = no tree)";

/// A number of a model's delta nets.
template <std::int32_t DeltaNet::*kField, std::int32_t kLeast, std::int32_t kMost,
          std::int32_t kStep = 1>
bool set_net(BenchModel& model, std::string_view text) {
  const auto number = parse_number<std::int32_t>(text, kLeast, kMost);
  model.delta_net.*kField = number.value_or(0);
  return number && *number % kStep == 0;
}

bool set_state_dtype(BenchModel& model, std::string_view text) {
  return set_named(model.delta_net.state_dtype, std::array{DType::kF32, DType::kF16, DType::kBF16},
                   text);
}

bool set_method(BenchModel& model, std::string_view text) {
  model.delta_net.in_chunks = text != "loop";
  const bool in_f32 = text == "chunk_f32";
  model.delta_net.kernel_family = in_f32 ? KernelFamily::kGpu : KernelFamily::kAuto;
  return in_f32 || text == "chunk" || text == "loop";
}

constexpr std::string_view kLegalDim = "a multiple of 16, 16 ... 256";

/// What a model has beyond its configuration.
struct Option {
  std::string_view key;
  bool (*set)(BenchModel&, std::string_view);
  std::string_view legal;
  bool recurrent = false;  ///< of recurrent layers
};
constexpr Option kOptions[] = {
    {"op", set_op,
     "write, reshape_and_cache, append, copy_blocks, swap_out, swap_in or gather (of latent rows)"},
    {"layout", set_layout, "NHD or HND"},
    {"span", set_span, "a number of tokens, 0 ... 16777216 (0 = none)"},
    {"directions", set_directions, "yes or no"},
    {"keep_keys", set_keep_keys, "a number of keys, 0 ... 16777216 (0 = none)"},
    {"tree", set_tree<&AttentionConfig::use_trees>, kLegalTree},
    {"masked_tree", set_tree<&AttentionConfig::custom_mask>, kLegalTree},
    {"num_k_heads", set_net<&DeltaNet::num_k_heads, 1, 65536>, "1 ... 65536", true},
    {"num_v_heads", set_net<&DeltaNet::num_v_heads, 1, 65536>, "1 ... 65536", true},
    {"head_k_dim", set_net<&DeltaNet::head_k_dim, 16, 256, 16>, kLegalDim, true},
    {"head_v_dim", set_net<&DeltaNet::head_v_dim, 16, 256, 16>, kLegalDim, true},
    {"conv_width", set_net<&DeltaNet::conv_width, 2, 8>, "2 ... 8", true},
    {"full_attention_interval", set_net<&DeltaNet::full_attention_interval, 2, 256>, "2 ... 256",
     true},
    {"state_dtype", set_state_dtype, "f32, f16 or bf16", true},
    {"method", set_method, "chunk, chunk_f32 or loop", true},
};

/// Sets a field of the configuration; false if there is none of this name. Lists are on or off:
/// their values follow once the number of heads is known.
bool set_config(AttentionConfig& config, const std::string& key, const std::string& text) {
  bool found = false;
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    if (row.name != key) return;
    found = true;
    if (!row.legal.array.empty()) throw ShapeFault{key, text, "none, as rows bring no such tensor"};
    if constexpr (std::is_same_v<Value, std::vector<float>>) {
      if (text != "yes" && text != "no") throw ShapeFault{key, text, "yes or no"};
      (config.*row.member).assign(text == "yes" ? 1 : 0, 0);
    } else {
      try {
        set_field(config, key, text);
      } catch (const Error&) {
        throw ShapeFault{key, text, std::string(row.legal.words)};
      }
    }
  });
  return found;
}

std::vector<std::string_view> names_of_keys() {
  std::vector<std::string_view> names;
  for_each_field([&](const auto& row) { names.push_back(row.name); });
  for (const Option& option : kOptions) names.push_back(option.key);
  return names;
}

void apply_options(BenchModel& model, std::span<const std::string> words) {
  for (const std::string& word : words) {
    const std::size_t equals = std::min(word.find('='), word.size());
    const std::string key = word.substr(0, equals);
    const std::string value = equals == word.size() ? "" : word.substr(equals + 1);
    if (equals < word.size() && set_config(model.config, key, value)) continue;
    const auto* const option = std::ranges::find(kOptions, key, &Option::key);
    if (equals == word.size() || option == std::end(kOptions)) {
      throw ShapeFault{
          "option", word,
          fmt::format("KEY=VALUE with KEY one of {}", fmt::join(names_of_keys(), ", "))};
    }
    if (!option->set(model, value)) throw ShapeFault{key, value, std::string(option->legal)};
  }
  AttentionConfig& config = model.config;
  if (config.num_heads % std::max(config.num_kv_heads, 1) != 0) {
    throw ShapeFault{"num_heads", std::to_string(config.num_heads),
                     fmt::format("a multiple of num_kv_heads, {}", config.num_kv_heads)};
  }
  if (config.use_mla && config.rope_dim >= config.head_size) {
    throw ShapeFault{"rope_dim", std::to_string(config.rope_dim),
                     fmt::format("less than head_size, {}", config.head_size)};
  }
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    if constexpr (std::is_same_v<Value, std::vector<float>>) {
      Value& values = config.*row.member;
      if (!values.empty()) values.resize(to_size(config.num_heads));
      for (std::size_t h = 0; h < values.size(); ++h)
        values[h] = 0.5F * static_cast<float>(h % 5) - 1.0F;
    }
  });
}

BenchModel parse_model(std::span<const std::string> words) {
  if (words.size() < 2) throw ShapeFault{"model", "", "model NAME KEY=VALUE..."};
  BenchModel model{.name = words[1]};
  apply_options(model, words.subspan(2));
  for (const auto& [key, value] : {std::pair{"num_heads", model.config.num_heads},
                                   {"num_kv_heads", model.config.num_kv_heads},
                                   {"head_size", model.config.head_size}}) {
    if (value == 0)
      throw ShapeFault{key, "missing", "num_heads, num_kv_heads and head_size of every model"};
  }
  return model;
}

std::int64_t count_tokens(std::span<const RequestShape> requests) {
  std::int64_t tokens = 0;
  for (const RequestShape& request : requests) tokens += request.query_len;
  return tokens;
}

/// Digits, then perhaps a k, which stands for 1024. Takes them off `text`.
std::optional<std::int64_t> take_number(std::string_view& text) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  auto value = parse_number<std::int64_t>(text.substr(0, digits), 1, kMaxLength);
  text.remove_prefix(digits);
  if (value && text.starts_with('k')) {
    text.remove_prefix(1);
    *value *= 1024;
  }
  return value;
}

/// Bounds the memory that a file can ask for: a few characters can stand for many requests.
struct Budget {
  static constexpr std::int64_t kRequests = 1 << 20, kRows = 4096;
  std::int64_t requests = kRequests, rows = kRows;

  void take_requests(std::int64_t count) {
    requests -= count;
    if (requests < 0)
      throw ShapeFault{"requests", "more", fmt::format("{} in all rows and batches", kRequests)};
  }
  void take_row() {
    if (--rows < 0) throw ShapeFault{"rows", "more", fmt::format("{} of a file", kRows)};
  }
};

/// Adds [COUNT]qLENGTH[k][sLENGTH[k]], joined by _, as vLLM's benchmarks write batches.
void add_requests(std::vector<RequestShape>& requests, const std::string& batch, Budget& budget) {
  const ShapeFault fault{
      "batch", batch,
      "[COUNT]qTOKENS[k][sCONTEXT[k]] joined by _, CONTEXT at least TOKENS (its value "
      "where it is left out), at most 16777216 tokens and 65536 requests"};
  std::int64_t tokens = count_tokens(requests);
  for (const std::string& part : split(batch, '_')) {
    std::string_view rest = part;
    const auto count = rest.starts_with('q') ? 1 : take_number(rest);
    if (!count || !rest.starts_with('q')) throw fault;
    rest.remove_prefix(1);
    const auto query_len = take_number(rest);
    auto seq_len = query_len;
    if (rest.starts_with('s')) {
      rest.remove_prefix(1);
      seq_len = take_number(rest);
    }
    if (!query_len || !seq_len || !rest.empty() || *query_len > *seq_len || *seq_len > kMaxLength ||
        *count + static_cast<std::int64_t>(requests.size()) > kMaxRequests) {
      throw fault;
    }
    tokens += *count * *query_len;
    if (tokens > kMaxLength) throw fault;
    budget.take_requests(*count);
    requests.insert(requests.end(), to_size(*count),
                    {static_cast<std::int32_t>(*query_len), static_cast<std::int32_t>(*seq_len)});
  }
}

/// A batch that has a name of its own.
struct NamedBatch {
  std::vector<RequestShape> requests;
  bool has_rows = false;
};
using NamedBatches = std::map<std::string, NamedBatch>;

/// batch NAME BATCH...: the parts make one batch; more lines of the name add to it.
void add_batch(NamedBatches& batches, std::span<const std::string> words, Budget& budget) {
  if (words.size() < 3) throw ShapeFault{"batch", "", "batch NAME BATCH..."};
  NamedBatch& batch = batches[words[1]];
  if (batch.has_rows)
    throw ShapeFault{"batch", words[1], "all lines of a batch before its first row"};
  for (const std::string& part : words.subspan(2)) add_requests(batch.requests, part, budget);
}

/// What a row's word for a batch stands for, decodes first.
std::vector<RequestShape> requests_of(NamedBatches& batches, const std::string& batch,
                                      Budget& budget) {
  std::vector<RequestShape> requests;
  const auto named = batches.find(batch);
  if (named == batches.end()) {
    add_requests(requests, batch, budget);
  } else {
    named->second.has_rows = true;
    budget.take_requests(std::ssize(named->second.requests));
    requests = named->second.requests;
  }
  std::stable_partition(requests.begin(), requests.end(),
                        [](const RequestShape& request) { return request.query_len == 1; });
  return requests;
}

/// Refuses what a row's own options would not change.
void check_own_options(const BenchShape& shape, std::span<const std::string> own) {
  for (const std::string& word : own) {
    const std::string key = word.substr(0, word.find('=')), value = word.substr(key.size() + 1);
    const auto* const option = std::ranges::find(kOptions, key, &Option::key);
    const bool recurrent = option != std::end(kOptions) && option->recurrent;
    if (recurrent == shape.is_recurrent() || key == "dtype") continue;
    throw ShapeFault{key, value, fmt::format("none in rows of suite {}", shape.suite)};
  }
}

/// A line's rows, one a batch of its list.
std::vector<BenchShape> parse_rows(const BenchModel* model, NamedBatches& batches,
                                   std::span<const std::string> words, Budget& budget) {
  const std::string& suite = words[0];
  if (std::ranges::find(bench_suites(), suite) == bench_suites().end()) {
    throw ShapeFault{"suite", suite,
                     fmt::format("model, batch or {}", fmt::join(bench_suites(), ", "))};
  }
  if (model == nullptr) throw ShapeFault{"suite", suite, "a model line before the first row"};
  if (words.size() < 3) throw ShapeFault{"row", suite, "SUITE SETS BATCH [KEY=VALUE...]"};
  std::vector<BenchShape> shapes;
  for (const std::string& batch : split(words[2], ',')) {
    budget.take_row();
    BenchShape shape{.model = *model,
                     .suite = suite,
                     .batch = batch,
                     .options = fmt::format("{}", fmt::join(words.subspan(3), "/")),
                     .sets = split(words[1], ','),
                     .requests = requests_of(batches, batch, budget)};
    for (const std::string& set : shape.sets) {
      if (std::ranges::find(kSets, set) == kSets.end())
        throw ShapeFault{"sets", set, "quick, cpu and gpu, joined by commas"};
    }
    apply_options(shape.model, words.subspan(3));
    check_own_options(shape, words.subspan(3));
    check_recurrent(shape);
    if (!shape.is_recurrent()) {
      check_op(shape);
      check_format(shape);
      check_contiguous(shape);
      add_lists(shape);
    }
    shapes.push_back(std::move(shape));
  }
  return shapes;
}

}  // namespace

std::string BenchShape::name() const {
  return fmt::format("{}/{}/{}{}{}", model.name, suite, batch, options.empty() ? "" : "/", options);
}

bool BenchShape::in_set(std::string_view set) const {
  return std::ranges::find(sets, set) != sets.end();
}

bool BenchShape::is_recurrent() const {
  return suite == "gdn_decode" || suite == "gdn_prefill" || suite == "conv";
}

std::int32_t BenchShape::num_tokens() const {
  return static_cast<std::int32_t>(count_tokens(requests));
}

std::int32_t BenchShape::max_query_len() const {
  return std::ranges::max_element(requests, {}, &RequestShape::query_len)->query_len;
}

std::int32_t BenchShape::max_seq_len() const {
  return std::ranges::max_element(requests, {}, &RequestShape::seq_len)->seq_len;
}

std::string_view to_string(CacheOp op) {
  return std::ranges::find(kOps, op, [](const auto& known) { return known.first; })->second;
}

const std::vector<std::string>& bench_suites() {
  static const std::vector<std::string> suites = {
      "decode",   "prefill",      "mixed",      "spec",        "cache", "merge",
      "metadata", "startup",      "first_step", "warmed_step", "step",  "replay",
      "lengths",  "mixed_replay", "gdn_decode", "gdn_prefill", "conv"};
  return suites;
}

std::vector<BenchShape> parse_shapes(std::string_view text, std::string_view name) {
  std::vector<BenchShape> shapes;
  std::set<std::string> names;
  std::optional<BenchModel> model;
  NamedBatches batches;
  Budget budget;
  each_line(text, name, [&](const std::vector<std::string>& words, const std::string& where) {
    try {
      if (words[0] == "model") {
        model = parse_model(words);
        return;
      }
      if (words[0] == "batch") return add_batch(batches, words, budget);
      for (BenchShape& shape : parse_rows(model ? &*model : nullptr, batches, words, budget)) {
        if (!names.insert(shape.name()).second) {
          throw ShapeFault{"row", shape.name(), "each row once; name several sets in one row"};
        }
        shapes.push_back(std::move(shape));
      }
    } catch (const ShapeFault& fault) {
      throw_invalid("{}: {}: '{}', legal: {}", where, fault.field, fault.value, fault.legal);
    }
  });
  return shapes;
}

}  // namespace clattn::cli
