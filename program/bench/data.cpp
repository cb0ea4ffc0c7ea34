#include "program/bench/data.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>

#include "program/common/device_memory.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

/// Pages of the layer's cache, zeroed.
KVCache make_pages(const BenchTask& task, const AttentionBackend& backend, std::int64_t num_pages) {
  const Queue queue = task.context->create_queue();
  const BenchModel& model = task.shape.model;
  KVCache cache = make_kv_cache(*task.context, queue, backend, model.config, num_pages,
                                model.layout ? model.layout : task.options.layout);
  set_unit_scales(*task.context, queue, cache);
  return cache;
}

}  // namespace

TiledRandom::TiledRandom(Elements elements)
    : elements_(std::make_shared<const Elements>(std::move(elements))) {}

TiledRandom::TiledRandom(DType dtype, std::uint32_t seed, double size, double mean) {
  static std::map<std::tuple<DType, std::uint32_t, double, double>, std::shared_ptr<const Elements>>
      made;
  std::shared_ptr<const Elements>& elements = made[{dtype, seed, size, mean}];
  if (!elements) {
    std::vector<std::byte> bytes = random_elements(dtype, kPeriod, seed, size, mean);
    std::vector<double> values = decode_elements(dtype, bytes);
    if (codes_per_element(dtype) > 1)
      for (std::byte& code : bytes) code |= code << 4;
    elements = std::make_shared<Elements>(Elements{std::move(bytes), std::move(values)});
  }
  elements_ = elements;
}

void TiledRandom::fill(const Queue& queue, const Buffer& buffer) const {
  const std::span<const std::byte> bytes = elements_->bytes;
  for (std::size_t at = 0; at < buffer.size_bytes(); at += bytes.size()) {
    queue.write(buffer, bytes.first(std::min(bytes.size(), buffer.size_bytes() - at)), at);
  }
}

void TiledRandom::fill(const Queue& queue, const KVCache& cache) const {
  if (!cache.row_scales) return fill(queue, cache.buffer);
  constexpr std::size_t kChunkBytes = 1 << 20;
  const std::span<const std::byte> bytes = elements_->bytes;  // one for each code
  const KVCache::RowScales& at = *cache.row_scales;
  const std::size_t page_bytes = to_size(at.block_stride) * sizeof(float);
  const std::int64_t rows = std::int64_t{cache.block_size} * cache.num_kv_heads;
  const auto chunk = static_cast<std::int64_t>(std::max<std::size_t>(kChunkBytes / page_bytes, 1));
  for (std::int64_t first = 0; first < cache.num_blocks; first += chunk) {
    const std::int64_t end = std::min(first + chunk, cache.num_blocks);
    const std::size_t begin = to_size(first) * page_bytes;
    std::vector<std::byte> pages(to_size(end - first) * page_bytes);
    for (std::size_t i = 0; i < pages.size();) {
      const std::span<const std::byte> rest = bytes.subspan((begin + i) % bytes.size());
      const std::size_t count = std::min(rest.size(), pages.size() - i);
      std::memcpy(&pages[i], rest.data(), count);
      i += count;
    }
    for (std::int64_t page = first; page < end; ++page) {
      for (const std::int64_t side : {at.k_offset, at.v_offset}) {
        for (std::int64_t row = 0; row < rows; ++row) {  // the rows of a page, in some order
          const std::int64_t place = side + page * at.block_stride + row;
          const float scale = oracle::join_scale(row_scale_at(cache.dtype, place));
          std::memcpy(&pages[to_size(place) * sizeof(float) - begin], &scale, sizeof(float));
        }
      }
    }
    queue.write(cache.buffer, pages, begin);
  }
}

oracle::ScaleAndZero row_scale_at(DType code, std::int64_t place) {
  const double scale = 0.5 + 0.125 * static_cast<double>(place % 7);
  if (code != DType::kUInt4x2) return {scale};
  return {scale / 4, static_cast<std::uint32_t>(place % 16)};
}

std::vector<std::byte> TiledRandom::stored(DType dtype, std::size_t first,
                                           std::size_t count) const {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = at(first + i);
  return encode_elements(dtype, values);
}

TiledRandom TiledRandom::stored_as(DType cache, double scale) const {
  Elements stored;
  const oracle::Element element = element_of(cache);
  for (const double value : elements_->values) {
    stored.values.push_back(scale * oracle::round_to(element, value / scale));
  }
  return TiledRandom(std::move(stored));
}

std::vector<std::int32_t> RotatingCache::pages_of_set(std::size_t set) const {
  const auto begin = pages.begin() + static_cast<std::ptrdiff_t>(set) * pages_per_set;
  return {begin, begin + pages_per_set};
}

