// Calls of the C API (clattn.h) with random arguments, of null and of each other's handles.
#include <vector>

#include "random_calls/c_help.hpp"

using namespace clattn;
using namespace test::c;
using test::CWorld;
using test::World;

CWorld::CWorld(const Context& like) {
  remake(context,
         [&](auto* made) { return clattn_context_adopt(like.handle(), like.device(), made); });
  remake(queue, [&](auto* made) { return clattn_queue_create(context.get(), 0, made); });
  for (auto& buffer : buffers)
    remake(buffer, [&](auto* made) { return clattn_buffer_create(context.get(), 1 << 16, made); });
  remake(event, clattn_event_create);
  remake(model, clattn_model_create);
  make_graphs(*this);
}

static void make_handles(World& world) {
  CWorld& c = *world.c;
  const auto at = static_cast<std::size_t>(world.dice.below(3));  // of the buffers
  switch (world.dice.below(5)) {
    case 0:
      clattn_queue_finish(c.queue.get());  // what was built for it is then used on the next one
      return remake(c.queue, [&](auto* made) {
        return clattn_queue_create(maybe(world.dice, c.context), world.dice.one_in(2), made);
      });
    case 1:
      return remake(c.buffers.at(at), [&](auto* made) {
        return clattn_buffer_adopt(world.buffers.back().handle(), made);
      });
    case 2:
      return remake(c.buffers.at(at), [&](auto* made) {
        const bool odd = world.dice.one_in(20);
        const std::int64_t size = odd ? world.dice.odd_number() % 100000 : 1 << 16;
        return clattn_buffer_create(maybe(world.dice, c.context), static_cast<std::size_t>(size),
                                    made);
      });
    case 3:
      return remake(c.event, clattn_event_create);
    default:
      return remake(c.model, clattn_model_create);
  }
}

static void copy_memory(World& world) {
  CWorld& c = *world.c;
  const bool odd = world.dice.one_in(10);
  const auto offset = static_cast<std::size_t>(odd ? world.dice.odd_number() : 8);
  const auto size = static_cast<std::size_t>(world.dice.below(5000));
  const ClattnBuffer* const buffer = maybe(world.dice, world.dice.pick(c.buffers));
  if (world.dice.one_in(2))
    return tell(
        clattn_buffer_write(buffer, maybe(world.dice, c.queue), offset, world.sent.data(), size));
  tell(clattn_buffer_read(buffer, maybe(world.dice, c.queue), offset, world.received.data(), size));
}

static void make_layer(World& world) {
  CWorld& c = *world.c;
  ClattnLayerConfig config = layer_config(world.dice);
  const std::array<float, 4> sinks = {0, 1, 2, 3};
  config.name = "layer";
  if (world.dice.one_in(2)) config.dtype = "f32";
  if (world.dice.one_in(3)) config.kv_cache_dtype = "fp8";
  if (world.dice.one_in(3)) config.sinks = sinks.data();
  if (world.dice.one_in(6)) {
    const std::array fields = {&config.num_heads,  &config.num_kv_heads, &config.head_size,
                               &config.block_size, &config.rope_dim,     &config.sliding_window};
    *world.dice.pick(fields) = static_cast<std::int32_t>(world.dice.odd_number());
    if (config.block_size > 64 || config.head_size > 64) return;
    if (config.num_heads > 4) config.sinks = nullptr;  // they are as many as it says
  }
  if (world.dice.one_in(12))
    config.head_size_v = static_cast<std::int16_t>(world.dice.odd_number());
  config.fp8_products = static_cast<std::int16_t>(world.dice.one_in(4));
  if (world.dice.one_in(6)) {
    const std::array texts = {&config.dtype, &config.backend, &config.attn_type,
                              &config.kernel_family};
    *world.dice.pick(texts) = world.dice.one_in(2) ? "" : "encoder_decoder";
  }
  c.layer.reset();  // its name is free again
  remake(c.layer, [&](auto* made) {
    ClattnModel* const model = world.dice.one_in(3) ? nullptr : c.model.get();
    return clattn_layer_create(maybe(world.dice, c.context), model, &config, made);
  });
  // What a forward needs besides, so that some succeed.
  remake(c.cache, [&](auto* made) {
    return clattn_cache_create(c.layer.get(), c.queue.get(), test::kBlocks, nullptr, made);
  });
  tell(clattn_layer_bind_cache(c.layer.get(), c.cache.get()));
  remake(c.step, [&](auto* made) { return clattn_step_create(c.layer.get(), nullptr, made); });
}

