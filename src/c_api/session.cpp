#include <clattn/block_pool.hpp>
#include <clattn/explain.hpp>
#include <clattn/session.hpp>
#include <clattn/session_states.hpp>

#include "c_api/recurrent_metadata.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

struct ClattnSession : Holds<Session, "session"> {};
CLATTN_DESTROYS(clattn_session_destroy, ClattnSession)

namespace {

/// Tells the application's function, if there is one.
auto telling(ClattnProgress progress, void* user) {
  return [progress, user](std::int32_t done, std::int32_t total) {
    if (progress != nullptr)
      progress(user, static_cast<std::size_t>(done), static_cast<std::size_t>(total));
  };
}

std::shared_ptr<const RecurrentLayers> recurrent_of(const ClattnSessionConfig& given) {
  if (given.recurrent_layers == nullptr) {
    detail::throw_invalid_if(given.num_state_slots != 0,
                             "config: num_state_slots is {}, legal without recurrent_layers: 0",
                             given.num_state_slots);
    return nullptr;
  }
  RecurrentLayers layers;
  layers.layers = each_of(given.recurrent_layers, given.num_recurrent_layers,
                          "config: recurrent_layers", [](const ClattnKVCacheSpec* spec) {
                            return spec_of(spec, "config: recurrent_layers: an element");
                          });
  layers.num_slots = given.num_state_slots;
  return std::make_shared<RecurrentLayers>(std::move(layers));
}

SessionConfig config_of(const ClattnSessionConfig& given) {
  SessionConfig config;
  config.layers =
      each_of(given.layers, given.num_layers, "config: layers", [](const ClattnLayerConfig* layer) {
        return options_of(read(layer, "config: layers: an element"));
      });
  config.num_blocks = given.num_blocks;
  config.cache_bytes = given.cache_bytes;
  config.prefix_caching = given.no_prefix_caching == 0;
  config.layout = layout_of(given.layout);
  config.progress = telling(given.progress, given.progress_user);
  config.explicit_commit = given.explicit_commit != 0;
  config.builder = builder_options_of(given.step_options);
  config.recurrent = recurrent_of(given);
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
  const auto ends = elements(given.spans, 2 * given.num_spans, "requests: spans");
  const auto drafts = elements(given.drafts, given.num_drafts, "requests: drafts");
  const std::size_t num_parents = given.draft_parents == nullptr ? 0 : given.num_drafts;
  const auto parents = elements(given.draft_parents, num_parents, "requests: draft_parents");
  StepRequest request = {
      .id = given.id,
      .new_tokens = {tokens.begin(), tokens.end()},
      .max_tokens = given.max_tokens == 0 ? kAll : static_cast<std::int32_t>(given.max_tokens),
      .compute_every_row = given.compute_every_row != 0};
  for (std::size_t i = 0; i < ends.size(); i += 2) request.spans.push_back({ends[i], ends[i + 1]});
  request.drafts.assign(drafts.begin(), drafts.end());
  request.draft_parents.assign(parents.begin(), parents.end());
  return request;
}

ClattnStateView view_of(const StateView& view) {
  return {sizeof(ClattnStateView), 0,           view.buffer.handle(),
          view.num_blocks,         view.offset, view.block_stride};
}

Accepted accepted_of(const ClattnAccepted& given) {
  const auto path = elements(given.path, given.num_accepted, "requests: path");
  return {given.id, {path.begin(), path.end()}};
}

std::int32_t count_of(std::span<const std::int32_t> values) {
  return static_cast<std::int32_t>(values.size());
}

}  // namespace

ClattnResult clattn_session_create(const ClattnContext* context, const ClattnSessionConfig* config,
                                   ClattnSession** session) {
  return make_handle(session, [&] {
    const auto& on = held(context);
    const ClattnSessionConfig& given = read(config, "config");
    return Session(on, given.queue == nullptr ? Queue() : given.queue->held, config_of(given));
  });
}

