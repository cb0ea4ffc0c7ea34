#include "capture/case.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <set>
#include <system_error>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "files/files.hpp"

namespace clattn::detail {
namespace {

namespace fs = std::filesystem;

void require(const std::error_code& failure, const fs::path& path, std::string_view what) {
  if (!failure) return;
  throw Error(ErrorCode::kIo, fmt::format("CLATTN_CAPTURE_DIR: {}: cannot {}: {}", path.string(),
                                          what, failure.message()));
}

/// One more than the largest number that an entry of `root` begins with.
std::int64_t first_free_number(const fs::path& root) {
  std::int64_t next = 0;
  std::error_code failure;
  for (fs::directory_iterator entry(root, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    std::int64_t number = 0;
    constexpr std::int64_t kMost = 1'000'000'000'000;  // larger ones are not captures' names
    const auto [last, status] =
        std::from_chars(name.data(), name.data() + std::min(name.find('-'), name.size()), number);
    if (status == std::errc{} && number < kMost) next = std::max(next, number + 1);
  }
  require(failure, root, "be read");
  return next;
}

std::int64_t take_number(const fs::path& root) {
  static std::atomic<std::int64_t> next = first_free_number(root);
  return next++;
}

/// The pages, each once. Throws unless the cache has all of them.
std::set<std::int32_t> distinct(const std::vector<std::int32_t>& pages, std::int64_t num_blocks) {
  std::set<std::int32_t> each(pages.begin(), pages.end());
  if (!each.empty() && (*each.begin() < 0 || *each.rbegin() >= num_blocks)) {
    throw_invalid("block_table: page {}, legal: 0 … {} (the cache's num_blocks - 1)",
                  *each.begin() < 0 ? *each.begin() : *each.rbegin(), num_blocks - 1);
  }
  return each;
}

/// The first element of a page is the one with the lowest address.
npy::NpyArray read_plane(const Queue& queue, const CaseCache& cache, const CaseCache::Plane& plane,
                         const std::set<std::int32_t>& pages) {
  const std::size_t element = element_size_bytes(cache.dtype);
  const auto at = [&](std::int64_t page, std::int64_t token, std::int64_t head, std::int64_t dim) {
    return to_size(plane.element_at(page, token, head, dim)) * element;
  };
  std::vector<std::size_t> places;  // in logical order, from a page's first element on
  const std::int64_t heads = cache.shape.size() == 3 ? cache.shape[2] : 1;
  for (std::int64_t token = 0; token < cache.shape[1]; ++token) {
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t dim = 0; dim < plane.width; ++dim)
        places.push_back(at(0, token, head, dim) - at(0, 0, 0, 0));
    }
  }
  const std::size_t span = std::ranges::max(places) + element;
  std::vector<std::int64_t> shape = cache.shape;
  shape.push_back(plane.width);
  npy::NpyArray array = zeros(cache.dtype, std::move(shape));
  for (const std::int32_t page : pages) {
    const std::vector<std::byte> stored = read(queue, plane.memory, at(page, 0, 0, 0), span);
    std::byte* to = array.data.data() + to_size(page) * places.size() * element;
    for (const std::size_t place : places) {
      std::memcpy(to, &stored[place], element);
      to += element;
    }
  }
  return array;
}

/// Gives the arrays to `take` one after the other, because caches are large.
void read_cache(const Queue& queue, const CaseCache& cache, const std::vector<std::int32_t>& pages,
                const auto& take) {
  const std::set<std::int32_t> each = distinct(pages, cache.shape[0]);
  for (const CaseCache::Plane& plane : cache.planes)
    take(plane.name, read_plane(queue, cache, plane, each));
}

template <typename Cache>
CaseCache of_planes(const Cache& cache, cl_mem key, cl_mem value, std::string_view layout) {
  return {.dtype = cache.dtype,
          .layout = layout,
          .shape = {cache.num_blocks, cache.block_size, cache.num_kv_heads},
          .planes = {{"key_cache", "k_scale", key, std::bind_front(&Cache::key_at, &cache),
                      cache.head_size},
                     {"value_cache", "v_scale", value, std::bind_front(&Cache::value_at, &cache),
                      cache.head_size}},
          .scales = cache.scales.handle(),
          .per_head = cache.scales_per_head};
}

CaseCache described(const KVCache& cache) {
  detail::throw_unsupported_if(cache.row_scales.has_value(),
                               "capture: kv_cache_dtype is {}, supported: types",
                               to_string(cache.format()));
  const cl_mem memory = cache.buffer.handle();
  const bool hnd = cache.head_stride > cache.token_stride;
  CaseCache result =
      of_planes(cache, memory, memory, to_string(hnd ? KVCacheLayout::kHND : KVCacheLayout::kNHD));
  result.planes.back().width = cache.value_size();
  if (cache.scales && cache.scales_query)
    result.query_scale_at = 2 * to_size(cache.scales_per_head ? cache.num_kv_heads : 1);
  return result;
}

CaseCache described(const PackedPages& cache) {
  return of_planes(cache, cache.key, cache.value, "packed");
}

/// Latent rows follow one another without gaps.
CaseCache described(const MLACache& cache) {
  const std::int64_t tokens = cache.block_size;
  const std::int64_t width = std::int64_t{cache.kv_lora_rank} + cache.rope_dim;
  const auto element_at = [=](std::int64_t block, std::int64_t token, std::int64_t /*head*/,
                              std::int64_t dim) { return (block * tokens + token) * width + dim; };
  return {.dtype = cache.dtype,
          .layout = {},
          .shape = {cache.num_blocks, tokens},
          .planes = {{"kv_cache", "k_scale", cache.buffer.handle(), element_at, width}},
          .scales = cache.scale.handle()};
}

}  // namespace

