#include "device/attention_case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

namespace attention_test {

namespace {

using clattn::DType;

constexpr std::size_t kGuardElems = 64;
constexpr std::uint8_t kPattern = 0xA5;

oracle::Element element(DType dtype) {
  return dtype == DType::kF32   ? oracle::Element::kF32
         : dtype == DType::kF16 ? oracle::Element::kF16
                                : oracle::Element::kBF16;
}

/// A host copy of a device tensor in its element type.
class Tensor {
 public:
  Tensor(DType dtype, std::size_t count)
      : dtype_(dtype), bytes_(count * clattn::element_size_bytes(dtype)) {}

  void set_bits(std::size_t i, std::uint32_t bits) { std::memcpy(at(i), &bits, width()); }
  /// Stores the nearest value and returns what was stored.
  double set(std::size_t i, double value) {
    const std::uint32_t bits = oracle::encode(element(dtype_), value);
    set_bits(i, bits);
    return oracle::decode(element(dtype_), bits);
  }
  double get(std::size_t i) const { return oracle::decode(element(dtype_), bits(i)); }
  std::uint32_t bits(std::size_t i) const {
    std::uint32_t value = 0;
    std::memcpy(&value, bytes_.data() + i * width(), width());
    return value;
  }
  std::size_t size() const { return bytes_.size() / width(); }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::size_t width() const { return clattn::element_size_bytes(dtype_); }
  std::byte* at(std::size_t i) { return bytes_.data() + i * width(); }
  DType dtype_;
  std::vector<std::byte> bytes_;
};

clattn::Buffer upload(const clattn::Context& context, const clattn::Queue& queue, Tensor& tensor) {
  clattn::Buffer buffer = context.allocate(tensor.bytes().size());
  queue.write(buffer, tensor.bytes());
  return buffer;
}

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// The call on the host: lengths, tables, tensors as the device gets them and as the oracle sees
/// them.
struct HostCase {
  oracle::AttentionCase truth;
  std::vector<std::int32_t> block_table;  // with poisoned tails
  std::int64_t num_blocks = 0;
  std::int64_t num_tokens = 0;
};

HostCase lay_out(const CaseSpec& spec) {
  std::mt19937 random(spec.page_seed);
  HostCase host;
  const clattn::AttentionConfig& c = spec.config;
  oracle::AttentionCase& t = host.truth;
  t.num_heads = c.num_heads;
  t.num_kv_heads = c.num_kv_heads;
  t.head_size = c.head_size;
  t.block_size = c.block_size;
  t.scale = c.scale ? static_cast<double>(*c.scale) : 1.0 / std::sqrt(c.head_size);
  t.causal = spec.causal;
  t.query_start_loc = {0};
  std::int64_t used = 0;
  std::int64_t widest = 1;
  for (const Request& request : spec.requests) {
    t.query_start_loc.push_back(t.query_start_loc.back() + request.query_len);
    t.seq_lens.push_back(request.query_len + request.context_len);
    const std::int64_t pages = (t.seq_lens.back() + c.block_size - 1) / c.block_size;
    used += pages;
    widest = std::max(widest, pages);
  }
  host.num_tokens = t.query_start_loc.back();
  host.num_blocks = used + 2;
  t.max_blocks = widest + 1;  // every row has at least one unused entry
  std::vector<std::int32_t> pages(index(host.num_blocks));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  host.block_table.assign(spec.requests.size() * index(t.max_blocks),
                          std::numeric_limits<std::int32_t>::max());
  std::size_t next = 0;
  for (std::size_t r = 0; r < spec.requests.size(); ++r) {
    const std::int64_t count = (t.seq_lens[r] + c.block_size - 1) / c.block_size;
    for (std::int64_t p = 0; p < count; ++p) {
      host.block_table[r * index(t.max_blocks) + index(p)] = pages[next++];
    }
  }
  t.block_table = host.block_table;
  return host;
}

std::uint32_t nan_bits(DType dtype) {
  return dtype == DType::kF32 ? 0x7FC00001U : dtype == DType::kF16 ? 0x7E01U : 0x7FC1U;
}

/// The cache of one case: physical bits for the device, logical doubles for the oracle.
class CacheImage {
 public:
  CacheImage(const CaseSpec& spec, HostCase& host, const clattn::KVCache& cache)
      : cache_(cache),
        host_(host),
        bits_(spec.config.cache_dtype(),
              cache.buffer.size_bytes() / clattn::element_size_bytes(cache.dtype)) {
    for (std::size_t i = 0; i < bits_.size(); ++i) bits_.set_bits(i, nan_bits(cache.dtype));
    const std::size_t logical = index(cache.num_blocks) * index(cache.block_size) *
                                index(cache.num_kv_heads) * index(cache.head_size);
    host.truth.key_cache.assign(logical, std::numeric_limits<double>::quiet_NaN());
    host.truth.value_cache = host.truth.key_cache;
  }

