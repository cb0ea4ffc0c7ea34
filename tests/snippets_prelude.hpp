#pragma once

#include <array>
#include <clattn/attn_utils.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/cascade.hpp>
#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <clattn/explain.hpp>
#include <clattn/kv_scales.hpp>
#include <clattn/log.hpp>
#include <clattn/registry.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// What fragments of C++ in the documents may use (tests/snippets.sh): the names of
// examples/one_step.cpp, a step and its tensors.
using namespace clattn;

extern const std::shared_ptr<Context> context;
extern const Queue queue;
extern const AttentionBackend& backend;
extern AttentionConfig config;
extern const std::shared_ptr<const AttentionImpl> impl;
extern const std::unique_ptr<AttentionMetadataBuilder> builder;
extern const KVCache cache;
extern const CommonAttentionMetadata batch;
extern const TensorRef query, key, value, output;