ClattnResult clattn_session_queue(const ClattnSession* session, ClattnQueue** queue) {
  return make_handle(queue, [&] { return held(session).queue(); });
}

ClattnResult clattn_session_warm_up(ClattnSession* session, ClattnProgress progress, void* user) {
  return guarded([&] { held(session).warm_up(telling(progress, user)); });
}

ClattnResult clattn_session_explain(const ClattnSession* session, int32_t layer, char* text,
                                    size_t capacity, size_t* size) {
  return give_text(text, capacity, size,
                   [&] { return to_string(held(session).layer(layer).explain()); });
}

ClattnResult clattn_session_load_kv_scales(ClattnSession* session, int32_t layer,
                                           const ClattnKVScales* scales) {
  return guarded([&] { load_kv_scales(held(session).layer(layer), scales); });
}

ClattnResult clattn_session_info(const ClattnSession* session, ClattnSessionInfo* info) {
  return guarded([&] {
    const Session& of = held(session);
    const BlockPool* const slots = of.state_slots();
    fill(info, "info",
         {.struct_size = 0,
          .num_layers = of.num_layers(),
          .block_size = of.blocks().block_size(),
          .num_blocks = of.blocks().num_blocks(),
          .num_free_blocks = of.blocks().num_free(),
          .num_windows = static_cast<int32_t>(of.window_blocks().size()),
          .num_recurrent_layers = of.num_recurrent_layers(),
          .num_slots = slots == nullptr ? 0 : slots->num_blocks(),
          .num_free_slots = slots == nullptr ? 0 : slots->num_free()});
  });
}

ClattnResult clattn_session_window_info(const ClattnSession* session, int32_t window,
                                        ClattnWindowInfo* info) {
  return guarded([&] {
    const std::vector<WindowBlocks> all = held(session).window_blocks();
    detail::throw_invalid_if(window < 0 || std::cmp_greater_equal(window, all.size()),
                             "window is {}, legal: 0 to {} (num_windows - 1)", window,
                             std::ssize(all) - 1);
    const WindowBlocks& of = all[static_cast<std::size_t>(window)];
    fill(info, "info",
         {.struct_size = 0,
          .window = of.window,
          .num_blocks = of.blocks->num_blocks(),
          .num_free_blocks = of.blocks->num_free()});
  });
}

ClattnResult clattn_session_add(ClattnSession* session, const int32_t* prompt, size_t num_tokens,
                                uint64_t cache_salt, int64_t* id) {
  return give(id, "id", [&] {
    return held(session).add(elements(prompt, num_tokens, "prompt"), cache_salt);
  });
}

ClattnResult clattn_session_fork(ClattnSession* session, int64_t id, int64_t* copy) {
  return give(copy, "copy", [&] { return held(session).fork(id); });
}

ClattnResult clattn_session_evict(ClattnSession* session, int64_t id) {
  return guarded([&] { held(session).evict(id); });
}

ClattnResult clattn_session_finish(ClattnSession* session, int64_t id) {
  return guarded([&] { held(session).finish(id); });
}

ClattnResult clattn_session_truncate(ClattnSession* session, int64_t id, int32_t length) {
  return guarded([&] { held(session).truncate(id, length); });
}

ClattnResult clattn_session_request_info(const ClattnSession* session, int64_t id,
                                         ClattnRequestInfo* info) {
  return guarded([&] {
    const Session& of = held(session);
    const auto tokens = of.tokens(id), blocks = of.block_table(id);
    fill(info, "info",
         {.struct_size = 0,
          .num_tokens = count_of(tokens),
          .num_computed_tokens = of.num_computed_tokens(id),
          .num_blocks = count_of(blocks),
          .tokens = tokens.data(),
          .block_table = blocks.data()});
  });
}

