#pragma once

#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "op.hpp"
#include "requests.hpp"

namespace ggml_clattn {

/// Computes FLASH_ATTN_EXT by CLAttn on one device, in the host's memory. Thread-safe; calls take
/// turns.
class Engine {
 public:
  /// On the device that CLATTN_DEVICE names, else on a CPU. Throws clattn::Error if there is none,
  /// or if it does not share the host's memory.
  Engine();
  /// The device's name.
  const std::string& device_name() const noexcept { return device_name_; }
  /// Why ops of this kind are not computed; empty = they are, whatever their tensors hold, unless
  /// the mask has values that CLAttn cannot compute.
  std::string refusal(const Op& op);
  /// Computes the op, whose refusal() is empty, and waits. Returns why it did not; empty = it did.
  std::string compute(const Op& op);

 private:
  /// What layers of one configuration need to know of a step.
  struct Plan {
    clattn::AttentionConfig config;
    std::int32_t num_rows, num_requests, num_keys;  ///< the most that the builder takes
    std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
    const clattn::AttentionMetadata* metadata;  ///< null = not of these requests
  };
  /// A mask of a step, which all layers of a kind share, and what was made of it.
  struct Step {
    const void* mask_at;                   ///< null = none
    std::vector<std::int64_t> shape;       ///< all else that the requests depend on
    std::vector<std::uint16_t> mask = {};  ///< a copy
    Requests requests = {};
    clattn::Buffer cells = {};  ///< of requests.cells, if masked
    std::vector<Plan> plans = {};
  };

  void open_context();
  Step& step_of(const Op& op);
  const clattn::AttentionImpl& impl_of(const clattn::AttentionConfig& config);
  const clattn::AttentionMetadata& metadata_of(const clattn::AttentionConfig& config,
                                               std::int64_t num_rows, Step& step);
  clattn::Buffer share(const void* memory, std::size_t size_bytes);
  void attend(const Op& op, Step& step);

  std::mutex mutex_;
  clattn::Device device_;
  std::string device_name_;
  std::shared_ptr<clattn::Context> context_;  ///< made when the first op is asked about
  clattn::Queue queue_;
  std::vector<std::pair<clattn::AttentionConfig, std::string>> refusals_;
  std::vector<std::shared_ptr<const clattn::AttentionImpl>> impls_;
  std::vector<std::unique_ptr<Step>> steps_;  ///< the last used first
};

}  // namespace ggml_clattn
