// Calls of the C API's sessions (clattn_session.h).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "random_calls/c_help.hpp"

using namespace test::c;
using test::CHandle;
using test::CWorld;
using test::Dice;
using test::World;

static constexpr std::int64_t kSessionBlocks = 16;

static void count_progress(void* user, size_t done, size_t total) {
  *static_cast<size_t*>(user) += done <= total ? 1 : 0;
}

static void make_session(World& world) {
  CWorld& c = *world.c;
  Dice& dice = world.dice;
  ClattnLayerConfig layer = layer_config(dice), other = layer;
  for (ClattnLayerConfig* const config : {&layer, &other}) {
    if (dice.one_in(4)) config->sliding_window = 5;
    if (dice.one_in(20)) config->name = "one name for two";
    if (dice.one_in(20)) config->block_size = 8;
  }
  if (dice.one_in(2)) layer.dtype = other.dtype = "f32";
  if (dice.one_in(2)) layer.use_trees = other.use_trees = 1;
  if (dice.one_in(4)) layer.kv_cache_dtype = other.kv_cache_dtype = "fp8";
  const ClattnLayerConfig* const layers[] = {&layer, dice.one_in(20) ? nullptr : &other};
  const ClattnStepOptions options = step_options(dice);
  const std::array<const char*, 4> layouts = {nullptr, "NHD", "HND", "no layout"};
  size_t told = 0;
  auto config = sized<ClattnSessionConfig>(dice);
  config.layers = dice.one_in(40) ? nullptr : layers;
  config.num_layers = static_cast<size_t>(dice.one_in(20) ? dice.below(2) : 2);
  config.num_blocks = dice.one_in(10) ? dice.odd_number() % 1000 : kSessionBlocks;
  if (dice.one_in(3)) config.cache_bytes = static_cast<std::uint64_t>(dice.below(1 << 20));
  if (dice.one_in(4)) config.layout = dice.pick(layouts);
  if (!dice.one_in(8)) config.step_options = &options;
  if (dice.one_in(2)) config.queue = c.queue.get();
  if (dice.one_in(4)) config.no_prefix_caching = 1;
  if (dice.one_in(4)) config.explicit_commit = 1;
  if (dice.one_in(2)) config.progress = count_progress;
  config.progress_user = &told;
  remake(c.session.handle, [&](auto* made) {
    const ClattnResult status = clattn_session_create(maybe(dice, c.context), &config, made);
    if (status == CLATTN_SUCCESS) c.session.requests.clear();
    if (status == CLATTN_SUCCESS) c.session.known.clear();
    if (status == CLATTN_SUCCESS) c.session.explicit_commit = config.explicit_commit != 0;
    return status;
  });
}

/// One of the session's requests, or a number that is none's.
static std::int64_t request_of(World& world) {
  auto& requests = world.c->session.requests;
  return requests.empty() || world.dice.one_in(30) ? world.dice.odd_number()
                                                   : world.dice.pick(requests);
}

static void add_request(World& world) {
  test::CSession& session = world.c->session;
  Dice& dice = world.dice;
  if (session.handle == nullptr) return make_session(world);
  if (session.requests.size() > 8) return;
  const std::array<std::int32_t, 40> prompt = {};  // all begin alike
  const auto tokens = static_cast<size_t>(dice.one_in(20) ? 0 : 1 + dice.below(39));
  std::int64_t id = -1;
  tell(clattn_session_add(maybe(dice, session.handle), dice.one_in(40) ? nullptr : prompt.data(),
                          tokens, static_cast<std::uint64_t>(dice.below(2)),
                          dice.one_in(60) ? nullptr : &id));
  session.requests.push_back(id);
}

static void change_request(World& world) {
  test::CSession& session = world.c->session;
  ClattnSession* const handle = maybe(world.dice, session.handle);
  const std::int64_t id = request_of(world);
  std::int64_t copy = -1;
  switch (world.dice.below(4)) {
    case 0:
      if (session.requests.size() > 8) return;
      tell(clattn_session_fork(handle, id, world.dice.one_in(60) ? nullptr : &copy));
      return session.requests.push_back(copy);
    case 1:
      return tell(clattn_session_evict(handle, id));
    case 2:
      return tell(
          clattn_session_truncate(handle, id, static_cast<std::int32_t>(1 + world.dice.below(50))));
    default:
      tell(clattn_session_finish(handle, id));
      std::erase(session.requests, id);
  }
}

/// Each request's rows end where its sequence does.
static void read_rows(const ClattnStepRows& rows) {
  bool fits = rows.query_start_loc[rows.num_requests] == rows.num_tokens;
  for (std::int32_t i = 0; fits && i < rows.num_requests; ++i) {
    const std::int32_t first = rows.query_start_loc[i], end = rows.query_start_loc[i + 1];
    const std::int32_t drafts = rows.num_drafts[i];
    fits = first < end - drafts && rows.positions[first] + end - first == rows.seq_lens[i];
  }
  if (!fits) throw std::runtime_error("rows of a step that do not fit");
}