static void make_cache(World& world) {
  CWorld& c = *world.c;
  const std::array<const char*, 4> layouts = {nullptr, "NHD", "HND", "no layout"};
  if (world.dice.one_in(4)) {
    remake(c.cache, [&](auto* made) {
      return clattn_cache_adopt(maybe(world.dice, c.layer), maybe(world.dice, c.buffers[0]),
                                world.dice.pick(layouts), made);
    });
  } else {
    remake(c.cache, [&](auto* made) {
      const std::int64_t blocks = world.dice.one_in(10) ? world.dice.odd_number() % 100000 : 8;
      return clattn_cache_create(maybe(world.dice, c.layer), maybe(world.dice, c.queue), blocks,
                                 world.dice.pick(layouts), made);
    });
  }
  if (world.dice.one_in(4)) {
    const bool query = world.dice.one_in(2);
    const auto set = query ? clattn_cache_set_scales_with_query : clattn_cache_set_scales;
    tell(set(c.cache.get(), world.dice.one_in(2) ? nullptr : c.buffers[1].get(),
             world.dice.one_in(2)));
  }
  tell(clattn_layer_bind_cache(maybe(world.dice, c.layer), maybe(world.dice, c.cache)));
}

static void make_step(World& world) {
  CWorld& c = *world.c;
  const ClattnStepOptions options = step_options(world.dice);
  remake(c.step, [&](auto* made) {
    return clattn_step_create(maybe(world.dice, c.layer), world.dice.one_in(8) ? nullptr : &options,
                              made);
  });
}

static void build_step(World& world) {
  CWorld& c = *world.c;
  if (c.layer == nullptr || c.step == nullptr) return make_layer(world);
  const Batch batch = test::c::batch(world);
  tell(clattn_step_build(maybe(world.dice, c.step), maybe(world.dice, c.queue), &batch.info));
}

static ClattnTensorRef any_tensor(World& world) {
  return tensor_of(world.dice, world.dice.pick(world.c->buffers).get());
}

static void forward(World& world) {
  CWorld& c = *world.c;
  if (c.layer == nullptr || c.step == nullptr) return make_layer(world);
  auto tensors = sized<ClattnTensors>(world.dice);
  tensors.query = any_tensor(world);
  tensors.key = any_tensor(world);
  tensors.value = any_tensor(world);
  tensors.output = any_tensor(world);
  if (world.dice.one_in(2)) tensors.lse = world.dice.pick(c.buffers).get();
  if (world.dice.one_in(20)) tensors.output_fp8 = world.dice.pick(c.buffers).get();
  if (world.dice.one_in(20)) tensors.custom_mask_stride = world.dice.odd_number();
  if (world.dice.one_in(4)) tensors.num_rows = world.dice.below(20);
  if (world.dice.one_in(3)) tensors.event = c.event.get();
  tell(clattn_layer_forward(maybe(world.dice, c.layer), maybe(world.dice, c.queue), &tensors,
                            maybe(world.dice, c.step)));
}

static void write_cache(World& world) {
  CWorld& c = *world.c;
  auto write = sized<ClattnCacheWrite>(world.dice);
  write.dtype = world.dice.one_in(2) ? "f32" : nullptr;
  write.key = any_tensor(world);
  write.value = any_tensor(world);
  write.slot_mapping = maybe(world.dice, world.dice.pick(c.buffers));
  write.slot_offset_bytes = world.slot_offset_bytes();
  write.num_tokens = world.dice.one_in(20) ? world.dice.odd_number() : world.dice.below(20);
  if (world.dice.one_in(3)) write.event = c.event.get();
  tell(clattn_reshape_and_cache(maybe(world.dice, c.context), maybe(world.dice, c.queue),
                                maybe(world.dice, c.cache), &write));
}

