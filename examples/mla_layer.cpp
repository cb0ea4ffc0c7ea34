// A decode step of a multi-head latent attention (MLA) layer: CLBlast multiplies by the up and down
// projections, CLAttn attends over the paged latent cache in between, and the result is compared
// with the layer as models define it, keys and values expanded, in double precision.
//
//   k_nope[h] = W_UK[h] c      v[h] = W_UV[h] c          c: a token's latent vector
//   out[h]    = sum_j p_j v_j[h],  p = softmax(scale * (<q_nope, k_nope> + <q_pe, k_pe>))
//
// W_UK moves to the query and W_UV behind the sum, so that a cache entry is (c, k_pe) for all
// heads.
#include <algorithm>
#include <clattn/clattn.hpp>
#include <clattn/mla.hpp>

#include <clblast.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <vector>

namespace {

constexpr std::size_t kHeads = 8, kNope = 32, kRope = 16, kLatent = 64, kValue = 48;
constexpr std::size_t kEntry = kLatent + kRope;  // of the cache, and of an absorbed query
constexpr std::size_t kBlockSize = 16;
const float kScale = 1 / std::sqrt(static_cast<float>(kNope + kRope));
const std::vector<int> kSeqLens = {5, 33, 48};                 // one query token each
const std::vector<int> kBlocks = {4, 0, 0, 2, 6, 1, 5, 0, 3};  // [3, 3]
constexpr std::size_t kNumBlocks = 7;

using Floats = std::vector<float>;

Floats random_floats(std::size_t count, float deviation) {
  static std::mt19937 random(7);
  std::normal_distribution<float> normal(0, deviation);
  Floats values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return values;
}

struct Layer {
  Floats w_uk = random_floats(kHeads * kNope * kLatent, 0.2F);   // [heads, nope, latent]
  Floats w_uv = random_floats(kHeads * kValue * kLatent, 0.2F);  // [heads, value, latent]
};

struct Step {
  Floats q_nope = random_floats(kSeqLens.size() * kHeads * kNope, 1);  // [tokens, heads, nope]
  Floats q_pe = random_floats(kSeqLens.size() * kHeads * kRope, 1);    // [tokens, heads, rope]
  Floats cache = random_floats(kNumBlocks * kBlockSize * kEntry, 1);   // [blocks, tokens, entry]
};

const float* entry_of(const Step& step, std::size_t request, std::size_t position) {
  const auto block = static_cast<std::size_t>(kBlocks[request * 3 + position / kBlockSize]);
  return step.cache.data() + (block * kBlockSize + position % kBlockSize) * kEntry;
}

double dot(const float* a, const float* b, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += double{a[i]} * double{b[i]};
  return sum;
}

/// One head of one request as the model defines it: [value].
std::vector<double> reference(const Layer& layer, const Step& step, std::size_t request,
                              std::size_t head) {
  const std::size_t row = request * kHeads + head;
  const auto seq_len = static_cast<std::size_t>(kSeqLens[request]);
  std::vector<double> out(kValue), logits;
  for (std::size_t j = 0; j < seq_len; ++j) {
    const float* c = entry_of(step, request, j);
    double logit = dot(&step.q_pe[row * kRope], c + kLatent, kRope);
    for (std::size_t n = 0; n < kNope; ++n)
      logit +=
          step.q_nope[row * kNope + n] * dot(&layer.w_uk[(head * kNope + n) * kLatent], c, kLatent);
    logits.push_back(logit * kScale);
  }
  const double largest = *std::max_element(logits.begin(), logits.end());
  double denominator = 0;
  for (const double logit : logits) denominator += std::exp(logit - largest);
  for (std::size_t j = 0; j < seq_len; ++j) {
    const double p = std::exp(logits[j] - largest) / denominator;
    for (std::size_t v = 0; v < kValue; ++v)
      out[v] +=
          p * dot(&layer.w_uv[(head * kValue + v) * kLatent], entry_of(step, request, j), kLatent);
  }
  return out;
}

class Device {
 public:
  const std::shared_ptr<clattn::Context> context = clattn::Context::create();
  const clattn::Queue queue = context->create_queue();

