#pragma once

/// CLAttn: paged attention for every OpenCL device. See README.md for a first program.

#include <clattn/attention.hpp>
#include <clattn/attention_config.hpp>
#include <clattn/attn_utils.hpp>
#include <clattn/batch_view.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/cascade.hpp>
#include <clattn/ceilings.hpp>
#include <clattn/context.hpp>
#include <clattn/custom_mask.hpp>
#include <clattn/derived_batches.hpp>
#include <clattn/device.hpp>
#include <clattn/error.hpp>
#include <clattn/flashinfer.hpp>
#include <clattn/graph.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/layer.hpp>
#include <clattn/layer_parameters.hpp>
#include <clattn/metadata.hpp>
#include <clattn/mla.hpp>
#include <clattn/page.hpp>
#include <clattn/paged_attention.hpp>
#include <clattn/paged_bias.hpp>
#include <clattn/plugin.hpp>
#include <clattn/registry.hpp>
#include <clattn/reorder.hpp>
#include <clattn/spec_decode.hpp>
#include <clattn/tuning.hpp>
#include <clattn/types.hpp>
#include <clattn/v0_slot_mapping.hpp>
#include <clattn/virtual_batches.hpp>
#include <clattn/xformers.hpp>
