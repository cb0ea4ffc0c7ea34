#include <algorithm>
#include <array>
#include <clattn/config_fields.hpp>
#include <random>

#include "program/fuzz/recipe.hpp"

namespace clattn::cli {
namespace {

/// Draws that depend on the seeds alone, not on a standard library's distributions.
class Dice {
 public:
  Dice(std::uint32_t seed, std::uint64_t stream, std::uint64_t index) {
    std::seed_seq seeds{std::uint64_t{seed}, stream, index & 0xFFFFFFFFU, index >> 32U};
    generator_.seed(seeds);
  }
  /// An integer in [low, high].
  std::int32_t between(std::int32_t low, std::int32_t high) {
    const auto count = static_cast<std::uint64_t>(std::int64_t{high} - low + 1);
    return static_cast<std::int32_t>(low + static_cast<std::int64_t>(generator_() % count));
  }
  bool percent(std::int32_t chance) { return between(1, 100) <= chance; }
  template <typename Range>
  auto pick(const Range& from) {
    return from[static_cast<std::size_t>(
        between(0, static_cast<std::int32_t>(std::size(from)) - 1))];
  }

 private:
  std::mt19937_64 generator_;
};

constexpr std::array kTypes = {DType::kF16, DType::kF16, DType::kBF16, DType::kF32};
constexpr std::array kByteTypes = {DType::kFp8E4M3, DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8};
constexpr std::int32_t kHeadSizes[] = {64,  64,  128, 128, 32, 72, 80, 96,
                                       112, 120, 192, 256, 8,  40, 16, 104};
constexpr std::int32_t kUnusualHeadSizes[] = {20, 4, 264};  // refused everywhere
constexpr std::int32_t kBlockSizes[] = {16, 16, 16, 32, 64, 48, 8, 1, 5};
constexpr std::int32_t kGroups[] = {1, 1, 2, 4, 4, 6, 7, 8, 16};
constexpr std::int32_t kEdges[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257};
constexpr std::int32_t kMostRequests = 9;

/// Lengths of queries and histories by what they make the kernels do.
struct BatchKind {
  std::int32_t shortest_query, longest_query;
  bool history;
};
constexpr BatchKind kBatchKinds[] = {
    {1, 1, true},    {1, 1, true},                   // decodes
    {2, 8, true},    {1, 16, true},                  // speculative ones
    {1, 200, false}, {17, 200, true},                // prompts, parts of prompts
    {0, 100, true},  {0, 300, true},  {0, 3, true},  // all sorts
};

/// A length up to `most`, often where tiles and pages begin and end.
std::int32_t draw_length(Dice& dice, std::int32_t most) {
  if (most <= 0) return 0;
  if (dice.percent(40)) return std::min(dice.pick(kEdges), most);
  return dice.between(1, dice.percent(50) ? most : std::min(most, 70));
}

std::vector<RequestShape> draw_requests(Dice& dice, std::int32_t most_tokens) {
  const BatchKind kind = dice.pick(kBatchKinds);
  std::vector<RequestShape> requests;
  std::int32_t left = most_tokens;
  for (std::int32_t count = dice.between(1, kMostRequests); count > 0 && left > 0; --count) {
    const std::int32_t longest = std::min(kind.longest_query, left);
    std::int32_t query = draw_length(dice, longest);
    query = std::clamp(query, std::min(kind.shortest_query, longest), longest);
    if (kind.shortest_query == 0 && dice.percent(15)) query = 0;
    const std::int32_t history =
        kind.history && !dice.percent(10) ? draw_length(dice, left - query) : 0;
    requests.push_back({query, query + history});
    left -= query + history;
  }
  return requests;
}

/// Spans of a prompt, of which the last ones may reach beyond its keys.
std::vector<KeySpan> draw_spans(Dice& dice, std::int32_t seq_len) {
  std::vector<KeySpan> spans;
  std::int32_t at = 0;
  while (at <= seq_len && !dice.percent(25)) {
    const std::int32_t first = at + (dice.percent(30) ? 0 : draw_length(dice, seq_len - at));
    at = first + (dice.percent(10) ? dice.between(0, 1) : draw_length(dice, seq_len));
    spans.push_back({first, at});
  }
  return spans;
}

/// A tree of a request's drafts: its query tokens and some that are stored already. Parents mostly
/// stand not far before their children.
std::vector<std::int32_t> draw_tree(Dice& dice, const RequestShape& request) {
  std::vector<std::int32_t> parents;
  const std::int32_t most = std::min(kMaxTreeNodes, request.seq_len);
  if (request.query_len > most) return parents;
  const std::int32_t nodes =
      dice.percent(60) ? request.query_len : dice.between(request.query_len, most);
  for (std::int32_t node = 0; node < nodes; ++node)
    parents.push_back(node - 1 - dice.between(0, std::min(node, dice.percent(20) ? node : 3)));
  return parents;
}

/// What a request says of its keys beyond their number. Layers that do not look at spans now and
/// then get some, too.
void draw_lists(Dice& dice, const AttentionConfig& config, RequestShape& request) {
  constexpr std::array kDirections = {Direction::kBothWays, Direction::kCausal, Direction::kCanvas};
  if (config.use_directions) request.direction = dice.pick(kDirections);
  if (config.use_first_keys && dice.percent(60))
    request.first_key = draw_length(dice, request.seq_len);
  if (config.use_keep_keys && dice.percent(70))
    request.keep_keys = draw_length(dice, request.seq_len);
  if (config.use_trees && dice.percent(50)) {
    request.direction = Direction::kCausal;
    request.parents = draw_tree(dice, request);
    return;
  }
  if (dice.percent(config.use_spans ? 70 : 2)) request.spans = draw_spans(dice, request.seq_len);
}

void draw_types(Dice& dice, AttentionConfig& config) {
  config.dtype = dice.pick(kTypes);
  if (dice.percent(45)) config.kv_cache_dtype = dice.pick(kByteTypes);
  if (dice.percent(4)) config.kv_cache_dtype = dice.pick(kTypes);
}

/// A value other than the default, up to what its row says.
///@{
void draw_value(Dice& dice, const ConfigField<std::int32_t>& row, AttentionConfig& config) {
  config.*row.member = row.standard + draw_length(dice, row.random.most);
}
void draw_value(Dice&, const ConfigField<bool>& row, AttentionConfig& config) {
  config.*row.member = true;
}
template <typename Number>
void draw_value(Dice& dice, const ConfigField<Number>& row, AttentionConfig& config) {
  if constexpr (std::is_same_v<Number, float> || std::is_same_v<Number, std::optional<float>>)
    config.*row.member = static_cast<float>(row.random.most * dice.between(1, 100)) / 100;
}
void draw_value(Dice&, const ConfigField<std::vector<float>>& row, AttentionConfig& config) {
  config.*row.member = per_head_values(config.num_heads, row.legal.minus_infinity);
}
///@}

/// The options that rows of the configuration leave to chance, if `takes(row)`.
template <typename Takes>
void draw_options(Dice& dice, AttentionConfig& config, Takes takes) {
  for_each_field([&](const auto& row) {
    if (dice.percent(row.random.percent) && takes(row)) draw_value(dice, row, config);
  });
}

void draw_attention_type(Dice& dice, AttentionConfig& config) {
  if (dice.percent(88)) return;
  constexpr std::array kOthers = {AttentionType::kEncoderDecoder, AttentionType::kEncoderOnly,
                                  AttentionType::kEncoder};
  config.attn_type = dice.pick(kOthers);
  if (config.attn_type == AttentionType::kEncoderDecoder) return;
  config.block_size = 0;  // no pages
  config.kv_cache_dtype = std::nullopt;
}

void draw_latent(Dice& dice, AttentionConfig& config) {
  constexpr std::int32_t kRanks[] = {512, 512, 128, 64, 256, 48};
  constexpr std::int32_t kHeads[] = {16, 1, 8, 5, 24};
  config.use_mla = true;
  config.rope_dim = dice.percent(70) ? 64 : 8 * dice.between(1, 8);
  config.head_size = dice.pick(kRanks) + config.rope_dim;
  config.num_kv_heads = 1;
  config.num_heads = dice.pick(kHeads);
}

/// Which lists of a batch the layer looks at, all of them together now and then. Most of what they
/// say depends on a window.
void draw_list_options(Dice& dice, AttentionConfig& config) {
  constexpr std::array kRules = {SpanRule::kWhole, SpanRule::kClipLeft, SpanRule::kClipBoth};
  if (!dice.percent(30)) return;
  const std::int32_t chance = dice.percent(25) ? 100 : 40;
  config.use_spans = dice.percent(chance);
  config.use_directions = dice.percent(chance);
  config.use_first_keys = dice.percent(chance);
  config.use_keep_keys = dice.percent(chance);
  config.use_trees = dice.percent(20);
  config.span_rule = dice.pick(kRules);
  if (dice.percent(50)) config.window_left = draw_length(dice, dice.between(1, 70)) - 1;
  if (dice.percent(25)) config.window_right = draw_length(dice, dice.between(1, 70)) - 1;
}

KernelFamily draw_family(Dice& dice, KernelFamily forced) {
  if (forced != KernelFamily::kAuto) return forced;
  return dice.percent(80) ? KernelFamily::kAuto : dice.pick(kKernelFamilies);
}

void draw_layer(Dice& dice, Recipe& recipe) {
  AttentionConfig& config = recipe.config;
  const std::int32_t order = dice.between(1, 100);
  draw_types(dice, config);
  config.block_size = dice.pick(kBlockSizes);
  if (order <= 12) {
    recipe.order = CacheOrder::kLatent;
    draw_latent(dice, config);
    return draw_options(dice, config,
                        [](const auto& row) { return (row.takers & field::kLatent) != 0; });
  }
  config.head_size = dice.percent(2) ? dice.pick(kUnusualHeadSizes) : dice.pick(kHeadSizes);
  config.num_kv_heads = dice.between(1, 4);
  config.num_heads = config.num_kv_heads * dice.pick(kGroups);
  if (order <= 22) {
    recipe.order = CacheOrder::kPacked;
    return draw_options(dice, config,
                        [](const auto& row) { return (row.takers & field::kPacked) != 0; });
  }
  draw_options(dice, config, [](const auto&) { return true; });
  draw_attention_type(dice, config);
  if (dice.percent(8)) recipe.backend = dice.percent(50) ? "XFORMERS" : "FLASHINFER";
}

/// Now and then a large head, or values of fewer elements.
void draw_sizes(Dice& dice, AttentionConfig& config) {
  if (dice.percent(4)) config.head_size = 8 * dice.between(33, 64);
  if (dice.percent(12)) config.head_size_v = 8 * dice.between(1, std::max(config.head_size / 8, 1));
}

void draw_plan(Dice& dice, Recipe& recipe) {
  PlanOptions& plan = recipe.plan;
  if (dice.percent(40)) recipe.batch.num_splits = dice.between(1, 8);
  if (dice.percent(15)) plan.split_policy = SplitPolicy::kDeterministic;
  plan.fast_build = dice.percent(10);
  plan.side_by_side = !dice.percent(10);
  if (dice.percent(20)) plan.decode_threshold = dice.between(2, 8);
  if (dice.percent(12)) {
    plan.limits = BatchLimits{
        .max_num_reqs = 4 * kMostRequests, .max_num_batched_tokens = 4096, .max_model_len = 8192};
  }
}

void draw_batch(Dice& dice, std::int32_t most_tokens, Recipe& recipe) {
  constexpr double kSizes[] = {1, 1, 1, 0.015625, 4};
  constexpr std::array kLayouts = {KVCacheLayout::kNHD, KVCacheLayout::kHND};
  BatchFamily& batch = recipe.batch;
  batch.requests = draw_requests(dice, most_tokens);
  batch.causal = !dice.percent(10);
  batch.scales_per_head = recipe.order != CacheOrder::kLatent && dice.percent(30);
  batch.size = dice.pick(kSizes);
  if (dice.percent(10)) batch.common_prefix_len = recipe.config.block_size * dice.between(1, 4);
  draw_plan(dice, recipe);
  if (recipe.order == CacheOrder::kPages && dice.percent(60)) recipe.layout = dice.pick(kLayouts);
  recipe.stores = recipe.order != CacheOrder::kLatent && !dice.percent(25);
  recipe.repeat = dice.between(1, 2);
}

}  // namespace

Recipe draw(const DrawOptions& options, std::uint64_t index) {
  Recipe recipe;
  Dice of_layer(options.seed, 1, index / options.layer_calls), of_batch(options.seed, 2, index);
  draw_layer(of_layer, recipe);
  recipe.config.kernel_family = draw_family(of_layer, options.family);
  if (recipe.order != CacheOrder::kPacked) {
    Dice of_layer_lists(options.seed, 3, index / options.layer_calls);
    draw_list_options(of_layer_lists, recipe.config);
  }
  Dice of_sizes(options.seed, 5, index / options.layer_calls);
  if (recipe.order == CacheOrder::kPages) draw_sizes(of_sizes, recipe.config);
  draw_batch(of_batch, options.most_tokens, recipe);
  Dice of_lists(options.seed, 4, index);
  for (RequestShape& request : recipe.batch.requests) draw_lists(of_lists, recipe.config, request);
  if (of_lists.percent(15)) recipe.batch.padding = of_lists.between(1, 100);
  recipe.seed = static_cast<std::uint32_t>(16 * (std::uint64_t{options.seed} * 1000003 + index));
  normalise(recipe);
  return recipe;
}

}  // namespace clattn::cli
