#include "backends/clblast_gemm.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

#if defined(CLATTN_HAS_CLBLAST)
#include <clblast_c.h>
#endif

namespace clattn::detail {

#if defined(CLATTN_HAS_CLBLAST)

bool has_clblast() noexcept {
  return true;
}

void multiply(cl_command_queue queue, cl_mem work, const Product& p) {
  const auto at = [](std::int64_t element) { return static_cast<std::size_t>(element); };
  const CLBlastStatusCode status = CLBlastSgemmStridedBatched(
      CLBlastLayoutRowMajor, CLBlastTransposeNo,
      p.transposed ? CLBlastTransposeYes : CLBlastTransposeNo, p.m, p.n, p.k, p.alpha, work,
      at(p.a), p.k, p.m * p.k, work, at(p.b), p.transposed ? p.k : p.n, p.k * p.n, 0.0F, work,
      at(p.c), p.n, p.m * p.n, p.count, &queue, nullptr);
  if (status == CLBlastSuccess) return;
  throw Error(ErrorCode::kOpenCL,
              fmt::format("CLBlast: SgemmStridedBatched of {} x ({} x {} x {}) failed: {}", p.count,
                          p.m, p.n, p.k, static_cast<int>(status)),
              static_cast<cl_int>(status));
}

#else

bool has_clblast() noexcept {
  return false;
}

void multiply(cl_command_queue, cl_mem, const Product&) {
  throw_unsupported("CLBlast: the library was built without it (CMake: CLATTN_CLBLAST)");
}

#endif

}  // namespace clattn::detail
