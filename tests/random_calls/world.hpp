#pragma once

#include <array>
#include <clattn/attention.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/context.hpp>
#include <clattn/graph.hpp>
#include <clattn/layer.hpp>
#include <clattn/mla.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "random_calls/c_calls.hpp"
#include "random_calls/threads.hpp"

namespace test {

/// What a seed and a call's number decide.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  /// 0 … below - 1.
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(limit));
  }
  bool one_in(std::int64_t count) { return below(count) == 0; }
  template <typename T, std::size_t N>
  const T& pick(const std::array<T, N>& choices) {
    return choices[static_cast<std::size_t>(below(N))];
  }
  template <typename T>
  T& pick(std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(below(static_cast<std::int64_t>(choices.size())))];
  }
  /// A number that hostile callers like.
  std::int64_t odd_number();

 private:
  std::mt19937_64 engine_;
};

/// A batch and the arrays that it points into.
struct RandomBatch {
  std::vector<std::int32_t> query_start_loc, seq_lens, block_table;
  std::vector<std::int64_t> slots;
  clattn::CommonAttentionMetadata batch;
};

/// A paged layer and what belongs to it. Builders outlive their metadata.
struct Paged {
  clattn::AttentionConfig config;
  const clattn::AttentionBackend* backend = nullptr;
  std::shared_ptr<const clattn::AttentionImpl> impl;
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
  std::unique_ptr<clattn::AttentionMetadataBuilder> group_builder;  ///< of another block table
  clattn::KVCache cache;
  const clattn::AttentionMetadata* metadata = nullptr;  ///< of the last build that did not throw
  std::vector<std::byte> known;  ///< what its known step gave, once it has run
};

struct Latent {
  clattn::MLAConfig config;
  std::shared_ptr<const clattn::MLAImpl> impl;
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
  clattn::MLACache cache;
  const clattn::AttentionMetadata* metadata = nullptr;
};

struct Recorded {
  std::unique_ptr<clattn::AttentionState> state;
  clattn::Graph graph;
  std::size_t layer = 0;
};

inline constexpr std::int32_t kBlocks = 8;
inline constexpr std::size_t kHostBytes = 1 << 16;

/// Everything that the calls of a run act on.
struct World {
  explicit World(std::uint64_t seed);

  Dice dice;
  std::shared_ptr<clattn::Context> context;
  clattn::Queue queue;
  std::vector<clattn::Buffer> buffers;
  clattn::Buffer results;            ///< as large as the last of them
  std::vector<clattn::Buffer> rows;  ///< apart from each other, as advance_step wants them
  std::vector<Paged> layers;
  std::vector<Latent> latents;
  std::vector<Recorded> recorded;
  std::unique_ptr<clattn::DeviceErrors> errors;
  clattn::LayerRegistry registry;
  std::unique_ptr<clattn::Attention> layer;  ///< of the registry
  clattn::Event event;
  std::unique_ptr<CWorld> c;
  std::unique_ptr<Threads> threads;  ///< once they are wanted
  /// Host memory of asynchronous copies: alive as long as any.
  std::vector<std::byte> sent = std::vector<std::byte>(kHostBytes);
  std::vector<std::byte> received = std::vector<std::byte>(kHostBytes);

  clattn::Buffer& buffer() { return dice.pick(buffers); }
  clattn::Event* maybe_event() { return dice.one_in(3) ? &event : nullptr; }
  clattn::TensorRef tensor();
  clattn::TensorRef output();  ///< mostly apart from other tensors
  std::size_t slot_offset_bytes();
  RandomBatch batch(std::int32_t block_size) { return batch(dice, block_size); }
  /// By another thread's dice; touches nothing else.
  static RandomBatch batch(Dice& dice, std::int32_t block_size);
  std::vector<clattn::BlockPair> block_pairs();
};

clattn::AttentionConfig random_config(Dice& dice);
Paged make_paged(World& world, const clattn::AttentionConfig& config);

/// A call of the public API with random arguments, by the name of what it calls.
struct RandomCall {
  const char* name;
  std::int64_t weight;
  void (*run)(World&);
};
std::span<const RandomCall> memory_calls();
std::span<const RandomCall> layer_calls();
std::span<const RandomCall> cache_calls();
std::span<const RandomCall> host_calls();
/// All of them, the C API's (c_calls.hpp) and the threads' included.
const std::vector<RandomCall>& random_calls();

}  // namespace test
