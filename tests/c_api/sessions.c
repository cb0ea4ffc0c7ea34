/* Sessions. Queries and keys are 0, and a token's value is its id, so that every row of the output
   is the mean of its request's tokens so far. */
#include <math.h>

#include "expect.h"

enum { kRows = 64, kQueryRow = 8 * 64, kKeyRow = 2 * 64, kBlockSize = 16, kBlocks = 8 };

typedef struct Client {
  ClattnSession* session;
  ClattnQueue* queue;
  ClattnBuffer *zeros, *values, *output;
  ClattnTensors tensors;
} Client;

static void count_layers(void* user, size_t done, size_t total) {
  if (total == 2) *(size_t*)user = *(size_t*)user * 10 + done + 1;
}

static Client make_client(const Fixture* fixture, int explicit_commit, int use_trees) {
  static const float zeros[kRows * kQueryRow];
  Client client = {0};
  ClattnLayerConfig layer = layer_config();
  const ClattnLayerConfig* const layers[] = {&layer, &layer};
  size_t progress = 0;
  ClattnSessionConfig config = {.struct_size = sizeof config};
  layer.use_trees = use_trees;
  config.layers = layers;
  config.num_layers = 2;
  config.num_blocks = kBlocks;
  config.progress = count_layers;
  config.progress_user = &progress;
  config.explicit_commit = explicit_commit;
  EXPECT_OK(clattn_session_create(fixture->context, &config, &client.session));
  EXPECT(progress == 123);
  EXPECT_OK(clattn_session_queue(client.session, &client.queue));
  EXPECT_OK(clattn_buffer_create(fixture->context, sizeof zeros, &client.zeros));
  EXPECT_OK(clattn_buffer_create(fixture->context, sizeof zeros, &client.values));
  EXPECT_OK(clattn_buffer_create(fixture->context, sizeof zeros, &client.output));
  EXPECT_OK(clattn_buffer_write(client.zeros, client.queue, 0, zeros, sizeof zeros));
  client.tensors.struct_size = sizeof client.tensors;
  client.tensors.query.buffer = client.tensors.key.buffer = client.zeros;
  client.tensors.value.buffer = client.values;
  client.tensors.output.buffer = client.output;
  return client;
}

static void destroy_client(Client client) {
  clattn_session_destroy(client.session);
  clattn_queue_destroy(client.queue);
  clattn_buffer_destroy(client.zeros);
  clattn_buffer_destroy(client.values);
  clattn_buffer_destroy(client.output);
}

/* Attends a layer of a step and compares every row that is no draft with the mean. */
static void attend_layer(Client* client, int layer, const ClattnStepRequest* requests,
                         const ClattnStepRows* rows) {
  static float output[kRows * kQueryRow];
  memset(output, 0, sizeof output);
  EXPECT_OK(clattn_buffer_write(client->output, client->queue, 0, output, sizeof output));
  EXPECT_OK(clattn_session_attend(client->session, layer, &client->tensors));
  EXPECT_OK(clattn_buffer_read(client->output, client->queue, 0, output, sizeof output));
  for (int i = 0; i < rows->num_requests; ++i) {
    ClattnRequestInfo info = {.struct_size = sizeof info};
    EXPECT_OK(clattn_session_request_info(client->session, requests[i].id, &info));
    const int end = rows->query_start_loc[i + 1] - rows->num_drafts[i];
    for (int row = rows->query_start_loc[i]; row < end; ++row) {
      double sum = 0;
      for (int t = 0; t <= rows->positions[row]; ++t) sum += info.tokens[t];
      EXPECT(rows->token_ids[row] == info.tokens[rows->positions[row]]);
      EXPECT(fabs(output[row * kQueryRow + row] - sum / (rows->positions[row] + 1)) < 1e-3);
    }
  }
}

/* Attends both layers, after which the tokens count as computed. */
static void attend(Client* client, const ClattnStepRequest* requests, const ClattnStepRows* rows) {
  static float values[kRows * kKeyRow];
  for (int i = 0; i < rows->num_tokens * kKeyRow; ++i)
    values[i] = (float)rows->token_ids[i / kKeyRow];
  EXPECT_OK(clattn_buffer_write(client->values, client->queue, 0, values, sizeof values));
  attend_layer(client, 1, requests, rows); /* in any order */
  attend_layer(client, 0, requests, rows);
  for (int i = 0; i < rows->num_requests; ++i) {
    ClattnRequestInfo info = {.struct_size = sizeof info};
    EXPECT_OK(clattn_session_request_info(client->session, requests[i].id, &info));
    EXPECT(info.num_computed_tokens == rows->seq_lens[i] - rows->num_drafts[i]);
  }
}