  clattn::Buffer upload(const Floats& values) const {
    const clattn::Buffer buffer = context->allocate(values.size() * sizeof(float));
    queue.write(buffer, std::as_bytes(std::span(values)));
    return buffer;
  }

  /// C[head] = A[head] B[head] for all heads: A [tokens, heads, k], C [tokens, heads, c_width].
  void project(std::size_t n, std::size_t k, const clattn::Buffer& a, const clattn::Buffer& b,
               clblast::Transpose transpose, const clattn::Buffer& c, std::size_t c_width) const {
    cl_command_queue raw = queue;
    const std::size_t b_width = transpose == clblast::Transpose::kYes ? k : n;
    const auto status = clblast::GemmStridedBatched<float>(
        clblast::Layout::kRowMajor, clblast::Transpose::kNo, transpose, kSeqLens.size(), n, k, 1,
        a.handle(), 0, kHeads * k, k, b.handle(), 0, b_width, n * k, 0, c.handle(), 0,
        kHeads * c_width, c_width, kHeads, &raw);
    if (status != clblast::StatusCode::kSuccess) throw std::runtime_error("CLBlast failed");
  }
};

/// The layer's output [tokens, heads, value].
Floats run(const Device& device, const Layer& layer, const Step& step) {
  const clattn::MLAConfig config{.num_heads = kHeads,
                                 .kv_lora_rank = kLatent,
                                 .rope_dim = kRope,
                                 .block_size = kBlockSize,
                                 .dtype = clattn::DType::kF32,
                                 .scale = kScale};
  const auto attention = clattn::make_mla_impl(*device.context, config);
  const auto builder = clattn::make_mla_builder(device.context, config);
  clattn::MLACache cache;
  cache.buffer = device.upload(step.cache);
  cache.dtype = config.dtype;
  cache.num_blocks = kNumBlocks;
  cache.block_size = config.block_size;
  cache.kv_lora_rank = config.kv_lora_rank;
  cache.rope_dim = config.rope_dim;
  const std::size_t rows = kSeqLens.size() * kHeads;
  Floats absorbed(rows * kEntry);  // q_pe stands there already, CLBlast fills in the rest
  for (std::size_t row = 0; row < rows; ++row)
    std::copy_n(&step.q_pe[row * kRope], kRope, &absorbed[row * kEntry + kLatent]);
  const clattn::Buffer query = device.upload(absorbed);
  const clattn::Buffer latent = device.context->allocate(rows * kLatent * sizeof(float));
  const clattn::Buffer out = device.context->allocate(rows * kValue * sizeof(float));

  device.project(kLatent, kNope, device.upload(step.q_nope), device.upload(layer.w_uk),
                 clblast::Transpose::kNo, query, kEntry);
  const std::vector<int> starts = {0, 1, 2, 3};
  const auto& metadata =
      builder->build(device.queue, clattn::CommonAttentionMetadata::of(starts, kSeqLens, kBlocks));
  attention->forward(device.queue, {.query = {query.handle()}, .output = {latent.handle()}}, cache,
                     metadata);
  device.project(kValue, kLatent, latent, device.upload(layer.w_uv), clblast::Transpose::kYes, out,
                 kValue);
  Floats result(rows * kValue);
  device.queue.read(out, std::as_writable_bytes(std::span(result)));
  return result;
}

}  // namespace

int main() {
  const Layer layer;
  const Step step;
  const Floats result = run(Device(), layer, step);
  std::vector<double> errors;
  for (std::size_t row = 0; row < kSeqLens.size() * kHeads; ++row) {
    const auto expected = reference(layer, step, row / kHeads, row % kHeads);
    for (std::size_t v = 0; v < kValue; ++v)
      errors.push_back(std::abs(result[row * kValue + v] - expected[v]));
  }
  std::printf("largest difference from double precision: %.1e\n",
              *std::max_element(errors.begin(), errors.end()));
  const auto is_right = [](double error) { return error < 2e-5; };  // NaN is not
  return std::all_of(errors.begin(), errors.end(), is_right) ? 0 : 1;
}
