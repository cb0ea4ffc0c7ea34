// Decodes with trees of drafts and without: the same tokens, in fewer steps. The model is a small
// one of random weights that runs on the host but for its attention. Its drafts are what it would
// say without attention: of each token the two most likely followers, and theirs, 14 in all.
#include <algorithm>
#include <array>
#include <clattn/clattn.hpp>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <tuple>
using namespace clattn;

namespace {

using Ints = std::vector<std::int32_t>;
using Floats = std::vector<float>;

constexpr std::size_t kVocabulary = 96, kHidden = 64, kLayers = 3, kHeads = 4, kKVHeads = 2;
constexpr std::size_t kHeadSize = 16, kDrafts = 2 + 4 + 8;
constexpr std::int32_t kPromptTokens = 10, kNewTokens = 64;

std::size_t index(std::int32_t value) {
  return static_cast<std::size_t>(value);
}

/// rows x columns numbers between -size and size.
struct Matrix {
  Matrix(std::size_t rows, std::size_t columns, float size, std::mt19937& random)
      : values(rows * columns), num_columns(columns) {
    for (float& value : values) value = size * (static_cast<float>(random()) / 2147483648.F - 1);
  }
  std::span<const float> row(std::size_t i) const {
    return std::span(values).subspan(i * num_columns, num_columns);
  }
  Floats times(std::span<const float> vector) const {
    Floats product;
    for (std::size_t i = 0; i < values.size() / num_columns; ++i)
      product.push_back(std::inner_product(vector.begin(), vector.end(), row(i).begin(), 0.F));
    return product;
  }
  Floats values;
  std::size_t num_columns;
};

/// Rotates each head of a query or key for its position (RoPE).
void rotate(std::span<float> heads, std::int32_t position) {
  constexpr std::size_t kHalf = kHeadSize / 2;
  for (std::size_t at = 0; at < heads.size(); at += kHeadSize)
    for (std::size_t i = at; i < at + kHalf; ++i) {
      const float exponent = -static_cast<float>(i - at) / kHalf;
      const float angle = static_cast<float>(position) * std::pow(10000.F, exponent);
      const float a = heads[i], b = heads[i + kHalf];
      heads[i] = a * std::cos(angle) - b * std::sin(angle);
      heads[i + kHalf] = a * std::sin(angle) + b * std::cos(angle);
    }
}

struct Layer {
  explicit Layer(std::mt19937& random)
      : query(kHeads * kHeadSize, kHidden, 0.4F, random),
        key(kKVHeads * kHeadSize, kHidden, 0.4F, random),
        value(kKVHeads * kHeadSize, kHidden, 0.2F, random),
        output(kHidden, kHeads * kHeadSize, 0.1F, random) {}
  Matrix query, key, value, output;
};

class Model {
 public:
  Model()
      : embedding_(kVocabulary, kHidden, 1, random_), logits_(kVocabulary, kHidden, 1, random_) {
    for (std::size_t i = 0; i < kLayers; ++i) layers_.emplace_back(random_);
  }

  /// Runs a step; gives of each row the most likely next token.
  Ints run(Session& session, const Step& step) const {
    std::vector<Floats> rows;
    for (const std::int32_t token : step.token_ids) {
      const auto embedded = embedding_.row(index(token));
      rows.emplace_back(embedded.begin(), embedded.end());
    }
    for (std::size_t l = 0; l < kLayers; ++l) run_layer(session, step, l, rows);
    Ints next;
    for (const Floats& row : rows) next.push_back(followers(row)[0]);
    return next;
  }

  /// Drafts behind the newest token: their tokens and their parents.
  std::pair<Ints, Ints> guess(std::int32_t newest) const {
    Ints tokens, parents;
    for (std::int32_t node = -1; tokens.size() < kDrafts; ++node) {
      const std::int32_t token = node < 0 ? newest : tokens[index(node)];
      for (const std::int32_t follower : followers(embedding_.row(index(token)))) {
        tokens.push_back(follower);
        parents.push_back(node);
      }
    }
    return {tokens, parents};
  }

 private:
  /// The two most likely tokens after a hidden state.
  std::array<std::int32_t, 2> followers(std::span<const float> hidden) const {
    Floats scores = logits_.times(hidden);
    std::array<std::int32_t, 2> best{};
    for (std::int32_t& token : best) {
      const auto found = std::max_element(scores.begin(), scores.end());
      token = static_cast<std::int32_t>(found - scores.begin());
      *found = -INFINITY;
    }
    return best;
  }