static void run(Client* client, const ClattnStepRequest* requests, size_t count, int num_tokens) {
  ClattnStepRows rows = {.struct_size = sizeof rows};
  EXPECT_OK(clattn_session_step(client->session, requests, count, &rows));
  EXPECT(rows.num_requests == (int)count && rows.num_tokens == num_tokens);
  attend(client, requests, &rows);
}

static int64_t add(const Client* client, int first, int count, uint64_t cache_salt) {
  int32_t prompt[kRows];
  int64_t id = -1;
  for (int i = 0; i < count; ++i) prompt[i] = first + i;
  EXPECT_OK(clattn_session_add(client->session, prompt, (size_t)count, cache_salt, &id));
  return id;
}

static ClattnRequestInfo info_of(const Client* client, int64_t id) {
  ClattnRequestInfo info = {.struct_size = sizeof info};
  EXPECT_OK(clattn_session_request_info(client->session, id, &info));
  return info;
}

static int free_blocks(const Client* client) {
  ClattnSessionInfo info = {.struct_size = sizeof info};
  EXPECT_OK(clattn_session_info(client->session, &info));
  EXPECT(info.num_layers == 2 && info.block_size == kBlockSize && info.num_blocks == kBlocks);
  return info.num_free_blocks;
}

/* A prompt in two chunks, one that shares its block, a fork whose other token stays its own, and a
   request that is computed anew after its blocks were given up. */
static void test_requests(Client* client) {
  const int32_t token = 100, other = 200;
  int64_t copy = -1;
  ClattnStepRequest first = {.id = add(client, 1, 20, 0), .max_tokens = 15}, both[2];
  int64_t needed = -1;
  EXPECT_OK(clattn_session_blocks_needed(client->session, &first, 1, &needed, 1));
  EXPECT(needed == 1);
  EXPECT_INVALID(clattn_session_blocks_needed(client->session, &first, 1, &needed, 2),
                 "num_pools is 2, legal: 1 (1 + num_windows)");
  EXPECT_INVALID(clattn_session_blocks_needed(client->session, &first, 1, NULL, 1),
                 "needed is null");
  run(client, &first, 1, 15);
  first.max_tokens = 0;
  run(client, &first, 1, 5);
  EXPECT(free_blocks(client) == kBlocks - 2);

  const int64_t alike = add(client, 1, 18, 0), salted = add(client, 1, 18, 7);
  EXPECT(info_of(client, alike).num_computed_tokens == kBlockSize);
  EXPECT(info_of(client, alike).block_table[0] == info_of(client, first.id).block_table[0]);
  EXPECT(info_of(client, salted).num_computed_tokens == 0);
  EXPECT_OK(clattn_session_finish(client->session, salted));

  EXPECT_OK(clattn_session_fork(client->session, first.id, &copy));
  both[0] = (ClattnStepRequest){.id = copy, .new_tokens = &token, .num_new_tokens = 1};
  both[1] = (ClattnStepRequest){.id = first.id, .new_tokens = &other, .num_new_tokens = 1};
  run(client, both, 2, 2);
  EXPECT(info_of(client, copy).tokens[20] == 100 && info_of(client, first.id).tokens[20] == 200);
  EXPECT(info_of(client, copy).block_table[1] != info_of(client, first.id).block_table[1]);

  EXPECT_OK(clattn_session_evict(client->session, copy));
  EXPECT(info_of(client, copy).num_computed_tokens == 0 && info_of(client, copy).num_blocks == 0);
  both[0].num_new_tokens = 0;
  run(client, both, 1, 21 - kBlockSize); /* the first block is found */
  EXPECT_OK(clattn_session_finish(client->session, copy));
  EXPECT_OK(clattn_session_finish(client->session, alike));
  EXPECT_OK(clattn_session_finish(client->session, first.id));
  EXPECT(free_blocks(client) == kBlocks);
}

