#include "cli/verify.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include "cli/elements.hpp"

namespace clattn::cli {
namespace {

constexpr double kOutFloor = 1e-7;  // below the last bit of f32 at the size of any real output
// An LSE is a logit plus a logarithm in f32: its error grows with its size.
constexpr double kLseAbsolute = 2e-5, kLseRelative = 2e-6;

}  // namespace

void Deviation::add(double got, double truth, double allowed) {
  ++compared;
  if (got == truth) return;  // infinities included
  const double error = std::abs(got - truth);
  const double share =
      std::isfinite(error) ? error / allowed : std::numeric_limits<double>::infinity();
  if (share > worst_share) {
    worst_share = share;
    allowance = allowed;
  }
  if (!(error <= max_error)) max_error = error;
}

void Deviation::merge(const Deviation& other) {
  compared += other.compared;
  if (!(other.max_error <= max_error)) max_error = other.max_error;
  if (other.worst_share > worst_share) {
    worst_share = other.worst_share;
    allowance = other.allowance;
  }
}

Deviation compare(DType dtype, std::span<const std::byte> out, std::span<const float> lse,
                  const oracle::AttentionResult& truth) {
  Deviation deviation;
  const std::vector<double> got = decode_elements(dtype, out);
  for (std::size_t i = 0; i < got.size(); ++i) {
    deviation.add(got[i], truth.out[i], 2 * truth.bound[i] + kOutFloor);
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const double allowed = kLseAbsolute + kLseRelative * std::abs(truth.lse[i]);
    deviation.add(static_cast<double>(lse[i]), truth.lse[i], allowed);
  }
  return deviation;
}

}  // namespace clattn::cli
