#pragma once

#include <array>
#include <clattn/context.hpp>
#include <clattn/session.hpp>
#include <memory>
#include <vector>

namespace test {

struct World;

/// What threads act on beside each other, as the headers allow: each has its queue, builder and
/// outputs; the context, a layer's impl and its cache, which is only read, belong to all. One of
/// them serves requests by a session.
struct Threads {
  explicit Threads(World& world);

  struct Stepper {
    clattn::Queue queue;
    std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
    clattn::Buffer out;
  };
  std::shared_ptr<const clattn::AttentionImpl> impl;
  clattn::KVCache cache;
  std::array<Stepper, 2> steppers;
  clattn::Buffer rows, session_out;  ///< rows: what all read
  clattn::Session session;
  std::vector<clattn::RequestId> requests;  ///< of the session, not finished
};

/// Random calls of each thread; throws what the first of those that failed threw.
void call_from_threads(World& world);

}  // namespace test
