#include <fmt/format.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/environment.hpp"
#include "opencl/device/device_info.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace clattn::detail {
namespace {

#if defined(__x86_64__) && defined(__linux__)

bool has_instructions() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  // Of leaf 7: tiles of bf16 and of int8, and AVX512_VBMI, which decode over 8 bits needs. Every
  // processor with AMX so far has all of them.
  constexpr unsigned kBF16 = 1U << 22U, kTile = 1U << 24U, kInt8 = 1U << 25U, kVbmi = 1U << 1U;
  constexpr unsigned kAll = kBF16 | kTile | kInt8;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAll) == kAll &&
         (ecx & kVbmi) != 0;
}

/// Whether the operating system saves the registers of tiles and their configuration.
bool saves_registers() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kOsSaves = 1U << 27U;  // leaf 1: XGETBV may be used
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsSaves) == 0) return false;
  std::uint32_t low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr std::uint32_t kTiles = 3U << 17U;
  return (low & kTiles) == kTiles;
}

std::string ask() {
  if (!environment().amx_enabled) return "CLATTN_AMX forbids them";
  if (!has_instructions()) return "the processor has none";
  if (!saves_registers()) return "the operating system does not save them";
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  if (syscall(SYS_arch_prctl, kRequest, kTileData) != 0)
    return fmt::format("the operating system does not grant them: {}", std::strerror(errno));
  return {};
}

#else

std::string ask() {
  return "they are Linux's to grant on x86-64";
}

#endif

}  // namespace

const std::string& why_no_x86_tiles() {
  static const std::string reason = ask();
  return reason;
}

}  // namespace clattn::detail
