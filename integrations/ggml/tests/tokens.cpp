// Greedy tokens of llama.cpp after random prompts: prompts in chunks, then decoding of all
// sequences together. Prints a line for each sequence. usage: tokens MODEL FLASH(on|off|auto)
// CACHE(f16|bf16|q8_0) SEQUENCES UNIFIED(0|1) PROMPT NEW
#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Arguments {
  std::string model;
  llama_flash_attn_type flash;
  ggml_type cache;
  int sequences;
  bool unified;
  int prompt;  ///< tokens of the first sequence; each further one has 7 fewer
  int decoded;
};

Arguments parse(int count, char** arguments) {
  if (count != 8) throw std::runtime_error("seven arguments are needed");
  const std::string flash = arguments[2];
  const std::string cache = arguments[3];
  return {.model = arguments[1],
          .flash = flash == "on"    ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                   : flash == "off" ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                    : LLAMA_FLASH_ATTN_TYPE_AUTO,
          .cache = cache == "q8_0"   ? GGML_TYPE_Q8_0
                   : cache == "bf16" ? GGML_TYPE_BF16
                                     : GGML_TYPE_F16,
          .sequences = std::atoi(arguments[4]),
          .unified = std::atoi(arguments[5]) != 0,
          .prompt = std::atoi(arguments[6]),
          .decoded = std::atoi(arguments[7])};
}

llama_context* make_context(llama_model* model, const Arguments& options) {
  llama_context_params params = llama_context_default_params();
  const int each = options.prompt + options.decoded;
  params.n_ctx = static_cast<std::uint32_t>(each * options.sequences);
  params.n_batch = params.n_ctx;
  params.n_ubatch = 64;
  params.n_seq_max = static_cast<std::uint32_t>(options.sequences);
  params.n_threads = params.n_threads_batch = 2;
  params.flash_attn_type = options.flash;
  params.kv_unified = options.unified;
  params.type_k = options.cache;
  // Without flash attention llama.cpp has values in 16 bits only.
  params.type_v = options.flash == LLAMA_FLASH_ATTN_TYPE_DISABLED ? GGML_TYPE_F16 : options.cache;
  llama_context* const context = llama_init_from_model(model, params);
  if (context == nullptr) throw std::runtime_error("no context");
  return context;
}

class Batch {
 public:
  explicit Batch(int tokens) : batch_(llama_batch_init(tokens, 0, 1)) {}
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  ~Batch() { llama_batch_free(batch_); }
  /// The token's place among the batch's.
  int add(llama_token token, int position, int sequence, bool wants_logits) {
    const int i = batch_.n_tokens++;
    batch_.token[i] = token;
    batch_.pos[i] = position;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = sequence;
    batch_.logits[i] = wants_logits ? 1 : 0;
    return i;
  }
  void decode(llama_context* context) {
    if (llama_decode(context, batch_) != 0) throw std::runtime_error("llama_decode failed");
    batch_.n_tokens = 0;
  }

 private:
  llama_batch batch_;
};

struct Choice {
  llama_token token;
  float margin;  ///< of its logit over the next best one
};

Choice best(llama_context* context, const llama_model* model, int i) {
  const float* const logits = llama_get_logits_ith(context, i);
  const int size = llama_vocab_n_tokens(llama_model_get_vocab(model));
  const float* const first = std::max_element(logits, logits + size);
  float second = -INFINITY;
  for (const float* each = logits; each != logits + size; ++each)
    if (each != first) second = std::max(second, *each);
  return {static_cast<llama_token>(first - logits), *first - second};
}

void run(const Arguments& options) {
  llama_model* const model =
      llama_model_load_from_file(options.model.c_str(), llama_model_default_params());
  if (model == nullptr) throw std::runtime_error("no model");
  llama_context* const context = make_context(model, options);
  std::mt19937 random(3);
  Batch batch(options.sequences * options.prompt);
  std::vector<int> lengths;
  std::vector<int> rows;
  for (int s = 0; s < options.sequences; ++s) {
    lengths.push_back(options.prompt - 7 * s);
    for (int i = 0; i < lengths[s]; ++i) {
      const auto token = static_cast<llama_token>(3 + random() % 500);
      const int row = batch.add(token, i, s, i + 1 == lengths[s]);
      if (i + 1 == lengths[s]) rows.push_back(row);
    }
  }
  std::vector<std::vector<Choice>> choices(options.sequences);
  batch.decode(context);
  for (int step = 0; step < options.decoded; ++step) {
    std::vector<int> next;
    for (int s = 0; s < options.sequences; ++s) {
      choices[s].push_back(best(context, model, rows[s]));
      next.push_back(batch.add(choices[s].back().token, lengths[s] + step, s, true));
    }
    if (step + 1 < options.decoded) batch.decode(context);
    rows = next;
  }
  for (const std::vector<Choice>& sequence : choices) {
    for (const Choice& choice : sequence) std::printf("%d:%.4f ", choice.token, choice.margin);
    std::puts("");
  }
  llama_free(context);
  llama_model_free(model);
}

}  // namespace

int main(int count, char** arguments) try {
  llama_backend_init();
  ggml_backend_load_all();
  run(parse(count, arguments));
  llama_backend_free();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "tokens: %s\n", error.what());
  return 1;
}
