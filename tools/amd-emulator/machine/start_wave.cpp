#include "machine/start_wave.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "machine/ranges.hpp"
#include "machine/settings.hpp"

namespace amdemu {
namespace {

/// The value of a hidden argument and its size in bytes; size 0: one that stays 0.
struct Hidden {
  std::uint64_t value = 0;
  std::uint32_t size = 0;
};
Hidden hidden_argument(std::string_view kind, const Launch& launch) {
  const int d = kind.back() == 'y' ? 1 : kind.back() == 'z' ? 2 : 0;
  if (kind.starts_with("hidden_block_count_")) return {launch.global[d] / launch.local[d], 4};
  if (kind.starts_with("hidden_group_size_")) return {launch.local[d], 2};
  if (kind.starts_with("hidden_global_offset_")) return {launch.offset[d], 8};
  if (kind == "hidden_grid_dims") return {launch.dims, 2};
  if (kind == "hidden_dynamic_lds_size") return {launch.dynamic_local, 4};
  if (kind == "hidden_shared_base") return {kSharedApertureHigh, 4};
  if (kind == "hidden_private_base") return {kPrivateApertureHigh, 4};
  return {};
}

}  // namespace

std::uint32_t private_bytes_of(const Kernel& kernel) {
  constexpr std::uint32_t kStack = 16384;  // of calls whose depth the compiler does not know
  return (kernel.private_bytes + (kernel.dynamic_stack ? kStack : 0U) + 15U) & ~15U;
}

Arguments::Arguments(const Launch& launch) {
  const Kernel& kernel = *launch.kernel;
  segment_.assign(std::max<std::size_t>(kernel.kernarg_bytes, launch.kernarg.size()) + 512, 0);
  std::copy(launch.kernarg.begin(), launch.kernarg.end(), segment_.begin());
  for (const KernelArg& arg : kernel.args) {
    if (!arg.is_hidden()) continue;
    const Hidden hidden = hidden_argument(arg.kind, launch);
    std::memcpy(segment_.data() + arg.offset, &hidden.value, hidden.size);
  }
  packet_.setup = static_cast<std::uint16_t>(launch.dims);
  for (int d = 0; d < 3; ++d) {
    packet_.group[d] = static_cast<std::uint16_t>(launch.local[d]);
    packet_.grid[d] = static_cast<std::uint32_t>(launch.global[d]);
  }
  packet_.private_bytes = private_bytes_of(kernel);
  packet_.group_bytes = kernel.local_bytes + launch.dynamic_local;
  packet_.kernarg = segment();
  register_range(segment_.data(), segment_.size());
  register_range(&packet_, sizeof(packet_));
}

Arguments::~Arguments() {
  forget_range(segment_.data());
  forget_range(&packet_);
}

WaveStart::WaveStart(const Launch& launch, const Arguments& arguments)
    : launch_(launch),
      kernel_(*launch.kernel),
      chip_(*launch.image->chip),
      arguments_(arguments),
      lanes_(chip_.wave == 64 || !kernel_.is_wave32() ? 64 : 32),
      items_(launch.local[0] * launch.local[1] * launch.local[2]),
      local_bytes_(kernel_.local_bytes + launch.dynamic_local),
      private_bytes_(private_bytes_of(kernel_)) {}

void WaveStart::wave(Wave& w, Group& group, std::uint32_t index, unsigned char* scratch) const {
  std::fill_n(w.v, kNumVgprs * lanes_, settings().poison);
  std::fill(std::begin(w.s), std::end(w.s), settings().poison);
  w.image = launch_.image.get(), w.chip = &chip_, w.group = &group, w.index = index;
  w.scratch = scratch, w.scratch_bytes = private_bytes_;
  w.state = Wave::kRunning;
  w.mode = (kernel_.rsrc1 >> 12 & 0xff) |  // rounding and denormals, then FP16_OVFL
           ((kernel_.rsrc1 >> 26 & 1) != 0 ? kModeOverflowClamps : 0U);
  w.s[kScc] = 0;
  w.set64(kNullSink, 0);
  w.set64(kVcc, 0);
  w.set64(kSharedBase, std::uint64_t(kSharedApertureHigh) << 32);
  w.set64(kPrivateBase, std::uint64_t(kPrivateApertureHigh) << 32);
  const std::uint32_t first = index * lanes_, count = std::min(lanes_, items_ - first);
  w.set64(kExec, count == 64 ? ~0ULL : (1ULL << count) - 1);
  w.mask_of_lanes = 0;  // and lane_mask says so: a wave before may have left another there
  std::fill(std::begin(w.lane_mask), std::end(w.lane_mask), 0U);
  scalar_registers(w);
  work_item_ids(w, first, count);
  w.pc = launch_.image->index_at(kernel_.entry);
}

/// User registers in the order of the ABI, then what the hardware adds.
void WaveStart::scalar_registers(Wave& w) const {
  const auto property = [&](unsigned bit) { return (kernel_.properties >> bit & 1) != 0; };
  const auto rsrc2 = [&](unsigned bit) { return (kernel_.rsrc2 >> bit & 1) != 0; };
  const Group& group = *w.group;
  int r = 0;
  const auto put64 = [&](std::uint64_t value) { w.set64(r, value), r += 2; };
  if (property(0)) {  // descriptor of private memory
    constexpr std::uint32_t kAddThreadId = 1U << 23;
    put64(0);
    put64(0xffffffffULL | std::uint64_t(kAddThreadId) << 32);
  }
  if (property(1)) put64(arguments_.packet());
  if (property(2)) put64(0);  // queue
  if (property(3)) put64(arguments_.segment());
  if (property(4)) put64(0);  // dispatch id
  if (property(5)) put64(0);  // where private memory starts
  if (property(6)) w.s[r++] = private_bytes_;
  r = static_cast<int>(kernel_.rsrc2 >> 1 & 31);  // may be more than what is in use
  if (chip_.generation >= 12) {
    w.s[kTtmp + 9] = group.id[0];
    w.s[kTtmp + 7] = group.id[1] | group.id[2] << 16;
  } else {
    for (unsigned d = 0; d < 3; ++d) {
      if (rsrc2(7 + d)) w.s[r++] = group.id[d];
    }
  }
  if (rsrc2(10)) w.s[r++] = 0;  // work-group info
  if (rsrc2(0)) w.s[r++] = 0;   // where the wave's private memory starts
}

void WaveStart::work_item_ids(Wave& w, std::uint32_t first, std::uint32_t count) const {
  const std::uint32_t dimensions = kernel_.rsrc2 >> 11 & 3, lx = launch_.local[0],
                      ly = launch_.local[1];
  for (std::uint32_t l = 0; l < count; ++l) {
    const std::uint32_t item = first + l;
    const std::uint32_t x = item % lx, y = item / lx % ly, z = item / lx / ly;
    if (chip_.packed_ids) {
      w.v[l] = x | y << 10 | z << 20;
    } else {
      w.v[l] = x;
      if (dimensions >= 1) w.v[lanes_ + l] = y;
      if (dimensions >= 2) w.v[2 * lanes_ + l] = z;
    }
  }
}

}  // namespace amdemu