RotatingCache make_rotating_cache(const BenchTask& task) {
  const auto& [context, options, shape] = task;
  constexpr std::size_t kMaxSets = 256;  // each has a metadata builder of its own
  const DeviceCapabilities& device = context->capabilities();
  const AttentionConfig config = shape.model.config;
  RotatingCache result;
  result.backend = get_attn_backend(config, &device, options.backend).get();
  const KVCacheSpec spec = spec_of(config);
  result.pages_per_set = count_pages(shape);
  const std::size_t set_bytes = to_size(result.pages_per_set) * spec.page_size_bytes();
  const std::size_t room = room_of(device, 2);
  if (set_bytes > room) {
    throw_unsupported("needs {} bytes of KV cache, the device has room for {}", set_bytes, room);
  }
  const std::size_t wanted = (options.rotate_bytes + set_bytes - 1) / set_bytes;
  result.num_sets = static_cast<std::int32_t>(
      std::clamp<std::size_t>(wanted, 1, std::min(kMaxSets, room / set_bytes)));
  const std::int64_t num_pages = result.pages_per_set * result.num_sets;
  result.cache = make_pages(task, *result.backend, num_pages);
  result.pages = shuffled_pages(num_pages, 7);
  return result;
}

RotatingCache make_overlapping_cache(const BenchTask& task) {
  const BenchShape& shape = task.shape;
  const Context& context = *task.context;
  constexpr std::int64_t kStride = 8;  // what kernels load at a time, or twice as much
  const AttentionConfig config = shape.model.config;
  RotatingCache result;
  result.backend = get_attn_backend(config, &context.capabilities(), task.options.backend).get();
  result.pages_per_set = count_pages(shape);
  result.pages.resize(to_size(result.pages_per_set));
  std::iota(result.pages.rbegin(), result.pages.rend(), 0);
  result.cache = make_pages(task, *result.backend, config.use_mla ? result.pages_per_set : 1);
  if (config.use_mla) return result;
  const std::size_t apart = to_size(kStride) * element_size_bytes(config.cache_dtype());
  result.cache.buffer =
      context.allocate(result.cache.buffer.size_bytes() + to_size(result.pages_per_set) * apart);
  result.cache.num_blocks = result.pages_per_set;
  result.cache.block_stride = kStride;
  return result;
}

BenchBatch::BenchBatch(const BenchShape& shape, const std::vector<std::int32_t>& pages)
    : block_size(shape.model.config.block_size) {
  query_start_loc = {0};
  max_blocks = ceil_div(shape.max_seq_len(), block_size);
  auto next = pages.begin();
  for (const RequestShape& request : shape.requests) {
    query_start_loc.push_back(query_start_loc.back() + request.query_len);
    seq_lens.push_back(request.seq_len);
    const auto num_pages = ceil_div(request.seq_len, block_size);
    block_table.insert(block_table.end(), next, next + num_pages);
    block_table.resize(seq_lens.size() * to_size(max_blocks), -1);
    next += num_pages;
  }
  list(shape.requests, shape.model.config);
}

std::int64_t BenchBatch::slot(std::size_t request, std::int32_t token) const {
  const std::int32_t query_len = query_start_loc[request + 1] - query_start_loc[request];
  const std::int32_t position = seq_lens[request] - query_len + token;
  const std::int64_t block =
      block_table[request * to_size(max_blocks) + to_size(position / block_size)];
  return block * block_size + position % block_size;
}

namespace {

/// The keys before a tree, and one by one the drafts on the path to this one.
std::vector<KeyRange> keys_on_path(const RequestShape& request, std::int32_t token) {
  const std::int32_t first = request.seq_len - request.query_len;
  std::vector<KeyRange> keys;
  for (std::int32_t node = token; node >= 0; node = request.parents[to_size(node)])
    keys.insert(keys.begin(), {first + node, first + node + 1});
  keys.insert(keys.begin(), {0, first});
  return keys;
}

}  // namespace

std::vector<KeyRange> seen_keys(const AttentionConfig& config, const RequestShape& request,
                                std::int32_t token) {
  if (!request.parents.empty()) return keys_on_path(request, token);
  oracle::AttentionCase window;
  put_window(config, window);
  const std::int64_t keys = request.seq_len, p = keys - request.query_len + token;
  const std::int64_t ahead = window.window_right < 0 ? keys : p + window.window_right + 1;
  const bool causal = !config.use_directions || request.direction == Direction::kCausal;
  std::int64_t begin = window.window_left < 0 ? 0 : p - window.window_left;
  std::int64_t end = causal ? p + 1 : ahead;
  for (const KeySpan& span : request.spans) {
    if (!config.use_spans || p < span.first || p >= span.end) continue;
    const std::int64_t first = span.first, last = span.end;
    if (config.span_rule == SpanRule::kWhole) begin = std::min(begin, first);
    if (causal || config.span_rule == SpanRule::kWhole)
      end = std::max(end, config.span_rule == SpanRule::kClipBoth ? std::min(last, ahead) : last);
  }
  const auto to_position = [&](std::int64_t key) {
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(key, 0, keys));
  };
  const std::int32_t kept = config.use_keep_keys ? request.keep_keys : 0;
  const KeyRange near = {to_position(begin), to_position(end)};
  if (kept == 0 || kept >= near.begin) return {{kept > 0 ? 0 : near.begin, near.end}};
  return {{0, kept}, near};
}

