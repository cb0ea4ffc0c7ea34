// What a wave finds when it starts: the ABI between AMD's runtime, clang and the hardware.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "machine/launch.hpp"
#include "machine/wave.hpp"

namespace amdemu {

/// The queue's packet, which kernels may read through their dispatch pointer.
struct Packet {
  std::uint16_t header, setup, group[3], reserved0;
  std::uint32_t grid[3], private_bytes, group_bytes;
  std::uint64_t kernel, kernarg, reserved2, signal;
};

/// The kernel argument segment with its hidden arguments, and the packet. Registered while it
/// lives.
class Arguments {
 public:
  explicit Arguments(const Launch& launch);
  ~Arguments();
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  std::uint64_t segment() const { return reinterpret_cast<std::uint64_t>(segment_.data()); }
  std::uint64_t packet() const { return reinterpret_cast<std::uint64_t>(&packet_); }

 private:
  std::vector<unsigned char> segment_;
  Packet packet_{};
};

/// Private memory of a work-item.
std::uint32_t private_bytes_of(const Kernel& kernel);

class WaveStart {
 public:
  WaveStart(const Launch& launch, const Arguments& arguments);

  std::uint32_t waves_of_group() const { return (items_ + lanes_ - 1) / lanes_; }
  std::uint32_t local_bytes() const { return local_bytes_; }
  std::size_t scratch_bytes_of_wave() const { return std::size_t(private_bytes_) * lanes_; }

  /// Wave `index` of a group.
  void wave(Wave& w, Group& group, std::uint32_t index, unsigned char* scratch) const;

 private:
  void scalar_registers(Wave& w) const;
  void work_item_ids(Wave& w, std::uint32_t first, std::uint32_t count) const;

  const Launch& launch_;
  const Kernel& kernel_;
  const Chip& chip_;
  const Arguments& arguments_;
  std::uint32_t lanes_, items_, local_bytes_, private_bytes_;
};

}  // namespace amdemu
