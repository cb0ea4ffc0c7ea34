#include "device/attention_case.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/kv_cache_spec.hpp>
#include <cmath>
#include <optional>
#include <random>

#include "device/attention_host.hpp"
#include "device/bounded_batch.hpp"
#include "device/device_lists.hpp"
#include "kernels/step/paged_step.hpp"
#include "program/common/verify.hpp"

namespace attention_test {

namespace {

using clattn::DType;

constexpr std::size_t kGuardElems = 64;
constexpr std::uint8_t kPattern = 0xA5;
constexpr float kOutputScale = 0.037F;

clattn::Buffer upload(const clattn::Context& context, const clattn::Queue& queue, Tensor& tensor) {
  clattn::Buffer buffer = context.allocate(tensor.bytes().size());
  queue.write(buffer, tensor.bytes());
  return buffer;
}

void compare(const CaseSpec& spec, const HostCase& host, CaseResult& result) {
  oracle::AttentionResult want = oracle::attention(host.truth, element(spec.config.dtype));
  if (result.multiplies_fp8) {
    clattn::cli::put_fp8_rows(spec.config, host.truth, element(spec.config.dtype),
                              spec.query_scale > 0 ? spec.query_scale : 1, want);
  }
  constexpr double kFloor = 2e-6;     // f32 sums of values of size about 1
  constexpr double kLseFloor = 2e-4;  // the field's gate for log-sum-exp
  const auto judge = [&](double got, double expected, double allowed, std::string place) {
    double share = std::abs(got - expected) / allowed;
    if (std::isinf(expected)) share = got == expected ? 0.0 : 1e30;
    if (std::isnan(got)) share = 1e30;
    // A row that sees an overflowed token: any number would be wrong, NaN and infinities are not.
    if (std::isnan(expected) || expected > 1e300) share = std::isfinite(got) ? 1e30 : 0.0;
    if (share > result.worst_share) {
      result.worst_share = share;
      result.worst_place =
          fmt::format("{}: got {}, expected {}, allowed {}", place, got, expected, allowed);
    }
  };
  const std::size_t width = index(spec.config.output_head_size());
  // Of element i of the output in the oracle's, whose rows are as long as queries.
  const auto place = [&](std::size_t i) {
    return i / width * index(spec.config.head_size) + i % width;
  };
  for (std::size_t i = 0; i < result.out.size(); ++i) {
    judge(result.out[i], want.out[place(i)],
          want.allowed(place(i), result.rounds_probabilities) + kFloor,
          fmt::format("out token {} head {} dim {}", i / width / index(spec.config.num_heads),
                      i / width % index(spec.config.num_heads), i % width));
  }
  for (std::size_t i = 0; i < result.out_fp8.size(); ++i) {
    // Rounding never falls: the right code lies between those of the ends of what is allowed.
    const double slack = want.allowed(place(i), result.rounds_probabilities) + kFloor;
    const auto fp8 = [](double x) { return oracle::round_to(oracle::Element::kFp8E4M3, x); };
    const double got = oracle::decode(oracle::Element::kFp8E4M3, result.out_fp8[i]);
    const bool right = got >= fp8((want.out[place(i)] - slack) / kOutputScale) &&
                       got <= fp8((want.out[place(i)] + slack) / kOutputScale);
    judge(right ? 0.0 : 1.0, 0.0, 1e-3, fmt::format("out_fp8 {}", i));
  }
  for (std::size_t i = 0; i < want.lse.size(); ++i) {
    const double more = want.lse_bound.empty() ? 0 : want.lse_bound[i];
    judge(result.lse[i], want.lse[i], kLseFloor + more, fmt::format("lse {}", i));
  }
}

void check_guards(Tensor& tensor, std::string_view name, std::string& fault) {
  const std::size_t width = tensor.bytes().size() / tensor.size();
  const std::size_t guard = kGuardElems * width;
  for (std::size_t i = 0; i < tensor.bytes().size(); ++i) {
    const bool inside = i >= guard && i < tensor.bytes().size() - guard;
    if (!inside && tensor.bytes()[i] != std::byte{kPattern}) {
      fault = fmt::format("guard band of {} touched at byte {}", name, i);
    }
  }
}

/// A cache of the case's pages, or the pair of key and value tensors seen as one-token pages.
clattn::KVCache make_cache(const clattn::Context& context, const CaseSpec& spec,
                           const HostCase& host, const clattn::AttentionBackend& backend) {
  const clattn::AttentionConfig& c = spec.config;
  clattn::KVCacheSpec cache_spec{.block_size = host.truth.block_size,
                                 .num_kv_heads = c.num_kv_heads,
                                 .head_size = c.head_size,
                                 .dtype = c.cache_dtype()};
  if (c.cache_format().scales_per_row())
    cache_spec.kv_quant_mode = clattn::KVQuantMode::kPerTokenHead;
  if (!c.contiguous_kv() && c.output_head_size() != c.head_size)
    cache_spec.head_size_v = c.output_head_size();
  if (spec.page_padding > 0) {
    cache_spec.page_size_padded = cache_spec.page_size_bytes() + spec.page_padding;
  }
  const clattn::Buffer raw =
      context.allocate(index(host.num_blocks) * cache_spec.page_size_bytes());
  if (!c.contiguous_kv()) {
    clattn::KVCache cache = clattn::reshape_kv_cache(raw, cache_spec, backend, spec.layout);
    if (spec.heads_apart) {
      cache.token_stride = c.head_size;
      cache.block_stride = host.truth.block_size * cache.token_stride;
      cache.head_stride = host.num_blocks * cache.block_stride;
      cache.v_offset = c.num_kv_heads * cache.head_stride;
    }
    return cache;
  }
  const std::int64_t row = std::int64_t{c.num_kv_heads} * c.head_size;
  clattn::KVCache cache;
  cache.buffer = raw;
  cache.dtype = c.dtype;
  cache.num_blocks = host.num_blocks;
  cache.block_size = 1;
  cache.num_kv_heads = c.num_kv_heads;
  cache.head_size = c.head_size;
  cache.v_offset = host.num_blocks * row;
  cache.block_stride = cache.token_stride = row;
  cache.head_stride = c.head_size;
  return cache;
}

clattn::Buffer make_scales(const clattn::Context& context, const clattn::Queue& queue,
                           const CaseSpec& spec) {
  const std::int64_t heads = spec.scales_per_head ? spec.config.num_kv_heads : 1;
  Tensor scales(DType::kF32, index(2 * heads) + (spec.query_scale > 0 ? 1 : 0));
  if (spec.query_scale > 0) scales.set(index(2 * heads), spec.query_scale);
  for (std::int64_t h = 0; h < heads; ++h) {
    scales.set(index(h), cache_scale(spec, false, h));
    scales.set(index(heads + h), cache_scale(spec, true, h));
  }
  return upload(context, queue, scales);
}

/// A random mask with poison (1 = may attend) past every request's keys; the oracle gets it too.
clattn::Buffer make_mask(const clattn::Context& context, const clattn::Queue& queue,
                         const CaseSpec& spec, HostCase& host) {
  oracle::AttentionCase& t = host.truth;
  t.custom_mask_stride = *std::max_element(t.seq_lens.begin(), t.seq_lens.end()) + 3;
  t.custom_mask.assign(index(host.num_tokens * t.custom_mask_stride), 1);
  for (std::size_t r = 0; r < spec.requests.size(); ++r) {
    std::mt19937 random(9000 + spec.requests[r].identity);
    std::bernoulli_distribution visible(spec.mask_density);
    for (std::int64_t token = t.query_start_loc[r]; token < t.query_start_loc[r + 1]; ++token) {
      const std::int64_t position = t.seq_lens[r] - (t.query_start_loc[r + 1] - token);
      for (std::int64_t p = 0; p < t.seq_lens[r]; ++p) {
        const bool shown = spec.mask_shows_ahead ? p > position : visible(random);
        t.custom_mask[index(token * t.custom_mask_stride + p)] = shown ? 1 : 0;
      }
    }
  }
  const clattn::Buffer mask = context.allocate(std::max<std::size_t>(t.custom_mask.size(), 1));
  if (!t.custom_mask.empty()) queue.write(mask, std::as_bytes(std::span(t.custom_mask)));
  return mask;
}

/// The step's metadata; with bounds, its lengths come from the device, as its lists may.
const clattn::AttentionMetadata& build_step(const clattn::Context& context,
                                            const clattn::Queue& queue,
                                            clattn::AttentionMetadataBuilder& builder,
                                            const CaseSpec& spec, const HostCase& host) {
  std::vector<std::int32_t> key_start_loc;
  clattn::CommonAttentionMetadata batch = describe_batch(spec, host, key_start_loc);
  std::optional<DeviceListBatch> lists;
  if (spec.lists_on_device) batch = lists.emplace(batch).batch;
  std::optional<BoundedBatch> bounded;
  if (spec.bounds_above >= 0)
    batch = bounded.emplace(batch, spec.config.block_size, spec.bounds_above).batch;
  const auto& metadata = builder.build(queue, batch, nullptr, spec.build_options);
  const bool lists_first = spec.bounds_above % 2 != 0;
  if (lists && lists_first) lists->give(context, queue, metadata);
  if (bounded) give_lengths(context, queue, metadata, host.truth.seq_lens);
  if (lists && !lists_first) lists->give(context, queue, metadata);
  return metadata;
}

/// Outputs on the device, filled with a pattern and fenced by guard bands.
struct Outputs {
  Tensor out, lse, fp8;
  clattn::Buffer out_buffer, lse_buffer, fp8_buffer, fp8_scale;
  // The library writes lse and fp8 from element 0 of their buffers: only the band behind is
  // guarded.
  std::size_t lse_bytes, fp8_bytes;

