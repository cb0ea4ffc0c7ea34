#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/config_fields.hpp>
#include <clattn/registry.hpp>
#include <clattn/tuning.hpp>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "program/commands.hpp"
#include "program/common/layer_options.hpp"
#include "program/common/options.hpp"
#include "program/devices/devices.hpp"

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
std::shared_ptr<const AttentionBackend> selected(const AttentionConfig& config,
                                                 const DeviceCapabilities* capabilities,
                                                 std::string& why_none) {
  try {
    return get_attn_backend(config, capabilities);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    why_none = error.what();
    return nullptr;
  }
}

/// What every backend says about the shape, and the kernels of those that take it.
json choice_json(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                 const std::shared_ptr<const AttentionBackend>& chosen) {
  const DeviceCapabilities& capabilities = context->capabilities();
  json backends = json::array();
  for (const auto& backend : list_attn_backends()) {
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
    const auto chosen = selected(config, &context->capabilities(), why_none);
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
      "_tokens = a decode kernel that prefills a few tokens\n"
      "Backends: chosen = the first that takes the layer, or the one that CLATTN_BACKEND names\n");
}

void print_report(const json& devices, bool explain) {
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
    fmt::print("  {}\n", told ? "no backend serves this shape"
                              : "cannot be used: " + device["error"].get<std::string>());
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

namespace {

/// What the commands are asked.
struct DevicesArguments {
  LayerOptions layer;
  std::string device;
  bool as_json = false;
};

/// Ends the program with 3 where no device serves the shape, with 4 where none opens.
void check_served(const json& devices) {
  const auto opens = [](const json& device) { return device.contains("backends"); };
  const auto serves = [](const json& device) { return !device.contains("error"); };
  if (std::ranges::any_of(devices, serves)) return;
  throw ExitCode{std::ranges::any_of(devices, opens) ? Status::kUnsupported : Status::kOpenCL};
}

void report(const DevicesArguments& arguments, bool explain) {
  const AttentionConfig config = arguments.layer.layer().config;
  std::string ignored;  // what matters here is that a wrong CLATTN_BACKEND throws
  static_cast<void>(selected(config, nullptr, ignored));
  json devices = json::array();
  const Device standard = select_device();
  const bool all = arguments.device.empty() && !explain;
  for (const Device& device : all ? list_devices() : std::vector{select_device(arguments.device)}) {
    devices.push_back(device_json(device, standard, config));
  }
  if (arguments.as_json) {
    write_text("-", devices.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
  } else {
    fmt::print("Layer of {}: {}\n", arguments.layer.name(), to_string(config));
    print_report(devices, explain);
  }
  check_served(devices);
}

}  // namespace

void add_report_command(CLI::App& app, const char* name, const char* help, bool explain) {
  CLI::App* const command = app.add_subcommand(name, help);
  const auto arguments = std::make_shared<DevicesArguments>();
  arguments->layer.add_to(*command, 1 << 24, kCacheFormatNames);
  add_device(*command, arguments->device, explain ? "the one that programs use" : "all devices");
  command->add_flag("--json", arguments->as_json, "Print JSON");
  command->callback([arguments, explain] { report(*arguments, explain); });
}

}  // namespace cli
}  // namespace clattn
