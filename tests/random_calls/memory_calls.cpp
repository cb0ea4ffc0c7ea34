// Calls of contexts, queues, buffers and events.
#include <algorithm>

#include "random_calls/world.hpp"

using namespace clattn;
using test::Dice;
using test::World;

static std::size_t bytes_of(Dice& dice) {
  return static_cast<std::size_t>(dice.one_in(10) ? dice.odd_number() : dice.below(5000));
}

static std::span<std::byte> part_of(Dice& dice, std::vector<std::byte>& host) {
  return std::span(host).first(static_cast<std::size_t>(dice.below(5000)));
}

static void allocate(World& world) {
  // Small ones, and some that no device has.
  const std::size_t bytes = world.dice.one_in(8)
                                ? static_cast<std::size_t>(world.dice.odd_number())
                                : static_cast<std::size_t>(1 + world.dice.below(70000));
  if (bytes > (std::size_t{1} << 20) && bytes < (std::size_t{1} << 40)) return;
  // The last one stays: tensors fit it.
  if (Buffer& old = world.buffer(); &old != &world.buffers.back()) {
    old = world.context->allocate(bytes);
  }
}

static void write(World& world) {
  const auto source = part_of(world.dice, world.sent);
  world.queue.write(world.buffer(), source, bytes_of(world.dice));
}

static void write_async(World& world) {
  const auto source = part_of(world.dice, world.sent);
  world.queue.write_async(world.buffer(), source, bytes_of(world.dice), world.maybe_event());
}

static void read(World& world) {
  const auto target = part_of(world.dice, world.received);
  world.queue.read(world.buffer(), target, bytes_of(world.dice));
}

static void read_async(World& world) {
  const auto target = part_of(world.dice, world.received);
  world.queue.read_async(world.buffer(), target, bytes_of(world.dice), world.maybe_event());
}

static void fill(World& world) {
  world.queue.fill(world.buffer(), static_cast<std::uint32_t>(world.dice.below(20)),
                   bytes_of(world.dice) & ~std::size_t{3}, bytes_of(world.dice) & ~std::size_t{3});
}

static void map(World& world) {
  HostView view = world.queue.map(world.buffer(), HostAccess::kReadWrite);
  if (!view.bytes().empty()) view.bytes().back() = std::byte{1};
}

static void share(World& world) {
  const Buffer shared = world.context->share(part_of(world.dice, world.received));
  world.queue.fill(shared, 7, 0, shared.size_bytes() & ~std::size_t{3});
  world.queue.finish();
}

static void wait(World& world) {
  if (world.event) world.event.wait();
  if (world.dice.one_in(3)) world.event.reset();
}

static void flush(World& world) {
  world.queue.flush();
}

static void finish(World& world) {
  world.queue.finish();
}

static void queues(World& world) {
  Queue made = world.context->create_queue(world.dice.one_in(2) ? QueueProfiling::kOn
                                                                : QueueProfiling::kOff);
  made.fill(world.buffer(), 0, 0, 4);
  made.finish();
  if (world.dice.one_in(2)) {
    world.queue.finish();
    world.queue = Queue::adopt(made);
  }
}

static void adopt(World& world) {
  const auto context = Context::adopt(world.context->handle(), world.context->device());
  const Buffer retained = Buffer::adopt(world.buffer().handle());
  context->create_queue().fill(retained, 0, 0, 4);
}

std::span<const test::RandomCall> test::memory_calls() {
  static constexpr auto kCalls = std::to_array<RandomCall>({
      {"Context::allocate", 40, allocate},
      {"Queue::write", 60, write},
      {"Queue::write_async", 60, write_async},
      {"Queue::read", 60, read},
      {"Queue::read_async", 60, read_async},
      {"Queue::fill", 40, fill},
      {"Queue::map", 30, map},
      {"Context::share", 20, share},
      {"Event::wait", 30, wait},
      {"Queue::flush", 10, flush},
      {"Queue::finish", 20, finish},
      {"Context::create_queue", 2, queues},
      {"Context::adopt", 1, adopt},
  });
  return kCalls;
}