/* Too few blocks: nothing has changed, and it works once another request has ended. */
static void test_out_of_blocks(Client* client) {
  ClattnStepRequest large = {.id = add(client, 300, 60, 0)}, more = {.id = -1};
  ClattnStepRequest too_much;
  ClattnStepRows rows = {.struct_size = sizeof rows};
  run(client, &large, 1, 60);
  more.id = add(client, 400, 60, 0);
  run(client, &more, 1, 60);
  too_much = (ClattnStepRequest){.id = add(client, 500, 10, 0)};
  expect_status(__FILE__, __LINE__, "a step of too many blocks",
                clattn_session_step(client->session, &too_much, 1, &rows),
                CLATTN_ERROR_OUT_OF_BLOCKS, "0 of 8 are free");
  EXPECT_OK(clattn_session_finish(client->session, large.id));
  run(client, &too_much, 1, 10);
  EXPECT_OK(clattn_session_finish(client->session, more.id));
  EXPECT_OK(clattn_session_finish(client->session, too_much.id));
}

/* A verifier of drafts wants a row of every token, also of those that another request computed. */
static void test_every_row(Client* client) {
  int32_t drafts[20];
  ClattnStepRequest first = {.id = add(client, 600, kBlockSize, 0)}, second = first;
  for (int i = 0; i < 20; ++i) drafts[i] = 700 + i;
  run(client, &first, 1, kBlockSize);
  EXPECT_OK(clattn_session_fork(client->session, first.id, &second.id));
  first.new_tokens = second.new_tokens = drafts;
  first.num_new_tokens = second.num_new_tokens = 20;
  run(client, &first, 1, 20);
  second.compute_every_row = 1;
  run(client, &second, 1, 20);
  EXPECT_OK(clattn_session_finish(client->session, first.id));
  EXPECT_OK(clattn_session_finish(client->session, second.id));
}

/* Three drafts, of which the second is right, and the third, which follows it. Then the request is
   taken back. */
static void test_drafts(const Fixture* fixture) {
  const int32_t token = 100, drafts[] = {10, 20, 30}, parents[] = {-1, -1, 1}, path[] = {1, 2};
  static float output[4 * kQueryRow];
  ClattnStepRows rows = {.struct_size = sizeof rows};
  Client client = make_client(fixture, 0, 1), chains = make_client(fixture, 0, 0);
  ClattnSession* const session = client.session;
  ClattnStepRequest part = {.id = add(&client, 1, 20, 0)};
  run(&client, &part, 1, 20);
  part.new_tokens = &token;
  part.num_new_tokens = 1;
  part.num_drafts = 3;
  EXPECT_INVALID(clattn_session_step(session, &part, 1, &rows), "requests: drafts is null");
  part.drafts = drafts;
  part.draft_parents = parents;
  EXPECT_OK(clattn_session_step(session, &part, 1, &rows));
  EXPECT(rows.num_tokens == 4 && rows.num_drafts[0] == 3 && rows.seq_lens[0] == 24);
  EXPECT(rows.token_ids[3] == 30 && rows.positions[2] == 21 && rows.positions[3] == 22);
  EXPECT_INVALID(clattn_session_accept(session, part.id, path, 2), "in a step that does not count");
  attend(&client, &part, &rows);
  EXPECT_OK(clattn_buffer_read(client.output, client.queue, 0, output, sizeof output));
  EXPECT(fabs(output[3 * kQueryRow] - (210 + 100 + 20 + 30) / 23.) < 1e-3);
  EXPECT_INVALID(clattn_session_truncate(session, part.id, 1), "request 0 has 3 drafts");
  EXPECT_INVALID(clattn_session_accept(session, part.id, NULL, 1), "path is null");
  EXPECT_INVALID(clattn_session_accept(session, part.id, path + 1, 1), "path[0] is 2");
  ClattnAccepted both[2] = {{.id = part.id, .num_accepted = 1}, {.id = part.id}};
  EXPECT_INVALID(clattn_session_accept_all(session, NULL, 1), "requests is null");
  EXPECT_INVALID(clattn_session_accept_all(NULL, both, 0), "session is null");
  EXPECT_INVALID(clattn_session_accept_all(session, both, 1), "requests: path is null");
  both[0].path = path;
  both[0].num_accepted = 2;
  EXPECT_INVALID(clattn_session_accept_all(session, both, 2), "request 0 is repeated, legal: once");
  EXPECT_OK(clattn_session_accept_all(session, both, 0));
  EXPECT_OK(clattn_session_accept_all(session, both, 1));
  EXPECT(info_of(&client, part.id).num_tokens == 23 && info_of(&client, part.id).tokens[22] == 30);
  part.num_drafts = 0;
  run(&client, &part, 1, 1); /* sees the path that was accepted */
  EXPECT_OK(clattn_session_truncate(session, part.id, 3));
  EXPECT(info_of(&client, part.id).num_tokens == 3 && free_blocks(&client) == kBlocks - 1);
  run(&client, &part, 1, 1);
  EXPECT_INVALID(clattn_session_truncate(session, part.id, 5), "length is 5, legal: 1");
  EXPECT_INVALID(clattn_session_truncate(NULL, part.id, 1), "session is null");
  EXPECT_INVALID(clattn_session_accept(session, part.id, NULL, 0), "has no drafts");
  EXPECT_INVALID(clattn_session_accept(NULL, part.id, NULL, 0), "session is null");
  part.id = add(&chains, 1, 5, 0);
  part.num_drafts = 3;
  EXPECT_INVALID(clattn_session_step(chains.session, &part, 1, &rows),
                 "layer 0 without use_trees: a chain");
  part.draft_parents = NULL;
  run(&chains, &part, 1, 9);
  EXPECT_OK(clattn_session_accept(chains.session, part.id, NULL, 0));
  EXPECT(info_of(&chains, part.id).num_tokens == 6);
  destroy_client(client);
  destroy_client(chains);
}