  void run_layer(Session& session, const Step& step, std::size_t l,
                 std::vector<Floats>& rows) const {
    const Layer& layer = layers_[l];
    Floats tensors[3];
    for (std::size_t row = 0; row < rows.size(); ++row) {
      Floats parts[3] = {layer.query.times(rows[row]), layer.key.times(rows[row]),
                         layer.value.times(rows[row])};
      for (Floats* const rotated : {&parts[0], &parts[1]}) rotate(*rotated, step.positions[row]);
      for (std::size_t i = 0; i < 3; ++i)
        tensors[i].insert(tensors[i].end(), parts[i].begin(), parts[i].end());
    }
    Buffer buffers[3];
    for (std::size_t i = 0; i < 3; ++i) {
      buffers[i] = session.context()->allocate(tensors[i].size() * sizeof(float));
      session.queue().write(buffers[i], std::as_bytes(std::span(tensors[i])));
    }
    const Buffer out = session.context()->allocate(buffers[0].size_bytes());
    session.attend(static_cast<std::int32_t>(l), {.query = {buffers[0].handle()},
                                                  .key = {buffers[1].handle()},
                                                  .value = {buffers[2].handle()},
                                                  .output = {out.handle()}});
    Floats attended(tensors[0].size());
    session.queue().read(out, std::as_writable_bytes(std::span(attended)));
    constexpr std::size_t kWidth = kHeads * kHeadSize;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const Floats added = layer.output.times(std::span(attended).subspan(row * kWidth, kWidth));
      for (std::size_t i = 0; i < kHidden; ++i) rows[row][i] += added[i];
    }
  }

  std::mt19937 random_{20261130};
  Matrix embedding_, logits_;
  std::vector<Layer> layers_;
};

struct Result {
  Ints tokens;
  int num_steps = 0;
};

/// The prompt and what follows it. Either kind computes all of it, as `salt` differs.
Result generate(Session& session, const Model& model, const Ints& prompt, bool with_drafts) {
  Result result;
  StepRequest part{.id = session.add(prompt, with_drafts ? 1 : 0)};
  std::int32_t newest = prompt.back();
  while (session.tokens(part.id).size() < prompt.size() + kNewTokens) {
    if (with_drafts) std::tie(part.drafts, part.draft_parents) = model.guess(newest);
    const Step& step = session.step({part});
    const Ints next = model.run(session, step);
    const std::int32_t row = step.last_row(0);  // the first draft's is the one behind it
    std::int32_t last = -1;                     // accepted draft
    Ints path;
    for (std::int32_t draft = 0; draft < step.num_drafts[0]; ++draft) {
      if (part.draft_parents[index(draft)] == last &&
          part.drafts[index(draft)] == next[index(row + 1 + last)])
        path.push_back(last = draft);
    }
    if (with_drafts) session.accept(part.id, path);
    newest = next[index(row + 1 + last)];
    part.new_tokens = {newest};
    ++result.num_steps;
  }
  session.truncate(part.id, kPromptTokens + kNewTokens);  // a path may lead further
  const auto tokens = session.tokens(part.id);
  result.tokens.assign(tokens.begin(), tokens.end());
  session.finish(part.id);
  return result;
}

void print(const char* name, const Result& result) {
  std::printf("%s: %d steps for", name, result.num_steps);
  for (const std::int32_t token : std::span(result.tokens).subspan(kPromptTokens))
    std::printf(" %d", token);
  std::printf("\n");
}

}  // namespace

int main() {
  AttentionOptions layer;
  layer.config.num_heads = kHeads;
  layer.config.num_kv_heads = kKVHeads;
  layer.config.head_size = kHeadSize;
  layer.config.dtype = DType::kF32;
  layer.config.use_trees = true;
  SessionConfig config{.layers = std::vector(kLayers, layer), .num_blocks = 16};
  config.layers[1].config.sliding_window = 24;
  config.builder.decode_threshold = 1 + kDrafts;  // such steps run decode kernels
  Session session(config);
  const Model model;
  Ints prompt(kPromptTokens);
  std::iota(prompt.begin(), prompt.end(), 1);
  const Result plain = generate(session, model, prompt, false);
  const Result drafted = generate(session, model, prompt, true);
  print("plain", plain);
  print("drafts", drafted);
  const bool same = plain.tokens == drafted.tokens;
  std::printf("%s\n", same ? "the same tokens" : "OTHER TOKENS");
  return same && drafted.num_steps < plain.num_steps ? 0 : 1;
}