  Outputs(const clattn::Context& context, const clattn::Queue& queue, const CaseSpec& spec,
          std::size_t rows)
      : out(spec.config.dtype, rows * index(spec.config.output_head_size()) + 2 * kGuardElems),
        lse(DType::kF32, rows + 2 * kGuardElems),
        fp8(DType::kInt8, rows * index(spec.config.output_head_size()) + 2 * kGuardElems),
        lse_bytes(lse.bytes().size() - kGuardElems * sizeof(float)),
        fp8_bytes(fp8.bytes().size() - kGuardElems) {
    for (Tensor* tensor : {&out, &lse, &fp8}) {
      std::fill(tensor->bytes().begin(), tensor->bytes().end(), std::byte{kPattern});
    }
    out_buffer = upload(context, queue, out);
    lse_buffer = context.allocate(lse_bytes);
    queue.write(lse_buffer, std::span(lse.bytes()).first(lse_bytes));
    if (!spec.config.output_fp8) return;
    fp8_buffer = context.allocate(fp8_bytes);
    queue.write(fp8_buffer, std::span(fp8.bytes()).first(fp8_bytes));
    fp8_scale = context.allocate(sizeof(float));
    queue.write(fp8_scale, std::as_bytes(std::span(&kOutputScale, 1)));
  }