  /// Stores a token's K and V element where position `position` of request `r` lives.
  void put(std::size_t r, std::int64_t position, std::int64_t head, std::int64_t dim, double key,
           double value, bool on_device) {
    const std::int64_t page =
        host_.block_table[r * index(host_.truth.max_blocks) + index(position / cache_.block_size)];
    const std::int64_t token = position % cache_.block_size;
    const std::int64_t physical =
        page * cache_.block_stride + token * cache_.token_stride + head * cache_.head_stride + dim;
    const std::int64_t logical =
        ((page * cache_.block_size + token) * cache_.num_kv_heads + head) * cache_.head_size + dim;
    const auto element_type = element(cache_.dtype);
    host_.truth.key_cache[index(logical)] = oracle::round_to(element_type, key);
    host_.truth.value_cache[index(logical)] = oracle::round_to(element_type, value);
    if (on_device) {
      bits_.set(index(cache_.k_offset + physical), key);
      bits_.set(index(cache_.v_offset + physical), value);
    }
    expected_.push_back({index(cache_.k_offset + physical), oracle::encode(element_type, key)});
    expected_.push_back({index(cache_.v_offset + physical), oracle::encode(element_type, value)});
  }

  Tensor& bits() { return bits_; }

  /// What differs between the device's cache and the expectation: stored tokens, NaN elsewhere.
  std::string compare(Tensor& device) const {
    std::vector<std::uint32_t> want(device.size(), nan_bits(cache_.dtype));
    for (const auto& [place, value] : expected_) want[place] = value;
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (device.bits(i) != want[i]) {
        return fmt::format("cache element {} is {:#x}, expected {:#x}", i, device.bits(i), want[i]);
      }
    }
    return {};
  }

 private:
  const clattn::KVCache& cache_;
  HostCase& host_;
  Tensor bits_;
  std::vector<std::pair<std::size_t, std::uint32_t>> expected_;
};

/// Fills the cache with random tokens; the step's own tokens go through `key` and `value` when they
/// are written by the library.
void fill_cache(const CaseSpec& spec, HostCase& host, CacheImage& image, Tensor& key,
                Tensor& value) {
  const auto heads = spec.config.num_kv_heads;
  const auto dims = spec.config.head_size;
  for (std::size_t r = 0; r < spec.requests.size(); ++r) {
    const std::int64_t context = spec.requests[r].context_len;
    std::mt19937 random(1000 + spec.requests[r].identity);
    std::normal_distribution<double> normal;
    for (std::int64_t p = 0; p < host.truth.seq_lens[r]; ++p) {
      const bool written = spec.write_cache && p >= context;
      const std::int64_t row = host.truth.query_start_loc[r] + (p - context);
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t d = 0; d < dims; ++d) {
          double k = normal(random);
          double v = normal(random);
          if (spec.last_token_overflows && p + 1 == host.truth.seq_lens[r]) {
            k = v = std::numeric_limits<double>::infinity();
          }
          if (written) {
            const std::size_t at = index((row * heads + h) * dims + d);
            k = key.set(at, k);
            v = value.set(at, v);
          }
          image.put(r, p, h, d, k, v, !written);
        }
      }
    }
  }
}

