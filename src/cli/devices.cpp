#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/tuning.hpp>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/bench/report.hpp"
#include "cli/commands.hpp"
#include "cli/common/error.hpp"

namespace clattn {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DeviceCapabilities, name, vendor, platform_version,
                                   driver_version, device_version, opencl_c_version, compute_units,
                                   max_work_group_size, global_mem_bytes, max_alloc_bytes,
                                   local_mem_bytes, float_vector_width, reports_fp16,
                                   reports_subgroups, static_local_mem_bytes, inline_ptx,
                                   warpgroup_products, fp8_conversions, bf16_products, x86_tiles,
                                   native_exp2_error, native_builtins, x86_prefetch, long_loops,
                                   struct_arguments, matrix_units, wrong_matrix_units, flushes_f16,
                                   wave_size)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(KernelInfo, role, name, work_group_size, block_rows, block_kv)

namespace cli {

namespace {

std::vector<int> sub_groups_of(const DeviceCapabilities& capabilities) {
  std::vector<int> sizes;
  for (const int size : {8, 16, 32, 64}) {
    if ((capabilities.sub_groups_in_step & static_cast<unsigned>(size)) != 0) sizes.push_back(size);
  }
  return sizes;
}

using nlohmann::json;

/// The selector's answer, or null and in `why_none` its reasons.
const AttentionBackend* selected(const AttentionConfig& config,
                                 const DeviceCapabilities* capabilities, std::string& why_none) {
  try {
    return &get_attn_backend(config, capabilities);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    why_none = error.what();
    return nullptr;
  }
}

/// What every backend says about the shape, and the kernels of those that take it.
json choice_json(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                 const AttentionBackend* chosen) {
  const DeviceCapabilities& capabilities = context->capabilities();
  json backends = json::array();
  for (const AttentionBackend* backend : list_attn_backends()) {
    json row = {{"name", backend->name()}, {"chosen", backend == chosen}};
    const std::vector<std::string> reasons = backend->validate_configuration(config, &capabilities);
    row["rejected_because"] = reasons;
    if (reasons.empty()) {
      row["layout"] = to_string(backend->preferred_layout(capabilities));
      const auto impl = backend->make_impl(context, config);
      row["candidates"] = to_string(impl->candidates());
      row["kernels"] = impl->kernels();
    }
    backends.push_back(std::move(row));
  }
  return backends;
}

/// One device; a device that does not open, or whose kernels do not build, is told, not fatal.
json device_json(const Device& device, const Device& standard, const AttentionConfig& config) {
  const auto selector = [](const Device& each) {
    return fmt::format("{}:{}", each.platform_index, each.device_index);
  };
  json row = {{"selector", selector(device)}, {"default", selector(device) == selector(standard)}};
  try {
    const std::shared_ptr<Context> context = Context::create(device);
    row["capabilities"] = capabilities_json(context->capabilities());
    std::string why_none;
    const AttentionBackend* chosen = selected(config, &context->capabilities(), why_none);
    row["backends"] = choice_json(context, config, chosen);
    row["tuning_problems"] = tuning_problems(*context);
    row["build_failures"] = context->build_failures();
    row["program_cache_problem"] = context->program_cache_problem();
    if (chosen == nullptr) row["error"] = why_none;
  } catch (const Error& error) {
    row["error"] = error.what();
  }
  return row;
}

std::string mebibytes(std::uint64_t bytes) {
  return fmt::format("{:.0f} MiB", static_cast<double>(bytes) / (1 << 20));
}

void print_capabilities(const json& fields) {
  const auto c = fields.get<DeviceCapabilities>();  // but for the fields that are there as words
  fmt::print("  {} · {} · driver {} · {}\n", fields["platform"].get<std::string>(),
             c.device_version, c.driver_version, c.opencl_c_version);
  fmt::print("  {} compute units, work-groups to {}, float vectors of {}\n", c.compute_units,
             c.max_work_group_size, c.float_vector_width);
  fmt::print("  memory {}, largest buffer {}, local {} KiB reported, {} KiB static seen\n",
             mebibytes(c.global_mem_bytes), mebibytes(c.max_alloc_bytes), c.local_mem_bytes / 1024,
             c.static_local_mem_bytes / 1024);
  const auto in_step = fields["sub_groups_in_step"].get<std::vector<int>>();
  const auto yes = [](bool has) { return has ? "yes" : "no"; };
  fmt::print(
      "  cl_khr_fp16 {}, sub-groups {}, inline PTX {}, warpgroup products {}, fp8 conversions {}, "
      "bf16 products {}, x86 tiles {}, wave {}\n"
      "  native_exp2 off by {:.1e}, CPU built-ins {}, x86 prefetch {}, long loops {}, struct "
      "arguments {}, sub-groups in step {}\n",
      yes(c.reports_fp16), yes(c.reports_subgroups), yes(c.inline_ptx), yes(c.warpgroup_products),
      yes(c.fp8_conversions), yes(c.bf16_products), yes(c.x86_tiles),
      c.wave_size > 0 ? fmt::format("{}", c.wave_size) : "not found", c.native_exp2_error,
      yes(c.native_builtins), yes(c.x86_prefetch), c.long_loops ? "yes" : "CUT SHORT",
      c.struct_arguments ? "yes" : "DAMAGED",
      in_step.empty() ? "none" : fmt::format("of {}", fmt::join(in_step, ", ")));
  fmt::print("  matrix units {}\n",
             c.matrix_units.empty() ? "none" : fmt::format("{}", fmt::join(c.matrix_units, ", ")));
  if (c.flushes_f16) fmt::print("  matrix products take f16 below 2^-14 as 0\n");
  for (const std::string& unit : c.wrong_matrix_units)
    fmt::print("  matrix unit {} computes WRONG and is not used\n", unit);
}

void print_backend(const json& backend, bool explain) {
  const auto name = backend["name"].get<std::string>();
  const auto reasons = backend["rejected_because"].get<std::vector<std::string>>();
  if (!reasons.empty()) {
    fmt::print("  {} rejected: {}\n", name, fmt::join(reasons, "; "));
    return;
  }
  fmt::print("  {} {} layout {}\n", name, backend["chosen"].get<bool>() ? "chosen," : "possible,",
             backend["layout"].get<std::string>());
  for (const auto& kernel : backend["kernels"].get<std::vector<KernelInfo>>()) {
    fmt::print("    {:8} {:44} work-group {:4}  rows {:4}  keys {:4}\n", kernel.role, kernel.name,
               kernel.work_group_size, kernel.block_rows, kernel.block_kv);
  }
  if (explain && backend["chosen"].get<bool>()) {
    std::istringstream candidates(backend["candidates"].get<std::string>());
    for (std::string line; std::getline(candidates, line);) fmt::print("    {}\n", line);
  }
}

void print_legend() {
  fmt::print(
      "\nNames of kernels: r16 = tiles of 16 rows (query tokens x query heads of a KV head),\n"
      "kv64 = of 64 keys, wg128 = groups of 128 work-items, d256 = for heads to 256,\n"
      "_local = through local memory, _ptx = by inline PTX, _vec = by vectors of a CPU,\n"
      "_tokens = a decode kernel that prefills a few tokens\n");
}

void print_report(const json& devices, const AttentionConfig& config, bool explain) {
  fmt::print("Shape: {} heads, {} KV heads, head size {}, block size {}, {}, KV cache {}\n",
             config.num_heads, config.num_kv_heads, config.head_size, config.block_size,
             to_string(config.dtype), to_string(config.cache_dtype()));
  for (const json& device : devices) {
    const bool opened = device.contains("capabilities");
    const char* standard = device["default"].get<bool>() ? ", default" : "";
    fmt::print("\n{}  {}\n", device["selector"].get<std::string>(),
               opened ? fmt::format("{} ({}{})", device["capabilities"]["name"].get<std::string>(),
                                    device["capabilities"]["kind"].get<std::string>(), standard)
                      : fmt::format("does not open{}", standard));
    if (opened) print_capabilities(device["capabilities"]);
    if (device.contains("backends")) {
      for (const json& backend : device["backends"]) print_backend(backend, explain);
    }
    for (const json& problem : device.value("tuning_problems", json::array())) {
      fmt::print("  tuning: {}\n", problem.get<std::string>());
    }
    for (const json& failure : device.value("build_failures", json::array())) {
      fmt::print("  not built: {}\n", failure.get<std::string>());
    }
    if (const auto problem = device.value("program_cache_problem", ""); !problem.empty())
      fmt::print("  program cache: {}\n", problem);
    if (!device.contains("error")) continue;
    // The reasons of backends that reject the shape stand above already.
    const bool told = device.contains("backends") &&
                      std::ranges::all_of(device["backends"], [](const json& backend) {
                        return !backend["rejected_because"].empty();
                      });
    fmt::print("  error: {}\n",
               told ? "no backend serves this shape" : device["error"].get<std::string>());
  }
  if (explain) print_legend();
}

}  // namespace

nlohmann::json capabilities_json(const DeviceCapabilities& capabilities) {
  json result = capabilities;
  result["kind"] = to_string(capabilities.kind);
  result["platform"] = capabilities.platform_name;
  result["sub_groups_in_step"] = sub_groups_of(capabilities);
  return result;
}

void add_devices_command(CLI::App& app) {
  struct Arguments {
    AttentionConfig config{.num_heads = 32, .num_kv_heads = 8, .head_size = 128};
    std::string dtype = "f16", kv_cache_dtype = "auto", device;
    bool as_json = false;
    bool explain = false;
  };
  auto* command = app.add_subcommand(
      "devices", "List devices, their capabilities and the kernels that a model shape would get");
  const auto arguments = std::make_shared<Arguments>();
  const auto number = [&](const char* name, std::int32_t& value, int most, const char* help) {
    command->add_option(name, value, help)->check(CLI::Range(1, most));
  };
  number("--heads", arguments->config.num_heads, 65536, "Query heads");
  number("--kv-heads", arguments->config.num_kv_heads, 65536, "Key/value heads");
  number("--head-size", arguments->config.head_size, 65536, "Head size");
  number("--block-size", arguments->config.block_size, 1 << 24, "Tokens a cache page");
  command->add_option("--dtype", arguments->dtype, "f32, f16 or bf16");
  command->add_option("--kv-dtype", arguments->kv_cache_dtype,
                      "auto, f32, f16, bf16, fp8_e4m3, fp8_e5m2 or int8");
  command->add_option("--device", arguments->device,
                      "gpu, cpu, PLATFORM:DEVICE or part of a name; default: all devices");
  command->add_flag("--json", arguments->as_json, "Print JSON");
  command->add_flag("--explain", arguments->explain,
                    "Print every kernel that was considered, and why it was not chosen");
  command->callback([arguments] {
    AttentionConfig& config = arguments->config;
    throw_invalid_if(config.num_heads % config.num_kv_heads != 0,
                     "--heads: {} is not a multiple of --kv-heads {}", config.num_heads,
                     config.num_kv_heads);
    config.dtype = parse_dtype(arguments->dtype);
    config.kv_cache_dtype = parse_kv_cache_dtype(arguments->kv_cache_dtype);
    std::string ignored;  // what matters here is that a wrong CLATTN_BACKEND throws
    static_cast<void>(selected(config, nullptr, ignored));
    json devices = json::array();
    const Device standard = select_device();
    for (const Device& device : arguments->device.empty()
                                    ? list_devices()
                                    : std::vector{select_device(arguments->device)}) {
      devices.push_back(device_json(device, standard, config));
    }
    if (arguments->as_json) {
      write_text("-", devices.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
    } else {
      print_report(devices, config, arguments->explain);
    }
  });
}

}  // namespace cli
}  // namespace clattn