/* Steps that the application commits count then, and not twice if they are begun again. */
static void test_commit(const Fixture* fixture) {
  const int32_t token = 9;
  ClattnStepRows rows = {.struct_size = sizeof rows};
  Client client = make_client(fixture, 1, 0);
  ClattnStepRequest part = {.id = add(&client, 1, 5, 0)};
  EXPECT_OK(clattn_session_step(client.session, &part, 1, &rows));
  EXPECT_INVALID(clattn_session_commit(client.session),
                 "commit: 0 of 2 layers have been attended, legal: all of them");
  for (int layer = 0; layer < 2; ++layer)
    EXPECT_OK(clattn_session_attend(client.session, layer, &client.tensors));
  EXPECT(info_of(&client, part.id).num_computed_tokens == 0);
  EXPECT_OK(clattn_session_commit(client.session));
  EXPECT(info_of(&client, part.id).num_computed_tokens == 5);
  part.new_tokens = &token;
  part.num_new_tokens = 1;
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_OK(clattn_session_step(client.session, &part, 1, &rows));
    for (int layer = 0; layer < 2; ++layer)
      EXPECT_OK(clattn_session_attend(client.session, layer, &client.tensors));
    EXPECT(rows.num_tokens == 1 && rows.positions[0] == 5);
  }
  EXPECT_OK(clattn_session_commit(client.session));
  EXPECT(info_of(&client, part.id).num_tokens == 6);
  destroy_client(client);
}

/* All rows of an image see all of it. */
static void test_spans(const Fixture* fixture) {
  static float output[kRows * kQueryRow], values[kRows * kKeyRow];
  const int32_t spans[] = {0, 4, 5, 7}, last[] = {3, 3, 3, 3, 4, 6, 6, 7};
  Client client = make_client(fixture, 0, 0);
  ClattnLayerConfig layer = layer_config();
  const ClattnLayerConfig* const layers[] = {&layer};
  ClattnSessionConfig config = {.struct_size = sizeof config};
  ClattnStepRequest part = {.id = add(&client, 0, 8, 0), .spans = spans, .num_spans = 2};
  ClattnStepRows rows = {.struct_size = sizeof rows};
  EXPECT_INVALID(clattn_session_step(client.session, &part, 1, &rows),
                 "spans has 2 elements, legal where no layer has use_spans: none");
  clattn_session_destroy(client.session);
  config.layers = layers;
  config.num_layers = 1;
  config.num_blocks = kBlocks;
  config.queue = client.queue;
  layer.use_spans = 1;
  EXPECT_OK(clattn_session_create(fixture->context, &config, &client.session));
  part.id = add(&client, 0, 8, 0);
  EXPECT_OK(clattn_session_step(client.session, &part, 1, &rows));
  for (int i = 0; i < 8 * kKeyRow; ++i) values[i] = (float)(i / kKeyRow);
  EXPECT_OK(clattn_buffer_write(client.values, client.queue, 0, values, sizeof values));
  EXPECT_OK(clattn_session_attend(client.session, 0, &client.tensors));
  EXPECT_OK(clattn_buffer_read(client.output, client.queue, 0, output, sizeof output));
  for (int row = 0; row < 8; ++row) /* tokens 0 to last */
    EXPECT(fabs(output[row * kQueryRow] - last[row] / 2.0) < 1e-3);
  part.spans = NULL;
  EXPECT_INVALID(clattn_session_step(client.session, &part, 1, &rows), "requests: spans is null");
  destroy_client(client);
}

