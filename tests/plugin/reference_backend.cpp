// A backend of a third party, as one would write it: this file knows the C contract and OpenCL, and
// nothing else of the library. Attention in plain loops on the host over f32 buffers. PLUGIN_DEFECT
// makes the shared objects that the loader must refuse.

#include <clattn/backend_abi.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#define DEFECT_NONE 0
#define DEFECT_ABI_VERSION 1
#define DEFECT_STRUCT_SIZE 2
#define DEFECT_NO_ENTRY 3
#define DEFECT_MISSING_FUNCTION 4
#define DEFECT_REFUSES 5
#define DEFECT_TAKEN_NAME 6
#define DEFECT_CACHE_SHAPE 7
#define DEFECT_STRIDE_ORDER 8
#define DEFECT_NEWER_CONFIG 9
#define DEFECT_OLDER_CONFIG 10

namespace {

struct Impl {
  ClattnAttentionConfig config;
};

void fail(ClattnStatus* status, int code, int cl_code, const char* message) {
  status->code = code;
  status->cl_code = cl_code;
  std::snprintf(status->message, sizeof(status->message), "%s", message);
}

void destroy(void* self) {
  delete static_cast<int*>(self);
}

void validate(void*, const ClattnAttentionConfig* config, const ClattnDevice*,
              ClattnAddReason add_reason, void* sink) {
  if (std::strcmp(config->dtype, "f32") != 0 || std::strcmp(config->kv_cache_dtype, "f32") != 0) {
    add_reason(sink, "dtypes other than f32 not supported");
  }
  if (config->head_size > 64) {
    const std::string text =
        "head_size " + std::to_string(config->head_size) + " not supported: 1 to 64 are";
    add_reason(sink, text.c_str());
  }
  if (config->sinks != nullptr) add_reason(sink, "sinks not supported");
  const bool windows = config->sliding_window != 0 || config->attention_chunk_size != 0 ||
                       config->window_left >= 0 || config->window_right >= 0;
  // What the batch says of each query has windows counted in.
  const bool told = config->use_spans != 0 || config->use_directions != 0 ||
                    config->use_first_keys != 0 || config->use_keep_keys != 0 ||
                    config->use_trees != 0;
  if (config->alibi_slopes != nullptr || config->logits_soft_cap != 0 || (windows && !told)) {
    add_reason(sink, "slopes, caps and windows not supported");
  }
}

void kv_cache_shape(void*, int64_t num_blocks, int32_t block_size, int32_t num_kv_heads,
                    int32_t head_size, int64_t shape[5], ClattnStatus*) {
  const int64_t tokens = block_size + (PLUGIN_DEFECT == DEFECT_CACHE_SHAPE ? 1 : 0);
  const int64_t values[5] = {num_blocks, 2, tokens, num_kv_heads, head_size};
  std::memcpy(shape, values, sizeof(values));
}

void kv_cache_stride_order(void*, int32_t, int32_t order[5], ClattnStatus*) {
  for (int i = 0; i < 5; ++i) order[i] = i;
  if (PLUGIN_DEFECT == DEFECT_STRIDE_ORDER) {
    order[3] = 4;
    order[4] = 3;
  }
}

void* impl_create(void*, cl_context, cl_device_id, const ClattnAttentionConfig* config,
                  ClattnStatus* status) {
  auto* impl = new (std::nothrow) Impl{*config};
  if (impl == nullptr) fail(status, CLATTN_UNSUPPORTED, 0, "out of memory");
  return impl;
}

void impl_destroy(void*, void* impl) {
  delete static_cast<Impl*>(impl);
}

/// Everything in a buffer, blocking: this backend is for judging others, not for speed.
std::vector<float> read_all(cl_command_queue queue, cl_mem buffer, ClattnStatus* status) {
  size_t bytes = 0;
  cl_int error = clGetMemObjectInfo(buffer, CL_MEM_SIZE, sizeof(bytes), &bytes, nullptr);
  std::vector<float> values(bytes / sizeof(float));
  if (error == CL_SUCCESS) {
    error = clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, values.size() * sizeof(float),
                                values.data(), 0, nullptr, nullptr);
  }
  if (error != CL_SUCCESS) fail(status, CLATTN_OPENCL, error, "a buffer cannot be read");
  return values;
}

