/* Attention by one call, beside plain loops in double precision. */
#include <math.h>

#include "model.h"

enum { kKeys = 9, kQueries = 4, kHeads = 8, kKVHeads = 2, kDims = 64, kSeqs = 2 };

static const int32_t query_starts[] = {0, 1, 4}, key_starts[] = {0, 6, 9}, seq_lens[] = {6, 3};

static void read_floats(const Fixture* fixture, const ClattnBuffer* buffer, float* values,
                        size_t count) {
  EXPECT_OK(clattn_buffer_read(buffer, fixture->queue, 0, values, count * sizeof(float)));
}

/* Softmax of a token over the first `seen` keys of its sequence, by head. */
static void check_row(const float* query, const float* key, const float* value, int seen,
                      const float* output, float lse) {
  double weights[kKeys], sum = 0;
  for (int k = 0; k < seen; ++k) {
    double logit = 0;
    for (int d = 0; d < kDims; ++d) logit += query[d] * key[k * kKVHeads * kDims + d];
    weights[k] = exp(logit / 8);
    sum += weights[k];
  }
  EXPECT(fabs(log2(sum) - lse) < 1e-4);
  for (int d = 0; d < kDims; ++d) {
    double wanted = 0;
    for (int k = 0; k < seen; ++k) wanted += weights[k] * value[k * kKVHeads * kDims + d];
    EXPECT(fabs(wanted / sum - output[d]) < 1e-4);
  }
}

/* `lse`: base 2, [heads, tokens]. */
static void check_rows(const float* query, const float* key, const float* value,
                       const float* output, const float* lse) {
  for (int s = 0; s < kSeqs; ++s) {
    for (int t = query_starts[s]; t < query_starts[s + 1]; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        const int first = (key_starts[s] * kKVHeads + h / 4) * kDims;
        check_row(query + (t * kHeads + h) * kDims, key + first, value + first,
                  seq_lens[s] - (query_starts[s + 1] - 1 - t), output + (t * kHeads + h) * kDims,
                  lse[h * kQueries + t]);
      }
    }
  }
}

static ClattnAttentionCall call_of(const Model* model) {
  ClattnAttentionCall call = {.struct_size = sizeof call, .num_seqs = kSeqs};
  call.query.buffer = model->input;
  call.output.buffer = model->output;
  call.query_start_loc = query_starts;
  call.lse = model->lse;
  call.lse_token_stride = 1;
  call.lse_head_stride = kQueries;
  call.lse_base_2 = 1;
  return call;
}

static void test_contiguous(const Fixture* fixture, const Model* model) {
  float query[kQueries * kRowFloats], keys[2 * kKeys * kKVHeads * kDims];
  float output[kQueries * kRowFloats], lse[kQueries * kHeads];
  ClattnLayerConfig config = layer_config();
  ClattnAttentionCall call = call_of(model);
  call.key.buffer = call.value.buffer = model->memory;
  call.value.offset = kKeys * kKVHeads * kDims;
  call.key_start_loc = key_starts;
  EXPECT_OK(clattn_attention(fixture->queue, &config, &call));
  read_floats(fixture, model->input, query, kQueries * kRowFloats);
  read_floats(fixture, model->memory, keys, 2 * kKeys * kKVHeads * kDims);
  read_floats(fixture, model->output, output, kQueries * kRowFloats);
  read_floats(fixture, model->lse, lse, kQueries * kHeads);
  check_rows(query, keys, keys + kKeys * kKVHeads * kDims, output, lse);

  call.num_seqs = -1;
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call), "num_seqs is -1, legal: >= 0");
  call.num_seqs = kSeqs;
  call.num_pages = -1;
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call), "num_pages is -1, legal: >= 0");
  call.num_pages = 0;
  call.seq_lens = seq_lens;
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call), "seq_lens holds 2 elements");
  call.seq_lens = NULL;
  call.query_start_loc = NULL;
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call), "query_start_loc is null");
  call.query_start_loc = query_starts;
  config.name = "layer";
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call),
                 "config: name is set, legal: for layers alone");
  config.name = NULL;
  EXPECT_INVALID(clattn_attention(NULL, &config, &call), "queue is null");
  EXPECT_INVALID(clattn_attention(fixture->queue, NULL, &call), "config is null");
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, NULL), "call is null");
}

