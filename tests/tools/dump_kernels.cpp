// clattn_dump_kernels OUT_DIR: writes what the library would hand to a driver, for offline
// compilers and lint. For every variant and a covering set of shapes: NAME.cl (flattened source),
// NAME.options (one line) and NAME.kind
// ("cpu" or "gpu").

#include <fmt/format.h>

#include <array>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>

#include "kernels/variants.hpp"
#include "opencl/source.hpp"

namespace {

using clattn::DType;
using clattn::KernelFamily;
using clattn::detail::KernelShape;
using clattn::detail::Role;
using clattn::detail::Variant;

struct ShapeRow {
  std::int32_t head_size;
  std::int32_t block_size;
  DType dtype;
  DType cache_dtype;
};
// Every element type on both sides, head sizes that fill lanes and ones that do not, and odd pages.
constexpr std::array kShapes = {
    ShapeRow{128, 16, DType::kF16, DType::kF16}, ShapeRow{128, 16, DType::kBF16, DType::kBF16},
    ShapeRow{256, 16, DType::kF32, DType::kF32}, ShapeRow{72, 5, DType::kBF16, DType::kF16},
    ShapeRow{8, 1, DType::kF32, DType::kBF16},
};

KernelShape shape_for(const Variant& variant, const ShapeRow& row) {
  const std::int32_t group = variant.role == Role::kDecode ? std::min(variant.block_rows, 8) : 4;
  return {group, 1, row.head_size, row.block_size, row.dtype, row.cache_dtype};
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  if (!file.flush()) throw std::runtime_error(fmt::format("cannot write {}", path.string()));
}

void write_kernel(const std::filesystem::path& directory, const std::string& name,
                  const std::string& file, const std::string& options, const std::string& kind) {
  const auto read = clattn::detail::kernel_file_reader("");
  write(directory / (name + ".cl"), clattn::detail::flatten_source(file, read).text);
  write(directory / (name + ".options"), options + "\n");
  write(directory / (name + ".kind"), kind + "\n");
}

void dump(const std::filesystem::path& directory, const Variant& variant) {
  const bool cpu = variant.family == KernelFamily::kCpu;
  clattn::DeviceCapabilities device;
  device.kind = cpu ? clattn::DeviceKind::kCpu : clattn::DeviceKind::kGpu;
  device.float_vector_width = cpu ? 16 : 1;
  for (const ShapeRow& row : kShapes) {
    const auto source = clattn::detail::kernel_source(variant, shape_for(variant, row), device);
    const std::string name =
        fmt::format("{}__d{}_{}_{}", variant.name, row.head_size, clattn::to_string(row.dtype),
                    clattn::to_string(row.cache_dtype));
    write_kernel(directory, name, source.file, source.options, cpu ? "cpu" : "gpu");
  }
}

/// Kernels that no variant row names. The sub-group probe is not among them: not compiling is an
/// answer that it gives. CLA_REDUCE=1 marks inline PTX, as in the variants.
struct Extra {
  const char* name;
  const char* file;
  const char* options;
  const char* kind;
};
constexpr std::array kExtras = {
    Extra{"ceilings__vec", "ceilings.cl", "-DCLA_WG_SIZE=1 -DCLA_VEC=16", "cpu"},
    Extra{"ceilings__wg256", "ceilings.cl", "-DCLA_WG_SIZE=256 -DCLA_VEC=4", "gpu"},
    Extra{"kv_scales__vec", "kv_scales.cl", "-DCLA_WG_SIZE=1 -DCLA_Q_DTYPE=0", "cpu"},
    Extra{"kv_scales__wg256", "kv_scales.cl", "-DCLA_WG_SIZE=256 -DCLA_Q_DTYPE=2", "gpu"},
    Extra{"zero_rows__wg256", "zero_rows.cl", "-DCLA_WG_SIZE=256 -DCLA_Q_DTYPE=1", "gpu"},
    Extra{"selftest__local", "selftest.cl",
          "-DCLA_SELFTEST=1 -DCLA_WG_SIZE=64 -DCLA_LOCAL_BYTES=16384", "gpu"},
    Extra{"selftest__ptx", "selftest.cl",
          "-DCLA_SELFTEST=2 -DCLA_WG_SIZE=64 -DCLA_LOCAL_BYTES=0 -DCLA_REDUCE=1", "gpu"},
};

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 2) throw std::runtime_error("usage: clattn_dump_kernels OUT_DIR");
    std::filesystem::create_directories(argv[1]);
    for (const Variant& variant : clattn::detail::variants()) dump(argv[1], variant);
    for (const Extra& extra : kExtras) {
      write_kernel(argv[1], extra.name, extra.file, extra.options, extra.kind);
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "clattn_dump_kernels: {}\n", error.what());
    return 1;
  }
  return 0;
}