void write(cl_command_queue queue, cl_mem buffer, int64_t at, const float* from, size_t count,
           ClattnStatus* status) {
  const cl_int error =
      clEnqueueWriteBuffer(queue, buffer, CL_TRUE, static_cast<size_t>(at) * sizeof(float),
                           count * sizeof(float), from, 0, nullptr, nullptr);
  if (error != CL_SUCCESS) fail(status, CLATTN_OPENCL, error, "a buffer cannot be written");
}

int64_t place(const ClattnKVCache& cache, int64_t block, int64_t token, int64_t head) {
  return block * cache.block_stride + token * cache.token_stride + head * cache.head_stride;
}

void write_kv_cache(void*, void*, cl_command_queue queue, const ClattnTensor* key,
                    const ClattnTensor* value, const ClattnKVCache* cache, const ClattnBatch* batch,
                    cl_event*, ClattnStatus* status) {
  const std::vector<float> k = read_all(queue, key->buffer, status);
  const std::vector<float> v = read_all(queue, value->buffer, status);
  const auto dims = static_cast<size_t>(cache->head_size);
  for (int32_t t = 0; t < batch->num_actual_tokens && status->code == CLATTN_OK; ++t) {
    const int64_t slot = batch->slot_mapping[t];
    if (slot < 0) continue;
    for (int32_t h = 0; h < cache->num_kv_heads; ++h) {
      const int64_t to = place(*cache, slot / cache->block_size, slot % cache->block_size, h);
      const int64_t head = int64_t{h} * cache->head_size;
      write(queue, cache->buffer, cache->k_offset + to,
            &k[static_cast<size_t>(key->offset + t * key->token_stride + head)], dims, status);
      write(queue, cache->buffer, cache->v_offset + to,
            &v[static_cast<size_t>(value->offset + t * value->token_stride + head)], dims, status);
    }
  }
}

/// The keys of its request that a query sees.
std::vector<int32_t> seen_keys(const ClattnBatch& batch, int32_t request, int64_t token) {
  const int32_t seq_len = batch.seq_lens[request];
  const auto behind = static_cast<int32_t>(batch.query_start_loc[request + 1] - token);
  ClattnSeenKeys seen{};
  seen.end = batch.causal != 0 ? seq_len - behind + 1 : seq_len;
  seen.tree_begin = seq_len;
  if (batch.seen_keys != nullptr) seen = batch.seen_keys[token];
  std::vector<int32_t> keys;
  for (int32_t j = 0; j < seq_len; ++j) {
    const int32_t node = j - seen.tree_begin;
    const bool shown =
        node < 0 ||
        (batch.tree_bits[token * batch.tree_words + node / 32] >> (node % 32) & 1U) != 0;
    const bool kept = seen.kept_begin <= j && j < seen.kept_end;
    if (kept || (seen.begin <= j && j < seen.end && shown)) keys.push_back(j);
  }
  return keys;
}

/// One query token and head over its keys: returns the natural log of the softmax denominator.
double attend(const Impl& impl, const ClattnKVCache& cache, const std::vector<float>& memory,
              const int32_t* pages, const std::vector<int32_t>& keys, int32_t head,
              const float* query, std::vector<double>& out) {
  const auto dims = static_cast<int32_t>(impl.config.head_size);
  double largest = -INFINITY;
  double sum = 0;
  std::fill(out.begin(), out.end(), 0.0);
  for (const int32_t j : keys) {
    const int64_t at = place(cache, pages[j / cache.block_size], j % cache.block_size, head);
    const float* k = &memory[static_cast<size_t>(cache.k_offset + at)];
    const float* v = &memory[static_cast<size_t>(cache.v_offset + at)];
    double x = 0;
    for (int32_t d = 0; d < dims; ++d) x += double{query[d]} * double{k[d]};
    x *= double{impl.config.scale};
    const double top = std::fmax(largest, x);
    const double fade = std::exp(largest - top);
    const double weight = std::exp(x - top);
    sum = sum * fade + weight;
    for (int32_t d = 0; d < dims; ++d) {
      auto& o = out[static_cast<size_t>(d)];
      o = o * fade + weight * double{v[d]};
    }
    largest = top;
  }
  for (double& o : out) o = keys.empty() ? 0 : o / sum;
  return keys.empty() ? -INFINITY : largest + std::log(sum);
}

