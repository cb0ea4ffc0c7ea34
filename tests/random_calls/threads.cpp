#include "random_calls/threads.hpp"

#include <clattn/error.hpp>
#include <exception>
#include <thread>

#include "random_calls/driver_faults.hpp"
#include "random_calls/world.hpp"

using namespace clattn;
using test::Dice;
using test::Threads;
using test::World;

static constexpr int kCallsOfAThread = 12;
static constexpr std::size_t kRowBytes = std::size_t{64} * 4 * 32 * 4;  // of the largest step
static const BatchLimits kLimits = {
    .max_num_reqs = 8, .max_num_batched_tokens = 64, .max_model_len = 128};

static SessionConfig session_config() {
  AttentionOptions layer{.config = {.num_heads = 4, .head_size = 32}};
  layer.config.num_kv_heads = 2;
  layer.config.dtype = DType::kF32;
  return {.layers = {layer, layer}, .num_blocks = 12, .builder = {.limits = kLimits}};
}

Threads::Threads(World& world)
    : rows(world.context->allocate(kRowBytes)),
      session_out(world.context->allocate(kRowBytes)),
      session(world.context, world.context->create_queue(), session_config()) {
  const AttentionConfig config = session.layer(0).config();
  const AttentionBackend& backend = *session.layer(0).get_attn_backend();
  impl = backend.make_impl(world.context, config);
  cache = make_kv_cache(*world.context, world.queue, backend, config, kBlocks);
  world.queue.fill(rows, 0x3F800000, 0, kRowBytes);
  for (Stepper& stepper : steppers) {
    stepper.queue = world.context->create_queue();
    stepper.builder = backend.make_builder(world.context, config, {.limits = kLimits});
    stepper.out = world.context->allocate(kRowBytes);
  }
  world.queue.finish();
}

/// `call`, unless it is refused or the driver fails: both are legal.
template <typename Call>
static void attempt(const Call& call) {
  try {
    call();
  } catch (const Error&) {
  }
}

static void build_and_forward(World& world, Dice& dice, Threads& threads,
                              Threads::Stepper& stepper) {
  const auto drawn = world.batch(dice, 16);
  const AttentionMetadata& metadata = stepper.builder->build(stepper.queue, drawn.batch);
  threads.impl->forward(stepper.queue,
                        {.query = {threads.rows.handle()}, .output = {stepper.out.handle()}},
                        threads.cache, metadata);
  if (dice.one_in(3)) stepper.queue.finish();
}

static void serve(Dice& dice, Threads& threads) {
  Session& session = threads.session;
  std::vector<RequestId>& requests = threads.requests;
  const std::vector<std::int32_t> prompt(static_cast<std::size_t>(dice.below(40)), 7);
  if (requests.empty() || (requests.size() < 8 && dice.one_in(4))) {
    requests.push_back(session.add(prompt));
    return;
  }
  const RequestId id = dice.pick(requests);
  switch (dice.below(8)) {
    case 0:
      if (requests.size() < 8) requests.push_back(session.fork(id));
      return;
    case 1:
      return session.evict(id);
    case 2:
      std::erase(requests, id);
      return session.finish(id);
    default:
      break;
  }
  StepRequest part{.id = dice.one_in(20) ? dice.odd_number() : id};
  for (std::int64_t i = dice.below(3); i > 0; --i)
    part.new_tokens.push_back(static_cast<std::int32_t>(dice.below(5)));
  if (dice.one_in(4)) part.max_tokens = static_cast<std::int32_t>(dice.below(20));
  session.step({part});
  for (std::int32_t layer = 0; layer < session.num_layers(); ++layer) {
    if (dice.one_in(30)) return;  // given up
    const TensorRef rows{threads.rows.handle()};
    session.attend(
        layer,
        {.query = rows, .key = rows, .value = rows, .output = {threads.session_out.handle()}});
  }
}

void test::call_from_threads(World& world) {
  if (world.threads == nullptr) world.threads = std::make_unique<Threads>(world);
  Threads& threads = *world.threads;
  std::array<std::exception_ptr, 3> failures;
  std::vector<std::thread> running;
  for (std::size_t number = 0; number < failures.size(); ++number) {
    const auto seed = static_cast<std::uint64_t>(1 + world.dice.below(1 << 30));
    running.emplace_back([&, number, seed] {
      driver::seed_thread(seed);
      Dice dice(seed);
      try {
        for (int call = 0; call < kCallsOfAThread; ++call) {
          attempt([&] {
            if (number == 0) return serve(dice, threads);
            build_and_forward(world, dice, threads, threads.steppers.at(number - 1));
          });
        }
      } catch (...) {
        failures.at(number) = std::current_exception();
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}