static void attend(World& world, std::int32_t layer) {
  CWorld& c = *world.c;
  auto tensors = sized<ClattnTensors>(world.dice);
  for (ClattnTensorRef* const tensor : {&tensors.query, &tensors.key, &tensors.value})
    *tensor = tensor_of(world.dice, c.graphs.rows.get());
  tensors.output = tensor_of(world.dice, c.graphs.session_output.get());
  if (world.dice.one_in(3)) tensors.event = c.event.get();
  tell(clattn_session_attend(maybe(world.dice, c.session.handle), layer, &tensors));
}

static void commit_session(World& world) {
  tell(clattn_session_commit(maybe(world.dice, world.c->session.handle)));
}

/// Mostly what a chain or a tree of step_session() allows.
static void accept_drafts_of(World& world, std::int64_t id) {
  Dice& dice = world.dice;
  std::array<std::int32_t, 3> path = {0, dice.one_in(2) ? 1 : 2, 2};
  if (dice.one_in(20)) path[0] = static_cast<std::int32_t>(dice.odd_number());
  ClattnSession* const session = maybe(dice, world.c->session.handle);
  ClattnAccepted accepted{};
  accepted.id = id;
  accepted.path = dice.one_in(60) ? nullptr : path.data();
  accepted.num_accepted = static_cast<size_t>(dice.below(dice.one_in(6) ? 4 : 2));
  if (!dice.one_in(3))
    return tell(clattn_session_accept(session, id, accepted.path, accepted.num_accepted));
  const std::array<ClattnAccepted, 2> both = {accepted, {request_of(world), path.data(), 1}};
  tell(clattn_session_accept_all(session, both.data(), static_cast<size_t>(1 + dice.below(2))));
}

static void accept_drafts(World& world) {
  accept_drafts_of(world, request_of(world));
}

static void step_session(World& world) {
  Dice& dice = world.dice;
  const auto& requests = world.c->session.requests;
  if (requests.empty()) return add_request(world);
  const std::array<std::int32_t, 3> tokens = {1, 2, 3}, parents = {-1, 0, dice.one_in(2) ? 0 : 1};
  std::array<ClattnStepRequest, 3> parts{};
  const auto first = static_cast<size_t>(dice.below(8));
  for (size_t i = 0; i < parts.size(); ++i) {
    ClattnStepRequest& part = parts.at(i);
    part.id = dice.one_in(20) ? request_of(world) : requests[(first + i) % requests.size()];
    part.new_tokens = dice.one_in(60) ? nullptr : tokens.data();
    part.num_new_tokens = static_cast<size_t>(dice.one_in(6) ? 0 : 1 + dice.below(2));
    if (dice.one_in(4)) part.max_tokens = dice.one_in(8) ? dice.odd_number() : dice.below(20);
    if (dice.one_in(4)) part.compute_every_row = 1;
    if (dice.one_in(4)) {
      part.drafts = dice.one_in(60) ? nullptr : tokens.data();
      part.num_drafts = static_cast<size_t>(dice.below(4));
      if (dice.one_in(3)) part.draft_parents = parents.data();
    }
    if (dice.one_in(100)) part.reserved = 1;
  }
  auto rows = sized<ClattnStepRows>(dice);
  const auto most = static_cast<std::int64_t>(std::min(requests.size(), parts.size()));
  const auto count = static_cast<size_t>(dice.one_in(20) ? dice.below(4) : 1 + dice.below(most));
  tell(clattn_session_step(maybe(dice, world.c->session.handle), parts.data(), count, &rows));
  if (count > 0) read_rows(rows);
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    if (dice.one_in(20)) return;  // left to attend_session(), or given up
    attend(world, layer);
  }
  if (world.c->session.explicit_commit && !dice.one_in(4)) commit_session(world);
  for (size_t i = 0; i < count; ++i)
    if (parts.at(i).num_drafts > 0 && !dice.one_in(6)) accept_drafts_of(world, parts.at(i).id);
}

static void attend_session(World& world) {
  attend(world, static_cast<std::int32_t>(world.dice.one_in(8) ? world.dice.odd_number()
                                                               : world.dice.below(2)));
}