ClattnResult clattn_session_step(ClattnSession* session, const ClattnStepRequest* requests,
                                 size_t num_requests, ClattnStepRows* rows) {
  return guarded([&] {
    Session& of = held(session);
    fill(rows, "rows", {});  // before a step begins that nobody could see
    const Step& step = of.step(each_of(requests, num_requests, "requests", request_of));
    fill(rows, "rows",
         {.struct_size = 0,
          .num_requests = count_of(step.seq_lens),
          .num_tokens = step.num_tokens(),
          .reserved = 0,
          .token_ids = step.token_ids.data(),
          .positions = step.positions.data(),
          .query_start_loc = step.query_start_loc.data(),
          .seq_lens = step.seq_lens.data(),
          .num_drafts = step.num_drafts.data()});
  });
}

ClattnResult clattn_session_blocks_needed(ClattnSession* session, const ClattnStepRequest* requests,
                                          size_t num_requests, int64_t* needed, size_t num_pools) {
  return guarded([&] {
    Session& of = held(session);
    const std::size_t pools = 1 + of.window_blocks().size();
    detail::throw_invalid_if(needed == nullptr, "needed is null, legal: [num_pools]");
    detail::throw_invalid_if(num_pools != pools, "num_pools is {}, legal: {} (1 + num_windows)",
                             num_pools, pools);
    std::ranges::copy(of.blocks_needed(each_of(requests, num_requests, "requests", request_of)),
                      needed);
  });
}

ClattnResult clattn_session_prepare_qkv(ClattnSession* session, int32_t layer,
                                        const ClattnPrepareQKV* call) {
  return guarded([&] {
    Session& of = held(session);
    const ClattnPrepareQKV& given = read(call, "call");
    detail::throw_invalid_if(given.event != nullptr || given.num_padding_tokens != 0,
                             "call: event or num_padding_tokens is given, legal: none");
    of.prepare_qkv(layer, prepare_of(given));
  });
}

ClattnResult clattn_session_attend(ClattnSession* session, int32_t layer,
                                   const ClattnTensors* tensors) {
  return guarded([&] {
    const ClattnTensors& given = read(tensors, "tensors");
    held(session).attend(layer, tensors_of(given), forward_options_of(given));
  });
}

ClattnResult clattn_session_recur(ClattnSession* session, int32_t layer, ClattnRecur run,
                                  void* user) {
  struct Stopped {};
  ClattnResult result = CLATTN_SUCCESS;  // of `run`
  const ClattnResult own = guarded([&] {
    Session& of = held(session);
    deref(run, "run");
    try {
      of.recur(layer, [&](const RecurrentStep& step) {
        const ClattnStateView conv = view_of(step.conv_states), states = view_of(step.states);
        const ClattnRecurrentMetadata conv_metadata{
            {{RecurrentMetadataBuilder(*of.context()), step.conv_metadata}}};
        const ClattnRecurrentMetadata metadata{
            {{RecurrentMetadataBuilder(*of.context()), step.metadata}}};
        const ClattnRecurrentStep given{.struct_size = sizeof given,
                                        .reserved = 0,
                                        .conv_states = conv.buffer == nullptr ? nullptr : &conv,
                                        .conv_metadata = &conv_metadata,
                                        .states = states.buffer == nullptr ? nullptr : &states,
                                        .metadata = &metadata};
        result = run(user, &given);
        if (result != CLATTN_SUCCESS) throw Stopped();
      });
    } catch (const Stopped&) {  // its text stays this thread's
    }
  });
  return result != CLATTN_SUCCESS ? result : own;
}

ClattnResult clattn_session_commit(ClattnSession* session) {
  return guarded([&] { held(session).commit(); });
}

ClattnResult clattn_session_accept(ClattnSession* session, int64_t id, const int32_t* path,
                                   size_t num_accepted) {
  return guarded([&] { held(session).accept(id, elements(path, num_accepted, "path")); });
}

ClattnResult clattn_session_accept_all(ClattnSession* session, const ClattnAccepted* requests,
                                       size_t num_requests) {
  return guarded(
      [&] { held(session).accept(each_of(requests, num_requests, "requests", accepted_of)); });
}