  void read(const clattn::Queue& queue, const CaseSpec& spec, CaseResult& result) {
    queue.read(out_buffer, out.bytes());
    queue.read(lse_buffer, std::span(lse.bytes()).subspan(kGuardElems * sizeof(float)));
    check_guards(out, "out", result.fault);
    check_guards(lse, "lse", result.fault);
    for (std::size_t i = kGuardElems; i < out.size() - kGuardElems; ++i) {
      result.out.push_back(out.get(i));
    }
    for (std::size_t i = kGuardElems; i < lse.size() - kGuardElems; ++i) {
      result.lse.push_back(lse.get(i));
    }
    if (!spec.config.output_fp8) return;
    queue.read(fp8_buffer, std::span(fp8.bytes()).subspan(kGuardElems));
    check_guards(fp8, "out_fp8", result.fault);
    for (std::size_t i = kGuardElems; i < fp8.size() - kGuardElems; ++i) {
      result.out_fp8.push_back(static_cast<std::uint8_t>(fp8.bits(i)));
    }
  }
};

/// How the launches of a step differ from its plan; empty = they do not. The plan counts a merge's
/// tasks in heads, the launch in blocks of columns, so those are not compared. Layers with other
/// kernels may run a plan, too.
std::string unplanned(const std::vector<clattn::PlannedLaunch>& planned,
                      const std::vector<clattn::LaunchRecord>& launches) {
  if (planned.empty()) return {};
  if (planned.size() != launches.size()) return "other launches than planned";
  for (std::size_t i = 0; i < launches.size(); ++i) {
    const bool merges = planned[i].concurrent_groups == 0;
    if (!merges && planned[i].tasks != launches[i].tasks) return "other tasks than planned";
    if (merges != launches[i].kernel.starts_with("merge")) return "another merge than planned";
    if (!(planned[i].predicted_us >= 0)) return "a launch without a predicted time";
  }
  return {};
}

}  // namespace

CaseResult run_case(const std::shared_ptr<clattn::Context>& context, const CaseSpec& spec) {
  const clattn::AttentionConfig& c = spec.config;
  HostCase host = lay_out(spec);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(c, &context->capabilities(), spec.backend);
  clattn::KVCache cache = make_cache(*context, spec, host, backend);
  if (clattn::is_quantized(cache.dtype) && !cache.row_scales) {
    cache.scales = make_scales(*context, queue, spec);
    cache.scales_per_head = spec.scales_per_head;
    cache.scales_query = spec.query_scale > 0;
  }
  clattn::ForwardOptions extra;
  clattn::Buffer mask;
  if (c.custom_mask) {
    mask = make_mask(*context, queue, spec, host);
    extra.custom_mask = mask.handle();
    extra.custom_mask_stride = host.truth.custom_mask_stride;
  }
  CacheImage image(spec, host, cache);
  const std::size_t step_elems = index(host.num_tokens * c.num_kv_heads * c.head_size);
  Tensor key(c.dtype, std::max<std::size_t>(step_elems, 1));
  Tensor value(c.dtype, std::max<std::size_t>(step_elems, 1));
  fill_cache(spec, host, image, key, value);
  queue.write(cache.buffer, image.bits().bytes());

  const std::int64_t row = std::int64_t{c.num_heads} * c.head_size;
  const std::int64_t query_stride = row + spec.query_padding;
  Tensor query = make_query(spec, host, query_stride);

  clattn::BuilderOptions options;
  options.limits.num_blocks = host.num_blocks;
  options.num_splits = spec.num_splits;
  options.split_policy = spec.split_policy;
  options.device_seq_lens = spec.bounds_above >= 0;
  options.device_directions = spec.lists_on_device && c.use_directions;
  options.device_trees = spec.lists_on_device && c.use_trees;
  options.side_by_side = spec.side_by_side;
  const auto builder = backend.make_builder(context, spec.planned_for.value_or(c), options);
  const auto impl = backend.make_impl(context, c);
  const clattn::AttentionMetadata& metadata = build_step(*context, queue, *builder, spec, host);
  if (spec.write_cache) {
    const clattn::Buffer k = upload(*context, queue, key);
    const clattn::Buffer v = upload(*context, queue, value);
    impl->write_kv_cache(queue, {k.handle()}, {v.handle()}, cache, metadata);
    queue.finish();
  }

  const clattn::Buffer q = upload(*context, queue, query);
  Outputs outputs(*context, queue, spec, index(host.num_tokens * c.num_heads));
  extra.output_fp8 = outputs.fp8_buffer.handle();
  extra.output_scale = outputs.fp8_scale.handle();
  std::vector<clattn::LaunchRecord> launches;
  extra.launches = &launches;
  const clattn::TensorRef in{q.handle(), 0, query_stride};
  const clattn::TensorRef out{outputs.out_buffer.handle(), kGuardElems, 0};
  if (c.contiguous_kv()) {
    const std::int64_t first = cache.token_stride;  // behind the unused row
    const std::int64_t value_stride = value_strides(c, cache).token;
    impl->forward_encoder(
        queue,
        {.query = in,
         .key = {cache.buffer.handle(), first, 0},
         .value = {cache.buffer.handle(), cache.v_offset + value_stride, value_stride},
         .output = out,
         .lse = outputs.lse_buffer.handle()},
        metadata, extra);
  } else {
    impl->forward(queue, {.query = in, .output = out, .lse = outputs.lse_buffer.handle()}, cache,
                  metadata, extra);
  }
  queue.read(cache.buffer, image.bits().bytes());

  CaseResult result;
  const std::vector<clattn::PlannedLaunch> planned = planned_launches(metadata);
  result.fault = unplanned(planned, launches);
  result.beside = std::ranges::any_of(planned, &clattn::PlannedLaunch::beside_last);
  const auto* step = metadata.step();  // a plug-in has none
  result.rebalanced = step != nullptr && step->planned.rebalanced;
  for (const auto& launch : launches) {
    result.kernels.emplace_back(launch.kernel);
    result.tasks.push_back(launch.tasks);
    result.work_groups.push_back(launch.work_groups);
    result.rounds_probabilities |= launch.rounds_probabilities;
    result.multiplies_fp8 |= launch.multiplies_fp8;
  }
  outputs.read(queue, spec, result);
  if (result.fault.empty()) result.fault = image.compare(image.bits());
  compare(spec, host, result);
  return result;
}

std::string describe(const CaseSpec& spec) {
  const clattn::AttentionConfig& c = spec.config;
  std::string text = fmt::format(
      "{} {} heads {}/{} x {}/{} page {} dtype {} cache {} family {} causal {}/{} splits {} "
      "pages {} requests (query+context)",
      spec.backend, clattn::to_string(spec.layout), c.num_heads, c.num_kv_heads, c.head_size,
      c.output_head_size(), c.block_size, clattn::to_string(c.dtype),
      clattn::to_string(c.cache_format()), clattn::to_string(c.kernel_family), spec.causal,
      spec.causal_encoder, spec.num_splits, spec.page_seed);
  text += fmt::format(
      "; type {} cap {} window {} sides {}/{} chunk {}+{} rule {} alibi {} sinks {} mask {} "
      "fp8 out {} per-head scales "
      "{}; ",
      clattn::to_string(c.attn_type), c.logits_soft_cap, c.sliding_window, c.window_left,
      c.window_right, c.attention_chunk_size, c.chunk_lookback, clattn::to_string(c.span_rule),
      !c.alibi_slopes.empty(), !c.sinks.empty(), c.custom_mask, c.output_fp8, spec.scales_per_head);
  if (spec.page_padding > 0) text += fmt::format("page padding {}; ", spec.page_padding);
  if (spec.heads_apart) text += "heads apart; ";
  if (spec.bounds_above >= 0) text += fmt::format("bounds {} above; ", spec.bounds_above);
  if (spec.lists_on_device) text += "lists on the device; ";
  for (const Request& r : spec.requests) {
    text += fmt::format(" {}+{}", r.query_len, r.context_len);
    if (r.direction) text += fmt::format(" direction {}", static_cast<int>(*r.direction));
    if (!r.parents.empty()) text += fmt::format(" tree [{}]", fmt::join(r.parents, ","));
    if (r.first_key > 0) text += fmt::format(" from {}", r.first_key);
    if (r.keep_keys > 0) text += fmt::format(" keeping {}", r.keep_keys);
    for (const auto& [first, end] : r.spans) text += fmt::format(" span {}-{}", first, end);
  }
  return text;
}

clattn::AttentionConfig small_config() {
  clattn::AttentionConfig config;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_size = 64;
  config.block_size = 16;
  return config;
}

const std::vector<std::shared_ptr<clattn::Context>>& all_contexts() {
  // Leaked on purpose: OpenCL objects must not be released by static destructors (oclgrind aborts
  // on them).
  static const auto* contexts = [] {
    auto* opened = new std::vector<std::shared_ptr<clattn::Context>>;
    for (const clattn::Device& device : clattn::list_devices()) {
      opened->push_back(clattn::Context::create(device));
    }
    return opened;
  }();
  return *contexts;
}

}  // namespace attention_test