/* The call's own keys are stored in pages given as lists, then read as rows. */
static void test_paged(const Fixture* fixture, const Model* model) {
  static const int32_t rows[] = {2, 1}, lists[] = {0, 1, 2}, own[] = {1, 3};
  float query[kQueries * kRowFloats];
  float first[kQueries * kRowFloats], again[kQueries * kRowFloats];
  ClattnLayerConfig config = layer_config();
  ClattnAttentionCall call = call_of(model);
  call.seq_lens = own;
  call.block_table = rows;
  call.num_pages = 2;
  call.page_start_loc = lists;
  call.key.buffer = call.value.buffer = model->input;
  call.value.offset = 256;
  EXPECT_OK(clattn_paged_attention(fixture->queue, model->cache, &config, &call));
  read_floats(fixture, model->input, query, kQueries * kRowFloats);
  read_floats(fixture, model->output, first, kQueries * kRowFloats);
  /* The first token sees itself alone. */
  for (int h = 0; h < kHeads; ++h) {
    for (int d = 0; d < kDims; ++d)
      EXPECT(fabsf(first[h * kDims + d] - query[256 + h / 4 * kDims + d]) < 1e-5F);
  }
  call.key.buffer = call.value.buffer = NULL;
  call.value.offset = 0;
  call.page_start_loc = NULL;
  EXPECT_OK(clattn_buffer_fill(model->output, fixture->queue, 0x7fc00000, 0, sizeof first));
  EXPECT_OK(clattn_paged_attention(fixture->queue, model->cache, &config, &call));
  read_floats(fixture, model->output, again, kQueries * kRowFloats);
  for (int i = 0; i < kQueries * kRowFloats; ++i) EXPECT(first[i] == again[i]);

  call.key_start_loc = key_starts;
  EXPECT_INVALID(clattn_paged_attention(fixture->queue, model->cache, &config, &call),
                 "key_start_loc holds 3 elements");
  EXPECT_INVALID(clattn_paged_attention(NULL, model->cache, &config, &call), "queue is null");
  EXPECT_INVALID(clattn_paged_attention(fixture->queue, NULL, &config, &call), "cache is null");
}

/* One sequence of 4 tokens. A span of all of it is both ways, and the last key alone is its value
   in the last row and nothing in the others. */
static void test_lists_of_calls(const Fixture* fixture, const Model* model) {
  static const int32_t starts[] = {0, 4}, spans_at[] = {0, 1}, falling[] = {0, -1};
  static const int32_t span[] = {0, 4}, last_key[] = {3}, behind[] = {5};
  static const uint8_t both_ways[] = {0}, none[] = {3};
  float causal[kQueries * kRowFloats], seen[kQueries * kRowFloats], again[kQueries * kRowFloats];
  ClattnLayerConfig config = layer_config();
  ClattnAttentionCall call = call_of(model);
  call.num_seqs = 1;
  call.query_start_loc = starts;
  call.key.buffer = call.value.buffer = model->memory;
  EXPECT_OK(clattn_attention(fixture->queue, &config, &call));
  read_floats(fixture, model->output, causal, kQueries * kRowFloats);

  call.not_causal = 1;
  EXPECT_OK(clattn_attention(fixture->queue, &config, &call));
  read_floats(fixture, model->output, seen, kQueries * kRowFloats);
  EXPECT(seen[0] != causal[0]);
  call.not_causal = 0;
  call.direction = both_ways;
  EXPECT_OK(clattn_buffer_fill(model->output, fixture->queue, 0x7fc00000, 0, sizeof again));
  EXPECT_OK(clattn_attention(fixture->queue, &config, &call));
  read_floats(fixture, model->output, again, kQueries * kRowFloats);
  for (int i = 0; i < kQueries * kRowFloats; ++i) EXPECT(fabsf(seen[i] - again[i]) < 1e-5F);
  call.direction = none;
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call),
                 "request 0: direction is 3, legal: 0 (both ways), 1 (causal), 2 (canvas)");
  call.direction = NULL;

  call.spans = span; /* all of the sequence: as both ways */
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call),
                 "call: span_start_loc is null, legal with spans: 2 elements");
  call.span_start_loc = falling;
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call),
                 "call: span_start_loc[1] is -1, legal: >= 0");
  call.span_start_loc = spans_at;
  EXPECT_OK(clattn_buffer_fill(model->output, fixture->queue, 0x7fc00000, 0, sizeof again));
  EXPECT_OK(clattn_attention(fixture->queue, &config, &call));
  read_floats(fixture, model->output, again, kQueries * kRowFloats);
  for (int i = 0; i < kQueries * kRowFloats; ++i) EXPECT(fabsf(seen[i] - again[i]) < 1e-5F);
  call.spans = NULL;
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call), "call: spans is null");
  call.span_start_loc = NULL;

  call.first_keys = behind;
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call),
                 "request 0: first_keys is 5, legal: 0 … 4 (seq_lens)");
  call.first_keys = last_key;
  EXPECT_OK(clattn_attention(fixture->queue, &config, &call));
  read_floats(fixture, model->output, again, kQueries * kRowFloats);
  read_floats(fixture, model->memory, seen, kQueries * kKVHeads * kDims);
  for (int h = 0; h < kHeads; ++h) {
    for (int d = 0; d < kDims; ++d) {
      const float value = seen[(3 * kKVHeads + h / 4) * kDims + d];
      EXPECT(again[h * kDims + d] == 0 && again[(2 * kHeads + h) * kDims + d] == 0);
      EXPECT(fabsf(again[(3 * kHeads + h) * kDims + d] - value) < 1e-6F);
    }
  }
  call.first_keys = NULL;
  call.keep_keys = behind; /* checked where it changes nothing, too */
  EXPECT_INVALID(clattn_attention(fixture->queue, &config, &call),
                 "request 0: keep_keys is 5, legal: 0 … 4 (seq_lens)");
}

void test_attention_functions(const Fixture* fixture) {
  const Model model = make_model(fixture);
  test_contiguous(fixture, &model);
  test_paged(fixture, &model);
  test_lists_of_calls(fixture, &model);
  EXPECT_OK(clattn_clear_attention_functions());
  destroy_model(model);
}
