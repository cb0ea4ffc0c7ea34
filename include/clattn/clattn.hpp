#pragma once

/// CLAttn: paged attention for every OpenCL device. This header is what an engine needs to serve a
/// model; README.md has a first program. The other headers of this folder are included by name:
/// devices, the registry of backends, specs of caches, recorded steps, the pool of blocks, cache
/// operations, cascades, MLA's own calls, plug-ins, tuning, reports (explain.hpp), the log.
/// `compat/` holds what mirrors names of older or particular engines.

#include <clattn/attention.hpp>
#include <clattn/attention_backend.hpp>
#include <clattn/attention_config.hpp>
#include <clattn/context.hpp>
#include <clattn/error.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/layer.hpp>
#include <clattn/metadata.hpp>
#include <clattn/session.hpp>
#include <clattn/types.hpp>
