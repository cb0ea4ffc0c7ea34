// Caches of another form than K and V pages: latent rows, and x-packed pairs.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/compat/paged_attention.hpp>
#include <clattn/mla.hpp>
#include <clattn/registry.hpp>
#include <cstring>
#include <utility>

#include "program/check/checks.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

constexpr std::int64_t kNumBlocks = 3;

Verdict compare_latent(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                       const BatchFamily& family, std::uint32_t seed) {
  const AttentionCall call = make_latent_call(family, config, seed);
  AttentionOutcome outcome = execute(context, call, kCheckRepeats);
  return {judge_output(call, outcome, oracle_result(call)), std::move(outcome.launches)};
}

Verdict compare_packed(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                       const BatchFamily& family, std::uint32_t seed) {
  AttentionCall call = make_call(family, config, seed);
  const oracle::AttentionResult truth = oracle_result(call);
  call.cache = expected_cache(call);  // packed here, so that a wrong write shows in its own line
  call.key.clear();
  call.value.clear();
  call.packed = true;
  const AttentionOutcome outcome = execute(context, call, kCheckRepeats);
  return {compare(config.dtype, outcome.out, outcome.lse, truth), outcome.launches};
}

/// Adds a line, after what it holds already.
void check_form(const CacheForm& form, const std::shared_ptr<Context>& context,
                const AttentionConfig& config, std::uint32_t seed, CheckLine line,
                CheckReport& report) {
  for (const BatchFamily& family : form.batches) {
    line.run(std::string(family.name),
             [&] { return form.compare(context, config, family, seed += 10); });
  }
  report.add(line);
}

}  // namespace

const CacheForm& latent_form() {
  static const auto backend = find_attn_backend(kMLABackendName);
  static const CacheForm form = {
      "MLA",
      {{"MLA decode", {{1, 1}, {1, 17}, {1, 150}}, 1},
       {"MLA, 2-9 tokens", {{2, 40}, {0, 20}, {9, 33}}, 1},
       {"MLA decode, 3 splits", {{1, 130}, {1, 64}}, 3}},
      [](const AttentionConfig& config, const DeviceCapabilities* device) {
        return backend->validate_configuration(config, device);
      },
      [](const std::shared_ptr<Context>& context, const AttentionConfig& config) {
        return backend->make_impl(context, config)->kernels();
      },
      [](const std::shared_ptr<Context>& context, const AttentionConfig& config) {
        compile_attention(context, config, kMLABackendName);
      },
      compare_latent};
  return form;
}

const CacheForm& packed_form() {
  static const CacheForm form = {
      "x-packed cache",
      {{"paged_attention_v1", {{1, 1}, {1, 17}, {1, 130}, {1, 16}}, 1},
       {"paged_attention_v2", {{1, 300}, {1, 9}, {1, 64}}, 3, true, true}},
      validate_paged_attention,
      [](const std::shared_ptr<Context>& context, const AttentionConfig& config) {
        return make_paged_attention(*context, config)->kernels();
      },
      [](const std::shared_ptr<Context>& context, const AttentionConfig& config) {
        make_paged_attention(*context, config);
      },
      compare_packed};
  return form;
}

AttentionConfig latent_layer(DType dtype, DType cache_dtype, KernelFamily family) {
  return {.num_heads = 16,
          .num_kv_heads = 1,
          .head_size = 512 + 64,
          .block_size = 16,
          .dtype = dtype,
          .kv_cache_dtype = cache_dtype,
          .scale = 0.0721687836F,  // 1 / sqrt(128 + 64)
          .use_mla = true,
          .kernel_family = family};
}