/// Random query rows; the padding between them is NaN.
Tensor make_query(const CaseSpec& spec, HostCase& host, std::int64_t stride) {
  const std::int64_t row = std::int64_t{spec.config.num_heads} * spec.config.head_size;
  Tensor query(spec.config.dtype, std::max<std::size_t>(index(host.num_tokens * stride), 1));
  for (std::size_t i = 0; i < query.size(); ++i) query.set_bits(i, nan_bits(spec.config.dtype));
  for (std::size_t r = 0; r < spec.requests.size(); ++r) {
    std::mt19937 random(500000 + spec.requests[r].identity);
    std::normal_distribution<double> normal(0.0, spec.sharpness);
    for (std::int64_t t = host.truth.query_start_loc[r]; t < host.truth.query_start_loc[r + 1];
         ++t) {
      for (std::int64_t i = 0; i < row; ++i) {
        host.truth.query.push_back(query.set(index(t * stride + i), normal(random)));
      }
    }
  }
  return query;
}

void compare(const CaseSpec& spec, const HostCase& host, CaseResult& result) {
  const oracle::AttentionResult want = oracle::attention(host.truth, element(spec.config.dtype));
  constexpr double kFloor = 2e-6;     // f32 sums of values of size about 1
  constexpr double kLseFloor = 2e-4;  // the field's gate for log-sum-exp
  const auto judge = [&](double got, double expected, double allowed, std::string place) {
    if (std::isnan(expected) || expected > 1e300)
      return;  // a row that sees an overflowed token has no right answer
    double share = std::abs(got - expected) / allowed;
    if (std::isinf(expected)) share = got == expected ? 0.0 : 1e30;
    if (std::isnan(got)) share = 1e30;
    if (share > result.worst_share) {
      result.worst_share = share;
      result.worst_place =
          fmt::format("{}: got {}, expected {}, allowed {}", place, got, expected, allowed);
    }
  };
  for (std::size_t i = 0; i < want.out.size(); ++i) {
    judge(result.out[i], want.out[i], 2 * want.bound[i] + kFloor,
          fmt::format("out token {} head {} dim {}",
                      i / index(spec.config.head_size) / index(spec.config.num_heads),
                      i / index(spec.config.head_size) % index(spec.config.num_heads),
                      i % index(spec.config.head_size)));
  }
  for (std::size_t i = 0; i < want.lse.size(); ++i) {
    judge(result.lse[i], want.lse[i], kLseFloor, fmt::format("lse {}", i));
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

}  // namespace

CaseResult run_case(const std::shared_ptr<clattn::Context>& context, const CaseSpec& spec) {
  const clattn::AttentionConfig& c = spec.config;
  HostCase host = lay_out(spec);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = clattn::get_attn_backend(c, &context->capabilities(), spec.backend);

  const clattn::KVCacheSpec cache_spec{.block_size = c.block_size,
                                       .num_kv_heads = c.num_kv_heads,
                                       .head_size = c.head_size,
                                       .dtype = c.cache_dtype()};
  const clattn::Buffer raw =
      context->allocate(index(host.num_blocks) * cache_spec.page_size_bytes());
  const clattn::KVCache cache = clattn::reshape_kv_cache(raw, cache_spec, backend, spec.layout);
  CacheImage image(spec, host, cache);
  const std::size_t step_elems = index(host.num_tokens * c.num_kv_heads * c.head_size);
  Tensor key(c.dtype, std::max<std::size_t>(step_elems, 1));
  Tensor value(c.dtype, std::max<std::size_t>(step_elems, 1));
  fill_cache(spec, host, image, key, value);
  queue.write(raw, image.bits().bytes());

  const std::int64_t row = std::int64_t{c.num_heads} * c.head_size;
  const std::int64_t query_stride = row + spec.query_padding;
  Tensor query = make_query(spec, host, query_stride);
  Tensor out(c.dtype, index(host.num_tokens * row) + 2 * kGuardElems);
  Tensor lse(DType::kF32, index(host.num_tokens * c.num_heads) + 2 * kGuardElems);
  std::fill(out.bytes().begin(), out.bytes().end(), std::byte{kPattern});
  std::fill(lse.bytes().begin(), lse.bytes().end(), std::byte{kPattern});

  clattn::CommonAttentionMetadata batch;
  batch.query_start_loc = host.truth.query_start_loc;
  batch.seq_lens = host.truth.seq_lens;
  batch.num_reqs = static_cast<std::int32_t>(spec.requests.size());
  batch.num_actual_tokens = static_cast<std::int32_t>(host.num_tokens);
  batch.block_table = host.block_table;
  batch.block_table_stride = host.truth.max_blocks;
  batch.causal = spec.causal;
  clattn::BuilderOptions options;
  options.limits.num_blocks = host.num_blocks;
  options.num_splits = spec.num_splits;
  options.split_policy = spec.split_policy;
  const auto builder = backend.make_builder(context, c, options);
  const auto impl = backend.make_impl(context, c);
  const clattn::AttentionMetadata& metadata = builder->build(queue, batch);
  if (spec.write_cache) {
    const clattn::Buffer k = upload(*context, queue, key);
    const clattn::Buffer v = upload(*context, queue, value);
    impl->write_kv_cache(queue, {k.handle()}, {v.handle()}, cache, metadata);
    queue.finish();
  }

  const clattn::Buffer q = upload(*context, queue, query);
  const clattn::Buffer o = upload(*context, queue, out);
  // The library writes lse from element 0 of its buffer: only the band behind it can be guarded.
  const std::size_t lse_bytes = lse.bytes().size() - kGuardElems * sizeof(float);
  const clattn::Buffer l = context->allocate(lse_bytes);
  queue.write(l, std::span(lse.bytes()).first(lse_bytes));
  std::vector<clattn::LaunchRecord> launches;
  impl->forward(queue, {q.handle(), 0, query_stride}, cache, metadata, {o.handle(), kGuardElems, 0},
                l.handle(), nullptr, &launches);
  queue.read(o, out.bytes());
  queue.read(l, std::span(lse.bytes()).subspan(kGuardElems * sizeof(float)));
  queue.read(raw, image.bits().bytes());

  CaseResult result;
  for (const auto& launch : launches) {
    result.kernels.emplace_back(launch.kernel);
    result.work_groups.push_back(launch.work_groups);
  }
  check_guards(out, "out", result.fault);
  check_guards(lse, "lse", result.fault);
  if (result.fault.empty()) result.fault = image.compare(image.bits());
  for (std::int64_t i = 0; i < host.num_tokens * row; ++i) {
    result.out.push_back(out.get(index(i) + kGuardElems));
  }
  for (std::int64_t i = 0; i < host.num_tokens * c.num_heads; ++i) {
    result.lse.push_back(lse.get(index(i) + kGuardElems));
  }
  compare(spec, host, result);
  return result;
}

std::string describe(const CaseSpec& spec) {
  const clattn::AttentionConfig& c = spec.config;
  std::string text = fmt::format(
      "{} {} heads {}/{} x {} page {} dtype {} cache {} family {} causal {} splits {} "
      "pages {} requests (query+context)",
      spec.backend, clattn::to_string(spec.layout), c.num_heads, c.num_kv_heads, c.head_size,
      c.block_size, clattn::to_string(c.dtype), clattn::to_string(c.cache_dtype()),
      clattn::to_string(c.kernel_family), spec.causal, spec.num_splits, spec.page_seed);
  for (const Request& r : spec.requests) text += fmt::format(" {}+{}", r.query_len, r.context_len);
  return text;
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
