#pragma once

#include <algorithm>
#include <clattn/recurrent.hpp>
#include <cstddef>
#include <cstdint>
#include <span>

#include "opencl/staging.hpp"

namespace clattn::detail {

/// Lists that go to the device in one upload, one behind the other.
class StagedLists {
 public:
  /// `size_bytes`: at least those of all lists.
  StagedLists(StagedUpload& staging, cl_command_queue queue, std::size_t size_bytes)
      : staging_(&staging), queue_(queue), host_(staging.host(queue, size_bytes)) {}

  /// Its elements are no larger than those of the lists before it.
  template <typename List>
  DeviceList add(const List& list) {
    const std::span elements(list);
    const std::size_t at = size_bytes_ / sizeof(elements[0]);
    std::ranges::copy(std::as_bytes(elements), host_.subspan(size_bytes_).begin());
    size_bytes_ += elements.size_bytes();
    return {staging_->buffer(), static_cast<std::int64_t>(at)};
  }
  void upload() { staging_->upload(queue_, size_bytes_); }

 private:
  StagedUpload* staging_;
  cl_command_queue queue_;
  std::span<std::byte> host_;
  std::size_t size_bytes_ = 0;
};

}  // namespace clattn::detail