static void test_reports(Client* client) {
  char text[4096];
  size_t size = 0, progress = 0;
  const ClattnKVScales scales = {.struct_size = sizeof scales, .k_scale = 1, .v_scale = 1};
  EXPECT_OK(clattn_session_warm_up(client->session, count_layers, &progress));
  EXPECT(progress == 123);
  EXPECT_OK(clattn_session_warm_up(client->session, NULL, NULL));
  EXPECT_OK(clattn_session_explain(client->session, 1, text, sizeof text, &size));
  EXPECT(size > 100 && strstr(text, "decode") != NULL);
  EXPECT_OK(clattn_session_load_kv_scales(client->session, 0, &scales));
  EXPECT_INVALID(clattn_session_warm_up(NULL, NULL, NULL), "session is null");
  EXPECT_INVALID(clattn_session_explain(NULL, 0, text, sizeof text, NULL), "session is null");
  EXPECT_INVALID(clattn_session_explain(client->session, 2, text, sizeof text, NULL), "layer is 2");
  EXPECT_INVALID(clattn_session_load_kv_scales(client->session, -1, &scales), "layer is -1");
  EXPECT_INVALID(clattn_session_load_kv_scales(client->session, 0, NULL), "scales is null");
  EXPECT_INVALID(clattn_session_load_kv_scales(NULL, 0, &scales), "session is null");
}

static void test_configs(const Fixture* fixture) {
  ClattnSession* session = NULL;
  ClattnLayerConfig layer = layer_config();
  const ClattnLayerConfig* layers[] = {&layer, NULL};
  ClattnSessionConfig config = {.struct_size = sizeof config};
  ClattnStepOptions options = {.struct_size = sizeof options};
  EXPECT_INVALID(clattn_session_create(NULL, &config, &session), "context is null");
  EXPECT_INVALID(clattn_session_create(fixture->context, NULL, &session), "config is null");
  EXPECT_INVALID(clattn_session_create(fixture->context, &config, NULL), "session is null");
  EXPECT_INVALID(clattn_session_create(fixture->context, &config, &session), "layers is empty");
  config.num_layers = 2;
  EXPECT_INVALID(clattn_session_create(fixture->context, &config, &session),
                 "config: layers is null");
  config.layers = layers;
  EXPECT_INVALID(clattn_session_create(fixture->context, &config, &session),
                 "config: layers: an element is null");
  config.num_layers = 1;
  EXPECT_INVALID(clattn_session_create(fixture->context, &config, &session), "num_blocks is 0");
  config.cache_bytes = 100000;
  config.layout = "DNH";
  EXPECT_INVALID(clattn_session_create(fixture->context, &config, &session), "DNH");
  config.layout = NULL;
  config.step_options = &options;
  options.side_by_side = 2;
  EXPECT_INVALID(clattn_session_create(fixture->context, &config, &session),
                 "options: side_by_side is 2");
  EXPECT(session == NULL);
  options.side_by_side = -1;
  config.queue = fixture->queue;
  config.no_prefix_caching = 1;
  EXPECT_OK(clattn_session_create(fixture->context, &config, &session));
  clattn_session_destroy(session);
  clattn_session_destroy(NULL);
}