void forward(void*, void* self, cl_command_queue queue, const ClattnTensor* query,
             const ClattnKVCache* cache, const ClattnBatch* batch, const ClattnTensor* output,
             cl_mem lse, cl_event*, ClattnStatus* status) {
  const auto& impl = *static_cast<Impl*>(self);
  const std::vector<float> q = read_all(queue, query->buffer, status);
  const std::vector<float> memory = read_all(queue, cache->buffer, status);
  if (status->code != CLATTN_OK) return;
  const auto dims = static_cast<int32_t>(impl.config.head_size);
  const auto group = static_cast<int32_t>(impl.config.num_heads / impl.config.num_kv_heads);
  std::vector<double> out(static_cast<size_t>(dims));
  for (int32_t r = 0; r < batch->num_reqs; ++r) {
    for (int64_t token = batch->query_start_loc[r]; token < batch->query_start_loc[r + 1];
         ++token) {
      const std::vector<int32_t> keys = seen_keys(*batch, r, token);
      for (int32_t h = 0; h < impl.config.num_heads; ++h) {
        const int64_t from = query->offset + token * query->token_stride + int64_t{h} * dims;
        const double log_sum =
            attend(impl, *cache, memory, batch->block_table + r * batch->block_table_stride, keys,
                   h / group, &q[static_cast<size_t>(from)], out);
        const std::vector<float> rounded(out.begin(), out.end());
        write(queue, output->buffer,
              output->offset + token * output->token_stride + int64_t{h} * dims, rounded.data(),
              rounded.size(), status);
        const auto narrow = static_cast<float>(log_sum);
        if (lse != nullptr) {
          write(queue, lse, token * impl.config.num_heads + h, &narrow, 1, status);
        }
      }
    }
  }
}

}  // namespace

#if PLUGIN_DEFECT == DEFECT_NO_ENTRY
extern "C" int clattn_backend_plugin_v0(const ClattnHostApi* host, ClattnBackendPlugin* plugin);
extern "C" int clattn_backend_plugin_v0(const ClattnHostApi* host, ClattnBackendPlugin* plugin) {
#else
extern "C" int clattn_backend_plugin_v3(const ClattnHostApi* host, ClattnBackendPlugin* plugin);
extern "C" int clattn_backend_plugin_v3(const ClattnHostApi* host, ClattnBackendPlugin* plugin) {
#endif
  if (host->abi_version != CLATTN_BACKEND_ABI_VERSION || PLUGIN_DEFECT == DEFECT_REFUSES) {
    plugin->refusal = "not on this host";
    return 7;
  }
  plugin->abi_version = CLATTN_BACKEND_ABI_VERSION;
  plugin->struct_size = sizeof(ClattnBackendPlugin);
  if (PLUGIN_DEFECT == DEFECT_ABI_VERSION) {
    plugin->abi_version = 1;
    return 0;
  }
  if (PLUGIN_DEFECT == DEFECT_STRUCT_SIZE) {
    plugin->struct_size += 8;
    return 0;
  }
  plugin->config_size = sizeof(ClattnAttentionConfig);
  if (PLUGIN_DEFECT == DEFECT_NEWER_CONFIG) plugin->config_size += 8;
  plugin->takes_seen_keys = PLUGIN_DEFECT == DEFECT_OLDER_CONFIG ? 0 : 1;
  // As compiled when soft caps were the last option.
  if (PLUGIN_DEFECT == DEFECT_OLDER_CONFIG)
    plugin->config_size = offsetof(ClattnAttentionConfig, alibi_slopes);
  plugin->name = PLUGIN_DEFECT == DEFECT_TAKEN_NAME ? "XFORMERS" : "REFERENCE";
  plugin->version = "1.0";
  plugin->self = new (std::nothrow) int(0);
  plugin->kv_dimension = 1;
  plugin->layouts = 1U << CLATTN_NHD;
  plugin->preferred_layout = CLATTN_NHD;
  plugin->destroy = destroy;
  plugin->validate = validate;
  plugin->kv_cache_shape = kv_cache_shape;
  plugin->kv_cache_stride_order = kv_cache_stride_order;
  plugin->impl_create = impl_create;
  plugin->impl_destroy = impl_destroy;
  plugin->write_kv_cache = write_kv_cache;
  if (PLUGIN_DEFECT != DEFECT_MISSING_FUNCTION) plugin->forward = forward;
  return 0;
}
