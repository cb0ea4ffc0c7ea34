// clattn_dump_kernels OUT_DIR: writes what the library would hand to a driver, for offline
// compilers and lint. For every variant and a covering set of shapes: NAME.cl (flattened source),
// NAME.options (one line), NAME.kind ("cpu", "gpu", or "amd" and the chips that have the variant's
// matrix unit) and NAME.traits (its role, the query rows of a work item, the keys that a group
// processes at once, the unit's lanes).

#include <fmt/format.h>

#include <array>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kernels/choose/variants.hpp"
#include "opencl/device/device_info.hpp"
#include "opencl/device/units.hpp"
#include "opencl/program/source.hpp"
#include "tools/extra_kernels.hpp"

namespace {

using clattn::DType;
using clattn::KernelFamily;
using clattn::detail::CacheForm;
using clattn::detail::KernelId;
using clattn::detail::KernelOptions;
using clattn::detail::KernelShape;
using clattn::detail::Role;
using clattn::detail::UnitId;
using clattn::detail::Variant;

struct ShapeRow {
  std::int32_t head_size;
  std::int32_t block_size;
  DType dtype;
  DType cache_dtype;
  KernelOptions options = {};
  std::int32_t rope_dim = 0;
  std::int32_t head_size_v = 0;
  bool row_scales = false;
};
constexpr KernelOptions kAllOptions{
    .window = true, .soft_cap = true, .alibi = true, .sink = true, .mask = true, .out_fp8 = true};
/// With rows that the batch lists, too.
constexpr KernelOptions kListOptions{.window = true,
                                     .listed_rows = true,
                                     .gaps = true,
                                     .soft_cap = true,
                                     .alibi = true,
                                     .sink = true,
                                     .mask = true,
                                     .out_fp8 = true};
/// All that latent rows have.
constexpr KernelOptions kLatentLists{.window = true, .listed_rows = true, .gaps = true};
// Every element type on both sides, head sizes that fill lanes and ones that do not, and odd pages.
constexpr std::array kShapes = {
    ShapeRow{128, 16, DType::kF16, DType::kF16},    ShapeRow{128, 16, DType::kBF16, DType::kBF16},
    ShapeRow{256, 16, DType::kF32, DType::kF32},    ShapeRow{72, 5, DType::kBF16, DType::kF16},
    ShapeRow{8, 1, DType::kF32, DType::kBF16},      ShapeRow{64, 1, DType::kF32, DType::kInt8},
    ShapeRow{64, 16, DType::kF16, DType::kFp8E5M2},
};
// Attention alone: every option, with pages and without.
constexpr std::array kOptionShapes = {
    ShapeRow{128, 16, DType::kF16, DType::kFp8E4M3, kAllOptions},
    ShapeRow{72, 0, DType::kBF16, DType::kBF16, kListOptions},
};
// Latent rows.
constexpr std::array kLatentShapes = {
    ShapeRow{512, 64, DType::kF16, DType::kF16, {}, 64},
    ShapeRow{512, 64, DType::kBF16, DType::kFp8E4M3, {}, 64},
    ShapeRow{512, 16, DType::kF32, DType::kF32, {}, 64},
    ShapeRow{64, 5, DType::kBF16, DType::kInt8, {}, 8},
    ShapeRow{512, 16, DType::kBF16, DType::kBF16, kLatentLists, 64},
    ShapeRow{512, 16, DType::kF16, DType::kFp8E5M2, kLatentLists, 64},
};
// Cache writes and packed decode.
constexpr std::array kQuantizedShapes = {
    ShapeRow{128, 16, DType::kF16, DType::kFp8E4M3},
    ShapeRow{80, 5, DType::kBF16, DType::kFp8E5M2},
    ShapeRow{16, 5, DType::kF32, DType::kInt8},
};

/// A scale for each token and head, of what takes it.
constexpr std::array kRowScaleShapes = {
    ShapeRow{128, 16, DType::kF16, DType::kInt8, kListOptions, 0, 0, true},
    ShapeRow{96, 5, DType::kBF16, DType::kFp8E4M3, {}, 0, 0, true},
    ShapeRow{72, 5, DType::kBF16, DType::kUInt4x2, kListOptions, 0, 0, true},
};

/// Values of fewer elements than keys, for prompts and the merge of their splits.
constexpr std::array kValueShapes = {
    ShapeRow{192, 0, DType::kBF16, DType::kBF16, {}, 0, 128},
    ShapeRow{72, 0, DType::kF16, DType::kF16, {}, 0, 40},
};

/// What warpgroup products take, beside the first of the shapes above.
constexpr std::array kWarpgroupShapes = {
    ShapeRow{64, 16, DType::kF16, DType::kF16},
    ShapeRow{256, 16, DType::kBF16, DType::kBF16},
    ShapeRow{128, 5, DType::kF16, DType::kF16, kAllOptions},
    ShapeRow{128, 16, DType::kBF16, DType::kUInt4x2, {}, 0, 0, true},
};

/// What products of e4m3 take, beside that with all options.
constexpr std::array kFp8ProductShapes = {ShapeRow{128, 16, DType::kBF16, DType::kFp8E4M3}};

/// What decode_ring.cl takes, beside those of 128 above.
constexpr std::array kRingShapes = {
    ShapeRow{256, 32, DType::kBF16, DType::kBF16},
    ShapeRow{128, 16, DType::kBF16, DType::kFp8E4M3, kAllOptions},
    ShapeRow{256, 16, DType::kF16, DType::kFp8E5M2},
};

/// What prefill_staged.cl takes, beside those of 64 and 128 above.
constexpr std::array kStagedShapes = {ShapeRow{256, 16, DType::kBF16, DType::kBF16}};
/// Heads for which warps on DPAS and WMMA share keys and dims.
constexpr std::array kSharedShapes = {
    ShapeRow{256, 16, DType::kF16, DType::kF16},
    ShapeRow{256, 16, DType::kBF16, DType::kFp8E4M3, kListOptions},
    ShapeRow{192, 5, DType::kBF16, DType::kInt8},
};

/// Decode of 8-bit caches on matrix units without options, for loops.py.
constexpr std::array kByteShapes = {
    ShapeRow{128, 16, DType::kF16, DType::kFp8E5M2},
    ShapeRow{256, 16, DType::kF16, DType::kFp8E5M2},
};

/// What products of bf16 pairs take, beside the second of the shapes above.
constexpr std::array kPairShapes = {
    ShapeRow{64, 5, DType::kBF16, DType::kFp8E4M3, kAllOptions},
    ShapeRow{256, 16, DType::kBF16, DType::kInt8},
    ShapeRow{128, 1, DType::kBF16, DType::kFp8E5M2},
    ShapeRow{96, 0, DType::kBF16, DType::kBF16, kListOptions},
};

std::vector<ShapeRow> rows_for(const Variant& variant) {
  const Role role = variant.role;
  if (role == Role::kMLADecode) return {kLatentShapes.begin(), kLatentShapes.end()};
  std::vector<ShapeRow> rows(kShapes.begin(), kShapes.end());
  rows.insert(rows.end(), kRowScaleShapes.begin(), kRowScaleShapes.end());
  if (role == Role::kPrefill || role == Role::kMerge)
    rows.insert(rows.end(), kValueShapes.begin(), kValueShapes.end());
  if (role == Role::kDecode || role == Role::kPrefill) {
    rows.insert(rows.end(), kOptionShapes.begin(), kOptionShapes.end());
    if (variant.unit_id == UnitId::sm90)
      rows.insert(rows.end(), kWarpgroupShapes.begin(), kWarpgroupShapes.end());
    if (variant.unit().fp8_products)
      rows.insert(rows.end(), kFp8ProductShapes.begin(), kFp8ProductShapes.end());
    if (variant.kernel_id == KernelId::decode_ring)
      rows.insert(rows.end(), kRingShapes.begin(), kRingShapes.end());
    if (variant.kernel_id == KernelId::prefill_staged)
      rows.insert(rows.end(), kStagedShapes.begin(), kStagedShapes.end());
    if (variant.family() == KernelFamily::kGpuMatrix &&
        variant.kernel_id != KernelId::prefill_staged)
      rows.insert(rows.end(), kSharedShapes.begin(), kSharedShapes.end());
    if (variant.family() == KernelFamily::kGpuMatrix && role == Role::kDecode)
      rows.insert(rows.end(), kByteShapes.begin(), kByteShapes.end());
    if (variant.unit().dot != 0) rows.insert(rows.end(), kPairShapes.begin(), kPairShapes.end());
  } else if (role == Role::kMerge) {
    rows.push_back(kLatentShapes.front());
    rows.push_back(kOptionShapes.front());
  } else {
    rows.insert(rows.end(), kQuantizedShapes.begin(), kQuantizedShapes.end());
  }
  return rows;
}

/// The devices that a unit's kernels are compiled for.
std::string_view kind_of(std::string_view header, KernelFamily family) {
  if (header.starts_with("tile/mfma")) return "amd gfx908 gfx90a gfx942";
  if (header.starts_with("tile/wmma")) return "amd gfx1100 gfx1201";
  return family == KernelFamily::kCpu ? "cpu" : "gpu";
}

/// Decode tiles are filled.
std::int32_t group_for(const Variant& variant) {
  if (variant.role == Role::kMLADecode) return 16;
  return variant.role == Role::kDecode ? std::min(variant.block_rows, 8) : 4;
}

KernelShape shape_for(const Variant& variant, const ShapeRow& row) {
  KernelShape shape;
  shape.num_heads = group_for(variant);
  shape.num_kv_heads = 1;
  shape.head_size = row.head_size;
  shape.head_size_v = row.head_size_v;
  shape.block_size = row.block_size;
  shape.dtype = row.dtype;
  shape.cache_dtype = row.cache_dtype;
  shape.options = row.options;
  shape.row_scales = row.row_scales;
  shape.fp8_products = variant.unit().fp8_products && !row.row_scales;
  if (shape.fp8_products) shape.options.alibi = shape.options.mask = false;  // never with them
  shape.options.alibi |= variant.role == Role::kPackedDecode;
  if (variant.role == Role::kMLADecode) {
    shape.form = CacheForm::kLatent;
    shape.rope_dim = row.rope_dim;
  }
  return shape;
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  if (!file.flush()) throw std::runtime_error(fmt::format("cannot write {}", path.string()));
}

void write_kernel(const std::filesystem::path& directory, const std::string& name,
                  const std::string& file, const std::string& options, const std::string& kind,
                  const std::string& unit = {}) {
  const auto read = clattn::detail::kernel_file_reader("");
  write(directory / (name + ".cl"), clattn::detail::flatten_source(file, read, unit).text);
  write(directory / (name + ".options"), options + "\n");
  write(directory / (name + ".kind"), kind + "\n");
}

void dump(const std::filesystem::path& directory, const Variant& variant) {
  const bool cpu = variant.family() == KernelFamily::kCpu;
  clattn::DeviceCapabilities device;
  device.kind = cpu ? clattn::DeviceKind::kCpu : clattn::DeviceKind::kGpu;
  device.float_vector_width = cpu ? 16 : 1;
  device.driver_version = "580";
  device.inline_ptx = !cpu;
  device.native_exp2_error = 0;
  // Lint looks at products of bf16 pairs and tiles as a processor's compiler, at others as SPIR's.
  device.native_builtins = variant.unit().dot != 0;
  for (const ShapeRow& row : rows_for(variant)) {
    if (!clattn::detail::takes_types(variant, shape_for(variant, row))) continue;
    const auto source = clattn::detail::kernel_source(variant, shape_for(variant, row), device);
    const std::string name = fmt::format(
        "{}__d{}{}_{}_{}{}", variant.name, row.head_size,
        row.head_size_v != 0 ? fmt::format("v{}", row.head_size_v) : "",
        clattn::to_string(row.dtype), clattn::to_string(shape_for(variant, row).cache_format()),
        row.options == KernelOptions{} ? "" : "_all");
    write_kernel(directory, name, source.file,
                 source.options + clattn::detail::device_macros(device),
                 std::string(kind_of(source.unit, variant.family())), source.unit);
    write(directory / (name + ".traits"),
          fmt::format("{} {} {} {}\n", to_string(variant.role), variant.block_rows,
                      step_keys(variant, row.head_size), variant.unit().lanes));
  }
}

/// Kernels that no variant row names. The sub-group probe is not among them: not compiling is an
/// answer that it gives. CLA_PTX=1 marks inline PTX, as in the variants.
constexpr std::array kExtras = {
    Extra{"ceilings__vec", "tile/ceilings.cl", "-DCLA_WG_SIZE=1 -DCLA_VEC=16", "cpu"},
    Extra{"ceilings__wg256", "tile/ceilings.cl", "-DCLA_WG_SIZE=256 -DCLA_VEC=4", "gpu"},
    Extra{"ceilings_bf16__avx512", "tile/cpu/ceiling_bf16.cl", "-DCLA_WG_SIZE=1 -DCLA_DOT=1", "cpu",
          "tile/cpu/avx512_bf16.clh"},
    Extra{"ceilings_bf16__amx", "tile/cpu/ceiling_bf16.cl", "-DCLA_WG_SIZE=1 -DCLA_DOT=1", "cpu",
          "tile/cpu/amx.clh"},
    Extra{"ceilings_mma__wg256", "tile/ceiling_sm80.cl",
          "-DCLA_WG_SIZE=256 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=1 -DCLA_PTX=1", "gpu"},
    Extra{"ceilings_wgmma__wg256", "tile/ceiling_sm90.cl",
          "-DCLA_WG_SIZE=256 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=1 -DCLA_PTX=1", "gpu"},
    // The cache operations: one code in groups of 1 and of 128; types and units at both ends.
    Extra{"move_tokens__vec", "cache/move_tokens.cl", "-DCLA_WG_SIZE=1 -DCLA_COPY_BYTES=16", "cpu"},
    Extra{"move_tokens__wg128", "cache/move_tokens.cl", "-DCLA_WG_SIZE=128 -DCLA_COPY_BYTES=16",
          "gpu"},
    Extra{"copy_blocks__vec", "cache/copy_blocks.cl", "-DCLA_WG_SIZE=1 -DCLA_COPY_BYTES=16", "cpu"},
    Extra{"copy_blocks__wg128", "cache/copy_blocks.cl", "-DCLA_WG_SIZE=128 -DCLA_COPY_BYTES=16",
          "gpu"},
    Extra{"copy_blocks__wg128_bytes", "cache/copy_blocks.cl",
          "-DCLA_WG_SIZE=128 -DCLA_COPY_BYTES=1", "gpu"},
    Extra{"merge_attn_states__vec", "attention/merge_attn_states.cl",
          "-DCLA_WG_SIZE=1 -DCLA_Q_DTYPE=0 -DCLA_KV_DTYPE=0 -DCLA_LSE_LOG2=0", "cpu"},
    Extra{"merge_attn_states__wg128", "attention/merge_attn_states.cl",
          "-DCLA_WG_SIZE=128 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=1 -DCLA_LSE_LOG2=0", "gpu"},
    Extra{"merge_attn_states__wg128_log2", "attention/merge_attn_states.cl",
          "-DCLA_WG_SIZE=128 -DCLA_Q_DTYPE=2 -DCLA_KV_DTYPE=2 -DCLA_LSE_LOG2=1", "gpu"},
    Extra{"merge_attn_states__wg128_e4m3", "attention/merge_attn_states.cl",
          "-DCLA_WG_SIZE=128 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=3 -DCLA_LSE_LOG2=0", "gpu"},
    Extra{"mla_cache__vec", "cache/mla_cache.cl",
          "-DCLA_WG_SIZE=1 -DCLA_Q_DTYPE=0 -DCLA_KV_DTYPE=0", "cpu"},
    Extra{"mla_cache__wg128_bf16", "cache/mla_cache.cl",
          "-DCLA_WG_SIZE=128 -DCLA_Q_DTYPE=2 -DCLA_KV_DTYPE=2", "gpu"},
    Extra{"mla_cache__wg128_e4m3", "cache/mla_cache.cl",
          "-DCLA_WG_SIZE=128 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=3", "gpu"},
    Extra{"mla_cache__wg128_e5m2", "cache/mla_cache.cl",
          "-DCLA_WG_SIZE=128 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=4", "gpu"},
    Extra{"mla_cache__wg128_int8", "cache/mla_cache.cl",
          "-DCLA_WG_SIZE=128 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=5", "gpu"},
    Extra{"prepare_qkv__vec_e4m3", "cache/prepare_qkv.cl",
          "-DCLA_WG_SIZE=1 -DCLA_Q_DTYPE=2 -DCLA_KV_DTYPE=3 -DCLA_HEAD_DIM=80 -DCLA_LANES=1 "
          "-DCLA_ALIGNED=0",
          "cpu"},
    Extra{"prepare_qkv__wg128", "cache/prepare_qkv.cl",
          "-DCLA_WG_SIZE=128 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=1 -DCLA_HEAD_DIM=256 -DCLA_LANES=32 "
          "-DCLA_ALIGNED=1",
          "gpu"},
    Extra{"prepare_qkv__wg128_int8", "cache/prepare_qkv.cl",
          "-DCLA_WG_SIZE=128 -DCLA_Q_DTYPE=0 -DCLA_KV_DTYPE=5 -DCLA_HEAD_DIM=80 -DCLA_LANES=10 "
          "-DCLA_ALIGNED=1",
          "gpu"},
    Extra{"advance_step__vec", "cache/advance_step.cl", "-DCLA_WG_SIZE=1", "cpu"},
    Extra{"advance_step__wg128", "cache/advance_step.cl", "-DCLA_WG_SIZE=128", "gpu"},
    Extra{"cut_queries__vec", "attention/cut_queries.cl", "-DCLA_WG_SIZE=1", "cpu"},
    Extra{"cut_queries__wg128", "attention/cut_queries.cl", "-DCLA_WG_SIZE=128", "gpu"},
    Extra{"list_rows__vec", "attention/list_rows.cl", "-DCLA_WG_SIZE=1", "cpu"},
    Extra{"list_rows__wg128", "attention/list_rows.cl", "-DCLA_WG_SIZE=128", "gpu"},
    Extra{"cut_tiles__vec", "attention/cut_tiles.cl", "-DCLA_WG_SIZE=1", "cpu"},
    Extra{"cut_tiles__wg128", "attention/cut_tiles.cl", "-DCLA_WG_SIZE=128", "gpu"},
    Extra{"kv_scales__vec", "cache/kv_scales.cl", "-DCLA_WG_SIZE=1 -DCLA_Q_DTYPE=0", "cpu"},
    Extra{"kv_scales__wg256", "cache/kv_scales.cl", "-DCLA_WG_SIZE=256 -DCLA_Q_DTYPE=2", "gpu"},
    Extra{"call_forms__vec", "attention/call_forms.cl", "-DCLA_WG_SIZE=1", "cpu"},
    Extra{"call_forms__wg256", "attention/call_forms.cl", "-DCLA_WG_SIZE=256", "gpu"},
    Extra{"zero_rows__wg256", "attention/zero_rows.cl", "-DCLA_WG_SIZE=256 -DCLA_ELEMENT_BYTES=2",
          "gpu"},
    Extra{"zero_rows__e1_wg256", "attention/zero_rows.cl",
          "-DCLA_WG_SIZE=256 -DCLA_ELEMENT_BYTES=1", "gpu"},
    Extra{"selftest__local", "tile/selftest.cl",
          "-DCLA_SELFTEST=1 -DCLA_WG_SIZE=64 -DCLA_LOCAL_BYTES=16384", "gpu"},
    Extra{"selftest__ptx", "tile/selftest.cl",
          "-DCLA_SELFTEST=2 -DCLA_WG_SIZE=64 -DCLA_LOCAL_BYTES=0 -DCLA_PTX=1", "gpu"},
    Extra{"selftest__bf16", "tile/selftest.cl",
          "-DCLA_SELFTEST=6 -DCLA_WG_SIZE=1 -DCLA_LOCAL_BYTES=0 -DCLA_DOT=1", "cpu"},
    Extra{"selftest__amx", "tile/cpu/selftest_amx.cl", "-DCLA_WG_SIZE=1", "cpu"},
    Extra{"selftest__exp2", "tile/selftest.cl",
          "-DCLA_SELFTEST=7 -DCLA_WG_SIZE=64 -DCLA_LOCAL_BYTES=0", "gpu"},
    Extra{"selftest__builtins", "tile/selftest.cl",
          "-DCLA_SELFTEST=8 -DCLA_WG_SIZE=1 -DCLA_LOCAL_BYTES=0 -DCLA_DOT=1", "cpu"},
    Extra{"selftest__loops", "tile/selftest.cl",
          "-DCLA_SELFTEST=9 -DCLA_WG_SIZE=1 -DCLA_LOCAL_BYTES=0", "cpu"},
    Extra{"selftest__struct", "tile/selftest.cl",
          "-DCLA_SELFTEST=10 -DCLA_WG_SIZE=64 -DCLA_LOCAL_BYTES=0", "gpu"},
};

/// Self-tests of matrix units. One that does not compile would leave a device without its unit.
void dump_self_tests(const std::filesystem::path& directory) {
  for (const clattn::detail::Unit* unit : clattn::detail::matrix_units()) {
    const std::string header(unit->header);
    struct Case {
      int head_size, dtype, cache_dtype;
    };
    for (const Case& row : {Case{128, 2, 2}, Case{64, 1, 5}, Case{32, 1, 1}}) {
      if (!unit->traits.few_rows && row.head_size < 128) continue;
      write_kernel(directory, fmt::format("selftest__{}_d{}", unit->name, row.head_size),
                   std::string(unit->self_test()),
                   fmt::format("-DCLA_PTX=0 -DCLA_WG_SIZE={} -DCLA_Q_DTYPE={} -DCLA_KV_DTYPE={} "
                               "-DCLA_HEAD_DIM={}{}",
                               2 * unit->traits.lanes, row.dtype, row.cache_dtype, row.head_size,
                               unit->compiler_options()),
                   std::string(kind_of(header, KernelFamily::kGpuMatrix)), header);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 2 || *argv[1] == '-')
      throw std::runtime_error("usage: clattn_dump_kernels OUT_DIR");
    std::filesystem::create_directories(argv[1]);
    for (const Variant& variant : clattn::detail::variants()) dump(argv[1], variant);
    dump_self_tests(argv[1]);
    const auto dump_extra = [&](const Extra& extra) {
      write_kernel(argv[1], extra.name, extra.file, extra.options, extra.kind, extra.unit);
    };
    for (const Extra& extra : kExtras) dump_extra(extra);
    for (const Extra& extra : kRecurrentKernels) dump_extra(extra);
  } catch (const std::exception& error) {
    fmt::print(stderr, "clattn_dump_kernels: {}\n", error.what());
    return 1;
  }
  return 0;
}
