#include <clattn/clattn_session.h>

#include <clattn/session.hpp>
#include <limits>
#include <vector>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

struct ClattnSession {
  Session session;
};

namespace {

/// Tells the application's function, if there is one.
auto telling(ClattnProgress progress, void* user) {
  return [progress, user](std::int32_t done, std::int32_t total) {
    if (progress != nullptr)
      progress(user, static_cast<std::size_t>(done), static_cast<std::size_t>(total));
  };
}

SessionConfig config_of(const ClattnSessionConfig& given) {
  SessionConfig config;
  for (const auto* layer : elements(given.layers, given.num_layers, "config: layers")) {
    config.layers.push_back(options_of(read(layer, "config: layers: an element")));
  }
  config.num_blocks = given.num_blocks;
  config.cache_bytes = given.cache_bytes;
  config.prefix_caching = given.no_prefix_caching == 0;
  config.layout = layout_of(given.layout);
  config.progress = telling(given.progress, given.progress_user);
  config.builder = builder_options_of(given.step_options);
  return config;
}

StepRequest request_of(const ClattnStepRequest& given) {
  constexpr std::int32_t kAll = std::numeric_limits<std::int32_t>::max();
  detail::throw_invalid_if(given.max_tokens < 0 || given.max_tokens > kAll,
                           "requests: request {}: max_tokens is {}, legal: 0 to {}", given.id,
                           given.max_tokens, kAll);
  detail::throw_unsupported_if(given.reserved != 0, "requests: reserved is {}, legal: 0",
                               given.reserved);
  const auto tokens = elements(given.new_tokens, given.num_new_tokens, "requests: new_tokens");
  return {.id = given.id,
          .new_tokens = {tokens.begin(), tokens.end()},
          .max_tokens = given.max_tokens == 0 ? kAll : static_cast<std::int32_t>(given.max_tokens)};
}

std::int32_t count_of(std::span<const std::int32_t> values) {
  return static_cast<std::int32_t>(values.size());
}

}  // namespace

ClattnResult clattn_session_create(const ClattnContext* context, const ClattnSessionConfig* config,
                                   ClattnSession** session) {
  return make_handle(session, "session", [&] {
    const ClattnContext& on = deref(context, "context");
    const ClattnSessionConfig& given = read(config, "config");
    return ClattnSession{Session(on.context, given.queue == nullptr ? Queue() : given.queue->queue,
                                 config_of(given))};
  });
}

void clattn_session_destroy(ClattnSession* session) {
  delete session;
}

ClattnResult clattn_session_queue(const ClattnSession* session, ClattnQueue** queue) {
  return make_handle(queue, "queue",
                     [&] { return ClattnQueue{deref(session, "session").session.queue()}; });
}

ClattnResult clattn_session_warm_up(ClattnSession* session, ClattnProgress progress, void* user) {
  return guarded([&] { deref(session, "session").session.warm_up(telling(progress, user)); });
}

ClattnResult clattn_session_explain(const ClattnSession* session, int32_t layer, char* text,
                                    size_t capacity, size_t* size) {
  return guarded([&] {
    const Attention& of = deref(session, "session").session.layer(layer);
    copy_text(to_string(of.explain()), text, capacity, size);
  });
}

ClattnResult clattn_session_load_kv_scales(ClattnSession* session, int32_t layer,
                                           const ClattnKVScales* scales) {
  return guarded([&] { load_kv_scales(deref(session, "session").session.layer(layer), scales); });
}

ClattnResult clattn_session_info(const ClattnSession* session, ClattnSessionInfo* info) {
  return guarded([&] {
    const Session& of = deref(session, "session").session;
    fill(info,
         {.struct_size = 0,
          .num_layers = of.num_layers(),
          .block_size = of.blocks().block_size(),
          .num_blocks = of.blocks().num_blocks(),
          .num_free_blocks = of.blocks().num_free(),
          .reserved = 0},
         "info");
  });
}

ClattnResult clattn_session_add(ClattnSession* session, const int32_t* prompt, size_t num_tokens,
                                uint64_t cache_salt, int64_t* id) {
  return guarded([&] {
    Session& of = deref(session, "session").session;
    int64_t& number = deref(id, "id");
    number = of.add(elements(prompt, num_tokens, "prompt"), cache_salt);
  });
}

ClattnResult clattn_session_fork(ClattnSession* session, int64_t id, int64_t* copy) {
  return guarded([&] {
    Session& of = deref(session, "session").session;
    int64_t& number = deref(copy, "copy");
    number = of.fork(id);
  });
}

ClattnResult clattn_session_evict(ClattnSession* session, int64_t id) {
  return guarded([&] { deref(session, "session").session.evict(id); });
}

ClattnResult clattn_session_finish(ClattnSession* session, int64_t id) {
  return guarded([&] { deref(session, "session").session.finish(id); });
}

ClattnResult clattn_session_request_info(const ClattnSession* session, int64_t id,
                                         ClattnRequestInfo* info) {
  return guarded([&] {
    const Session& of = deref(session, "session").session;
    const auto tokens = of.tokens(id), blocks = of.block_table(id);
    fill(info,
         {.struct_size = 0,
          .num_tokens = count_of(tokens),
          .num_computed_tokens = of.num_computed_tokens(id),
          .num_blocks = count_of(blocks),
          .tokens = tokens.data(),
          .block_table = blocks.data()},
         "info");
  });
}

ClattnResult clattn_session_step(ClattnSession* session, const ClattnStepRequest* requests,
                                 size_t num_requests, ClattnStepRows* rows) {
  return guarded([&] {
    Session& of = deref(session, "session").session;
    fill(rows, ClattnStepRows{}, "rows");  // before a step begins that nobody could see
    std::vector<StepRequest> parts;
    for (const ClattnStepRequest& given : elements(requests, num_requests, "requests"))
      parts.push_back(request_of(given));
    const Step& step = of.step(parts);
    fill(rows,
         {.struct_size = 0,
          .num_requests = count_of(step.seq_lens),
          .num_tokens = step.num_tokens(),
          .reserved = 0,
          .token_ids = step.token_ids.data(),
          .positions = step.positions.data(),
          .query_start_loc = step.query_start_loc.data(),
          .seq_lens = step.seq_lens.data()},
         "rows");
  });
}

ClattnResult clattn_session_attend(ClattnSession* session, int32_t layer,
                                   const ClattnTensors* tensors) {
  return guarded([&] {
    Session& of = deref(session, "session").session;
    const ClattnTensors& given = read(tensors, "tensors");
    of.attend(layer, tensors_of(given), forward_options_of(given));
  });
}
