#pragma once

#include <atomic>
#include <clattn/attention.hpp>
#include <clattn/attention_backend.hpp>
#include <clattn/device.hpp>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace test {

/// A backend of an application: takes heads of 64, and nothing else matters.
class FakeBackend : public clattn::AttentionBackend {
 public:
  explicit FakeBackend(std::string name) : name_(std::move(name)) {}
  std::string_view name() const noexcept override { return name_; }
  std::vector<std::string> validate_configuration(
      const clattn::AttentionConfig& config, const clattn::DeviceCapabilities*) const override {
    ++asked;
    if (config.head_size == 64) return {};
    return {"only heads of 64"};
  }
  std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t blocks, std::int32_t size,
                                                 std::int32_t heads,
                                                 std::int32_t dims) const override {
    return {blocks, 2, size, heads, dims};
  }
  std::array<std::int32_t, 5> get_kv_cache_stride_order(clattn::KVCacheLayout) const override {
    return {0, 1, 2, 3, 4};
  }
  std::int32_t kv_dimension() const noexcept override { return 1; }
  std::span<const clattn::KVCacheLayout> supported_layouts() const noexcept override {
    static constexpr clattn::KVCacheLayout kOne[] = {clattn::KVCacheLayout::kHND};
    return kOne;
  }
  clattn::KVCacheLayout preferred_layout(
      const clattn::DeviceCapabilities&) const noexcept override {
    return clattn::KVCacheLayout::kHND;
  }
  std::shared_ptr<const clattn::AttentionImpl> make_impl(
      std::shared_ptr<clattn::Context>, const clattn::AttentionConfig&) const override {
    return nullptr;
  }
  std::unique_ptr<clattn::AttentionMetadataBuilder> make_builder(
      std::shared_ptr<clattn::Context>, const clattn::AttentionConfig&,
      const clattn::BuilderOptions&) const override {
    return nullptr;
  }

  mutable std::atomic<int> asked = 0;

 private:
  std::string name_;
};

}  // namespace test