static void test_refused_calls(Client* client) {
  const int32_t prompt[] = {1, 2};
  int64_t id = add(client, 1, 2, 0), none = 0;
  ClattnSession* session = client->session;
  ClattnQueue* queue = NULL;
  ClattnSessionInfo info = {.struct_size = sizeof info};
  ClattnWindowInfo window = {.struct_size = sizeof window};
  ClattnRequestInfo request = {.struct_size = sizeof request};
  ClattnStepRequest part = {.id = id};
  ClattnStepRows rows = {.struct_size = sizeof rows}, small = {.struct_size = 4};
  EXPECT_INVALID(clattn_session_queue(NULL, &queue), "session is null");
  EXPECT_INVALID(clattn_session_queue(session, NULL), "queue is null");
  EXPECT_INVALID(clattn_session_info(NULL, &info), "session is null");
  EXPECT_INVALID(clattn_session_info(session, NULL), "info is null");
  EXPECT_INVALID(clattn_session_window_info(session, 0, &window), "window is 0, legal: 0 to -1");
  EXPECT_INVALID(clattn_session_request_info(NULL, id, &request), "session is null");
  EXPECT_INVALID(clattn_session_request_info(session, id, NULL), "info is null");
  EXPECT_INVALID(clattn_session_request_info(session, id + 1, &request), "does not exist");
  EXPECT_INVALID(clattn_session_add(NULL, prompt, 2, 0, &none), "session is null");
  EXPECT_INVALID(clattn_session_add(session, NULL, 2, 0, &none), "prompt is null");
  EXPECT_INVALID(clattn_session_add(session, prompt, 2, 0, NULL), "id is null");
  EXPECT_INVALID(clattn_session_add(session, NULL, 0, 0, &none), "0 tokens");
  EXPECT_INVALID(clattn_session_fork(NULL, id, &none), "session is null");
  EXPECT_INVALID(clattn_session_fork(session, id, NULL), "copy is null");
  EXPECT_INVALID(clattn_session_fork(session, id + 1, &none), "does not exist");
  EXPECT_INVALID(clattn_session_evict(NULL, id), "session is null");
  EXPECT_INVALID(clattn_session_evict(session, id + 1), "does not exist");
  EXPECT_INVALID(clattn_session_finish(NULL, id), "session is null");
  EXPECT_INVALID(clattn_session_finish(session, id + 1), "does not exist");
  EXPECT_INVALID(clattn_session_attend(session, 0, &client->tensors), "outside of a step");
  EXPECT_INVALID(clattn_session_step(NULL, &part, 1, &rows), "session is null");
  EXPECT_INVALID(clattn_session_step(session, NULL, 1, &rows), "requests is null");
  EXPECT_INVALID(clattn_session_step(session, &part, 1, NULL), "rows is null");
  EXPECT_INVALID(clattn_session_step(session, &part, 1, &small), "rows: struct_size is 4");
  part.max_tokens = -1;
  EXPECT_INVALID(clattn_session_step(session, &part, 1, &rows), "max_tokens is -1, legal: 0 to");
  part = (ClattnStepRequest){.id = id, .reserved = 1};
  EXPECT_UNSUPPORTED(clattn_session_step(session, &part, 1, &rows),
                     "requests: reserved is 1, legal: 0");
  part = (ClattnStepRequest){.id = id, .num_new_tokens = 1};
  EXPECT_INVALID(clattn_session_step(session, &part, 1, &rows), "requests: new_tokens is null");
  part.num_new_tokens = 0;
  EXPECT_OK(clattn_session_step(session, &part, 1, &rows));
  ClattnPrepareQKV prepare = {.struct_size = sizeof prepare, .num_padding_tokens = 1};
  EXPECT_INVALID(clattn_session_prepare_qkv(NULL, 0, &prepare), "session is null");
  EXPECT_INVALID(clattn_session_prepare_qkv(session, 0, NULL), "call is null");
  EXPECT_INVALID(clattn_session_prepare_qkv(session, 0, &prepare),
                 "event or num_padding_tokens is given, legal: none");
  prepare.num_padding_tokens = 0;
  EXPECT_INVALID(clattn_session_prepare_qkv(session, 0, &prepare), "neither query nor key");
  EXPECT_INVALID(clattn_session_attend(NULL, 0, &client->tensors), "session is null");
  EXPECT_INVALID(clattn_session_attend(session, 2, &client->tensors), "layer is 2");
  EXPECT_INVALID(clattn_session_attend(session, 0, NULL), "tensors is null");
  attend(client, &part, &rows);
  EXPECT_INVALID(clattn_session_commit(NULL), "session is null");
  EXPECT_INVALID(clattn_session_commit(session), "commit: explicit_commit is false");
  EXPECT_OK(clattn_session_finish(session, id));
}

void test_sessions(const Fixture* fixture) {
  Client client = make_client(fixture, 0, 0);
  test_reports(&client);
  test_requests(&client);
  test_every_row(&client);
  test_spans(fixture);
  test_drafts(fixture);
  test_commit(fixture);
  test_out_of_blocks(&client);
  test_refused_calls(&client);
  test_configs(fixture);
  destroy_client(client);
}