static void ask_session(World& world) {
  CWorld& c = *world.c;
  Dice& dice = world.dice;
  ClattnSession* const session = maybe(dice, c.session.handle);
  const auto layer = static_cast<std::int32_t>(dice.one_in(8) ? dice.odd_number() : dice.below(2));
  auto of_session = sized<ClattnSessionInfo>(dice);
  auto of_window = sized<ClattnWindowInfo>(dice);
  auto of_request = sized<ClattnRequestInfo>(dice);
  auto scales = sized<ClattnKVScales>(dice);
  std::array<char, 64> text{};
  size_t size = 0;
  switch (dice.below(6)) {
    case 0:
      tell(clattn_session_info(session, &of_session));
      return tell(clattn_session_window_info(session, layer, &of_window));
    case 1:
      tell(clattn_session_request_info(session, request_of(world), &of_request));
      if (std::any_of(of_request.tokens, of_request.tokens + of_request.num_tokens,
                      [](std::int32_t token) { return token < 0 || token > 3; }))
        throw std::runtime_error("a token that nobody added");
      return;
    case 2:
      return tell(clattn_session_explain(session, layer, text.data(),
                                         static_cast<size_t>(dice.below(65)), &size));
    case 3:
      scales.k_scale = scales.v_scale = dice.one_in(3) ? -1.0F : 0.5F;
      return tell(clattn_session_load_kv_scales(session, layer, &scales));
    case 4:
      clattn_queue_finish(c.queue.get());  // as in make_handles()
      return remake(c.queue, [&](auto* made) { return clattn_session_queue(session, made); });
    default:
      if (dice.one_in(4)) tell(clattn_session_warm_up(session, count_progress, &size));
  }
}

/// Seldom, so that most of them live until they are compared with what they computed before.
static void destroy_session(World& world) {
  if (world.dice.one_in(4)) world.c->session = {};
}

std::span<const test::RandomCall> test::c_session_calls() {
  static constexpr auto kCalls = std::to_array<RandomCall>({
      {"clattn_session_create", 1, make_session},
      {"clattn_session_add", 20, add_request},
      {"clattn_session_fork, _evict, _truncate, _finish", 20, change_request},
      {"clattn_session_step", 60, step_session},
      {"clattn_session_attend", 10, attend_session},
      {"clattn_session_commit", 5, commit_session},
      {"clattn_session_accept, _accept_all", 10, accept_drafts},
      {"clattn_session_..._info and the like", 20, ask_session},
      {"clattn_session_destroy", 1, destroy_session},
  });
  return kCalls;
}

/// A prompt and a token after it, by all layers; nothing of it is in the cache.
static std::vector<float> known_steps(CWorld& c, std::int32_t num_layers) {
  ClattnSession* const session = c.session.handle.get();
  const std::array<std::int32_t, 12> prompt = {};
  const std::array<std::int32_t, 1> next = {1};
  ClattnKVScales scales{};
  scales.struct_size = sizeof scales;
  scales.k_scale = scales.v_scale = 1;
  ClattnStepRequest part{};
  // A salt that no other request has: what is in the cache was computed from other keys.
  const std::uint64_t salt = 2 + c.session.checks++;
  tell(clattn_session_add(session, prompt.data(), prompt.size(), salt, &part.id));
  ClattnTensors tensors{};
  tensors.struct_size = sizeof tensors;
  tensors.query.buffer = tensors.key.buffer = tensors.value.buffer = c.graphs.rows.get();
  tensors.output.buffer = c.graphs.known_output.get();
  std::vector<float> output(4UL * prompt.size() * 4 * 32);  // of two steps by at most two layers
  auto place = output.begin();
  CHandle<ClattnQueue, clattn_queue_destroy> queue;
  remake(queue, [&](auto* made) { return clattn_session_queue(session, made); });
  for (const std::size_t count : {prompt.size(), next.size()}) {
    ClattnStepRows rows{};
    rows.struct_size = sizeof rows;
    tell(clattn_session_step(session, &part, 1, &rows));
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
      tell(clattn_session_load_kv_scales(session, layer, &scales));
      tell(clattn_session_attend(session, layer, &tensors));
      const std::size_t bytes = count * 4 * 32 * 2;  // of 16-bit rows, half of the others
      tell(clattn_buffer_read(c.graphs.known_output.get(), queue.get(), 0, &*place, bytes));
      place += static_cast<std::ptrdiff_t>(count) * 4 * 32;
    }
    if (c.session.explicit_commit) tell(clattn_session_commit(session));
    part.new_tokens = next.data();
    part.num_new_tokens = next.size();
  }
  tell(clattn_session_finish(session, part.id));
  return output;
}

bool test::session_computes_as_before(World& world) {
  CWorld& c = *world.c;
  CSession& session = c.session;
  if (session.handle == nullptr) return true;
  for (const std::int64_t id : session.requests)
    tell(clattn_session_finish(session.handle.get(), id));
  session.requests.clear();
  ClattnSessionInfo info{};
  info.struct_size = sizeof info;
  tell(clattn_session_info(session.handle.get(), &info));
  if (info.num_free_blocks != info.num_blocks) {
    fmt::print(stderr, "a session without requests holds {} of {} blocks\n",
               info.num_blocks - info.num_free_blocks, info.num_blocks);
    return false;
  }
  const std::vector<float> steps = known_steps(c, info.num_layers);
  if (session.known.empty()) session.known = steps;
  if (std::memcmp(steps.data(), session.known.data(), steps.size() * sizeof(float)) == 0)
    return true;
  fmt::print(stderr, "a session computes other bytes than before\n");
  return false;
}
