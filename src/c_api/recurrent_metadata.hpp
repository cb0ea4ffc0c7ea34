#pragma once

#include <clattn/recurrent.hpp>
#include <optional>

#include "c_api/handles.hpp"

namespace clattn::c_api {

/// A builder, and the batch that it has.
struct HeldMetadata {
  RecurrentMetadataBuilder builder;
  std::optional<RecurrentMetadata> built;
};

}  // namespace clattn::c_api

struct ClattnRecurrentMetadata : clattn::c_api::Holds<clattn::c_api::HeldMetadata, "metadata"> {};