CaseWriter::CaseWriter(fs::path root, std::string_view op) : root_(std::move(root)), op_(op) {
  std::error_code failure;
  fs::create_directories(root_, failure);
  require(failure, root_, "be created");
  number_ = take_number(root_);
  do {
    staging_ = files::unpredictable(root_ / fmt::format(".{:04}-{}", number_, op_));
  } while (!fs::create_directory(staging_, failure) && !failure);
  require(failure, staging_, "be created");
}

CaseWriter::~CaseWriter() {
  std::error_code ignored;
  if (!staging_.empty()) fs::remove_all(staging_, ignored);
}

void CaseWriter::add(std::string_view name, const npy::NpyArray& array) const {
  npy::write_npy(staging_ / fmt::format("{}.npy", name), array);
}

fs::path CaseWriter::commit(std::string_view case_json) {
  files::replace_file(staging_ / "case.json", case_json);
  for (;;) {
    fs::path place = root_ / fmt::format("{:04}-{}", number_, op_);
    std::error_code failure;
    fs::rename(staging_, place, failure);
    const bool taken = failure == std::errc::directory_not_empty ||
                       failure == std::errc::file_exists || failure == std::errc::not_a_directory;
    if (!taken) {
      require(failure, place, "be written");
      staging_.clear();
      return place;
    }
    number_ = take_number(root_);  // another process was faster
  }
}

CaseResults::CaseResults(const fs::path& place) : folder_(place / "captured") {
  std::error_code failure;
  fs::create_directories(folder_, failure);
  require(failure, folder_, "be created");
}

void CaseResults::add(std::string_view name, const npy::NpyArray& array) const {
  npy::write_npy(folder_ / fmt::format("{}.npy", name), array);
}

std::vector<std::byte> read(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                            std::size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  if (size_bytes > 0) queue.read(Buffer::adopt(memory), bytes, offset_bytes);
  return bytes;
}

std::vector<std::byte> read_rows(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                                 std::int64_t count, std::size_t row_bytes,
                                 std::size_t stride_bytes) {
  if (count == 0) return {};
  const std::vector<std::byte> span =
      read(queue, memory, offset_bytes, to_size(count - 1) * stride_bytes + row_bytes);
  std::vector<std::byte> rows;
  rows.reserve(to_size(count) * row_bytes);
  for (std::size_t i = 0; i < to_size(count); ++i) {
    const auto row = span.begin() + static_cast<std::ptrdiff_t>(i * stride_bytes);
    rows.insert(rows.end(), row, row + static_cast<std::ptrdiff_t>(row_bytes));
  }
  return rows;
}

npy::NpyArray read_tensor(const Queue& queue, const TensorRef& tensor, DType dtype,
                          std::vector<std::int64_t> shape, std::optional<std::int64_t> num_rows) {
  const std::size_t element = element_size_bytes(dtype);
  std::int64_t row = 1;
  for (std::size_t i = 1; i < shape.size(); ++i) row *= shape[i];
  const std::int64_t stride = tensor.token_stride == 0 ? row : tensor.token_stride;
  std::vector<std::byte> rows =
      read_rows(queue, tensor.buffer, to_size(tensor.offset) * element, num_rows.value_or(shape[0]),
                to_size(row) * element, to_size(stride) * element);
  rows.resize(to_size(shape[0] * row) * element);
  return {std::string(npy::descr_of(dtype)), std::move(shape), std::move(rows)};
}

CaseCache case_cache(const AnyCache& cache) {
  return std::visit([](const auto* each) { return described(*each); }, cache);
}

void add_cache(const NewCase& made, const CaseCache& cache,
               const std::vector<std::int32_t>& pages) {
  read_cache(made.queue, cache, pages,
             [&](std::string_view name, const npy::NpyArray& array) { made.add(name, array); });
}

AddResults commit_cache(NewCase& made, CaseCache cache, std::vector<std::int32_t> pages) {
  return made.commit([cache = std::move(cache), pages = std::move(pages)](
                         const CaseResults& results, const Queue& queue) {
    read_cache(queue, cache, pages, [&](std::string_view name, const npy::NpyArray& array) {
      results.add(fmt::format("{}_out", name), array);
    });
  });
}

void add_storage_keys(CaseKeys& keys, const CaseCache& cache) {
  keys.text("kv_cache_dtype", to_string(cache.dtype));
  if (!cache.layout.empty()) keys.text("layout", cache.layout);
}

void add_cache_keys(NewCase& made, const CaseCache& cache) {
  add_storage_keys(made.keys, cache);
  const bool list = cache.scales != nullptr && cache.per_head;
  const std::size_t each = list ? to_size(cache.shape[2]) : 1;
  std::vector<float> scales(cache.planes.size(), 1);
  if (cache.scales != nullptr)
    scales = read_as<float>(made.queue, cache.scales, 0,
                            std::ssize(scales) * static_cast<std::int64_t>(each));
  for (std::size_t i = 0; i < cache.planes.size(); ++i) {
    std::vector<std::string> texts;
    for (const float scale : std::span(scales).subspan(i * each, each))
      texts.push_back(CaseKeys::number(scale));
    made.keys.add(cache.planes[i].scale_key,
                  list ? fmt::format("[{}]", fmt::join(texts, ", ")) : texts.front());
  }
}

npy::NpyArray zeros(DType dtype, std::vector<std::int64_t> shape) {
  std::size_t bytes = element_size_bytes(dtype);
  for (const std::int64_t extent : shape)
    bytes = checked_mul(bytes, to_size(extent), "captured blocks");
  return {std::string(npy::descr_of(dtype)), std::move(shape), std::vector<std::byte>(bytes)};
}

}  // namespace clattn::detail