Work attention_work(const AttentionConfig& config, const std::vector<RequestShape>& requests) {
  Work work;
  const double key_width = config.head_size, value_width = config.output_head_size();
  const double scale_bytes = config.cache_format().scales_per_row() ? 2.0 * sizeof(float) : 0;
  const double row_bytes =
      config.num_kv_heads * ((config.use_mla ? key_width : key_width + value_width) *
                                 static_cast<double>(element_size_bytes(config.cache_dtype())) /
                                 codes_per_element(config.cache_dtype()) +
                             scale_bytes);
  for (const RequestShape& request : requests) {
    std::int64_t pairs = 0, unseen = 0;  // keys that lie before those of all queries, or in a gap
    for (std::int32_t token = 0; token < request.query_len; ++token) {
      std::int32_t behind = 0;
      for (const KeyRange& keys : seen_keys(config, request, token)) {
        pairs += keys.end - keys.begin;
        if (token == 0 && request.parents.empty()) unseen += keys.begin - behind;
        behind = keys.end;
      }
    }
    if (request.query_len > 0)
      work.bytes += row_bytes * static_cast<double>(request.seq_len - unseen);
    work.flops += 2 * (key_width + value_width) * config.num_heads * static_cast<double>(pairs);
  }
  return work;
}

std::int64_t count_pages(const BenchShape& shape) {
  std::int64_t pages = 0;
  for (const RequestShape& request : shape.requests) {
    pages += ceil_div(request.seq_len, shape.model.config.block_size);
  }
  return pages;
}

std::size_t room_of(const DeviceCapabilities& device, std::uint64_t parts) {
  return std::min(device.max_alloc_bytes, device.global_mem_bytes / parts);
}

std::vector<BenchKernel> kernels_of(const std::vector<LaunchRecord>& launches,
                                    const std::vector<KernelInfo>& known) {
  std::vector<BenchKernel> kernels;
  for (const LaunchRecord& launch : launches) {
    const auto same = std::ranges::find_if(kernels, [&](const BenchKernel& kernel) {
      return kernel.name == launch.kernel && kernel.work_groups == launch.work_groups &&
             kernel.work_group_size == launch.work_group_size;
    });
    if (same != kernels.end()) {
      ++same->launches;
      continue;
    }
    BenchKernel kernel{.name = std::string(launch.kernel),
                       .work_groups = launch.work_groups,
                       .work_group_size = launch.work_group_size};
    const auto info = std::ranges::find(known, kernel.name, &KernelInfo::name);
    if (info != known.end()) {
      kernel.role = info->role;
      kernel.block_rows = info->block_rows;
      kernel.block_kv = info->block_kv;
    }
    kernels.push_back(std::move(kernel));
  }
  return kernels;
}

BuilderOptions builder_options(const BenchShape& shape, std::int64_t num_blocks) {
  BuilderOptions options;
  options.limits = {.max_num_reqs = shape.num_reqs(),
                    .max_num_batched_tokens = shape.num_tokens(),
                    .max_model_len = shape.max_seq_len(),
                    .num_blocks = num_blocks};
  if (shape.suite == "spec") options.decode_threshold = shape.max_query_len();
  return options;
}

TwoWays::TwoWays(const BenchTask& task)
    : config_(task.shape.model.config),
      cache_(make_rotating_cache(task)),
      batch_(task.shape, cache_.pages_of_set(0)),
      queue_(task.context->create_queue()),
      options_(builder_options(task.shape, cache_.cache.num_blocks)),
      impl_(cache_.backend->make_impl(task.context, config_)) {
  const std::size_t heads = to_size(task.shape.num_tokens()) * to_size(config_.num_heads);
  const std::size_t size = element_size_bytes(config_.dtype);
  query_ = task.context->allocate(heads * to_size(config_.head_size) * size);
  for (Buffer* out : {&one_out_, &other_out_})
    *out = task.context->allocate(heads * to_size(config_.output_head_size()) * size);
  TiledRandom(config_.dtype, 5).fill(queue_, query_);
  TiledRandom(config_.cache_dtype(), 6).fill(queue_, cache_.cache);
  backend = cache_.backend->name();
}

Deviation TwoWays::verify() {
  const auto bytes = download<std::byte>(queue_, one_out_, one_out_.size_bytes());
  Deviation deviation;
  deviation.add(bytes == download<std::byte>(queue_, other_out_, other_out_.size_bytes()) ? 0 : 1,
                0, 0.5);
  for (std::size_t at = 0; at + sizeof(kPoison) <= bytes.size(); at += sizeof(kPoison))
    deviation.add(std::memcmp(&bytes[at], &kPoison, sizeof(kPoison)) == 0 ? 1 : 0, 0, 0.5);
  return deviation;
}

void TwoWays::poison_outputs() const {
  for (const Buffer* out : {&one_out_, &other_out_})
    queue_.fill(*out, kPoison, 0, out->size_bytes() / 4 * 4);
}

void TwoWays::attend(const AttentionMetadata& metadata, const Buffer& out,
                     std::vector<LaunchRecord>* launches) const {
  impl_->forward(queue_, {.query = {query_.handle()}, .output = {out.handle()}}, cache_.cache,
                 metadata, {.launches = launches});
}

}  // namespace clattn::cli