Verdict compare_packed_write(const Context& context, const AttentionConfig& config) {
  const std::int64_t block_size = config.block_size;
  const std::vector<std::int64_t> slots = {
      2 * block_size + 1, kPadSlotId, 0, block_size - 1, 5, kNumBlocks * block_size - 1};
  const DType type = config.cache_dtype();
  const std::size_t row = to_size(config.num_kv_heads) * to_size(config.head_size);
  const std::size_t row_bytes = row * element_size_bytes(type);
  const std::vector<std::byte> key = random_elements(config.dtype, slots.size() * row, 91);
  const std::vector<std::byte> value = random_elements(config.dtype, slots.size() * row, 92);
  const std::vector<float> scales =
      is_quantized(type) ? std::vector<float>{0.5F, 2} : std::vector<float>{1, 1};
  const auto stored_key = convert_elements(config.dtype, type, key, double{scales[0]});
  const auto stored_value = convert_elements(config.dtype, type, value, double{scales[1]});

  const std::size_t cache_bytes = to_size(kNumBlocks * block_size) * row_bytes;
  std::vector<std::byte> keys = poisoned(cache_bytes + GuardedOutput::kGuardBytes), values = keys;
  const Queue queue = context.create_queue(QueueProfiling::kOn);
  const Buffer key_cache = upload(context, queue, keys);
  const Buffer value_cache = upload(context, queue, values);
  const auto end = keys.begin() + static_cast<std::ptrdiff_t>(cache_bytes);
  LogicalCache wanted = unpack(config, {{keys.begin(), end}, {keys.begin(), end}});
  for (std::size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] < 0) continue;
    const std::size_t at = to_size(slots[t]) * row_bytes;
    std::memcpy(&wanted.key[at], &stored_key[t * row_bytes], row_bytes);
    std::memcpy(&wanted.value[at], &stored_value[t * row_bytes], row_bytes);
  }
  wanted = pack(config, wanted);
  std::ranges::copy(wanted.key, keys.begin());
  std::ranges::copy(wanted.value, values.begin());

  const Buffer key_rows = upload(context, queue, key);
  const Buffer value_rows = upload(context, queue, value);
  const Buffer mapping = upload(context, queue, slots);
  PackedKVCache cache = packed_shape(config, kNumBlocks);
  cache.key = key_cache.handle();
  cache.value = value_cache.handle();
  if (is_quantized(type)) cache.scales = upload(context, queue, scales);
  Event event;
  reshape_and_cache(context, queue, {.buffer = key_rows.handle()}, {.buffer = value_rows.handle()},
                    config.dtype, cache, mapping.handle(), 0, std::ssize(slots), &event);
  event.wait();
  Deviation deviation = compare_bytes(download<std::byte>(queue, key_cache, keys.size()), keys);
  deviation.merge(compare_bytes(download<std::byte>(queue, value_cache, keys.size()), values));
  return {deviation, one_launch("reshape_and_cache (x-packed)", event)};
}

namespace {

/// What batches say of latent rows, with each family of kernels.
void plan_latent_lists(const std::shared_ptr<Context>& context, CheckReport& report,
                       CheckPlan& plan) {
  const std::vector<RequestShape> requests = {
      {1, 130, Direction::kCausal, 17},
      {4, 65, Direction::kBothWays},
      {9, 40, Direction::kCausal, 3, 0, {{0, 7}, {33, 90}}},
      {8, 90, Direction::kCausal, 2, 0, {}, {-1, 0, 0, 1, 1, 2, -1, 4}}};
  CacheForm form = latent_form();
  form.name = "MLA, lists of a batch";
  form.batches = {{"unsplit", requests, 1}, {"3 splits", requests, 3}};
  for (const KernelFamily family : kVariantFamilies) {
    AttentionConfig config = latent_layer(DType::kF16, DType::kF16, family);
    config.use_spans = config.use_directions = config.use_first_keys = config.use_trees = true;
    const std::string what = fmt::format("{}, family {}", form.name, to_string(family));
    const std::string types = types_of(config.dtype, config.cache_dtype());
    if (!plan.takes(std::string(form.name), what, is_chosen(family, context->capabilities())))
      continue;
    const auto why = form.refusals(config, &context->capabilities());
    plan.add({what,
              [=] {
                if (why.empty()) form.compile(context, config);
              },
              [=, &report] {
                if (!why.empty())
                  return report.skip(what, types, fmt::format("{}", fmt::join(why, "; ")));
                check_form(form, context, config, 6000, {.what = what, .types = types}, report);
              }});
  }
}

}  // namespace

void plan_forms(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan) {
  std::uint32_t seed = 5000;
  plan_latent_lists(context, report, plan);
  for (const CacheForm* form : {&packed_form(), &latent_form()}) {
    const bool packed = form == &packed_form();
    for (const auto& [dtype, cache_dtype] : kCacheTypes) {
      seed += 100;
      const std::string types = types_of(dtype, cache_dtype);
      const std::string name(form->name);
      if (!plan.takes(name, types, is_representative(dtype, cache_dtype))) continue;
      const AttentionConfig config =
          packed ? make_config(8, 2, 64, 16, dtype, cache_dtype) : latent_layer(dtype, cache_dtype);
      plan.add({fmt::format("{}, {}", name, types), [=] { form->compile(context, config); },
                [=, &report] {
                  CheckLine line{.what = name, .types = types};
                  if (packed) {
                    line.run("write", [&] { return compare_packed_write(*context, config); });
                  } else if (const auto why = form->refusals(config, &context->capabilities());
                             !why.empty()) {
                    return report.skip(name, types, fmt::format("{}", fmt::join(why, "; ")));
                  }
                  check_form(*form, context, config, seed, line, report);
                }});
    }
  }
}

}  // namespace clattn::cli
