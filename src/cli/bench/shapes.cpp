#include "cli/bench/shapes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <span>
#include <sstream>

#include "cli/common/error.hpp"
#include "cli/common/text.hpp"

namespace clattn::cli {
namespace {

constexpr std::array<std::string_view, 3> kSets = {"quick", "cpu", "gpu"};
constexpr std::int64_t kMaxLength = 1 << 24, kMaxRequests = 65536;

/// What is wrong with a line: which field, its value and what is legal.
struct Fault {
  std::string field, value, legal;
};

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

template <std::int32_t AttentionConfig::*kField>
bool set_count(BenchModel& model, std::string_view text) {
  const int least = kField == &AttentionConfig::sliding_window ? 0 : 1;
  const auto value = parse_number<std::int32_t>(text, least, 65536);
  if (value) model.config.*kField = *value;
  return value.has_value();
}

bool set_rope_dim(BenchModel& model, std::string_view text) {
  return model.config.use_mla = set_count<&AttentionConfig::rope_dim>(model, text);
}

/// Keys and values without pages.
bool set_head_size_v(BenchModel& model, std::string_view text) {
  model.config.attn_type = AttentionType::kEncoderOnly;
  return set_count<&AttentionConfig::head_size_v>(model, text);
}

bool set_soft_cap(BenchModel& model, std::string_view text) {
  const auto value = parse_number<float>(text, 0, 1e6F);
  model.config.logits_soft_cap = value.value_or(0);
  return value.has_value();
}

bool set_scale(BenchModel& model, std::string_view text) {
  const auto value = parse_number<float>(text, 0, 1e6F);
  model.config.scale = value == 0 ? std::nullopt : value;
  return value.has_value();
}

bool set_dtype(BenchModel& model, std::string_view text) {
  const auto type = find_dtype(text);
  if (!type || is_quantized(*type)) return false;
  model.config.dtype = *type;
  model.config.kv_cache_dtype = type;
  return true;
}

bool set_kv_dtype(BenchModel& model, std::string_view text) {
  const auto type = find_dtype(text);
  if (type) model.config.kv_cache_dtype = type;
  return type.has_value();
}

/// A value for each head follows once their number is known.
bool set_sinks(BenchModel& model, std::string_view text) {
  model.config.sinks.assign(text == "yes" ? 1 : 0, 0);
  return text == "yes" || text == "no";
}

bool set_fp8_products(BenchModel& model, std::string_view text) {
  model.config.fp8_products = text == "yes";
  return text == "yes" || text == "no";
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

bool set_family(BenchModel& model, std::string_view text) {
  return set_named(model.config.kernel_family, kKernelFamilies, text);
}

bool set_layout(BenchModel& model, std::string_view text) {
  return set_named(model.layout,
                   std::array{KVCacheLayout::kNHD, KVCacheLayout::kHND, KVCacheLayout::kHDN}, text);
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

struct Option {
  std::string_view key;
  bool (*set)(BenchModel&, std::string_view);
  std::string_view legal;
};
constexpr Option kOptions[] = {
    {"heads", set_count<&AttentionConfig::num_heads>, "1 to 65536"},
    {"kv_heads", set_count<&AttentionConfig::num_kv_heads>, "1 to 65536"},
    {"head_size", set_count<&AttentionConfig::head_size>, "1 to 65536"},
    {"head_size_v", set_head_size_v, "1 to 65536"},
    {"block_size", set_count<&AttentionConfig::block_size>, "1 to 65536"},
    {"rope_dim", set_rope_dim, "1 to 65536"},
    {"window", set_count<&AttentionConfig::sliding_window>, "0 to 65536"},
    {"soft_cap", set_soft_cap, "0 to 1e6"},
    {"scale", set_scale, "0 to 1e6"},
    {"sinks", set_sinks, "yes or no"},
    {"dtype", set_dtype, "f32, f16 or bf16 (before kv_dtype)"},
    {"kv_dtype", set_kv_dtype, "f32, f16, bf16, fp8_e4m3, fp8_e5m2 or int8"},
    {"fp8_products", set_fp8_products, "yes or no"},
    {"family", set_family, "auto, cpu, gpu, gpu_ptx or gpu_matrix"},
    {"op", set_op,
     "write, reshape_and_cache, append, copy_blocks, swap_out, swap_in or gather (of latent rows)"},
    {"layout", set_layout, "NHD, HND or HDN"},
};

void apply_options(BenchModel& model, std::span<const std::string> words) {
  for (const std::string& word : words) {
    const std::size_t equals = std::min(word.find('='), word.size());
    const std::string key = word.substr(0, equals);
    const auto* const option = std::ranges::find(kOptions, key, &Option::key);
    if (equals == word.size() || option == std::end(kOptions)) {
      throw Fault{"option", word,
                  fmt::format("KEY=VALUE with KEY one of {}",
                              fmt::join(names_of(kOptions, &Option::key), ", "))};
    }
    const std::string value = word.substr(equals + 1);
    if (!option->set(model, value)) throw Fault{key, value, std::string(option->legal)};
  }
  AttentionConfig& config = model.config;
  if (config.num_heads % std::max(config.num_kv_heads, 1) != 0) {
    throw Fault{"heads", std::to_string(config.num_heads),
                fmt::format("a multiple of kv_heads, {}", config.num_kv_heads)};
  }
  if (config.use_mla && config.rope_dim >= config.head_size) {
    throw Fault{"rope_dim", std::to_string(config.rope_dim),
                fmt::format("less than head_size, {}", config.head_size)};
  }
  if (!config.sinks.empty()) config.sinks.resize(to_size(config.num_heads));
  for (std::size_t h = 0; h < config.sinks.size(); ++h)
    config.sinks[h] = 0.5F * static_cast<float>(h % 5) - 1.0F;
}

BenchModel parse_model(std::span<const std::string> words) {
  if (words.size() < 2) throw Fault{"model", "", "model NAME KEY=VALUE..."};
  BenchModel model{.name = words[1]};
  apply_options(model, words.subspan(2));
  for (const auto& [key, value] : {std::pair{"heads", model.config.num_heads},
                                   {"kv_heads", model.config.num_kv_heads},
                                   {"head_size", model.config.head_size}}) {
    if (value == 0) throw Fault{key, "missing", "heads, kv_heads and head_size of every model"};
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
  static constexpr std::size_t kLineBytes = 1 << 14;
  std::int64_t requests = kRequests, rows = kRows;

  void take_requests(std::int64_t count) {
    requests -= count;
    if (requests < 0)
      throw Fault{"requests", "more", fmt::format("{} in all rows and batches", kRequests)};
  }
  void take_row() {
    if (--rows < 0) throw Fault{"rows", "more", fmt::format("{} of a file", kRows)};
  }
};

/// Adds [COUNT]qLENGTH[k][sLENGTH[k]], joined by _, as vLLM's benchmarks write batches.
void add_requests(std::vector<RequestShape>& requests, const std::string& batch, Budget& budget) {
  const Fault fault{
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
  if (words.size() < 3) throw Fault{"batch", "", "batch NAME BATCH..."};
  NamedBatch& batch = batches[words[1]];
  if (batch.has_rows) throw Fault{"batch", words[1], "all lines of a batch before its first row"};
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

/// Whether the suite, the cache and the batch are ones that the row's operation takes.
void check_op(const BenchShape& shape) {
  const CacheOp op = shape.model.op;
  const std::string name(to_string(op));
  if (op == CacheOp::kWrite) return;
  if (shape.suite != "cache") throw Fault{"op", name, "in rows of suite cache"};
  const bool latent = shape.model.config.use_mla;
  if (op == CacheOp::kGather) {
    if (!latent) throw Fault{"op", name, "of latent attention"};
    return;
  }
  if (op == CacheOp::kReshapeAndCache || op == CacheOp::kAppend) {
    if (latent) throw Fault{"op", name, "not of latent attention"};
    if (op == CacheOp::kReshapeAndCache && shape.model.layout) {
      throw Fault{"layout", std::string(to_string(*shape.model.layout)),
                  "none with op reshape_and_cache, whose x-packed pair is one of its own"};
    }
    return;
  }
  const auto more_than_a_page = [&](const RequestShape& request) {
    return request.seq_len > shape.model.config.block_size;
  };
  if (shape.num_reqs() < 2 && !more_than_a_page(shape.requests.front())) {
    throw Fault{"batch", shape.batch, "two pages or more, half of which are copied"};
  }
}

/// Whether a row without pages is one of prompts over their own keys.
void check_contiguous(const BenchShape& shape) {
  const AttentionConfig& config = shape.model.config;
  if (!config.contiguous_kv()) return;
  const std::string size = std::to_string(config.head_size_v);
  if (shape.suite != "prefill") throw Fault{"head_size_v", size, "in rows of suite prefill"};
  if (config.use_mla || config.sliding_window > 0 || config.cache_dtype() != config.dtype)
    throw Fault{"head_size_v", size, "without rope_dim, window and a kv_dtype of its own"};
  for (const RequestShape& request : shape.requests) {
    if (request.seq_len == request.query_len) continue;
    throw Fault{"batch", shape.batch, "with head_size_v, requests without context"};
  }
}

/// A line's rows, one a batch of its list.
std::vector<BenchShape> parse_rows(const BenchModel* model, NamedBatches& batches,
                                   std::span<const std::string> words, Budget& budget) {
  const std::string& suite = words[0];
  if (std::ranges::find(bench_suites(), suite) == bench_suites().end()) {
    throw Fault{"suite", suite, fmt::format("model, batch or {}", fmt::join(bench_suites(), ", "))};
  }
  if (model == nullptr) throw Fault{"suite", suite, "a model line before the first row"};
  if (words.size() < 3) throw Fault{"row", suite, "SUITE SETS BATCH [KEY=VALUE...]"};
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
        throw Fault{"sets", set, "quick, cpu and gpu, joined by commas"};
    }
    apply_options(shape.model, words.subspan(3));
    check_op(shape);
    check_contiguous(shape);
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
      "decode",  "prefill",    "mixed",       "spec", "cache",  "merge",  "metadata",
      "startup", "first_step", "warmed_step", "step", "replay", "lengths"};
  return suites;
}

std::vector<BenchShape> parse_shapes(std::string_view text, std::string_view name) {
  std::vector<BenchShape> shapes;
  std::set<std::string> names;
  std::optional<BenchModel> model;
  NamedBatches batches;
  Budget budget;
  std::istringstream lines{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    throw_invalid_if(line.size() > Budget::kLineBytes, "{}:{}: a line of {} bytes, legal: up to {}",
                     name, number, line.size(), Budget::kLineBytes);
    line.erase(std::min(line.find('#'), line.size()));
    std::istringstream fields(line);
    std::vector<std::string> words;
    for (std::string word; fields >> word;) words.push_back(word);
    if (words.empty()) continue;
    try {
      if (words[0] == "model") {
        model = parse_model(words);
        continue;
      }
      if (words[0] == "batch") {
        add_batch(batches, words, budget);
        continue;
      }
      for (BenchShape& shape : parse_rows(model ? &*model : nullptr, batches, words, budget)) {
        if (!names.insert(shape.name()).second) {
          throw Fault{"row", shape.name(), "each row once; name several sets in one row"};
        }
        shapes.push_back(std::move(shape));
      }
    } catch (const Fault& fault) {
      throw_invalid("{}:{}: {}: '{}', legal: {}", name, number, fault.field, fault.value,
                    fault.legal);
    }
  }
  return shapes;
}

}  // namespace clattn::cli