static void copy_blocks(World& world) {
  CWorld& c = *world.c;
  std::vector<std::int64_t> pairs;
  for (const BlockPair& pair : world.block_pairs()) {
    pairs.push_back(pair.source);
    pairs.push_back(pair.destination);
  }
  const ClattnCache* const caches[] = {maybe(world.dice, c.cache), c.cache.get()};
  tell(clattn_copy_blocks(maybe(world.dice, c.context), maybe(world.dice, c.queue), caches,
                          static_cast<std::size_t>(world.dice.below(3)), pairs.data(),
                          pairs.size() / 2, nullptr));
}

static void ask(World& world) {
  CWorld& c = *world.c;
  std::array<char, 64> text{};
  auto step = sized<ClattnStepInfo>(world.dice);
  auto cache = sized<ClattnCacheInfo>(world.dice);
  auto context = sized<ClattnContextInfo>(world.dice);
  auto scales = sized<ClattnKVScales>(world.dice);
  std::size_t size = 0;
  std::uint64_t duration = 0;
  switch (world.dice.below(8)) {
    case 0:
      return tell(clattn_step_info(maybe(world.dice, c.step), &step));
    case 1:
      return tell(clattn_cache_info(maybe(world.dice, c.cache), &cache));
    case 2:
      return tell(clattn_context_info(maybe(world.dice, c.context), &context));
    case 3:
      return tell(clattn_layer_explain(maybe(world.dice, c.layer), text.data(),
                                       static_cast<std::size_t>(world.dice.below(65)), &size));
    case 4:
      return tell(clattn_event_wait(maybe(world.dice, c.event)));
    case 5:
      return tell(clattn_event_duration_ns(maybe(world.dice, c.event), &duration));
    case 6:
      scales.k_scale = scales.v_scale = world.dice.one_in(3) ? -1.0F : 0.5F;
      return tell(clattn_layer_load_kv_scales(maybe(world.dice, c.layer), &scales));
    default:
      return tell(clattn_queue_finish(maybe(world.dice, c.queue)));
  }
}

static void warm_up(World& world) {
  CWorld& c = *world.c;
  ClattnLayer* const layers[] = {maybe(world.dice, c.layer)};
  tell(clattn_warm_up(layers, 1, maybe(world.dice, c.queue), nullptr, nullptr));
}

/// Ends some handle; those that were made from it go on.
static void destroy(World& world) {
  CWorld& c = *world.c;
  switch (world.dice.below(5)) {
    case 0:
      return c.layer.reset();
    case 1:
      return c.cache.reset();
    case 2:
      return c.step.reset();
    case 3:
      return c.buffers.at(static_cast<std::size_t>(world.dice.below(3))).reset();
    default:
      return c.event.reset();
  }
}

std::vector<test::RandomCall> test::random_c_calls() {
  std::vector<RandomCall> all = {
      RandomCall{"clattn_..._create, _adopt", 20, make_handles},
      RandomCall{"clattn_buffer_write, _read", 40, copy_memory},
      RandomCall{"clattn_layer_create", 4, make_layer},
      RandomCall{"clattn_cache_create, _adopt", 5, make_cache},
      RandomCall{"clattn_step_create", 5, make_step},
      RandomCall{"clattn_step_build", 60, build_step},
      RandomCall{"clattn_layer_forward", 60, forward},
      RandomCall{"clattn_reshape_and_cache", 30, write_cache},
      RandomCall{"clattn_copy_blocks", 20, copy_blocks},
      RandomCall{"clattn_..._info and the like", 40, ask},
      RandomCall{"clattn_warm_up", 1, warm_up},
      RandomCall{"clattn_..._destroy", 2, destroy},
  };
  for (const auto calls : {c_session_calls(), c_graph_calls(), c_op_calls()})
    all.insert(all.end(), calls.begin(), calls.end());
  return all;
}
